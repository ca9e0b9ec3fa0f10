"""What a site's operator demands is held against a job, key by key."""

import ast
import math
import sys
import tomllib
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from support.agents import RUN_ID, consortium
from support.secagg_parties import RECORD as NOISED
from support.secure_runs import secure_job
from support.small_jobs import small_job

from clients import models
from clients.models.model_pool import ModelPool
from clients.privacy import site_policy
from clients.privacy.policy_spec import UNITS, PolicySpec, StatisticsPolicySpec
from federation.errors import JobError
from federation.ids import SiteId
from federation.job import job_digest, job_file
from federation.job.spec import JobSpec
from federation.wire import frame as wire
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.agreement.policy import check_against_policy
from privacy.secagg.arithmetic.noise_shares import NoiseShare
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.errors import ContractRefused
from privacy.secagg.protocol.of_job import contract_of

ROOT = Path(__file__).resolve().parents[3]
SITE = SiteId("site-0")
NOISE_SHARE = NoiseShare(
    multiplier=1.0, sensitivity=1.0, size=9, threshold=4, colluding=1
)
OPEN = {"privacy": "none", "secure_aggregation": False}
MODELS = ("clients.models:*", "support.small_jobs:blobs")
RECORD = {"unit": "record", "target_epsilon": 3.0, "delta": 1e-5}


def private_job(**private: Any) -> JobSpec:
    """A job with record-level privacy under secure aggregation."""
    return small_job(
        num_sites=2,
        aggregation={"weights": "uniform"},
        privacy={
            "secure_aggregation": {"enabled": True},
            "differential_privacy": RECORD | private,
        },
    )


def refused(job: JobSpec, site: SiteId = SITE, **policy: Any) -> tuple[str, str]:
    """The key that is wrong and what is said of it; its remedy is tried."""
    spec = PolicySpec(**{"functions": MODELS} | policy)
    with pytest.raises(JobError) as caught:
        site_policy.check_job(job, spec, site)
    assert caught.value.key is not None
    if caught.value.remedy:
        site_policy.check_job(job, remedied(spec, caught.value), site)
    return caught.value.key, caught.value.reason


def remedied(policy: PolicySpec, error: JobError) -> PolicySpec:
    """A policy with the values that an error says would accept the job."""
    values = {k.removeprefix("policy."): each for k, each in error.remedy.items()}
    if "statistics" in values:
        values["statistics"] = StatisticsPolicySpec(**values["statistics"])
    return replace(policy, **values)


def test_the_last_ranks_of_few_sites_are_refused():
    """As a sum of so few would be; a job without differential privacy has none."""
    rows = [{"name": f"site-{i}"} for i in range(5)]
    rows = [row | {"lora_rank": 2} if i > 1 else row for i, row in enumerate(rows)]
    job = replace(private_job(), sites=small_job(sites=rows).sites)
    site_policy.check_job(job, PolicySpec(functions=MODELS), SITE)
    key, text = refused(job, colluding_sites=1)
    assert key == "sites[2].lora_rank"
    assert "the largest ranks have 2" in text


def test_job_within_the_policy_is_accepted():
    """By the strictest policy and by the most open one."""
    strict = PolicySpec(functions=MODELS, max_epsilon=3.0, max_delta=1e-5, max_rounds=1)
    site_policy.check_job(private_job(), strict, SITE)
    site_policy.check_job(small_job(), PolicySpec(**OPEN, functions=MODELS), SITE)


def test_default_policy_accepts_no_job_without_privacy():
    """Whoever writes nothing gets the strictest."""
    key, text = refused(small_job())
    assert key == "privacy.differential_privacy.unit"
    assert "requires 'record' (policy.privacy), but the job has 'none'" in text


def test_the_remedy_is_that_of_all_faults():
    """Two faults of one key are named once: a pair without privacy is the second."""
    key, text = refused(secure_job(2, threshold=2))
    assert key == "privacy.differential_privacy.unit"
    assert "policy.accept_two_sites" not in text


def test_private_sites_may_take_different_steps_in_a_sum():
    """Noise bounds what sums show together, so that no operator need accept it."""
    job = private_job()
    schedule = replace(job.schedule, allocation="capacity", max_local_steps=8)
    training = replace(job.training, local_steps=4)
    job = replace(job, schedule=schedule, training=training)
    limits = {"functions": MODELS, "accept_dropouts": False}
    site_policy.check_job(job, PolicySpec(**limits, max_local_steps=8), SITE)
    key, text = refused(job, **limits, max_local_steps=7)
    assert key == "schedule.max_local_steps"
    assert "allows 7 local steps" in text


@pytest.mark.parametrize(
    ("job", "policy", "key", "text"),
    [
        (
            private_job(),
            {"max_epsilon": 2.9},
            "privacy.differential_privacy.target_epsilon",
            "allows 2.9 (policy.max_epsilon), but the job has 3",
        ),
        (
            private_job(),
            {"max_delta": 1e-6},
            "privacy.differential_privacy.delta",
            "allows 1e-06 (policy.max_delta), but the job has 1e-05",
        ),
        (
            private_job(held_out="public"),
            {},
            "privacy.differential_privacy.held_out",
            "its held-out data public (policy.public_held_out)",
        ),
        (
            small_job(),
            {"privacy": "none"},
            "privacy.secure_aggregation.enabled",
            "requires secure aggregation (policy.secure_aggregation)",
        ),
        (
            small_job(rounds=6),
            {**OPEN, "max_rounds": 5},
            "rounds",
            "allows 5 (policy.max_rounds), but the job has 6",
        ),
        (
            small_job(training={"local_epochs": 4}),
            {**OPEN, "max_local_steps": 1, "max_local_epochs": 3},
            "training.local_epochs",
            "allows 3 local epochs a round (policy.max_local_epochs)",
        ),
        (
            small_job(training={"local_steps": 1, "accumulate": 10_001}),
            OPEN,
            "training.accumulate",
            "allows 10000 batches a step (policy.max_accumulate)",
        ),
        (
            small_job(
                rounds=5,
                training={"local_steps": 1, "accumulate_from": [[2, 8], [4, 2**62]]},
            ),
            {**OPEN, "max_accumulate": 8},
            "training.accumulate_from[1]",
            "allows 8 batches a step (policy.max_accumulate)",
        ),
        (
            secure_job(
                training={"local_steps": 4}, schedule={"allocation": "capacity"}
            ),
            {**OPEN, "accept_dropouts": False},
            "schedule.allocation",
            "differ by single sites (policy.accept_dropouts)",
        ),
        (
            secure_job(2, threshold=2, clip_norm=20.0),
            OPEN,
            "privacy.secure_aggregation.clip_norm",
            "allows 10 (policy.max_clip_norm)",
        ),
        (
            secure_job(2, threshold=2),
            {**OPEN, "max_clip_norm": 100.0},
            "privacy.differential_privacy.unit",
            "run of two (policy.accept_two_sites)",
        ),
        (
            secure_job(5, threshold=5),
            {**OPEN, "min_sites": 6},
            "sites",
            "requires 6 in a sum (policy.min_sites), but this job allows",
        ),
        (
            secure_job(5, threshold=4),
            {**OPEN, "min_sites": 5},
            "privacy.secure_aggregation.threshold",
            "requires 5 in a sum (policy.min_sites), but this job allows",
        ),
        (
            private_job(),
            {"min_sites": 3},
            "sites",
            "requires 3 in a sum (policy.min_sites), but this job allows",
        ),
        (
            secure_job(5, threshold=4),
            {**OPEN, "colluding_sites": 3},
            "privacy.secure_aggregation.threshold",
            "(policy.colluding_sites), but 4 of 5 protect against 2",
        ),
        (
            private_job(),
            {"privacy": "none"},
            "sites",
            "requires 3 in a sum (policy.min_sites), but this job allows",
        ),
        (
            secure_job(5, threshold=5, hybrid=False),
            OPEN,
            "privacy.secure_aggregation.hybrid",
            "requires the post-quantum hybrid (policy.require_hybrid)",
        ),
        (
            secure_job(5, threshold=5, ring_bits=16),
            {**OPEN, "ring_bits": (24, 32)},
            "privacy.secure_aggregation.ring_bits",
            "accepts rings of 24, 32 bits (policy.ring_bits)",
        ),
        (
            secure_job(5, threshold=5, levels=3),
            {**OPEN, "levels": (8, 256)},
            "privacy.secure_aggregation.levels",
            "accepts sums in 8, 256 levels (policy.levels)",
        ),
        (
            secure_job(5, threshold=5, levels=3),
            {**OPEN, "levels": ()},
            "privacy.secure_aggregation.levels",
            "accepts no levels (policy.levels)",
        ),
        (
            secure_job(5, threshold=5),
            {**OPEN, "weight_rules": ("uniform",)},
            "aggregation.weights",
            "accepts the weights 'uniform' (policy.weight_rules)",
        ),
        (
            secure_job(5, threshold=5, element_bound=0.5),
            {**OPEN, "max_element_bound": 0.4},
            "privacy.secure_aggregation.element_bound",
            "allows 0.4 (policy.max_element_bound), but the job has 0.5",
        ),
        (
            secure_job(5, threshold=5, clip_norm=3.0),
            {**OPEN, "max_element_bound": 0.4},
            "privacy.secure_aggregation.element_bound",
            "but the job has 3",
        ),
        (
            small_job(),
            {**OPEN, "functions": ("support.small_jobs:blobs",)},
            "model.factory",
            "does not accept 'clients.models:logistic_regression' (policy.functions)",
        ),
        (
            small_job(),
            {**OPEN, "functions": ("clients.models:*",)},
            "data.source",
            "does not accept 'support.small_jobs:blobs' (policy.functions)",
        ),
        (
            small_job(training={"task": "os:system", "local_steps": 1}),
            OPEN,
            "training.task",
            "does not accept 'os:system' (policy.functions)",
        ),
        *(
            (
                small_job(training={"local_steps": 1, table: {"name": "os:system"}}),
                OPEN,
                f"training.{table}.name",
                "does not accept 'os:system' (policy.functions)",
            )
            for table in ("optimizer", "learning_rate")
        ),
        (
            small_job(data={"source": "os:system"}),
            OPEN,
            "data.source",
            "does not accept 'os:system' (policy.functions)",
        ),
        (
            small_job(model={"factory": "clients.models:logistic_regresion"}),
            OPEN,
            "model.factory",
            "did you mean logistic_regression?",
        ),
    ],
)
def test_each_rule_names_its_key_and_that_of_the_policy(
    job: JobSpec, policy: dict[str, Any], key: str, text: str
):
    """So that both operators know what to change, and to what."""
    found, said = refused(job, **policy)
    assert found == key
    assert f"site {SITE!r}" in said
    assert text in said


def test_all_faults_are_named_at_once_with_the_lines_that_accept_the_job():
    """The lines are for the site's log: they tell what else the operator accepts."""
    pinned = f"./tab.py@{'ab' * 32}:mlp"
    job = small_job(rounds=9, model={"factory": pinned})
    policy = PolicySpec(**OPEN, functions=("mine:secret",), max_rounds=8)
    with pytest.raises(JobError) as caught:
        site_policy.check_job(job, policy, SITE)
    told, here = caught.value.outside, str(caught.value)
    for text in (told, here):
        start = "rounds: site 'site-0' allows 8 (policy.max_rounds), but the job has 9;"
        assert text.startswith(start)
        for key, function in (
            ("model.factory", "./tab.py:mlp"),
            ("data.source", "support.small_jobs:blobs"),
        ):
            assert f"also {key}: site 'site-0' does not accept {function!r}" in text
        assert "mine:secret" not in text
    assert caught.value.remedy == {
        "policy.max_rounds": 9,
        "policy.functions": ["mine:secret", "./tab.py:mlp", "support.small_jobs:blobs"],
    }
    site_policy.check_job(job, remedied(policy, caught.value), SITE)


def test_a_file_that_the_author_lacked_is_among_the_lines_too():
    """Once the author has mended the job, the same lines accept it."""
    options = {"prepare": "./none.py:scale"}
    job = small_job(data={"source": "mine:rows", "options": options})
    policy = PolicySpec(**OPEN, functions=MODELS)
    with pytest.raises(JobError, match="missing or not Python") as caught:
        site_policy.check_job(job, policy, SITE)
    functions = ["mine:rows", "./none.py:scale"]
    assert caught.value.remedy == {"policy.functions": [*MODELS, *functions]}
    policy = remedied(policy, caught.value)
    with pytest.raises(JobError, match="missing or not Python") as again:
        site_policy.check_job(job, policy, SITE)
    assert again.value.remedy == {}


def test_a_site_is_not_asked_about_a_rule_of_the_aggregators():
    """It never calls the function; the aggregator does."""
    job = small_job(aggregation={"combine": "rules:mine"})
    site_policy.check_job(job, PolicySpec(**OPEN, functions=MODELS), SITE)


def test_the_advice_of_a_long_refusal_is_not_cut_off():
    """On its way it is one line of at most so many characters."""
    faults = site_policy.Faults(job=private_job(), site=SITE, has_data=True)
    remedy = {"policy.max_rounds": 9}
    for number in range(40):
        with faults.noted():
            raise JobError(
                "x" * 60, key=f"key{number}", outside="y" * 60, remedy=remedy
            )
    with pytest.raises(JobError) as caught:
        faults.check()
    told = wire.one_line(caught.value.outside)
    assert told.endswith("... Its log has the lines for site.toml")
    assert caught.value.__notes__[-1].endswith("\n  max_rounds = 9")


def test_a_key_of_the_job_is_named_once():
    """Where its limit and the budget of all runs are both exceeded."""
    faults = site_policy.Faults(job=private_job(), site=SITE, has_data=True)
    for reason in ("allows 2", "spent 1", "is site: b"):
        with faults.noted():
            raise JobError(reason, key="privacy.x", outside=reason)
    with pytest.raises(JobError) as caught:
        faults.check()
    assert caught.value.outside == "privacy.x: allows 2; also spent 1; also is site: b"


def test_names_of_options_stay_in_their_line():
    """The aggregator chooses them, and an operator pastes the lines."""
    faults = site_policy.Faults(job=small_job(), site=SITE, has_data=False)
    options = {"a\n[policy]\nx": {"b c": [1]}, "d": "e"}
    with faults.noted():
        raise JobError("none", remedy={"data.options": options})
    with pytest.raises(JobError) as caught:
        faults.check()
    lines = tomllib.loads(caught.value.__notes__[-1].partition("\n")[2])
    assert lines == {"data": {"options": options}}


def test_a_site_with_data_of_its_own_accepts_no_source_of_the_job():
    """It calls none, so its operator need not list what the others use."""
    policy = PolicySpec(**OPEN, functions=("clients.models:*",))
    options = {"helper": "os:system"}
    data = {"source": "./theirs.py:rows", "options": options}
    job = small_job(data=data, sites=[{"name": "site-0"}, {"name": "b", "data": data}])
    site_policy.check_job(job, policy, SITE, has_data=True)
    with pytest.raises(JobError, match=r"data.source: .*theirs") as caught:
        site_policy.check_job(job, policy, SITE)
    assert "sites[1]" not in str(caught.value)  # No other site's.
    for other in (SiteId("b"), SITE):  # Nor what no site would load.
        alone = replace(job, data=None) if other == SITE else job
        site_policy.check_job(alone, policy, other)
    model = {"factory": "clients.models:mlp", "options": options}
    with pytest.raises(JobError, match=r"model.options.helper: .*'os:system'"):
        site_policy.check_job(
            replace(job, model=small_job(model=model).model),
            policy,
            SITE,
            has_data=True,
        )


def test_pair_is_accepted_where_records_or_the_policy_allow_it():
    """One of both is enough."""
    site_policy.check_job(private_job(), PolicySpec(functions=MODELS), SITE)
    waived = PolicySpec(**OPEN, functions=MODELS, accept_two_sites=True)
    site_policy.check_job(secure_job(2, threshold=2), waived, SITE)


@pytest.mark.parametrize(
    ("weak", "limit"),
    [({"target_epsilon": 9.0}, "max_epsilon"), ({"held_out": "public"}, "held_out")],
)
def test_weak_promise_is_no_reason_to_accept_a_pair(weak: dict[str, Any], limit: str):
    """Epsilon 10^6 hides nothing from the other site."""
    job = private_job(**weak)
    assert limit in site_policy.weakness_of(job, PolicySpec(), 1e-6)
    policy = {**OPEN, "functions": MODELS, "min_sites": 2}
    key, said = refused(job, **policy)
    assert key == "privacy.differential_privacy.unit"
    assert "privacy in a run" in said


def test_groups_are_no_smaller_where_records_are_demanded():
    """Open sums of before, when the operator demanded less, were promised three."""
    assert PolicySpec().smallest_group(5) == 3
    assert PolicySpec(colluding_sites=2).smallest_group(5) == 4
    assert PolicySpec(min_sites=2).smallest_group(5) == 2
    assert PolicySpec(min_group=1).smallest_group(5) == 1


def test_held_out_data_are_public_where_the_operator_says_so():
    """A job cannot know; and where nothing is promised it does not matter."""
    job = private_job(held_out="public")
    said = PolicySpec(functions=MODELS, public_held_out=True)
    site_policy.check_job(job, said, SITE)
    nothing = PolicySpec(
        functions=MODELS, privacy="none", min_sites=2, accept_two_sites=True
    )
    site_policy.check_job(job, nothing, SITE)


def test_job_that_names_other_sites_is_refused():
    """Before anything of it is looked at."""
    key, text = refused(small_job(num_sites=2), site=SiteId("site-7"))
    assert (key, text) == ("sites", "site 'site-7' is not named by this job")


def shared_noise_job(unit: str, **private: Any) -> JobSpec:
    """A job of four sites whose noise adds up inside the sum."""
    table = {
        "unit": unit,
        "target_epsilon": 3.0,
        "accept_low_signal": unit == "site",
        "held_out": "public",
    }
    return small_job(
        num_sites=4,
        training={"local_steps": 1, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
        privacy={
            "secure_aggregation": {"enabled": True},
            "differential_privacy": table | private,
        },
    )


@pytest.mark.parametrize("unit", ["joint", "site"])
def test_noise_must_withstand_as_many_sites_as_the_policy_says(unit: str):
    """The secure sum's threshold alone does not decide it, where noise is shared."""
    policy = {"privacy": unit, "public_held_out": True, "functions": MODELS}
    two = PolicySpec(**policy, colluding_sites=2)
    key, text = refused(shared_noise_job(unit), **policy, colluding_sites=2)
    assert key == "privacy.differential_privacy.colluding_sites"
    assert "2 colluding sites cannot remove (policy.colluding_sites), not 1" in text
    site_policy.check_job(shared_noise_job(unit, colluding_sites=2), two, SITE)


@pytest.mark.parametrize("unit", ["joint", "site"])
def test_default_policy_refuses_noise_of_others(unit: str):
    """An operator who trusts nobody else says nothing."""
    key, text = refused(shared_noise_job(unit))
    assert key == "privacy.differential_privacy.unit"
    assert f"requires 'record' (policy.privacy), but the job has {unit!r}" in text


def test_units_are_accepted_from_the_policys_on():
    """The order is that of their strength."""
    units = {
        unit: site_policy.accepted_units(PolicySpec(privacy=unit)) for unit in UNITS
    }
    assert units == {
        "none": ("none", "site", "joint", "record", "person"),
        "site": ("site", "joint", "record", "person"),
        "joint": ("joint", "record", "person"),
        "record": ("record", "person"),
        "person": ("person",),
    }


@pytest.mark.parametrize(
    "function",
    [
        "antigravity:geohash",
        "antigravity:*",
        "clients.models:nn.Linear",
        "clients.models:_norm",
        "clients.models:__import__",
        "clients.models",
        "clients.models:",
        ":digits_cnn",
        "clients.models:digits_cnn:x",
        "clients.models:digits_cnn\n",
        "clients/models:digits_cnn",
        "clients.models.antigravity:geohash",
        "",
    ],
)
def test_function_that_nobody_named_is_refused_unseen(function: str):
    """Importing a module runs it; so nothing is imported to look."""
    before = set(sys.modules)
    assert not site_policy.is_accepted(function, MODELS)
    assert "antigravity" not in set(sys.modules) - before


@pytest.mark.parametrize("name", ["Sequence", "F", "nn", "math"])
def test_star_is_for_what_the_module_defines(name: str):
    """What it has imported would let a job call anything."""
    assert hasattr(models, name)
    job = small_job(model={"factory": f"clients.models:{name}"})
    key, _ = refused(job, **OPEN)
    assert key == "model.factory"


def test_star_is_for_that_very_module():
    """Not for those inside it or beside it."""
    assert site_policy.is_accepted("clients.models:mlp", MODELS)
    assert not site_policy.is_accepted("clients.data:digits", MODELS)
    assert not site_policy.is_accepted("clients:models", MODELS)


def test_named_function_is_not_imported_either():
    """It is accepted by its name; what builds the run imports it."""
    accepted = ("antigravity:geohash",)
    assert site_policy.is_accepted("antigravity:geohash", accepted)
    assert "antigravity" not in sys.modules


def own_functions() -> list[tuple[str, list[str]]]:
    """Every public function of ours that takes options, with their names."""
    found = []
    for package in ("clients", "privacy", "federation", "aggregator", "cloud_adapters"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    arguments = [*node.args.args, *node.args.kwonlyargs]
                    name = f"{module.removesuffix('.__init__')}:{node.name}"
                    found.append((name, [each.arg for each in arguments]))
    return found


def test_no_option_of_our_functions_names_what_the_policy_does_not_list():
    """The operator has listed the function, and nothing that its options name."""
    functions = own_functions()
    names = {name for name, _ in functions}
    assert "clients.models.clusters:clusters" in names
    assert "clients.audit.canaries:with_canaries" in names
    shapes = (
        lambda text: text,
        lambda text: {"factory": text},
        lambda text: [{"options": {"deep": [[text]]}}],
        lambda text: {text: 1},
    )
    job, seen = small_job(), set()
    for (name, arguments), shape in zip(functions, cycle(shapes), strict=False):
        policy = PolicySpec(**OPEN, functions=(*MODELS, name))
        for index, argument in enumerate(arguments):
            if index and (argument, shape) in seen:
                continue
            seen.add((argument, shape))
            options = {argument: shape("os:system")}
            model = replace(job.model, factory=name, options=options)
            with pytest.raises(JobError, match="'os:system'") as caught:
                site_policy.check_job(replace(job, model=model), policy, SITE)
            key = str(caught.value.key)
            assert key.startswith(f"model.options.{argument}"), (name, key)


def test_each_table_of_options_is_searched():
    pinned = f"./work.py@{'ab' * 32}:net"
    inside = {"options": {"members": [{"factory": pinned}]}}
    for table, changes in {
        "model": {"model": {"factory": "clients.models:mlp", **inside}},
        "data": {"data": {"source": "support.small_jobs:blobs", **inside}},
        **{
            f"training.{table}": {
                "training": {"local_steps": 1, table: {"name": listed, **inside}}
            }
            for table, listed in (
                ("optimizer", "clients.models:mlp"),
                ("learning_rate", "clients.models:mlp"),
            )
        },
        "training": {
            "training": {"local_steps": 1, "task": "clients.models:mlp"} | inside
        },
    }.items():
        key, said = refused(small_job(**changes), **OPEN)
        assert key == f"{table}.options.members[0].factory"
        assert "'./work.py:net'" in said


def test_a_listed_function_may_be_named_inside_options():
    options = {"number": 2, "factory": "clients.models:mlp", "options": {"hidden": [4]}}
    model = {"factory": "clients.models.clusters:clusters", "options": options}
    job = small_job(model=model | {"personal": ["choice.*"]})
    policy = PolicySpec(**OPEN, functions=(*MODELS, "clients.models.clusters:clusters"))
    site_policy.check_job(job, policy, SITE)


@pytest.mark.parametrize(("threshold", "fewest"), [(5, 5), (4, 4)])
def test_policy_of_many_in_a_sum_can_be_met(threshold: int, fewest: int):
    """By the job, and by the contract that follows from it."""
    job = secure_job(5, threshold=threshold, max_examples=9)
    policy = PolicySpec(**OPEN, functions=MODELS, min_sites=fewest)
    site_policy.check_job(job, policy, SITE)
    names = [site.name for site in job.sites]
    roster, layout = consortium(*names).roster, ModelPool(job).layout
    contract = contract_of(job, layout, run_id=RUN_ID, roster=roster, promises=())
    demands = site_policy.contract_policy(
        job, layout, run_id=RUN_ID, policy=policy, roster=roster, noise_share=None
    )
    check_against_policy(contract, demands)
    more = replace(demands, min_sites=fewest + 1)
    with pytest.raises(ContractRefused, match=f"may hold only {fewest} updates"):
        check_against_policy(contract, more)


def test_sum_of_three_is_demanded_where_the_operator_says_nothing():
    """Of two only where noise hides records, or where a pair was accepted."""
    record, none = PolicySpec(), PolicySpec(privacy="none")
    pair = PolicySpec(privacy="none", accept_two_sites=True)
    assert [f.fewest_in_sum(2) for f in (record, none, pair)] == [2, 3, 2]
    assert [f.fewest_in_sum(5) for f in (record, none, pair)] == [2, 3, 3]
    assert PolicySpec(privacy="person").fewest_in_sum(2) == 2
    assert PolicySpec(privacy="none", min_sites=2).fewest_in_sum(5) == 2
    assert PolicySpec(min_sites=4, accept_two_sites=True).fewest_in_sum(2) == 4


TWO_BLOCKS = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [64, 96]},
}
LIES = {
    "threshold": {"threshold": 4},
    "min_sites": {"min_sites": 4},
    "ring_bits": {"ring_bits": 24},
    "levels": {"levels": 3, "element_bound": None},
    "fragments": {"levels": 4, "fragments": 2},
    "clip_norm": {"clip_norm": 11.0},
    "element_bound": {"element_bound": 1e-6},
    "clip_elements": {"element_bound": 1.0, "clip_elements": True},
    "weight_rule": {"weight_rule": "uniform", "max_examples": 1},
    "max_examples": {"max_examples": 61},
    "max_rounds": {"max_rounds": 40},
    "hybrid": {"hybrid": False},
    "two_site_waiver": {"two_site_waiver": True},
}


def with_ring(contract: Contract, **changes: Any) -> Contract:
    """The same contract with other numbers, and the ring that follows from them."""
    names = ("ring_bits", "clip_norm", "element_bound")
    asked = {name: changes.get(name, getattr(contract, name)) for name in names}
    ring = RingSpec(
        bits=asked["ring_bits"],
        num_sites=contract.num_sites,
        clip_norm=asked["clip_norm"],
        element_bound=asked["element_bound"],
    )
    numbers = {"scale": ring.scale, "amplitude": ring.amplitude}
    return replace(contract, **numbers, **changes)


@pytest.mark.parametrize("lie", ["members", "differential_privacy.profile", *LIES])
def test_contract_is_that_of_the_job(lie: str):
    """Or a site and an accomplice would be a sum that hides nothing.

    The job is within the policy, and the contract says another thing: fewer sites,
    noise that nobody adds and that would lift the rule for two sites; or bounds that
    ask whether a site's numbers are above them, for the site that declines says so.
    """
    ring = {"levels": 4} if lie == "fragments" else {"element_bound": 1.0}
    job = secure_job(5, threshold=5, max_examples=60, model=TWO_BLOCKS, **ring)
    # Wide open, so that nothing but the job refuses what is told.
    policy = PolicySpec(
        **OPEN, functions=MODELS, require_hybrid=False, max_clip_norm=100.0
    )
    site_policy.check_job(job, policy, SITE)
    roster, pool = consortium(*(site.name for site in job.sites)).roster, ModelPool(job)
    demands = site_policy.contract_policy(
        job, pool.layout, run_id=RUN_ID, policy=policy, roster=roster, noise_share=None
    )

    def contract(told: JobSpec) -> Contract:
        terms = {"run_id": RUN_ID, "roster": roster, "promises": ()}
        found = contract_of(told, pool.layout, **terms)
        return replace(found, job_digest=job_digest.digest(job))

    check_against_policy(contract(job), demands)
    assert set(demands.terms) == set(LIES)
    if lie == "members":
        fewer = secure_job(3, threshold=3, max_examples=60, model=TWO_BLOCKS, **ring)
        assert {site.name for site in fewer.sites} < {site.name for site in job.sites}
        told = contract(fewer)
    elif lie in LIES:
        told = with_ring(contract(job), **LIES[lie])
    else:
        told = replace(contract(job), differential_privacy=NOISED)
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(told, demands)
    assert caught.value.key == lie


def test_every_demand_reaches_the_policy_of_contracts():
    """Where a job was looked at before, it is the second line of defence."""
    demanded: dict[str, Any] = {
        "min_sites": 4,
        "colluding_sites": 2,
        "ring_bits": (24, 16),
        "levels": (4, 16),
        "max_clip_norm": 3.0,
        "max_element_bound": 0.5,
        "weight_rules": ("uniform",),
        "max_epsilon": 2.0,
        "max_delta": 1e-7,
        "require_hybrid": False,
        "accept_two_sites": True,
        "max_rounds": 7,
    }
    job, share = private_job(), NOISE_SHARE
    found = site_policy.contract_policy(
        job,
        ModelPool(job).layout,
        run_id=RUN_ID,
        policy=PolicySpec(**demanded, functions=MODELS),
        roster=consortium(*(site.name for site in job.sites)).roster,
        noise_share=share,
    )
    # One round more is for evaluation alone.
    demanded |= {"max_rounds": 8, "colluding": demanded.pop("colluding_sites")}
    demanded["epsilon_cap"] = demanded.pop("max_epsilon")
    for name, value in demanded.items():
        wanted = frozenset(value) if isinstance(value, tuple) else value
        assert getattr(found, name) == wanted
    assert found.noise_share is share
    assert found.run_id == RUN_ID
    assert found.job_digest == job_digest.digest(job)
    nobody = site_policy.contract_policy(
        secure_job(5, max_examples=9),
        ModelPool(job).layout,
        run_id=RUN_ID,
        policy=PolicySpec(**OPEN, functions=MODELS, max_epsilon=2.0, max_delta=1e-7),
        roster=found.roster,
        noise_share=None,
    )
    assert (nobody.epsilon_cap, nobody.max_delta) == (math.inf, 1.0)


def test_statistics_are_refused_by_column_kind_and_epsilon():
    """Names of columns and categories that look like functions are called by nobody."""
    columns: list[dict[str, Any]] = [
        {"names": ["age", "lab.crp"], "low": 0.0, "high": 9.0, "bins": 3},
        {"names": ["os:system"], "categories": ["./x.py:f", "a:b"]},
    ]
    names = [{"name": f"site-{at}"} for at in range(3)]
    document = {"name": "s", "statistics": {"columns": columns}, "sites": names}
    secure = {"secure_aggregation": {"enabled": True}}
    job = job_file.parse({**document, "privacy": secure})
    open_ = {"privacy": "none", "functions": PolicySpec().functions}
    site_policy.check_job(job, PolicySpec(**open_), SITE)

    def says(job: JobSpec, **keys: Any) -> str:
        spec = StatisticsPolicySpec(**keys)
        return refused(job, **{**open_, "statistics": spec})[1]

    assert "'os:system'" in says(job, columns=("age", "lab.*"))
    assert "histograms" in says(job, kinds=("counts", "sums", "squares", "categories"))
    dp = {"differential_privacy": {"unit": "record", "target_epsilon": 3.0}}
    assert "2" in says(
        job_file.parse({**document, "privacy": secure | dp}), max_epsilon=2.0
    )


@pytest.mark.parametrize(
    "columns",
    [
        [{"names": ["age"], "low": 0.0, "high": 9.0, "bins": 3, "quantiles": [0.5]}],
        [
            {"names": ["note"], "categories": ["rare", "common"]},
            {"names": ["note.length"], "low": 0.0, "high": 9.0, "bins": 3},
        ],
    ],
)
def test_exact_cells_of_one_column_that_overlap_are_refused(
    columns: list[dict[str, Any]],
):
    """Their difference is a small cell, however large each is."""
    names = [{"name": f"site-{at}"} for at in range(3)]
    document = {"name": "s", "statistics": {"columns": columns}, "sites": names}
    secure = {"secure_aggregation": {"enabled": True}}
    job = job_file.parse({**document, "privacy": secure})
    open_ = {"privacy": "none", "functions": PolicySpec().functions}
    assert "would overlap" in refused(job, **open_)[1]
    any_cell = StatisticsPolicySpec(min_count=1)
    site_policy.check_job(job, PolicySpec(**open_, statistics=any_cell), SITE)
    dp = {"differential_privacy": {"unit": "record", "target_epsilon": 3.0}}
    noised = job_file.parse({**document, "privacy": secure | dp})
    site_policy.check_job(noised, PolicySpec(**open_), SITE)

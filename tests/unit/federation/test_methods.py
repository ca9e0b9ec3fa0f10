"""Methods that are described as data, and what each of them excludes."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
from support import toy
from support.small_jobs import blobs

from clients.data.datasets import as_dataset
from clients.methods.registry import COUNTED
from deploy.site_host import ranks as site_ranks
from deploy.site_host.config import (
    AggregatorSpec,
    ComputeSpec,
    LocalDataSpec,
    SiteFile,
)
from federation.errors import JobError
from federation.job import job_digest, job_file, method_checks
from federation.job.adapters import check_exact
from federation.job.method_checks import things
from federation.job.spec import JobSpec
from federation.methods.buffered import BUFFERED_SUMS
from federation.methods.joining import JOINING
from federation.methods.method import Method, Thing
from federation.methods.personal import CLUSTERS
from federation.methods.registry import METHODS


def training(**keys: Any) -> dict[str, Any]:
    return {"training": keys}


def secure(**keys: Any) -> dict[str, Any]:
    return {"privacy": {"secure_aggregation": {"enabled": True, **keys}}}


def private(unit: str, **keys: Any) -> dict[str, Any]:
    """A job with a unit of privacy, and with a secure sum if its noise is in one."""
    keys = {"unit": unit, "target_epsilon": 8.0, **keys}
    return {
        "aggregation": {"weights": "uniform"},
        "training": {"optimizer": {"name": "sgd"}},
        "privacy": {
            "differential_privacy": keys,
            "secure_aggregation": {"enabled": unit in {"joint", "site"}},
        },
    }


NINE = "cabdefghi"
OPEN = {"privacy": {"differential_privacy": {"unit": "none", "target_epsilon": None}}}
MOMENTUM = {"name": "sgd", "momentum": 0.9}
# What switches each method on.
ON: dict[str, dict[str, Any]] = {
    Thing.PROXIMAL: training(proximal_mu=0.1),
    Thing.NORMALIZED: training(local_epochs=1, normalized_steps=2),
    "control variates": training(control_variates=True),
    "FedDyn": {
        **training(dynamic_alpha=0.1),
        "aggregation": {"server_optimizer": {"name": "running_sum"}},
    },
    Thing.OVERLAP: training(local_steps=2, overlap_steps=1),
    Thing.CHOSEN_STEPS: {"schedule": {"local_work": "auto", "max_local_steps": 9}},
    Thing.LARGER_STEPS: training(accumulate_from=[[2, 2]]),
    Thing.FLOAT16: training(precision="fp16"),
    Thing.KEPT_OPTIMIZER: training(optimizer={**MOMENTUM, "state": "keep"}),
    Thing.KEPT_ZEROS: {
        "model": {"keep_zeros": True, "weights": "a.safetensors@" + 64 * "0"}
    },
    Thing.FEWER_RANKS: {
        "sites": [
            {"name": name} | ({"lora_rank": 2} if name in "ghi" else {})
            for name in NINE
        ]
    },
    Thing.PERSONAL: {"model": {"personal": ["choice.*"]}},
    Thing.CLUSTERS: {
        **training(task=CLUSTERS.on[0], metrics={"loss": [0.0, 9.0]}),
        "model": {"personal": ["choice.*"]},
    },
    Thing.TRAINER: training(task="trainer", metrics={"loss": [0.0, 9.0]}),
    Thing.FLOWER_APPS: {
        "sites": [{"name": "c"}, {"name": "a"}, {"name": "b", "flower_app": {}}]
    },
    Thing.RELAYS: {
        "relays": [{"name": "r", "sites": ["a"]}],
        "schedule": {"minimum_sites": 2},
    },
    Thing.SAMPLES: {"schedule": {"sites_per_round": 2, "minimum_sites": 2}},
    Thing.REMEMBERING: {"schedule": {"sites_per_round": 2, "sampling": "fair"}},
    Thing.FAIR: {"schedule": {"sites_per_round": 2, "sampling": "fair"}},
    Thing.UTILITY: {"schedule": {"sites_per_round": 2, "sampling": "utility"}},
    Thing.OVER_SELECTION: {"schedule": {"sites_per_round": 2, "over_selection": 1.5}},
    Thing.REPLICAS: {"schedule": {"replicas": [["a", "b"]]}},
    Thing.CODECS_UP: {"communication": {"codec": {"name": "int8"}}},
    Thing.DYNAMIC_WEIGHTS: {"aggregation": {"weights": "dynamic"}},
    Thing.ROBUST: {"aggregation": {"combine": "median", "weights": "uniform"}},
    "selection of the best model": {"selection": {"model": "best"}},
    "early stopping": {"selection": {"model": "last", "patience": 2}},
    "a moving average of models": {"selection": {"model": "ema"}},
    "an equal average of models": {"selection": {"model": "swa"}},
    Thing.STATISTICS: {
        "statistics": {"columns": [{"names": ["0"], "low": 0.0, "high": 1.0}]},
        "model": None,
        "training": None,
        "evaluation": {"every": 0},
        "aggregation": {"weights": "uniform"},
    },
    Thing.SECURE: secure(),
    Thing.GROUPS: {
        **secure(groups=3),
        "aggregation": {"combine": "median", "weights": "uniform"},
        "sites": [{"name": name} for name in NINE],
    },
    Thing.LEVELS: secure(levels=4),
    Thing.ELEMENT_BOUND: secure(element_bound=0.1),
    Thing.PRIVACY: {**private("site"), "evaluation": {"every": 0}},
    "noise for records": private("record"),
    "noise for persons": toy.merged(
        private("person"), {"data": {"partition": {"kind": "by_person"}}}
    ),
    Thing.JOINT: toy.merged(private("joint"), training(local_steps=1)),
    Thing.WHOLE_SITES: {**private("site"), "evaluation": {"every": 0}},
    "an adaptive clip norm": {
        **private("site", adaptive_clip=True),
        "evaluation": {"every": 0},
    },
    "noised statistics": private("record", standardise={"low": [0.0], "high": [1.0]}),
    Thing.BUFFERED: {"schedule": {"mode": "buffered"}},
    BUFFERED_SUMS.name: {
        **secure(),
        "schedule": {"mode": "buffered", "groups": [[*NINE[:3]], [*NINE[3:]]]},
        "sites": [{"name": name} for name in NINE],
    },
    JOINING.name: {"schedule": {"open_to": ["d-*"]}},
    Thing.PLACEMENT: toy.merged(
        training(local_epochs=1, local_steps=None), {"data": {"placement": "dynamic"}}
    ),
    Thing.CAPACITY: {
        "schedule": {"allocation": "capacity"},
        "training": {"local_epochs": None, "local_steps": 2},
    },
}
# What asks for each thing that follows from the job alone.
ASKS: dict[str, dict[str, Any]] = ON | {
    Thing.SUMS_OF_ALL: {**secure(), "schedule": {"groups": []}},
    Thing.FREE_SUMS: toy.merged(
        private("record"), {**secure(), "schedule": {"mode": "buffered", "groups": []}}
    ),
    Thing.STEPS: training(local_epochs=None, local_steps=2),
    Thing.EPOCHS: training(local_epochs=1),
    Thing.OTHER_OPTIMIZERS: training(optimizer=MOMENTUM),
    Thing.PLAIN_SGD: training(optimizer={"name": "sgd", "momentum": 0.0}),
    Thing.MUON: training(optimizer={"name": "muon", "momentum": 0.9}),
    Thing.WEIGHT_DECAY: training(optimizer={"weight_decay": 0.1}),
    Thing.WARM_UP: training(learning_rate={"warmup_steps": 2}),
    Thing.RATE_SCHEDULE: training(learning_rate={"name": "cosine"}),
    Thing.SEVERAL_STEPS: training(local_steps=2),
    Thing.CLIPPED_STEPS: training(clip_grad_norm=1.0),
    Thing.ALL_AHEAD: training(local_steps=1, overlap_steps=1),
    Thing.NO_WEIGHTS: {"model": {"weights": None}},
    Thing.ADAPTERS: {"model": {"options": {"lora": {"rank": 4, "method": "ffa"}}}},
    Thing.OTHER_COUNTS: training(task="binary"),
    Thing.WEIGHTED_LOSS: training(options={"label_smoothing": 0.1}),
    Thing.MEASURES: training(measures=["calibration"]),
    Thing.CLASSES: training(classes=["cat", "dog"]),
    Thing.FROZEN: {"model": {"frozen": ["body.*"]}},
    Thing.TOKENIZERS: {"model": {"tokenizers": [64 * "0"]}},
    Thing.TOKENS: training(task="causal_lm"),
    Thing.CONTRASTIVE: training(task="contrastive"),
    Thing.MAX_BUFFERS: {"model": {"integer_buffers": {"*": "max"}}},
    Thing.DEALT_PERSONS: {"data": {"partition": {"kind": "iid"}}},
    Thing.SHARED_CHOICE: {"model": {"personal": []}},
    Thing.PARTIAL_ROUNDS: {"schedule": {"minimum_sites": 1}},
    Thing.ALL_ASKED: {"schedule": {"sites_per_round": None}},
    Thing.OTHER_COMBINE: {"aggregation": {"combine": "median", "weights": "uniform"}},
    Thing.MEAN: {"aggregation": {"combine": "mean"}},
    Thing.UNGROUPED: {
        "aggregation": {"combine": "median", "weights": "uniform"},
        "privacy": {"secure_aggregation": {"groups": None}},
    },
    Thing.OWN_RULE: {"aggregation": {"combine": "rules:mine"}},
    Thing.OTHER_WEIGHTS: {"aggregation": {"weights": "examples"}},
    Thing.RARE_RESULTS: {"evaluation": {"every": 2}},
    Thing.NO_RESULTS: {"evaluation": {"every": 0}},
    Thing.PLAIN_MEAN: {"aggregation": {"server_optimizer": {"name": "average"}}},
    Thing.RUNNING_SUM: {"aggregation": {"server_optimizer": {"name": "running_sum"}}},
    Thing.SERVER_STEP: {"aggregation": {"server_optimizer": {"name": "adam"}}},
    Thing.OTHER_MODEL: {"selection": {"model": "best"}},
    Thing.CODECS: {"communication": {"down_codec": {"name": "bf16"}}},
    Thing.COMPARED_PLACES: {
        "communication": {"codec": {"name": "top_k"}},
        "aggregation": {"combine": "rules:mine"},
    },
    Thing.CHANGES: {"communication": {"down_content": "change"}},
    Thing.SUMS_DOWN: {"communication": {"down_content": "sum"}, **secure(levels=4)},
    Thing.SUMS_OF_ROUNDED: {
        "communication": {"down_content": "sum", "down_codec": {"name": "bf16"}},
        **secure(levels=4),
    },
    Thing.OPEN_UPDATES: {"privacy": {"secure_aggregation": {"enabled": False}}},
    Thing.OPEN_SUMS: toy.merged(secure(), OPEN),
    Thing.RING_16: secure(ring_bits=16),
    Thing.OTHER_RINGS: secure(ring_bits=24),
    Thing.CLIP_ELEMENTS: secure(element_bound=0.1, clip_elements=True),
    Thing.NO_PRIVACY: OPEN,
    Thing.RECORDS: private("record"),
    Thing.MIXED_RESULTS: toy.merged(
        private("record"), training(task="sft") | {"evaluation": {"every": 1}}
    ),
    Thing.RECORD_RESULTS: {**private("site"), "evaluation": {"every": 1}},
    Thing.SITE_RESULTS: {
        **private("site", held_out="public"),
        "evaluation": {"every": 1},
    },
}
FIRST_DIGEST = "351f8c8dd479a766c2fe67082a88d615bc7f91b716ce0e4f1620bb43ef8529fd"
# Where a method's arithmetic would silently not happen, or its promise not hold.
NEVER_BY_DEFAULT = {
    Thing.PRIVACY,
    Thing.TRAINER,
    Thing.FLOWER_APPS,
    Thing.RANKS,
    Thing.EXACT_ADAPTERS,
}

FOLLOWING = [method for method in METHODS if method.follows_counted]
# Refused whatever else a job asks for, or a part of a method.
NOT_ALONE = {
    Thing.ALL_AHEAD,
    Thing.RUNNING_SUM,
    Thing.SUMS_OF_ROUNDED,
    Thing.RECORD_RESULTS,
    Thing.COMPARED_PLACES,
    Thing.MIXED_RESULTS,
}
PRIVATE_SITES = {**private("site"), "evaluation": {"every": 0}}

each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)


def document(*changes: dict[str, Any]) -> dict[str, Any]:
    """A job's tables, with the sites of all; None takes a key out."""
    found = functools.reduce(toy.merged, changes, toy.document())
    both = itertools.zip_longest(*(each.get("sites", ()) for each in changes))
    sites = [functools.reduce(toy.merged, filter(None, each), {}) for each in both]
    if (found["training"] or {}).get("local_epochs"):
        found["training"].pop("local_steps", None)
    return pruned(found | ({"sites": sites} if sites else {}))


def pruned(table: dict[str, Any]) -> dict[str, Any]:
    return {
        name: pruned(value) if isinstance(value, dict) else value
        for name, value in table.items()
        if value is not None
    }


def sets(table: dict[str, Any], first: str, *rest: str) -> bool:
    """Whether a change decides on a key of the job file."""
    inner = table.get(first)
    if rest and isinstance(inner, dict):
        return sets(inner, *rest)
    return first in table


def parsed(*changes: dict[str, Any]) -> JobSpec | JobError:
    try:
        return job_file.parse(document(*changes))
    except JobError as error:
        return error


@pytest.mark.parametrize("thing", ASKS)
def test_each_thing_is_seen_in_a_job_that_asks_for_it(thing: str):
    if thing not in NOT_ALONE:
        assert things(job_file.parse(document(ASKS[thing])))[thing]


@each_method
def test_what_a_method_excludes_is_refused_with_its_reason(method: Method):
    assert method.is_on(job_file.parse(document(ON[method.name])))
    for thing in method.excluded.keys() & ASKS.keys():
        with pytest.raises(JobError) as caught:
            job_file.parse(document(ON[method.name], ASKS[thing]))
        # A thing may come with others that the method excludes too.
        said = str(caught.value)
        assert any(reason in said for reason in method.excludes), thing
        assert method.key.rpartition(".")[2] in said, thing


@each_method
def test_what_no_method_excludes_is_not_refused_for_a_method(method: Method):
    """Other rules may refuse it: they have other keys."""
    reasons = {reason for other in METHODS for reason in other.excludes}
    reasons |= {each for other in METHODS for each in other.ignores.values()}
    known = {each.key for each in METHODS}
    for thing, asks in ASKS.items():
        excluded = {thing} & method.excluded.keys()
        other = {each.name: each for each in METHODS}.get(thing)
        if other is not None and method.name in other.excluded:
            continue
        if excluded or sets(asks, *method.key.split(".")):
            continue
        job = parsed(ON[method.name], asks)
        if isinstance(job, JobError):
            by_method = any(each in str(job) for each in (*reasons, "works only with"))
            assert by_method or job.key not in known, (thing, str(job))
        else:
            assert things(job)[thing], thing
            assert method.is_on(job), thing


@each_method
def test_privacy_is_refused_unless_somebody_says_why_it_holds(method: Method):
    silent = replace(method, private_because="", excludes={}, name="a new method")
    job = job_file.parse(document(PRIVATE_SITES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method_checks, "METHODS", (silent,))
        patch.setattr(Method, "places", lambda *_: ["its.key"])
        patch.setattr(Method, "is_on", lambda *_: True)
        (fault,) = method_checks.check_methods(job)
    assert fault.key == "its.key"
    assert "promises" in fault.reason


def test_keys_without_effect_are_refused():
    cases: dict[str, dict[str, Any]] = {
        "training.overlap_mix": training(overlap_mix=0.3),
        "schedule.max_local_steps": {"schedule": {"max_local_steps": 9}},
        "schedule.training_share": {"schedule": {"training_share": 0.5}},
        "schedule.buffer_size": {"schedule": {"buffer_size": 2}},
        "schedule.max_staleness": {"schedule": {"max_staleness": 2}},
        "schedule.groups": {"schedule": {"groups": [["a", "b", "c"]]}} | secure(),
    }
    dp, secure_sum = "privacy.differential_privacy", "privacy.secure_aggregation"
    private_keys: dict[str, Any] = {
        "target_epsilon": 8.0,
        "delta": 1e-5,
        "noise_multiplier": 1.0,
        "records_per_person": 2,
        "colluding_sites": 2,
        "max_noise_multiplier": 1.0,
        "adaptive_clip": True,
        "accept_low_signal": True,
        "clip_quantile": 0.7,
        "clip_rate": 0.1,
    }
    cases |= {
        f"{dp}.{name}": {"privacy": {"differential_privacy": {name: value}}}
        for name, value in private_keys.items()
    }
    selection = {"metric": "f1", "goal": "max", "min_change": 0.1, "decay": 0.5}
    cases |= {
        f"selection.{name}": {"selection": {"model": "swa", name: value}}
        for name, value in selection.items()
    }
    cases |= {
        "selection.average_from": {"selection": {"average_from": 2}},
        "aggregation.byzantine_sites": {"aggregation": {"byzantine_sites": 1}},
        "communication.fragments": {"communication": {"fragments": 2}},
        f"{secure_sum}.clip_elements": secure(clip_elements=True),
        f"{secure_sum}.groups": toy.merged(
            ON[Thing.GROUPS], secure(enabled=False, groups=3)
        ),
    }
    assert {part for method in METHODS for part in method.parts} == cases.keys()
    for key, asks in cases.items():
        with pytest.raises(JobError, match="works only with") as caught:
            job_file.parse(document(asks))
        assert caught.value.key == key
    trainer = {
        "training.optimizer": training(optimizer={"lr": 0.5}),
        "training.learning_rate": training(learning_rate={"name": "linear"}),
        "training.clip_grad_norm": training(clip_grad_norm=1.0),
        "training.precision": training(precision="bf16"),
        "training.options": training(options={"a": 1}),
        "training.max_tokens": training(max_tokens=9),
        "evaluation.batch_size": {"evaluation": {"batch_size": 8}},
    }
    ignored = {key: (ON[Thing.TRAINER], asks) for key, asks in trainer.items()} | {
        f"{secure_sum}.threshold": (ON[Thing.GROUPS], secure(threshold=9)),
        f"{secure_sum}.clip_norm": (ON[Thing.WHOLE_SITES], secure(clip_norm=1.0)),
        "schedule.minimum_sites": (
            ON[Thing.BUFFERED],
            {"schedule": {"minimum_sites": 2}},
        ),
        "schedule.grace": (ON[Thing.BUFFERED], {"schedule": {"grace": 0.5}}),
    }
    assert {key for method in METHODS for key in method.ignores} == ignored.keys()
    for key, both in ignored.items():
        with pytest.raises(JobError, match="has no effect with") as caught:
            job_file.parse(document(*both))
        assert caught.value.key == key


@pytest.mark.parametrize("method", FOLLOWING, ids=lambda m: m.name)
def test_places_that_do_not_know_a_method_refuse_it(method: Method):
    assert method.excluded.keys() >= NEVER_BY_DEFAULT
    job = job_file.parse(document(ON[method.name]))
    ranked = SiteFile(
        name="a",
        aggregator=AggregatorSpec(address="127.0.0.1:1", authority="ca.crt"),
        data=LocalDataSpec(source="warehouse:patients"),
        compute=ComputeSpec(ranks=2),
    )
    data = tuple(as_dataset(part, name="blobs") for part in blobs())
    with pytest.raises(JobError, match=r"compute\.ranks = 1") as caught:
        site_ranks.check_job(job, ranked, data)
    assert caught.value.key == method.key
    with pytest.raises(JobError) as caught:
        check_exact(job)
    assert method.excluded[Thing.EXACT_ADAPTERS] in str(caught.value)


def test_job_without_methods_has_the_digest_of_before():
    """That of the first release, computed with its code."""
    found = job_digest.digest(job_file.parse(document())).hex()
    assert found == FIRST_DIGEST


def test_part_of_a_method_is_refused_without_it():
    for method in METHODS:
        for thing in method.only_with_it:
            off: Any = functools.reduce(
                lambda t, k: {k: t}, method.key.split(".")[::-1], None
            )
            with pytest.raises(JobError, match=f"{thing} works only with") as caught:
                job_file.parse(document(ASKS[thing], off))
            assert caught.value.key == method.key


def test_descriptions_agree_with_one_another():
    names = {method.name for method in METHODS}
    assert len(names) == len(METHODS)
    in_rooms_of_their_own = {Thing.RANKS, Thing.EXACT_ADAPTERS}
    assert names == ON.keys()
    assert ASKS.keys() | in_rooms_of_their_own == names | set(Thing)
    for method in METHODS:
        assert method.excluded.keys() <= names | set(Thing), method.name
        if method.follows_counted:
            assert method.keeps, method.name
            assert {Thing.RELAYS, Thing.PARTIAL_ROUNDS} <= method.excluded.keys()
    assert {m.name for m in METHODS if m.follows_counted} == {k.name for k in COUNTED}

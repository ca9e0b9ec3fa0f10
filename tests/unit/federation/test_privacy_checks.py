"""Values of the ``[privacy]`` tables that cannot work, and what does.

What units and secure sums cannot be combined with is in ``test_methods``.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from support import toy

from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec

DP = "privacy.differential_privacy"
SECURE = "privacy.secure_aggregation"
SITES = ("a", "b", "c", "d", "e", "f", "g")


def _job(unit: str, *changes: Mapping[str, Any], sites: int = 4) -> JobSpec:
    """A job that is accepted, but for the changes."""
    kind = "by_person" if unit == "person" else "iid"
    document: dict[str, Any] = {
        "data": {"partition": {"kind": kind}},
        "aggregation": {"weights": "uniform"},
        "evaluation": {"every": 0},
        "training": {"local_steps": 1, "optimizer": {"name": "sgd", "lr": 0.1}},
        "privacy": {
            "secure_aggregation": {"enabled": True},
            "differential_privacy": {"unit": unit, "target_epsilon": 8.0},
        },
    }
    for change in changes:
        document = toy.merged(document, change)
    return job_file.parse(_pruned(toy.document(document, sites=SITES[:sites])))


def _pruned(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table without the keys that a change takes out, by None."""
    return {
        name: _pruned(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
        if value is not None
    }


def _private(**keys: Any) -> dict[str, Any]:
    return {"privacy": {"differential_privacy": keys}}


def _secure(**keys: Any) -> dict[str, Any]:
    return {"privacy": {"secure_aggregation": keys}}


def _training(**keys: Any) -> dict[str, Any]:
    return {"training": keys}


IN_SUM: dict[str, tuple[dict[str, Any], str, str]] = {
    "everybody colludes": (
        _private(colluding_sites=4),
        f"{DP}.colluding_sites",
        "a sum may hold 4 updates: if 4 collude",
    ),
    "no bound on epsilon": (
        _private(target_epsilon=None),
        f"{DP}.target_epsilon",
        "set a limit",
    ),
    "another quorum": (
        {"schedule": {"minimum_sites": 3}},
        "schedule.minimum_sites",
        "the threshold is the quorum: remove this key",
    ),
}

TWO_MULTIPLIERS = (
    _private(noise_multiplier=1.0, max_noise_multiplier=2.0),
    f"{DP}.max_noise_multiplier",
    "has no effect with noise_multiplier",
)

STANDARDISE = f"{DP}.standardise"


def _standardise(**keys: Any) -> dict[str, Any]:
    return _private(standardise={"low": [0.0], "high": [1.0]} | keys)


BOUNDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no bounds": (_standardise(low=[]), f"{STANDARDISE}.high", "there are 0 lower"),
    "bounds of different lengths": (
        _standardise(low=[0.0, 0.0], high=[1.0, 1.0, 1.0]),
        f"{STANDARDISE}.high",
        "there are 2 lower and 3 upper bounds",
    ),
    "empty range": (
        _standardise(low=[0.0, 1.0], high=[1.0]),
        f"{STANDARDISE}.high",
        "each upper bound must exceed the lower one",
    ),
    "little noise": (
        _standardise(noise_multiplier=0.01),
        f"{STANDARDISE}.noise_multiplier",
        "must be at least 0.05",
    ),
}

REFUSED = [
    pytest.param(unit, *row, id=f"{unit}: {case}")
    for rows, units in (
        (IN_SUM, ("joint", "site")),
        ({"two multipliers": TWO_MULTIPLIERS}, ("joint",)),
        (BOUNDS, ("record", "joint", "person")),
        ({"limit": IN_SUM["no bound on epsilon"]}, ("person",)),
    )
    for case, row in rows.items()
    for unit in units
]


@pytest.mark.parametrize("unit", ["record", "joint"])
def test_noised_statistics_are_accepted(unit: str):
    job = _job(unit, _standardise(low=[0.0, -1.0], high=[1.0]))
    found = job.privacy.differential_privacy.standardise
    assert found is not None
    assert found.noise_multiplier == 10.0


@pytest.mark.parametrize("num_sites", [2, 6])
def test_persons_are_protected_like_records(num_sites: int):
    """By each site alone, so that two sites need no waiver, and groups may be pairs."""
    groups: dict[str, Any] = {}
    if num_sites > 2:
        groups = {**_secure(groups=3), "aggregation": {"combine": "median"}}
    job = _job("person", _training(local_steps=9), groups, sites=num_sites)
    private = job.privacy.differential_privacy
    assert private.by_itself
    assert private.clips_gradients
    assert not private.in_sum


@pytest.mark.parametrize("unit", ["joint", "site"])
def test_noise_in_the_sum_is_accepted(unit: str):
    """So what is refused below is refused for the change alone."""
    assert _job(unit).minimum_sites == 4


@pytest.mark.parametrize(("unit", "change", "key", "text"), REFUSED)
def test_refused_combination_names_its_key(
    unit: str, change: dict[str, Any], key: str, text: str
):
    """And says why."""
    with pytest.raises(JobError, match=text.replace(".", r"\.")) as caught:
        _job(unit, change)
    assert caught.value.key == key


@pytest.mark.parametrize("unit", ["joint", "site"])
@pytest.mark.parametrize(
    ("sites", "threshold", "most"),
    [(4, 3, 1), (4, 4, 3), (7, 5, 2), (7, 6, 4), (7, 7, 6)],
)
def test_more_colluders_than_the_sum_withstands_are_refused(
    unit: str, sites: int, threshold: int, most: int
):
    """With fewer than all sites they could have two sums opened: 2 t > N + n_C."""
    secure = _secure(threshold=threshold)
    _job(unit, secure, _private(colluding_sites=most), sites=sites)
    with pytest.raises(JobError) as caught:
        _job(unit, secure, _private(colluding_sites=most + 1), sites=sites)
    assert caught.value.key == f"{DP}.colluding_sites"
    if threshold < sites:
        assert f"two sums of {threshold} of {sites} sites" in str(caught.value)


@pytest.mark.parametrize("change", [{}, _training(local_steps=5)])
def test_sites_train_as_they_like(change: dict[str, Any]):
    """Where whole sites are the unit only the update is clipped."""
    momentum = _training(optimizer={"name": "adamw"}, clip_grad_norm=1.0)
    job = _job("site", change, momentum, _private(clip_norm=0.25))
    assert job.update_clip_norm == 0.25


def test_public_held_out_data_of_sites_is_accepted():
    """What is public needs no noise."""
    evaluation = {"evaluation": {"every": 1}}
    _job("site", evaluation, _private(held_out="public"))
    _job("joint", evaluation)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, 0.2), (_private(clip_norm=0.5), 0.1), (_secure(clip_norm=3.0), 3.0)],
)
def test_clip_norm_of_a_joint_update(change: dict[str, Any], expected: float):
    """Twice the step of an expected batch whose gradients all are clipped."""
    assert expected == _job("joint", change).update_clip_norm


GROUPED = {
    "aggregation": {
        "weights": "uniform",
        "combine": "median",
        "byzantine_sites": 1,
    },
    "privacy": {
        "secure_aggregation": {"enabled": True, "groups": 3},
        "differential_privacy": {"unit": "none", "target_epsilon": None},
    },
}
NINE = tuple("abcdefghi")


def _grouped(*changes: Mapping[str, Any], sites: int = 9) -> JobSpec:
    """A job with a robust rule over groups, but for the changes."""
    document = toy.merged({}, GROUPED)
    for change in changes:
        document = toy.merged(document, change)
    return job_file.parse(_pruned(toy.document(document, sites=NINE[:sites])))


def test_robust_rule_over_groups_is_accepted():
    """Sums of three at least; with noise at every site, of two."""
    assert _grouped().sites_in_sum == 3
    record = _private(unit="record", target_epsilon=8.0)
    assert _grouped(record, sites=7).sites_in_sum == 2


def test_named_groups_have_a_threshold_of_their_own_size():
    """More than two thirds of each, or two sums of one round could be opened."""

    def of(threshold: int | None, *sizes: int) -> JobSpec:
        names = iter(NINE)
        groups = [[next(names) for _ in range(size)] for size in sizes]
        tables = {
            "schedule": {"mode": "buffered", "groups": groups},
            "aggregation": {"combine": "mean", "byzantine_sites": 0},
            "privacy": {"secure_aggregation": {"groups": None, "threshold": threshold}},
        }
        return _grouped(tables, sites=sum(sizes))

    job = of(3, 3, 6)
    assert [job.fewest_with(site) for site in ("a", "d")] == [3, 5]
    assert (job.sites_in_sum, job.smallest_cohort, job.most_absent) == (3, 3, 1)
    assert (job.buffer_size, job.minimum_sites) == (3, 9)
    whole = of(None, 4, 5)
    assert (whole.sites_in_sum, whole.most_absent, whole.buffer_size) == (4, 0, 4)
    with pytest.raises(JobError, match="no sum has 5 updates") as caught:
        of(5, 4, 4)
    assert caught.value.key == f"{SECURE}.threshold"


@pytest.mark.parametrize(
    ("change", "sites", "key", "text"),
    [
        (
            {},
            8,
            f"{SECURE}.groups",
            r"8 sites make 3 groups of 2, .*at least 3",
        ),
        (_secure(groups=2), 9, f"{SECURE}.groups", "3"),
        (
            {"aggregation": {"byzantine_sites": 2}},
            9,
            f"{SECURE}.groups",
            r"median withstands 2 .*at least 5 groups",
        ),
        (
            {"aggregation": {"combine": "krum"}},
            9,
            f"{SECURE}.groups",
            r"krum withstands 1 .*at least 5 groups",
        ),
    ],
)
def test_groups_that_are_refused(
    change: dict[str, Any], sites: int, key: str, text: str
):
    """Each with its key and with what would do."""
    with pytest.raises(JobError, match=text) as caught:
        _grouped(change, sites=sites)
    assert caught.value.key == key


def test_two_sites_still_need_a_waiver():
    """Joint noise is not noise of one's own: the other knows its half."""
    with pytest.raises(JobError) as caught:
        _job("joint", sites=2)
    assert caught.value.key == f"{SECURE}.two_sites_waiver"
    assert _job("joint", _secure(two_sites_waiver=True), sites=2).minimum_sites == 2


SUMS = {"communication": {"down_content": "sum"}}


def _level_job(*changes: Mapping[str, Any], sites: int = 4) -> JobSpec:
    """A job of four levels whose sites are sent the sum, but for the changes."""
    secure = {"secure_aggregation": {"enabled": True, "levels": 4}}
    document: dict[str, Any] = {"privacy": secure, **SUMS}
    for change in changes:
        document = toy.merged(document, change)
    return job_file.parse(_pruned(toy.document(document, sites=NINE[:sites])))


@pytest.mark.parametrize("levels", [3, 4, 8, 16, 256])
def test_few_levels_are_accepted(levels: int):
    """With the model or the sum on the way down, and with record-level privacy."""
    job = _level_job(_secure(levels=levels))
    assert job.communication.links.sums
    assert not _level_job({"communication": None}).communication.links.sums
    private = _private(unit="record", target_epsilon=8.0)
    _level_job(private, {"aggregation": {"weights": "uniform"}})


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [
        (_secure(levels=5), f"{SECURE}.levels", "choose one of 3, 4, 8, 16, 256"),
        (_secure(levels=2), f"{SECURE}.levels", "must be at least 3"),
        (_secure(levels=257), f"{SECURE}.levels", "must be at most 256"),
    ],
)
def test_few_levels_that_cannot_work_name_their_key(
    change: dict[str, Any], key: str, text: str
):
    """And say why."""
    with pytest.raises(JobError, match=text) as caught:
        _level_job(change, sites=9)
    assert caught.value.key == key


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_few_levels_may_come_down_in_16_bits(name: str):
    """Where sites are sent the model."""
    change = {"communication": {"down_content": "model", "down_codec": {"name": name}}}
    assert _level_job(change).communication.links.down.name == name

"""Which changes of its job a begun run allows."""

from typing import Any

import pytest
from support import toy

from federation.errors import CheckpointMismatch, JobError
from federation.events import RunExtended
from federation.job import job_digest
from federation.job.job_extension import (
    check_extension,
    check_same,
    joining_fault,
)
from federation.job.spec import JobSpec

SITES = [{"name": name} for name in "cab"]
D, E = {"name": "d"}, {"name": "e"}


def job_of(*more: dict[str, Any], rounds: int = 4, **tables: Any) -> JobSpec:
    return toy.job(tables | {"sites": [*SITES, *more], "rounds": rounds})


def extended(before: int, after: int, *joined: str) -> RunExtended:
    return RunExtended(
        at=0.0,
        last_round=1,
        first_round=2,
        rounds_before=before,
        rounds=after,
        job_before="",
        job="",
        joined=joined,
    )


def test_sites_may_join_with_and_without_more_rounds():
    assert check_extension(job_of(), job_of(D)) == ("d",)
    assert check_extension(job_of(), job_of(D, E, rounds=5)) == ("d", "e")
    assert check_extension(job_of(), job_of(rounds=5)) == ()


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (job_of(), "choose more"),
        (job_of(D, rounds=3), "choose more"),
        (toy.job({"sites": [*SITES[1:], D], "rounds": 4}), "sites"),
        (job_of({**D}, seed=3), "seed"),
        (toy.job({"sites": [{**SITES[0], "region": "x"}, *SITES[1:], D]}), "region"),
    ],
)
def test_nothing_else_may_change(after: JobSpec, words: str):
    with pytest.raises(CheckpointMismatch, match=words):
        check_extension(job_of(), after)


SUMMED = {"server_optimizer": {"name": "running_sum"}}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"privacy": {"secure_aggregation": {"enabled": True}}},
            "secure aggregation: .* reveal",
        ),
        (
            {
                "privacy": {
                    "differential_privacy": {"unit": "record", "target_epsilon": 9.0}
                },
                "aggregation": {"weights": "uniform"},
            },
            "differential privacy: noise and promises",
        ),
        ({"training": {"control_variates": True}}, "control variates: .* adds up"),
        (
            {"training": {"dynamic_alpha": 0.1}, "aggregation": SUMMED},
            "FedDyn: .* adds up",
        ),
    ],
)
def test_site_that_cannot_join_is_told_by_name_and_why(
    tables: dict[str, Any], words: str
):
    with pytest.raises(CheckpointMismatch, match=words) as caught:
        check_extension(job_of(**tables), job_of(D, **tables))
    assert str(caught.value).startswith("'d' cannot join")


def test_only_sites_that_the_others_have_agreed_on_join_while_a_run_trains():
    agreed = {"schedule": {"open_to": ["d", "x-*"]}}
    assert joining_fault(job_of(**agreed), job_of(D, **agreed)) == ""
    with pytest.raises(CheckpointMismatch, match=r"'e' cannot join.*d, x-"):
        check_extension(job_of(**agreed), job_of(D, E, **agreed))
    assert "'e' cannot" in joining_fault(job_of(**agreed), job_of(E, **agreed))
    # An operator may add it by hand.
    assert check_extension(job_of(), job_of(D)) == ("d",)
    assert "open_to" in joining_fault(job_of(), job_of(D))
    secret = {"privacy": {"secure_aggregation": {"enabled": True}}}
    assert "reveal" in joining_fault(job_of(**secret), job_of(D, **secret))
    with pytest.raises(JobError, match=r"schedule\.open_to.*'D'"):
        job_of(schedule={"open_to": ["D"]})


def test_schedule_of_the_learning_rate_needs_the_number_of_rounds_alone():
    linear = {"training": {"learning_rate": {"name": "linear"}}}
    assert check_extension(job_of(**linear), job_of(D, **linear)) == ("d",)
    with pytest.raises(CheckpointMismatch, match="linear"):
        check_extension(job_of(**linear), job_of(rounds=5, **linear))


def test_checkpoint_of_any_earlier_job_of_the_run_is_its_own():
    jobs = [job_of(), job_of(D), job_of(D, E, rounds=6)]
    history = [extended(4, 4, "d"), extended(4, 6, "e")]
    newest = job_digest.deciding(jobs[-1])
    for job in jobs:
        check_same(newest, job_digest.deciding(job), where="x", extensions=history)
    strange = job_digest.deciding(job_of(E))
    with pytest.raises(CheckpointMismatch, match="sites"):
        check_same(newest, strange, where="x", extensions=history)
    with pytest.raises(CheckpointMismatch, match="sites"):
        check_same(newest, job_digest.deciding(jobs[1]), where="x")

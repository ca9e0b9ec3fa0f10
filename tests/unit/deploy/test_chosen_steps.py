"""Runs in virtual time that choose how many local steps their rounds take."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from clients.privacy.policy_spec import PolicySpec
from clients.privacy.site_policy import check_job
from deploy.cli import job_check
from deploy.fleet.forecast import measured_speeds
from deploy.wiring import parts as wiring
from federation.clock import VirtualClock
from federation.errors import JobError
from federation.events import CostPredicted, Event, LocalWorkChosen, RoundFinished
from federation.ids import SiteId
from federation.job.spec import JobSpec
from monitoring.runs.run_result import RunResult
from monitoring.views.run_fold import fold

LOW, HIGH, ROUNDS = 2, 64, 40
LINE = {
    "examples_per_second": 80,  # A step of 8 examples takes 0.1 s.
    "down_mbit": 0.1,
    "up_mbit": 0.1,
    "latency_seconds": 0.04,
}


def job(**tables: Any) -> JobSpec:
    """Three sites on thin lines."""
    names = [f"site-{i}" for i in range(3)]
    given: dict[str, Any] = {
        "rounds": ROUNDS,
        "training": {"local_steps": LOW, "batch_size": 8, "optimizer": {"lr": 0.1}},
        "evaluation": {"every": 0},
        "schedule": {"local_work": "auto", "max_local_steps": HIGH},
        "simulation": {"machines": [{"site": name, **LINE} for name in names]},
    }
    for name, table in tables.items():
        given[name] = {**given.get(name, {}), **table}
    return small_job(num_sites=3, **given)


def watched(of: JobSpec, **how: Any) -> tuple[RunResult, Sequence[Event]]:
    seen: list[Event] = []
    result = simulate(of, engine="virtual", listeners=[seen.append], **how)
    return result, seen


def choices(seen: Sequence[Event]) -> list[LocalWorkChosen]:
    return [event for event in seen if isinstance(event, LocalWorkChosen)]


@pytest.mark.slow
def test_a_run_comes_to_the_steps_that_the_model_of_time_says():
    """All steps of the run are taken, in fewer rounds; the events say why."""
    result, seen = watched(job())
    found = choices(seen)
    assert [event.num_steps for event in found[:4]] == [LOW, LOW, 2 * LOW, 4 * LOW]
    assert sum(event.num_steps for event in found) == LOW * ROUNDS
    assert len(found) == result.rounds_completed < ROUNDS
    last = found[-1]
    assert last.step_seconds == pytest.approx(0.1)
    assert last.waiting_seconds is not None
    took = {e.round_index: e.seconds for e in seen if isinstance(e, RoundFinished)}
    for number, steps, seconds in zip(
        last.rounds, last.steps, last.seconds, strict=True
    ):
        assert seconds == pytest.approx(took[number])
        assert seconds == pytest.approx(last.waiting_seconds + 0.1 * steps)
    (predicted,) = (e.seconds for e in seen if isinstance(e, CostPredicted))
    assert predicted is not None
    assert predicted < sum(took.values()) < 1.5 * predicted


def test_real_time_does_not_decide_in_a_simulation():
    with pytest.raises(JobError, match="--engine virtual") as caught:
        simulate(job())
    assert caught.value.key == "schedule.local_work"


@pytest.mark.parametrize("is_auto", [True, False])
def test_a_site_limits_the_steps_of_a_round(is_auto: bool):  # noqa: FBT001
    """Whether a job fixes them, or leaves them open."""
    policy = PolicySpec(privacy="none", secure_aggregation=False, max_local_steps=9)
    asked = job() if is_auto else small_job(training={"local_steps": 10})
    key = "schedule.max_local_steps" if is_auto else "training.local_steps"
    with pytest.raises(JobError, match="allows 9 local steps") as caught:
        check_job(asked, policy, SiteId("site-0"))
    assert caught.value.key == key
    check = replace(policy, max_local_steps=HIGH, functions=("*",))
    with pytest.raises(JobError, match="does not accept"):  # Only functions are left.
        check_job(asked, check, SiteId("site-0"))


@pytest.mark.slow
def test_the_forecast_says_what_auto_comes_to(tmp_path: Path):
    """By stated speeds; and a finished run shows the same speeds."""
    asked = job(schedule={"training_share": 0.9})
    tables = [
        f'[[sites]]\nname = "{site.name}"\ntrain_examples_per_second = 80.0\n'
        "evaluate_examples_per_second = 80.0\ndown_bytes_per_second = 12500.0\n"
        "up_bytes_per_second = 12500.0\nlatency_seconds = 0.04\n"
        for site in asked.sites
    ]
    (tmp_path / "speeds.toml").write_text("".join(tables))
    federation = wiring.build_federation(asked)
    found = job_check.forecast(federation, VirtualClock(), tmp_path / "speeds.toml")
    assert found.chosen is not None
    steps, rounds = found.chosen
    assert steps * rounds >= LOW * ROUNDS > steps * (rounds - 1)
    assert f'"auto" comes to {steps} local steps a round, {rounds} rounds' in [
        *found.lines()
    ]
    assert found.document()["chosen_steps"] == steps
    assert found.trained == pytest.approx(0.9, abs=0.01)

    assert found.traffic is not None
    _, seen = watched(job(schedule={"max_local_steps": 8}))
    speeds = measured_speeds(fold(seen), found.traffic)
    rates = [site.train_examples_per_second for site in speeds.sites]
    assert rates == pytest.approx([80.0] * 3)

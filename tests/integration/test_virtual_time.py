"""``simulate --engine virtual``: whole runs in which nothing waits."""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from support.small_jobs import small_job

from deploy.wiring.simulation import simulate
from federation.clock import SystemClock
from federation.errors import JobError
from federation.events import (
    CostPredicted,
    Event,
    RoundFinished,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    SitesPaid,
    Warned,
)
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from monitoring.views import run_plan
from monitoring.views.run_fold import fold

MBIT = 125_000


def machines_of(job: JobSpec) -> list[dict[str, Any]]:
    """The first site is slow, the second has a thin line."""
    speeds = {0: (10.0, 100.0), 1: (1000.0, 0.08)}
    return [
        {
            "site": site.name,
            "examples_per_second": speeds.get(index, (1000.0, 100.0))[0],
            "up_mbit": speeds.get(index, (1000.0, 100.0))[1],
            "latency_seconds": 0.5,
        }
        for index, site in enumerate(job.sites)
    ]


def plain_job(**changes: Any) -> JobSpec:
    """Three rounds of four sites."""
    return small_job(num_sites=4, **{"rounds": 3, **changes})


def virtual_job(**changes: Any) -> JobSpec:
    """A small job with a speed for every site."""
    tables = {"simulation": {"machines": machines_of(plain_job())}}
    tables["simulation"] |= changes.pop("simulation", {})
    return plain_job(**tables, **changes)


def events_of(job: JobSpec, **arguments: Any) -> list[Event]:
    """Everything that happened."""
    seen: list[Event] = []
    simulate(job, engine="virtual", listeners=[seen.append], **arguments)
    return seen


def only(events: list[Event], kind: type[Any]) -> list[Any]:
    """Events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def told(events: list[Event]) -> list[str]:
    """Events as text, without the run's random name."""
    (started,) = only(events, RunStarted)
    return [repr(event).replace(started.run_id, "RUN") for event in events]


def test_two_runs_have_the_same_events():
    """To the last digit of their times."""
    assert told(events_of(virtual_job())) == told(events_of(virtual_job()))


class Passes(tuple[Any, ...]):  # noqa: SLOT001 -- it counts
    """Counts how often somebody goes through it."""

    num: int

    def __new__(cls, rows: tuple[Any, ...]) -> Self:
        made = super().__new__(cls, rows)
        made.num = 0
        return made

    def __iter__(self) -> Iterator[Any]:
        self.num += 1
        return super().__iter__()


def passes(num_sites: int) -> int:
    """How often a run goes through the machines of its job."""
    job = small_job(num_sites=num_sites)
    job = small_job(num_sites=num_sites, simulation={"machines": machines_of(job)})
    machines = Passes(job.simulation.machines)
    events_of(replace(job, simulation=replace(job.simulation, machines=machines)))
    return machines.num


def test_start_is_linear_in_the_number_of_sites():
    """No site goes through the machines of all others: thousands of them start."""
    assert passes(2) == passes(9) > 0


def test_no_wall_clock_is_read(monkeypatch: pytest.MonkeyPatch):
    """Not even where the time would be thrown away."""

    def read(*_: object) -> float:
        raise AssertionError("somebody has read the wall clock")

    for name in ("now", "monotonic", "sleep"):
        monkeypatch.setattr(SystemClock, name, read)
    (finished,) = only(events_of(virtual_job()), RunFinished)
    assert finished.status == "completed"


def test_times_are_those_of_the_job():
    """Bytes over the line, twice the latency, and examples over the speed."""
    job = virtual_job(evaluation={"every": 0})
    events = events_of(job)
    speeds = {machine.site: machine for machine in job.simulation.machines}
    answers = only(events, SiteAnswered)
    assert answers
    for answer in answers:
        machine = speeds[answer.site]
        assert answer.training is not None
        work = sum(phase.seconds for phase in answer.phases)
        expected = (
            2 * 0.5
            + answer.bytes_down / (machine.down_mbit * MBIT)
            + answer.bytes_up / (machine.up_mbit * MBIT)
            + work
        )
        assert answer.answered_seconds - answer.asked_seconds == pytest.approx(expected)
        assert work >= answer.training.count / machine.examples_per_second - 1e-9
    slowest = max(a.answered_seconds for a in answers if a.round_index == 1)
    assert only(events, RoundFinished)[0].seconds == pytest.approx(slowest)


def test_prediction_is_what_virtual_time_takes(tmp_path: Path):
    """One model predicts a run, and moves the clocks while it runs."""
    for evaluation in ({"every": 0}, {"every": 1}):
        job = virtual_job(evaluation=evaluation)
        folder = tmp_path / str(evaluation["every"])
        events = events_of(job, folder=folder, report=job.evaluation.every == 1)
        (told,) = only(events, CostPredicted)
        view = fold(events)
        assert told.bytes_down[0] <= view.bytes_down <= told.bytes_down[1]
        assert told.bytes_up[0] <= view.bytes_up <= told.bytes_up[1]
        # The thin line carries 64 bytes more or less in 6 ms.
        assert told.seconds == pytest.approx(view.seconds, abs=0.05)
        assert view.predicted == told
    report = (tmp_path / "1" / "report.html").read_text()
    assert f"{view.bytes_down:,} bytes down, {view.bytes_up:,} up" in report
    assert "Predicted before the run" in report


EQUAL = {"training": {"local_steps": 12, "optimizer": {"lr": 0.1}}}


@pytest.mark.parametrize(
    "tables",
    [
        {**EQUAL, "schedule": {"allocation": "capacity"}},
        {
            **EQUAL,
            "rounds": 30,
            "schedule": {
                "mode": "buffered",
                "buffer_size": 2,
                "allocation": "capacity",
            },
        },
        {
            "training": {"local_epochs": 4, "optimizer": {"lr": 0.1}},
            "data": {
                "source": "support.small_jobs:blobs",
                "placement": "dynamic",
            },
        },
    ],
)
def test_prediction_follows_capacity(tables: dict[str, Any]):
    """Sites that take the steps, or the data, of their speed end together."""
    machines = [
        {**one, "examples_per_second": 10.0 * 2**index, "up_mbit": 10.0}
        for index, one in enumerate(machines_of(plain_job()))
    ]
    tables = {"rounds": 6, "evaluation": {"every": 0}, **tables}
    events = events_of(virtual_job(**tables, simulation={"machines": machines}))
    (told,) = only(events, CostPredicted)
    (finished,) = only(events, RunFinished)
    assert told.seconds == pytest.approx(finished.seconds, rel=0.08)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(("rounds", "size"), [(1, 2), (12, 2), (20, 1), (9, 4)])
def test_bytes_of_a_buffered_run_are_within_the_prediction(
    rounds: int, size: int, every: int
):
    """With tasks that its end finds at work, and updates that came too late."""
    job = virtual_job(
        rounds=rounds,
        evaluation={"every": every},
        schedule={"mode": "buffered", "buffer_size": size},
    )
    view = fold(events_of(job))
    told = view.predicted
    assert told is not None
    assert told.bytes_down[0] <= view.bytes_down <= told.bytes_down[1]
    assert told.bytes_up[0] <= view.bytes_up <= told.bytes_up[1]
    if rounds <= job.schedule.max_staleness:
        assert told.bytes_down[0] == told.bytes_down[1]


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(("rounds", "first"), [(1, 3), (2, 3), (12, 3), (9, 4)])
def test_bytes_of_groups_are_within_the_prediction(rounds: int, first: int, every: int):
    """Each has keys and a first task of its own, and perhaps other sizes."""
    names = [f"site-{index}" for index in range(first + 3)]
    machines = [
        {"site": name, "examples_per_second": 10.0 * 1.7**index}
        for index, name in enumerate(names)
    ]
    job = small_job(
        num_sites=len(names),
        rounds=rounds,
        evaluation={"every": every},
        schedule={"mode": "buffered", "groups": [names[:first], names[first:]]},
        privacy={"secure_aggregation": {"enabled": True, "max_examples": 1000}},
        simulation={"machines": machines},
    )
    view = fold(events_of(job))
    told = view.predicted
    assert told is not None
    assert told.bytes_down[0] <= view.bytes_down <= told.bytes_down[1]
    assert told.bytes_up[0] <= view.bytes_up <= told.bytes_up[1]


def test_prediction_of_work_is_not_the_wall_clock():
    """Elsewhere no speed is stated, and so no time is predicted."""
    heard: list[Event] = []
    simulate(plain_job(), listeners=[heard.append])
    (told,) = only(heard, CostPredicted)
    view = fold(heard)
    assert told.seconds is None
    assert told.bytes_up[0] <= view.bytes_up <= told.bytes_up[1]


def test_model_is_that_of_the_other_engine():
    """But for the order in which updates are added up."""
    job = virtual_job()
    ours, theirs = simulate(job, engine="virtual"), simulate(job)
    for name, values in theirs.weights.items():
        np.testing.assert_allclose(ours.weights[name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", [{}, {"mode": "buffered", "buffer_size": 2}])
def test_time_passes_while_everybody_is_away(schedule: dict[str, Any]):
    """Or rounds would be lost meanwhile, and three of them end a run."""
    machines = [{**one, "away": [[1.0, 90.0]]} for one in machines_of(plain_job())]
    job = virtual_job(schedule=schedule, simulation={"machines": machines})
    events = events_of(job)
    finished = only(events, RoundFinished)
    assert [one.status for one in finished] == ["lost", *["completed"] * 2]
    assert only(events, RunFinished)[0].seconds > 90.0


def test_waiting_is_for_the_site_that_is_away():
    """As in a deployed run: those that are there wait for it before they are asked."""
    first, *rest = machines_of(plain_job())
    first |= {"away": [[1.0, 90.0]]}
    job = virtual_job(
        schedule={"minimum_sites": 1 + len(rest)},
        simulation={"machines": [first, *rest]},
    )
    events = events_of(job)
    told = [event for event in only(events, Warned) if event.awaited]
    assert [event.awaited for event in told] == [(first["site"],)]
    found = fold(events).participation.waited[first["site"]]
    assert found >= len(rest) * (90.0 - told[0].at) > 0.0


def test_sites_are_paid_while_they_are_there_and_for_what_they_send(tmp_path: Path):
    """From the beginning of the run, also of one that is resumed."""
    first, second, *rest = machines_of(plain_job())
    first |= {"dollars_per_hour": 3600.0, "away": [[0.0, 0.5], [2.5, 1e6]]}
    second |= {"dollars_per_hour": 3.6, "dollars_per_gigabyte": 1e6}
    schedule = {"minimum_sites": 3}
    job = virtual_job(
        schedule=schedule, simulation={"machines": [first, second, *rest]}
    )
    once = iter([False, True])
    simulate(
        job,
        engine="virtual",
        folder=tmp_path,
        report=False,
        stop_requested=lambda: next(once),
    )
    events = events_of(job, folder=tmp_path, resume=True)
    (paid,), (end,) = only(events, SitesPaid), only(events, RunFinished)
    view = fold(RunFolder(tmp_path).read_events())
    sent = {site.site: site.bytes_up for site in view.sites}[second["site"]]
    expected = [2.0, end.at / 1000 + sent / 1000, 0.0, 0.0]
    assert end.at > 2.5
    assert paid.dollars == pytest.approx(expected)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [site["virtual_dollars"] for site in result["sites"]] == [*paid.dollars]
    assert result["virtual_dollars"] == pytest.approx(sum(expected))
    assert view.predicted
    assert view.predicted.dollars == pytest.approx(
        view.predicted.seconds * 1.001 + sent / 1000, rel=0.01
    )
    (row,) = [r for r in run_plan.rows(None, view) if r.unit == "dollars"]
    assert row.actual == pytest.approx(sum(expected))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"{paid.dollars[1]:,.4f}" in page
    assert "Virtual dollars" in page


def test_without_prices_there_are_no_dollars(tmp_path: Path):
    events = events_of(virtual_job(), folder=tmp_path)
    assert not only(events, SitesPaid)
    assert only(events, CostPredicted)[0].dollars is None
    assert json.loads((tmp_path / "result.json").read_text())["virtual_dollars"] is None
    assert "Virtual dollars" not in (tmp_path / "report.html").read_text("utf-8")


def test_site_that_is_too_slow_misses_the_deadline():
    """The round ends when the deadline passes, and takes no time on the wall."""
    job = virtual_job(
        schedule={"round_deadline_seconds": 30.0, "minimum_sites": 1},
        simulation={
            "faults": [
                {
                    "site": plain_job().sites[0].name,
                    "kind": "hang",
                    "seconds": 3600.0,
                    "rounds": [1],
                }
            ]
        },
    )
    events = events_of(job)
    first = only(events, RoundFinished)[0]
    assert first.seconds == pytest.approx(30.0)
    assert only(events, SiteFailed)[0].kind == "deadline"


def test_run_is_resumed_where_its_time_stood(tmp_path: Path):
    """Time continues, and the model is that of a run in one go."""
    once = iter([False, True])
    job = virtual_job()
    stop: dict[str, Any] = {"stop_requested": lambda: next(once), "report": False}
    simulate(job, engine="virtual", folder=tmp_path, **stop)
    events: list[Event] = []
    resumed = simulate(
        job, engine="virtual", folder=tmp_path, resume=True, listeners=[events.append]
    )
    whole = simulate(job, engine="virtual")
    assert events[0].at > 0
    for name, values in whole.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], values)
    assert "virtual" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_secure_aggregation_runs_in_virtual_time():
    """Its steps take the time of their messages."""
    job = virtual_job(privacy={"secure_aggregation": {"enabled": True}})
    events = events_of(job)
    assert only(events, RunFinished)[0].status == "completed"
    assert only(events, RoundFinished)[0].seconds > 4 * 0.5
    gc.collect()


def test_site_without_a_speed_is_refused():
    """No speed is made up."""
    job = plain_job(simulation={"machines": machines_of(plain_job())[1:]})
    with pytest.raises(JobError, match="speed of every site"):
        simulate(job, engine="virtual")


@pytest.mark.parametrize("site", ["nobody", None])
def test_machine_of_nobody_and_of_one_site_twice(site: str | None):
    """A slip of the pen is named with its place."""
    machines = machines_of(plain_job())
    first = {**machines[0], "site": site or machines[0]["site"]}
    with pytest.raises(JobError) as caught:
        plain_job(simulation={"machines": [*machines, first]})
    assert caught.value.key == f"simulation.machines[{len(machines)}].site"

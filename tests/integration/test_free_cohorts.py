"""Buffered rounds of secure sums over whichever sites are ready."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import agents
from support.agents import OPEN_POLICY, AgentGrid
from support.buffered_runs import (
    FAST,
    RECORD,
    SITES,
    SLOW,
    STEP_SECONDS,
    failures,
    fault,
    of,
    tables,
    told,
)
from support.free_cohorts import free_job
from support.killed_runs import kill_at
from support.small_jobs import small_job
from support.without_report import simulate

from clients.models.starting_weights import initial_weights
from clients.privacy.cohort_seal import CohortSeal, KeptRound, _Finished
from clients.privacy.ring_seal import RingSeal
from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.wiring.parts import build_federation
from federation.clock import SystemClock
from federation.errors import JobError, QuorumNotMet, SiteError
from federation.events import (
    Event,
    ModelEvaluated,
    RoundFinished,
    RunFinished,
    SiteAnswered,
    StepTaken,
    Warned,
)
from federation.messages import RoundTask, SecureAnswer, SecureStep, SecureTask
from monitoring.runs.run_folder import RunFolder

pytestmark = pytest.mark.slow

RUN = "20260102-030405-abcdef"

FREE = {**RECORD, "schedule": {"mode": "buffered", "buffer_size": 3}}
# Three speeds: nobody is always ready with the same others.
UNEQUAL = {
    "rounds": 12,
    "simulation": {
        "machines": [
            {"site": site, "examples_per_second": speed}
            for site, speed in zip(SITES, (100, 90, 75, 50, 30, 25), strict=True)
        ]
    },
}


def sums(events: Sequence[Event]) -> list[tuple[int, frozenset[str]]]:
    """The sums that made models: round and sites."""
    found = groupby(of(SiteAnswered, events), key=lambda event: event.round_index)
    return [(index, frozenset(e.site for e in answers)) for index, answers in found]


def test_cohorts_form_of_whoever_is_ready_and_the_slow_cost_the_fast_nothing():
    events = told(FREE, UNEQUAL)
    assert not failures(events)
    assert not of(Warned, events)
    cohorts = [sites for _, sites in sums(events)]
    assert len({*cohorts}) > 3
    assert all(len(sites) >= 3 for sites in cohorts)
    answers = of(SiteAnswered, events)
    counts = Counter(answer.site for answer in answers)
    assert counts["site-0"] >= 2 * counts["site-5"] >= 4
    assert {*counts} == {*SITES}
    assert max(answer.staleness for answer in answers) > 1
    (end,), (waits,) = (
        of(RunFinished, events),
        of(RunFinished, told(RECORD, UNEQUAL, {"rounds": 6})),
    )
    assert end.seconds < 0.7 * waits.seconds  # As many updates.
    # Each site trains at once when its sum is made, on the newest model.
    steps = Counter(event.step for event in of(StepTaken, events))
    assert {*steps} == {"ready", "advertise", "confirm"}


def test_virtual_time_is_the_same_every_time():
    def record(events: Sequence[Event]) -> list[Any]:
        return [(e.at, e.round_index, e.site) for e in of(SiteAnswered, events)]

    assert record(told(FREE, UNEQUAL)) == record(told(FREE, UNEQUAL))


def known_updates(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], int]:
    """Have each site bring an update of its own; the age that each is sealed with."""
    train, update, seal = CohortSeal._train, _Finished.update, CohortSeal._round
    asked: list[str] = []
    ages: dict[tuple[str, int], int] = {}

    def train_(self: CohortSeal, task: RoundTask, work: Any) -> Any:
        asked.append(task.site)
        return train(self, task, work)

    def update_(self: _Finished, weights_d: Any, result: Any) -> Any:
        found = update(self, weights_d, result)
        found.update_d[:] = VALUES[asked[-1]]
        return found

    def seal_(self: CohortSeal, task: RoundTask, *rest: Any) -> Any:
        found: Any = seal(self, task, *rest)
        ages[task.site, task.based_on] = found.cohort.age(found.kept.update)
        return found

    monkeypatch.setattr(CohortSeal, "_train", train_)
    monkeypatch.setattr(_Finished, "update", update_)
    monkeypatch.setattr(CohortSeal, "_round", seal_)
    return ages


VALUES = {site: 0.01 * 2**at for at, site in enumerate(SITES)}
FAR = {
    "simulation": {
        "machines": [
            {
                "site": site,
                "examples_per_second": 60.0,
                "latency_seconds": 0.5 if site == "site-5" else 0.0,
            }
            for site in SITES
        ]
    }
}


@pytest.mark.parametrize(
    ("size", "machines"), [(2, UNEQUAL), (3, UNEQUAL), (6, UNEQUAL), (2, FAR)]
)
def test_model_follows_from_updates_by_their_age(
    size: int, machines: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Each counts a sixth, divided by the root of one plus its age, as in FedBuff.

    If models are made while a cohort makes its keys, its sum is scaled once more.
    """
    ages, events = known_updates(monkeypatch), list[Event]()
    about = {"schedule": {"buffer_size": size, "max_staleness": 20}}
    job = small_job(**tables(FREE, machines, about))
    end = simulate(job, engine="virtual", listeners=[events.append])
    step, waited = 0.0, list[int]()
    for answer in of(SiteAnswered, events):
        based_on = answer.round_index - 1 - answer.staleness
        age = ages[answer.site, based_on]
        waited.append(answer.staleness - age)
        step += VALUES[answer.site] / ((1 + age) * (1 + waited[-1])) ** 0.5
    assert (max(waited) > 0) == (machines is FAR)
    begin_d, _ = initial_weights(job, build_federation(job).pool)
    found_d = np.concatenate([array.ravel() for array in end.weights.values()])
    np.testing.assert_allclose(found_d - begin_d, step / len(SITES), rtol=1e-3)


@pytest.mark.parametrize("most", [1, 16])
def test_updates_that_are_too_old_count_nothing(
    most: int, monkeypatch: pytest.MonkeyPatch
):
    """Either when they are ready, or when their sum comes late."""
    ages = known_updates(monkeypatch)
    about = {"schedule": {"buffer_size": 2, "max_staleness": most}, "rounds": 24}
    events = told(FREE, FAR, about)
    assert max(ages.values()) <= most
    if most == 1:
        (text, *_), site = (
            {f.message for f in failures(events)},
            failures(events)[0].site,
        )
        assert "which is too old" in text
        assert site == "site-5"
    else:
        (warned,) = of(Warned, events)
        assert "has no sum of site-2, site-5" in warned.message
        assert "is too old" in warned.message
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}


def test_run_without_enough_sites_for_a_sum_ends_and_says_how_many_it_needs():
    spells: list[list[list[float]]] = [[], [], *([[[0.3, 1e5]]] * 4)]
    away = {
        "simulation": {
            "machines": [
                {"site": site, "examples_per_second": 100.0, "away": each}
                for site, each in zip(SITES, spells, strict=True)
            ]
        }
    }
    with pytest.raises(QuorumNotMet, match=r"3 of 6 sites.*is away"):
        told(FREE, away)


def test_site_that_fails_in_training_is_missed_by_nobody():
    events = told(FREE, UNEQUAL, fault("site-1", "crash", 2))
    assert {(f.site, f.kind) for f in failures(events)} == {("site-1", "crashed")}
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}


class Dead(SiteError):
    """What a site's process says no more."""


def dead_in(
    monkeypatch: pytest.MonkeyPatch, step: SecureStep | None, site: str
) -> list[int]:
    """A site that is killed between ready and sealed, once; how often it was asked."""
    asked: list[int] = []
    take, seal = RingSeal.step, CohortSeal._round

    def step_(self: RingSeal, task: SecureTask, layout: Any) -> SecureAnswer:
        if task.step is step and task.site == site and not asked:
            asked.append(task.round_index)
            raise Dead("it was killed")
        return take(self, task, layout)

    def round_(self: CohortSeal, task: RoundTask, *rest: Any) -> Any:
        if step is None and task.site == site and not asked:
            asked.append(task.round_index)
            raise Dead("it was killed")
        return seal(self, task, *rest)

    monkeypatch.setattr(RingSeal, "step", step_)
    monkeypatch.setattr(CohortSeal, "_round", round_)
    return asked


@pytest.mark.parametrize("step", [SecureStep.ADVERTISE, SecureStep.CONFIRM])
def test_cohort_that_loses_a_site_before_it_has_keys_forms_again(
    step: SecureStep, monkeypatch: pytest.MonkeyPatch
):
    """The others have sealed nothing: their updates count in the next cohort."""
    trained: Counter[str] = Counter()
    train = CohortSeal._train

    def count(self: CohortSeal, task: RoundTask, work: Any) -> Any:
        trained[task.site] += 1
        return train(self, task, work)

    monkeypatch.setattr(CohortSeal, "_train", count)
    dead_in(monkeypatch, step, "site-0")
    events = told(FREE, UNEQUAL)
    assert [f.site for f in failures(events)] == ["site-0"]
    (warned,) = of(Warned, events)
    assert "no new keys of site-0, site-1, site-2" in warned.message
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}
    (_, first), *_ = sums(events)
    assert first > {"site-1", "site-2"}
    assert "site-0" not in first
    counts = Counter(a.site for a in of(SiteAnswered, events))
    for site in SITES[1:]:  # All but the last update of each counts.
        assert trained[site] - counts[site] <= 1
    assert trained["site-0"] - counts["site-0"] in {1, 2}
    assert counts["site-0"] > 1  # It gets the next model.


def test_cohort_that_loses_a_site_with_keys_has_no_sum_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its sites have sealed their updates, and do so only once."""
    dead_in(monkeypatch, None, "site-0")
    events = told(FREE, UNEQUAL)
    assert {f.site for f in failures(events)} == {"site-0"}
    (warned,) = of(Warned, events)
    assert "has no sum of site-0, site-1, site-2: 2 of 3" in warned.message
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}
    (_, first), *_ = sums(events)
    assert first == {"site-1", "site-2", "site-3", "site-4", "site-5"}  # Three count.
    began = [(a.site, a.round_index - a.staleness) for a in of(SiteAnswered, events)]
    assert len({*began}) == len(began)


def test_frozen_site_costs_the_others_nothing():
    """While it trains, and with an update that counts when it comes."""
    about = {"rounds": 18, "schedule": {"max_staleness": 50}}
    events = told(FREE, fault("site-3", "hang", 1, seconds=2.0), about)
    seconds = [e.seconds for e in of(RoundFinished, events)]
    assert sum(seconds[:4]) < 6 * STEP_SECONDS
    late = [a for a in of(SiteAnswered, events) if a.site == "site-3"]
    assert late
    assert late[0].staleness >= 5
    assert not failures(events)


def test_answer_was_asked_when_its_training_was():
    """So reports count training as work, and not as waiting for a task."""
    for answer in of(SiteAnswered, told(FREE, UNEQUAL)):
        assert answer.answered_seconds - answer.asked_seconds > STEP_SECONDS


def test_site_that_says_twice_that_it_is_ready_counts_once():
    events = told(FREE, UNEQUAL, fault("site-1", "duplicate", 1))
    assert {f.site for f in failures(events)} == {"site-1"}
    assert {f.kind for f in failures(events)} == {"duplicate", "invalid"}
    began = [(a.site, a.round_index - a.staleness) for a in of(SiteAnswered, events)]
    assert len({*began}) == len(began)
    assert ("site-1", 1) in began
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}


def test_model_is_evaluated_where_all_of_a_cohort_began_with_it():
    events = told(FREE, {"evaluation": {"every": 1}})
    assert not failures(events)  # Who is at work at the end is not late.
    found = of(ModelEvaluated, events)
    by_round = {event.round_index: {*event.sites} for event in found}
    *during, last = by_round.values()
    assert during
    assert all(sites == {*FAST} for sites in during)
    assert last == {*SITES}
    stale = {a.round_index for a in of(SiteAnswered, events) if a.staleness}
    assert not {index + 1 for index in [*by_round][:-1]} & stale


def test_results_of_sites_that_were_not_asked_for_them_spoil_their_sum(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of several models no results are read, so that a site cannot add some."""
    work = CohortSeal._work

    def lie(self: CohortSeal, round_: Any) -> Any:
        words, header_h = work(self, round_)
        is_kept = isinstance(round_, KeptRound) and not round_.cohort.is_fresh
        if round_.task.site == "site-0" and is_kept:
            slots = round_.masking.contract.header_slots
            header_h[slots.index("evaluation_count")] += np.uint64(3)
        return words, header_h

    monkeypatch.setattr(CohortSeal, "_work", lie)
    events = told(FREE, {"evaluation": {"every": 1}})
    stale = [a for a in of(SiteAnswered, events) if a.staleness]
    assert "site-0" in {answer.site for answer in stale}
    texts = [event.message for event in of(Warned, events)]
    assert any("sum of site-0" in t and "sums of evaluation" in t for t in texts)


def test_threads_of_one_process_can_do_it_too():
    events = told(FREE, engine="inproc")
    assert of(RunFinished, events)[0].status == "completed"
    assert not [f for f in failures(events) if f.kind != "late"]


@pytest.mark.parametrize(
    "moment", [("SiteAnswered", 4), ("RoundFinished", 5), ("StepTaken", 6)]
)
def test_killed_run_counts_no_update_twice(moment: tuple[str, int], tmp_path: Path):
    """With an open sum, between two, and while a cohort makes its keys."""
    folder = tmp_path / "run"
    kill_at(tables(FREE), folder, *moment, engine="virtual")
    events = told(FREE, folder=folder, resume=True)
    assert of(RunFinished, events)[0].status == "completed"
    assert [e.round_index for e in of(RoundFinished, events)][-1] == 10
    began = [(a.site, a.round_index - a.staleness) for a in of(SiteAnswered, events)]
    assert len({*began}) == len(began)


class Killed(BaseException):
    """Ends a coordinator as a signal would."""


@pytest.mark.parametrize("moment", ["ready", "advertise", "confirm", "sealed"])
def test_new_coordinator_goes_on_with_the_same_agents(moment: str, tmp_path: Path):
    """Over bytes: who has sealed under a number neither trains nor is charged again."""
    job = free_job(rounds=3, evaluation={"every": 0})
    names = [site.name for site in job.sites]
    members = agents.consortium(*names)
    tables = {"policy": {**OPEN_POLICY, "max_delta": 0.01}}
    grid = AgentGrid(
        {name: agents.agent(tmp_path, name, members, **tables) for name in names}
    )
    folder = RunFolder(tmp_path / "runs" / RUN)
    folder.path.mkdir(parents=True)
    folder.write_job(job)
    seen: list[Event] = []

    def kill(event: Event) -> None:
        if isinstance(event, SiteAnswered) or getattr(event, "step", "") == moment:
            raise Killed

    def coordinate(*listeners: Any) -> None:
        parties, clock = members.parties, SystemClock()
        DeployedRun(
            folder, parties, clock=clock, listeners=[*listeners], report=False
        ).run(grid.connect)

    with grid.connected():
        with pytest.raises(Killed):
            coordinate(kill)
        grid.end()
        tasks = [task for task in grid.seen if isinstance(task, RoundTask)]
        sealed = {task.site for task in tasks if task.secure}
        coordinate(seen.append)
    tasks = [task for task in grid.seen if isinstance(task, RoundTask)]
    assert bool(sealed) == (moment == "sealed")
    assert of(RunFinished, seen)[0].status == "completed"
    began = [(a.site, a.round_index - a.staleness) for a in of(SiteAnswered, seen)]
    assert len({*began}) == len(began)
    for name in names:
        path = tmp_path / name / "runs" / RUN / "sites" / name / "ledger.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        of_first = [one for one in lines if one.get("round_index") == 1]
        mine = [task for task in tasks if task.site == name and not task.secure]
        asked = [task for task in mine if task.round_index == 1]
        assert len(of_first) == len(asked) - (name in sealed)


def test_epsilon_of_as_many_tasks_is_that_of_fixed_groups():
    """What a site is charged for is what it begins, whoever is in its sums."""

    def spent(*changes: dict[str, Any]) -> dict[tuple[str, int], float]:
        events = told(RECORD, *changes, {"rounds": 8})
        answers = of(SiteAnswered, events)
        return {(a.site, a.spent.anchor.train): a.spent.epsilon for a in answers}

    groups = {"schedule": {"mode": "buffered", "groups": [FAST, SLOW]}}
    fixed, free = spent(groups), spent(FREE)
    common = fixed.keys() & free.keys()
    assert len(common) >= 8
    for key in common:
        assert free[key] == pytest.approx(fixed[key], rel=1e-12)
    for site in SITES:  # One charge for each task, and more of them for fast ones.
        numbers = sorted(number for name, number in free if name == site)
        assert numbers == [*range(1, len(numbers) + 1)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"privacy": {"differential_privacy": None}}, "schedule.groups.*of its own"),
        (
            {"privacy": {"differential_privacy": {"unit": "site"}}},
            "schedule.groups.*of its own",
        ),
        (
            {
                "privacy": {"differential_privacy": {"unit": "joint"}},
                "training": {"local_steps": 1, "optimizer": {"name": "sgd"}},
            },
            "schedule.groups.*of its own",
        ),
        ({"privacy": {"secure_aggregation": {"threshold": 5}}}, "all 3 sites of a sum"),
        ({"schedule": {"buffer_size": 1}}, "a sum has 1 updates.*at least 2"),
        ({"schedule": {"allocation": "capacity"}}, "take the same steps"),
        ({"privacy": {"secure_aggregation": {"levels": 4}}}, "no common steps"),
    ],
    ids=["none", "site", "joint", "threshold", "size", "capacity", "levels"],
)
def test_what_such_sums_cannot_be_combined_with_is_refused(
    changes: dict[str, Any], said: str
):
    with pytest.raises(JobError, match=said):
        small_job(**tables(FREE, changes))

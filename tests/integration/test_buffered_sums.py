"""Buffered rounds of secure sums: groups of sites at their own pace."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import toy
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
from support.killed_runs import kill_at
from support.small_jobs import small_job
from support.without_report import simulate

from aggregator import buffered_sums, group_sums
from aggregator.buffered_sums import BufferedGroups
from clients.privacy.ring_seal import RingSeal
from federation.errors import JobError, QuorumNotMet, SiteError
from federation.events import (
    CostPredicted,
    Event,
    ModelEvaluated,
    RoundFinished,
    RunFinished,
    SiteAnswered,
    StepTaken,
    Warned,
)
from federation.ids import SiteId
from federation.messages import SecureAnswer, SecureStep, SecureTask, Task
from federation.rounds.round_record import RoundRecord
from privacy.secagg.agreement.groups import named_groups
from privacy.secagg.errors import OutOfOrder, TooFewSites
from privacy.secagg.protocol.messages import Survivors
from privacy.secagg.protocol.setup import AggregatorSetup

pytestmark = pytest.mark.slow

BUFFERED = {"schedule": {"mode": "buffered", "groups": [FAST, SLOW]}}


def test_groups_go_at_their_own_pace():
    events = told(BUFFERED)
    answers = of(SiteAnswered, events)
    counts = Counter(answer.site for answer in answers)
    assert {counts[site] for site in FAST} == {8}
    assert {counts[site] for site in SLOW} == {2}
    assert {a.staleness for a in answers if a.site in SLOW} == {3, 4}
    (end,), (waits,) = of(RunFinished, events), of(RunFinished, told({"rounds": 5}))
    assert end.seconds < 0.5 * waits.seconds  # As many updates.
    assert not failures(events)
    assert not of(Warned, events)
    (predicted,) = of(CostPredicted, events)
    assert end.seconds == pytest.approx(predicted.seconds, rel=0.05)
    mixed = [[*FAST[:2], SLOW[0]], [FAST[2], *SLOW[1:]]]
    for changes in (
        {"simulation": {"combine_seconds": 0.1}},
        {"schedule": {"groups": mixed}},
    ):
        other = told(BUFFERED, changes)
        (predicted,), (end,) = of(CostPredicted, other), of(RunFinished, other)
        assert end.seconds == pytest.approx(predicted.seconds, rel=0.05)


def test_sums_of_all_groups_are_a_round():
    """What a group's sum counts is what its sites would count alone."""
    alike = {
        "simulation": {
            "machines": [{"site": site, "examples_per_second": 50.0} for site in SITES]
        }
    }
    whole = toy.merged(BUFFERED, {"schedule": {"buffer_size": len(SITES)}})
    rounds, buffers = (
        simulate(small_job(**tables(alike, each)), engine="virtual").weights
        for each in ({}, whole)
    )
    for name, values in rounds.items():
        np.testing.assert_allclose(values, buffers[name], atol=1e-6)


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_model_follows_from_sums_by_their_size_and_age(weights: str):
    """As the same buffers in the clear, which see each update."""
    sites = ["site-0", "site-1", "site-2"]
    about = {"aggregation": {"weights": weights}, "rounds": 6}
    secret = {"schedule": {"mode": "buffered", "groups": [sites, SLOW]}}
    clear = {
        "schedule": {"mode": "buffered", "buffer_size": 3},
        "privacy": {"secure_aggregation": {"enabled": False}},
    }
    found, expected = (
        simulate(small_job(**tables(about, each)), engine="virtual").weights
        for each in (secret, clear)
    )
    for name, values in expected.items():
        np.testing.assert_allclose(values, found[name], atol=1e-5)


@pytest.mark.parametrize("mode", [BUFFERED, {}], ids=["groups", "rounds"])
def test_surrogate_goes_through_secure_sums_as_training_does(mode: dict[str, Any]):
    """Its updates are masked and counted; the model is that without masks."""
    about = {"rounds": 1, "simulation": {"training": "surrogate"}}
    of_all = {"schedule": {"buffer_size": len(SITES)}} if mode else {}
    secret, clear = (
        simulate(small_job(**tables(mode, of_all, about, each)), engine="virtual")
        for each in ({}, CLEAR)
    )
    for name, values in clear.weights.items():
        assert np.abs(values).max() > 0.1
        np.testing.assert_allclose(values, secret.weights[name], atol=1e-4)


def test_frozen_site_costs_the_other_group_nothing_and_its_sum_counts_when_it_is_back():
    frozen = fault("site-3", "hang", 1, seconds=2.0)
    events = told(BUFFERED, frozen, {"rounds": 14})
    seconds = [e.seconds for e in of(RoundFinished, events)]
    assert sum(seconds[:8]) == pytest.approx(8 * STEP_SECONDS, rel=0.05)
    late = [a for a in of(SiteAnswered, events) if a.site == "site-3"]
    assert late
    assert late[0].staleness >= 8
    assert not failures(events)


def test_task_that_arrives_late_has_the_model_that_it_was_written_with():
    """Several models are made while it is on a slow line."""
    pairs = [SITES[:2], SITES[2:4], SITES[4:]]
    machines = [
        {
            "site": site,
            "examples_per_second": 60.0,
            "latency_seconds": 0.5 if site == "site-5" else 0.0,
        }
        for site in SITES
    ]
    events = told(
        RECORD,
        {"schedule": {"mode": "buffered", "groups": pairs}, "rounds": 30},
        {"simulation": {"machines": machines}},
    )
    assert not failures(events)
    assert "site-5" in {answer.site for answer in of(SiteAnswered, events)}


def test_site_that_fails_loses_its_groups_round_and_no_other():
    events = told(BUFFERED, fault("site-1", "crash", 3))
    assert {(f.site, f.round_index) for f in failures(events)} == {("site-1", 3)}
    (warned,) = of(Warned, events)
    assert "round 3 has no sum of site-0, site-1, site-2" in warned.message
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}
    answers = Counter(a.site for a in of(SiteAnswered, events))
    assert answers["site-3"] == 2
    assert answers["site-0"] == answers["site-1"] + 1


def test_group_makes_new_keys_while_the_other_trains():
    events = told(BUFFERED, fault("site-4", "restart", 1), {"rounds": 14})
    steps = [e for e in of(StepTaken, events) if e.round_index > 1]
    assert [e.step for e in steps] == ["advertise", "confirm"]
    assert {site for e in steps for site in e.sites} == {*SLOW}
    assert {a.site for a in of(SiteAnswered, events)} == {*SITES}
    fast = [e.seconds for e in of(RoundFinished, events)][1:]
    assert max(fast) < 1.1 * STEP_SECONDS


def test_group_whose_new_keys_fail_does_not_train_with_those_of_before(
    monkeypatch: pytest.MonkeyPatch,
):
    """A site is gone, without which there is no sum: the others work in vain."""
    books: list[object] = []

    class Setup(AggregatorSetup):
        def book(self) -> bytes:
            books.append(self)
            if len(books) == 3:
                raise TooFewSites("site-0 is gone")
            return super().book()

    go_on = BufferedGroups._tasks_for

    def lose(
        self: BufferedGroups, record: RoundRecord, sites: Sequence[SiteId]
    ) -> list[Task]:
        if record.round_index == 3:
            self._group_of[sites[0]].run_setup.note_disconnected(sites[0])
        return go_on(self, record, sites)

    monkeypatch.setattr(group_sums, "AggregatorSetup", Setup)
    monkeypatch.setattr(BufferedGroups, "_tasks_for", lose)
    events = told(BUFFERED)
    answers = of(SiteAnswered, events)
    assert {a.site for a in answers if a.round_index == 3} == {*SLOW}
    assert {a.site for a in answers if a.round_index == 4} == {*FAST}
    assert not failures(events)


def test_only_groups_with_the_newest_model_say_how_good_it_is():
    events = told(BUFFERED, {"evaluation": {"every": 1}})
    found = of(ModelEvaluated, events)
    for event in found[:-1]:
        assert set(event.sites) == {*FAST}
        assert event.pooled.count > 0
    assert set(found[-1].sites) == {*SITES}
    assert len(found) == 8 - 2 + 1  # Two began with an older model.


def test_threads_of_one_process_can_do_it_too():
    events = told(BUFFERED, engine="inproc")
    assert of(RunFinished, events)[0].status == "completed"
    assert not failures(events)


@pytest.mark.parametrize("moment", [("SiteAnswered", 4), ("RoundFinished", 5)])
def test_killed_run_loses_what_was_open_and_counts_no_sum_twice(
    moment: tuple[str, int], tmp_path: Path
):
    """Sites have answered under its number, and answer each number once."""
    folder = tmp_path / "run"
    kill_at(tables(BUFFERED), folder, *moment)
    events = told(BUFFERED, engine="inproc", folder=folder, resume=True)
    rounds = of(RoundFinished, events)
    assert [e.round_index for e in rounds] == [*range(moment[1], 11)]
    assert of(RunFinished, events)[0].status == "completed"
    refused = failures(events)
    assert {f.kind for f in refused} <= {"duplicate"}
    assert max(Counter(f.site for f in refused).values(), default=0) <= 1
    began = [(a.site, a.round_index - a.staleness) for a in of(SiteAnswered, events)]
    assert len(set(began)) == len(began)
    assert {site for site, _ in began} == {*SITES}


def test_each_site_is_charged_for_what_it_begins():
    events = told(BUFFERED, RECORD)
    newest = {a.site: a.spent for a in of(SiteAnswered, events)}
    counts = Counter(a.site for a in of(SiteAnswered, events))
    assert counts["site-0"] > counts["site-3"]
    for site, spent in newest.items():
        assert spent.anchor.train == counts[site]
    assert newest["site-3"].epsilon < newest["site-0"].epsilon <= 8.0


EIGHT = [f"site-{i}" for i in range(8)]
DROPS = {
    "num_sites": 8,
    "privacy": {"secure_aggregation": {"threshold": 3}},
    "schedule": {"mode": "buffered", "groups": [EIGHT[:4], EIGHT[4:]]},
    "simulation": {
        "machines": [
            {"site": site, "examples_per_second": 100.0 if site in EIGHT[:4] else 60.0}
            for site in EIGHT
        ]
    },
}
CLEAR = {
    "privacy": {"secure_aggregation": {"enabled": False, "threshold": None}},
    "schedule": {"groups": None},
}


class Killed(SiteError):
    """What a site's process says no more."""


def dead_in(monkeypatch: pytest.MonkeyPatch, step: SecureStep, *sites: str) -> None:
    """Sites that are killed after their masked update has left."""
    take = RingSeal.step

    def step_(self: RingSeal, task: SecureTask, layout: Any) -> SecureAnswer:
        if task.step is step and task.site in sites:
            raise Killed("it was killed")
        return take(self, task, layout)

    monkeypatch.setattr(RingSeal, "step", step_)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("crash", None),
        ("lost", None),
        ("", SecureStep.SURVIVORS),
        ("", SecureStep.REVEAL),
    ],
)
def test_group_opens_the_sum_of_those_whose_masked_updates_came(
    kind: str, step: SecureStep | None, monkeypatch: pytest.MonkeyPatch
):
    """One site of a group is gone before it, or in a step after it."""
    if step is not None:
        dead_in(monkeypatch, step, "site-1")
    came = 7 if kind else 8
    about = {"rounds": 1, "schedule": {"buffer_size": came}}
    faults = fault("site-1", kind, 1) if kind else {}
    events: list[Event] = []
    secret, clear = (
        simulate(
            small_job(**tables(DROPS, about, faults, each)), listeners=[events.append]
        )
        for each in ({}, CLEAR)
    )
    for name, values in clear.weights.items():
        np.testing.assert_allclose(values, secret.weights[name], atol=1e-5)
    assert secret.rounds_completed == 1
    steps = [e.step for e in of(StepTaken, events)]
    assert {*steps} == {"advertise", "confirm", "survivors", "reveal"}
    assert {*Counter(steps).values()} == {2}
    assert {e.site for e in failures(events)} == {"site-1"}


def test_group_without_too_many_sites_has_no_sum_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two of four are gone; of the other group one, and its sum is enough."""
    dead_in(monkeypatch, SecureStep.SURVIVORS, "site-0", "site-1", "site-4")
    events = told(DROPS, {"rounds": 4})
    assert {e.status for e in of(RoundFinished, events)} == {"completed"}
    texts = [e.message for e in of(Warned, events)]
    lost = "has no sum of site-0, site-1, site-2, site-3: 2 "
    assert any(lost in text for text in texts)
    assert not any("no sum of site-4" in text for text in texts)


def test_killed_run_opens_no_sum_whose_sites_have_agreed_on_it(tmp_path: Path):
    """What they have agreed on dies with the run, and the next round is another."""
    folder = tmp_path / "run"
    kill_at(tables(DROPS), folder, "StepTaken", 5)
    events = told(DROPS, engine="inproc", folder=folder, resume=True)
    assert of(RunFinished, events)[0].status == "completed"
    steps = Counter(e.step for e in of(StepTaken, events))
    assert 5 <= steps["reveal"] <= steps["survivors"]
    began = [(a.site, a.round_index - a.staleness) for a in of(SiteAnswered, events)]
    assert len(set(began)) == len(began)


def test_group_opens_no_second_sum_of_a_round(monkeypatch: pytest.MonkeyPatch):
    """The aggregator asks for another list too, with which both secrets of a site fall.

    Of a site on the first list it would get the secret of its own mask, and of a site
    that the second one lacks those with all others: together they open its update.
    """
    asked: list[str] = []
    unmask = BufferedGroups._unmask

    def lie(
        self: BufferedGroups, record: RoundRecord, group: Any, flight: Any
    ) -> list[SecureTask]:
        honest = unmask(self, record, group, flight)
        if flight.step is SecureStep.REVEAL and group.sites[0] not in asked:
            asked.append(group.sites[0])
            heads = dict(flight.round.protocol._heads)
            del heads[1]
            body = Survivors(heads=heads).to_bytes()
            step = SecureStep.SURVIVORS
            return [*(replace(task, step=step, body=body) for task in honest), *honest]
        return honest

    monkeypatch.setattr(BufferedGroups, "_unmask", lie)
    take, signed, refused = RingSeal.step, Counter[object](), list[str]()

    def step_(self: RingSeal, task: SecureTask, layout: Any) -> SecureAnswer:
        try:
            answer = take(self, task, layout)
        except OutOfOrder:
            refused.append(task.site)
            raise
        if task.step is SecureStep.SURVIVORS:
            signed[task.site, task.round_index] += 1
        return answer

    monkeypatch.setattr(RingSeal, "step", step_)
    told(DROPS, {"rounds": 3})
    assert {*refused} == {*EIGHT}
    assert len(asked) == 2
    assert {*signed.values()} == {1}


@pytest.mark.parametrize(
    "training", [{"control_variates": True}, {"dynamic_alpha": 0.1}]
)
def test_methods_that_need_all_sites_are_refused(training: dict[str, Any]):
    """The threshold of its secure sums is all sites, and yet no model is of all."""
    step = {"aggregation": {"server_optimizer": {"name": "running_sum"}}}
    with pytest.raises(JobError, match="all sites"):
        small_job(**tables(BUFFERED, {"training": training}, step))


def test_site_joins_no_group_but_the_one_that_its_job_names(
    monkeypatch: pytest.MonkeyPatch,
):
    """The aggregator puts a victim beside sites of its own choice."""
    others = named_groups([[*FAST[:2], SLOW[0]], [FAST[2], *SLOW[1:]]])
    monkeypatch.setattr(buffered_sums, "named_groups", lambda _groups: others)
    with pytest.raises(QuorumNotMet, match="different groups than this"):
        told(BUFFERED)

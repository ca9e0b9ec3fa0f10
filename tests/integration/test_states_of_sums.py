"""Sites of a secure sum that have lost what they kept: the run goes on."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from support.secure_runs import Run, run, secure_job, silence

from cloud_adapters.storage.memory import MemoryStore
from federation.errors import QuorumNotMet, SiteError
from federation.events import SiteFailed
from federation.job.kept_state import KEPT_ROUNDS
from federation.job.spec import JobSpec
from federation.messages import (
    FailureKind,
    RoundTask,
    SiteMessage,
    StateName,
    Task,
)
from federation.rounds.failures import failure

pytestmark = pytest.mark.slow

SITE = "site-1"
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "state": "keep"}
MLP = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [8]},
    "personal": ["3.*"],
}


def kept_job(rounds: int, *, threshold: int = 4, **tables: Any) -> JobSpec:
    training = {"local_steps": 2, "batch_size": 8, "optimizer": MOMENTUM}
    tables = {"training": training, "aggregation": {"weights": "uniform"}} | tables
    return secure_job(num_sites=4, threshold=threshold, rounds=rounds, **tables)


class Begins:
    """A site that notes the round whose state it is told to begin with."""

    def __init__(self, site: Any, before: Callable[[int], None]) -> None:
        self.site, self.before = site, before
        self.named: list[int] = []

    def handle(self, task: Task) -> SiteMessage:
        if isinstance(task, RoundTask) and task.kind.value == "train":
            self.before(task.round_index)
            self.named.append(task.state_round)
        return self.site.handle(task)


def losing(store: MemoryStore, *, at: int) -> Callable[[int], None]:
    """Delete what the site has kept, before a round."""

    def lose(round_index: int) -> None:
        if round_index == at:
            for found in list(store.list(f"sites/{SITE}/state-")):
                store.delete(found.key)

    return lose


def watched(
    job: JobSpec, *, loses_at: int = 0, **given: Any
) -> tuple[Run, Mapping[str, Begins]]:
    store, sites = MemoryStore(), dict[str, Begins]()

    def wrap(name: str) -> Callable[[Any], Begins]:
        lose = losing(store, at=loses_at) if name == SITE else lambda _: None

        def watch(site: Any) -> Begins:
            sites[name] = Begins(site, lose)
            return sites[name]

        return watch

    wraps = {site.name: wrap(site.name) for site in job.sites}
    return run(job, wraps=wraps, store=store, **given), sites


def kinds(found: Run) -> list[tuple[int, str, str]]:
    failed = [e for e in found.seen if isinstance(e, SiteFailed)]
    return [(e.round_index, e.site, e.kind.value) for e in failed]


def test_nothing_is_lost_and_every_round_begins_with_the_one_before():
    found, sites = watched(kept_job(4))
    assert found.statuses() == ["completed"] * 4
    assert [each.named for each in sites.values()] == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize(
    ("tables", "more"),
    [
        ({}, ""),
        ({"levels": 4}, ", levels"),
        ({"model": MLP}, ", personal parts"),
    ],
)
def test_where_all_must_answer_a_lost_file_costs_a_round_and_the_state(
    tables: dict[str, Any], more: str
):
    """Nobody knows of the lost file before the site is asked."""
    found, sites = watched(kept_job(5, **tables), loses_at=3)
    assert found.statuses() == ["completed", "completed", "lost", *["completed"] * 2]
    assert kinds(found) == [(3, SITE, "no_state")]
    assert [each.named for each in sites.values()] == [[0, 1, 2, 0, 4]] * 4
    kept = f"kept optimiser state{more}"
    said = [
        message for message in found.warnings() if "all sites begin with" in message
    ]
    assert said == [
        (
            f"round 4: site-1 did not keep the newest state of the others ({kept}), so "
            "all sites begin with none"
        )
    ]


def test_a_site_that_missed_a_round_brings_the_others_back_to_what_it_has():
    """One that is late loses no more than that; personal parts of all go on."""
    job = kept_job(5, threshold=3, model=MLP)
    found, sites = watched(job, fault=_missing(2))
    assert found.statuses() == ["completed"] * 5
    assert kinds(found) == [(2, SITE, "unreachable"), (3, SITE, "no_state")]
    assert next(each.named for each in sites.values()) == [0, 1, 2, 1, 4]
    assert sites[SITE].named == [0, 2, 1, 4]
    assert SITE in found.answered(4)
    assert any("that of round 1" in text for text in found.warnings())


def test_levels_begin_with_the_newest_state_or_with_none():
    """What an older one has left out was sent in a round since."""
    found, sites = watched(kept_job(4, threshold=3, levels=4), fault=_missing(2))
    assert next(each.named for each in sites.values()) == [0, 1, 2, 0]
    assert found.statuses() == ["completed"] * 4


def test_personal_parts_are_not_given_up_for_a_site_that_lost_its_own():
    """The others go on without it; it is named once, and refuses until the end."""
    lost = KEPT_ROUNDS + 2
    job = kept_job(lost + 3, threshold=3, model=MLP)
    found, sites = watched(job, loses_at=lost)
    assert found.statuses() == ["completed"] * (lost + 3)
    assert next(each.named for each in sites.values()) == [*range(lost + 3)]
    assert kinds(found) == [(i, SITE, "no_state") for i in range(lost, lost + 5)]
    (said,) = [text for text in found.warnings() if "personal parts" in text]
    assert "goes on without site-1" in said
    assert "model.weights" in said


def test_a_run_that_needs_the_site_stops_until_its_state_is_restored():
    lost, store = KEPT_ROUNDS + 2, MemoryStore()
    job, kept = kept_job(lost + 2, model=MLP), dict[str, bytes]()

    def wrap(site: Any) -> Begins:
        def lose(index: int) -> None:
            for info in [*store.list(f"sites/{SITE}/state-")] * (index == lost):
                kept[info.key] = store.read(info.key)
                store.delete(info.key)

        return Begins(site, lose)

    with pytest.raises(SiteError, match=f"round {lost + 1}: {SITE} lost.*Restore"):
        run(job, wraps={SITE: wrap}, store=store)
    for key, content in kept.items():
        store.put(key, [content])
    assert run(job, store=store).statuses() == ["completed"] * 2


def test_a_site_that_stays_away_takes_no_state_from_the_others():
    job = kept_job(6, threshold=3)
    _found, sites = watched(job, fault=silence("mask", [SITE], times=9))
    assert next(each.named for each in sites.values()) == [0, 1, 2, 3, 4, 5]


def test_others_go_back_once_for_a_site_that_is_not_back():
    """It said that it lacks a state, or failed, and then nothing more came of it."""
    job = kept_job(6, threshold=3)
    _found, sites = watched(job, fault=_missing(2, 4, 5, 6))
    assert next(each.named for each in sites.values()) == [0, 1, 2, 1, 4, 5]

    def failing(task: Task, answer: Callable[[], SiteMessage]) -> list[SiteMessage]:
        is_it = isinstance(task, RoundTask) and task.round_index > 1
        if is_it and task.site == SITE:
            return [failure(task, FailureKind.CRASHED, "no disk")]
        return [answer()]

    _found, sites = watched(job, fault=failing)
    assert next(each.named for each in sites.values()) == [0, 1, 1, 3, 4, 5]


def test_rounds_that_are_lost_do_not_push_out_the_state_to_begin_with():
    lost = KEPT_ROUNDS + 2
    job = kept_job(lost + 2, schedule={"max_lost_rounds": 99})

    def fault(task: Task, answer: Callable[[], SiteMessage]) -> list[SiteMessage]:
        is_lost = isinstance(task, RoundTask) and 1 < task.round_index <= 1 + lost
        message = answer()
        return [] if is_lost and task.site == SITE else [message]

    found, sites = watched(job, fault=fault)
    assert found.statuses() == ["completed", *["lost"] * lost, "completed"]
    assert [each.named for each in sites.values()] == [[0, *[1] * (lost + 1)]] * 4


def test_a_resumed_run_names_the_same_state():
    job, store, rounds = kept_job(4), MemoryStore(), [0]
    whole = run(job)

    def stop() -> bool:
        rounds[0] += 1
        return rounds[0] > 2

    half = run(job, store=store, stop_requested=stop)
    assert half.state.round_index == 2
    (name, *_) = {names[-1] for names in half.state.states.values()}
    assert isinstance(name, StateName)
    assert name.round_index == 2
    found = run(job, store=store)
    assert found.statuses() == ["completed"] * 2
    apart = np.abs(found.state.weights_d - whole.state.weights_d).max()
    assert apart < 1e-5
    fresh = {**MOMENTUM, "state": "fresh"}
    training = {"local_steps": 2, "batch_size": 8, "optimizer": fresh}
    other = run(kept_job(4, training=training))
    assert np.abs(other.state.weights_d - whole.state.weights_d).max() > 1e-2
    assert other.state.states == {}


def test_a_run_that_failed_gets_over_a_lost_state_when_it_is_resumed():
    """Its first round shows who lacks the state, and the next one begins without."""
    job, store = kept_job(7, schedule={"max_lost_rounds": 2}), MemoryStore()
    with pytest.raises(QuorumNotMet, match="2 rounds in a row"):
        run(job, store=store, fault=_missing(3, 4))
    losing(store, at=0)(0)
    found = run(job, store=store)
    assert found.statuses() == ["lost", "completed", "completed"]


def _missing(*rounds: int) -> Callable[..., list[SiteMessage]]:
    """The site is not reached in some rounds."""

    def fault(task: Task, answer: Callable[[], SiteMessage]) -> list[SiteMessage]:
        is_it = isinstance(task, RoundTask) and task.round_index in rounds
        return [] if is_it and task.site == SITE else [answer()]

    return fault

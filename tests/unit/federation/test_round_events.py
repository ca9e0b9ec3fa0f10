"""What a round emits, of values that are given."""

from dataclasses import replace

import pytest
from support import toy
from support.scripted_grid import reply_to

from federation import events
from federation.clock import VirtualClock
from federation.messages import FailureKind, SiteMessage, TaskKind
from federation.rounds.round_events import RoundEvents
from federation.rounds.round_sums import RoundSums
from federation.rounds.round_verdicts import RoundVerdicts

SITE, OTHER, _ = toy.SITES
START = 100.0


def opened() -> tuple[RoundEvents, list[events.Event]]:
    """The events of round 2, which began at second 100, and where they go."""
    told: list[events.Event] = []
    clock = VirtualClock()
    clock.sleep(START - clock.monotonic())
    return (
        RoundEvents(round_index=2, clock=clock, start=START, emit=told.append),
        told,
    )


def verdicts(*answers: SiteMessage) -> RoundVerdicts:
    """Those of round 2 on some answers."""
    found = RoundVerdicts(
        run_id=toy.RUN,
        round_index=2,
        kind=TaskKind.TRAIN,
        cohort=toy.SITES,
        layout=toy.LAYOUT,
    )
    for answer in answers:
        found.accept(answer)
    return found


def sums(emitter: RoundEvents) -> RoundSums:
    """Empty ones."""
    return RoundSums(clock=emitter.clock, start=START)


def test_answer_is_told_with_times_from_the_start_of_the_round():
    """And with what it reports."""
    emitter, told = opened()
    update = toy.update(round_index=2, num_examples=7)
    arrived = reply_to(update, asked_seconds=101.0, answered_seconds=104.0)
    emitter.answered(update, arrived, 0.5)
    (event,) = told
    assert isinstance(event, events.SiteAnswered)
    assert (event.asked_seconds, event.answered_seconds) == (1.0, 4.0)
    assert (event.round_index, event.num_examples, event.weight) == (2, 7, 0.5)
    assert event.training == update.training


def test_examples_that_are_withheld_are_not_told_as_none():
    """A site that may not say how many sends 0; the event has nothing."""
    emitter, told = opened()
    emitter.answered(toy.update(num_examples=0), reply_to(toy.update()), 1.0)
    (event,) = told
    assert isinstance(event, events.SiteAnswered)
    assert event.num_examples is None


@pytest.mark.parametrize("asked", [0.0, START - 30.0])
def test_late_answer_has_no_time_before_its_round(asked: float):
    """Its task was sent in an earlier round, or is not known to have been sent."""
    emitter, told = opened()
    late = reply_to(toy.update(), asked_seconds=asked, answered_seconds=START + 2.0)
    emitter.failed(toy.failure(SITE, FailureKind.LATE), late)
    before = reply_to(toy.update(), asked_seconds=asked, answered_seconds=asked)
    emitter.failed(toy.failure(SITE, FailureKind.LATE), before)
    times = [(e.asked_seconds, e.answered_seconds) for e in told]
    assert times == [(0.0, 2.0), (0.0, 0.0)]


def test_only_a_completed_round_has_a_norm():
    """What was combined in another one is not the model's."""
    emitter, told = opened()
    collected = sums(emitter)
    collected.update_norm = collected.update_clip = 1.5
    answer = replace(toy.update(), round_index=2, based_on=1)
    for status in ("completed", "discarded"):
        emitter.finished(status, toy.SITES, verdicts(answer), collected, ())
    completed, discarded = told
    assert isinstance(completed, events.RoundFinished)
    assert isinstance(discarded, events.RoundFinished)
    assert (completed.update_norm, completed.update_clip) == (1.5, 1.5)
    assert (discarded.update_norm, discarded.update_clip) == (None, None)
    assert completed.answered == (SITE,)

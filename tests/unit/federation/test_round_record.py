"""A round counts each byte once: with the step, the answer or the failure."""

import gc
import weakref
from dataclasses import replace
from itertools import count

from support import toy
from support.scripted_grid import reply_to

from federation.clock import VirtualClock
from federation.events import (
    Event,
    ModelEvaluated,
    RoundFinished,
    SiteAnswered,
    SiteFailed,
    SitesLeftOut,
    StepTaken,
    Warned,
)
from federation.members import RunMember, Standing
from federation.messages import (
    FailureKind,
    LeaveReason,
    MaskedUpdate,
    MetricSums,
    Reply,
    SecureAnswer,
    SecureStep,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    TaskKind,
)
from federation.rounds.round_record import RoundRecord

SITE, OTHER, THIRD = toy.SITES
ANSWER = toy.secure_answer(SITE)
SECURE = toy.job({"privacy": {"secure_aggregation": {"enabled": True}}})
SUMS = MetricSums(count=10, loss_sum=5.0, metrics={"correct": 5})


def opened(
    kind: TaskKind = TaskKind.TRAIN, round_index: int = 1
) -> tuple[RoundRecord, list[Event]]:
    """The record of a secure round, and where its events go."""
    told: list[Event] = []
    record = RoundRecord(
        job=SECURE,
        run_id=toy.RUN,
        state=replace(toy.initial_state(SECURE), round_index=round_index - 1),
        cohort=toy.SITES,
        layout=toy.LAYOUT,
        clock=VirtualClock(),
        emit=told.append,
        kind=kind,
    )
    return record, told


def replies(*messages: SiteMessage) -> list[Reply]:
    """Each with another number of bytes: 1 down and 10 up, 2 and 20, and so on."""
    return [
        reply_to(message, bytes_down=number, bytes_up=10 * number)
        for number, message in zip(count(1), messages, strict=False)
    ]


def crashed(site: str) -> SiteFailure:
    """A site's own word."""
    return SiteFailure(
        run_id=toy.RUN,
        round_index=1,
        site=site,
        kind=FailureKind.CRASHED,
        message="",
    )


def keep(_answer: SecureAnswer) -> None:
    """Use an answer, whatever it is."""


def of_kind(told: list[Event], kind: type[Event]) -> list[Event]:
    """Events of one kind."""
    return [event for event in told if isinstance(event, kind)]


def test_step_tells_what_counted():
    """Sites and their bytes, in the order of arrival."""
    record, told = opened()
    arrived = replies(toy.secure_answer(OTHER), ANSWER)
    used: list[SecureAnswer] = []
    record.take_step(SecureStep.SURVIVORS, arrived, used.append)
    assert [answer.site for answer in used] == [OTHER, SITE]
    (step,) = of_kind(told, StepTaken)
    assert (step.round_index, step.step) == (1, "survivors")
    assert (step.sites, step.bytes_down, step.bytes_up) == (
        (OTHER, SITE),
        (1, 2),
        (10, 20),
    )


def test_answer_to_an_earlier_round_is_late_in_a_step():
    """It was on its way while the site was away; nobody has done anything wrong."""
    record, told = opened(round_index=3)
    late = [toy.masked(SITE), toy.secure_answer(OTHER)]
    ours = replace(ANSWER, round_index=3)
    arrived = replies(*late, ours)
    used: list[SecureAnswer] = []
    record.take_step(SecureStep.SURVIVORS, arrived, used.append)
    assert used == [ours]
    failed = of_kind(told, SiteFailed)
    assert [event.kind for event in failed] == [FailureKind.LATE] * 2
    assert failed[0].message == "survivors: answered round 1 too late"


def test_late_answer_to_this_round_is_late_in_a_step():
    """The others have begun to open the sum; it still shows what the site takes."""
    record, told = opened()
    assert not [*record.sound([], MaskedUpdate)]
    late = reply_to(toy.masked(SITE), asked_seconds=1.0, answered_seconds=9.0)
    record.take_step(SecureStep.SURVIVORS, [late], keep)
    *missed, failed = of_kind(told, SiteFailed)
    assert {event.kind for event in missed} == {FailureKind.DEADLINE}
    assert (failed.site, failed.kind) == (SITE, FailureKind.LATE)
    assert record.overdue == {(SITE, 1): 8.0}


def test_round_total_is_the_sum_of_its_events():
    """Steps, masked updates and failures make up what the round's line says."""
    record, told = opened()
    record.take_step(SecureStep.ADVERTISE, replies(ANSWER), keep)
    masked = replies(toy.masked(SITE), toy.masked(OTHER), crashed(THIRD))
    for update, reply in record.sound(masked, MaskedUpdate):
        record.count_masked(update, reply)
    record.take_step(SecureStep.SURVIVORS, replies(ANSWER, ANSWER), keep)
    record.finish("completed")
    (finished,) = of_kind(told, RoundFinished)
    single = of_kind(told, SiteAnswered) + of_kind(told, SiteFailed)
    steps = of_kind(told, StepTaken)
    up = sum(e.bytes_up for e in single) + sum(sum(e.bytes_up) for e in steps)
    down = sum(e.bytes_down for e in single) + sum(sum(e.bytes_down) for e in steps)
    assert (finished.bytes_down, finished.bytes_up) == (down, up)


def test_evaluation_counts_its_answers_with_the_metrics():
    """Or, if the sum stays closed, as a step: never both."""
    for is_open in (True, False):
        record, told = opened(TaskKind.EVALUATE)
        for update, reply in record.sound(replies(toy.masked()), MaskedUpdate):
            record.count_masked(update, reply)
        if is_open:
            record.sums.secret_evaluation = SUMS
        record.finish_evaluation()
        kind = ModelEvaluated if is_open else StepTaken
        (event,) = of_kind(told, ModelEvaluated) + of_kind(told, StepTaken)
        assert isinstance(event, kind)
        assert (event.sites, event.bytes_down, event.bytes_up) == ((SITE,), (1,), (10,))
        assert is_open is not bool(of_kind(told, Warned))


def test_masked_update_is_let_go():
    """The record of a round keeps no update once it was counted."""
    record, _ = opened()
    update = toy.masked()
    words = weakref.ref(update.words)
    for counted, reply in record.sound(replies(update), MaskedUpdate):
        record.count_masked(counted, reply)
    del update, counted, reply
    gc.collect(1)  # All that the test made is young.
    assert words() is None


def test_site_that_leaves_after_its_answer_ends_the_round():
    """It is asked the steps that are left, and its own word in one ends that."""
    record, told = opened()
    answer = replace(toy.masked(SITE), leaving=LeaveReason.SPOT)
    for update, reply in record.sound(replies(answer), MaskedUpdate):
        record.count_masked(update, reply)
    assert record.members.of(SITE) == RunMember(Standing.LEAVING, "spot")
    assert not record.members.away()
    notice = toy.failure(SITE, FailureKind.LEAVING)
    record.take_step(SecureStep.REVEAL, replies(notice), lambda _: None)
    assert record.members.away().keys() == {SITE}
    found = [one.standings for one in told if isinstance(one, SitesLeftOut)]
    assert found == [("leaving",), ("gone",)]


def test_word_of_another_round_makes_nobody_leave():
    """It may be old: the site may be back."""
    record, _ = opened(round_index=2)
    late = toy.failure(SITE, FailureKind.LEAVING, round_index=1)
    list(record.sound(replies(late), MaskedUpdate))
    record.take_step(SecureStep.REVEAL, replies(late), lambda _: None)
    assert not record.members.away()


def test_reason_of_a_site_that_leaves_is_one_of_ours():
    """Its own text could name other sites, and would be in each checkpoint."""
    for said, kept in (
        ("spot", "spot"),
        (f"spot); {OTHER} (left out: lied", "for an unknown reason"),
    ):
        record, told = opened()
        word = replace(crashed(SITE), kind=FailureKind.LEAVING, message=said)
        list(record.sound(replies(word), MaskedUpdate))
        assert record.members.away() == {SITE: kept}
        (left,) = (event for event in told if isinstance(event, SitesLeftOut))
        assert left.named() == [f"{SITE} (gone: {kept})"]


def test_site_that_leaves_in_a_step_has_failed_once():
    """Its task is closed as well: it is not overdue at the end of the round."""
    record, told = opened()
    word = replace(
        crashed(SITE), round_index=0, kind=FailureKind.LEAVING, message="sigterm"
    )
    record.take_step(SecureStep.ADVERTISE, replies(word), lambda _answer: None)
    assert not list(record.sound(replies(), MaskedUpdate))  # Nobody else answers.
    failed = [(e.site, e.kind) for e in told if isinstance(e, SiteFailed)]
    assert failed == [(SITE, "leaving"), (OTHER, "deadline"), (THIRD, "deadline")]


def test_a_round_that_waited_for_a_busy_site_is_not_usual():
    """Its time says nothing of the next one's."""
    record, _ = opened()
    quick, awaited = replies(toy.update(SITE), toy.update(OTHER))
    list(record.sound([quick], SiteUpdate))
    assert record.is_usual
    list(record.sound([replace(awaited, is_awaited=True)], SiteUpdate))
    assert not record.is_usual

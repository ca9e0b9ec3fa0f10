"""What counts in a round, and what is wrong with the rest."""

import math
from dataclasses import replace

import numpy as np
import pytest
from support import toy

from federation.compression.codec import BF16, FP16, IDENTITY, Codec
from federation.messages import (
    FailureKind,
    PrivacySpent,
    SecureStep,
    SiteEvaluation,
    SiteMessage,
    TaskKind,
)
from federation.rounds.round_verdicts import RoundVerdicts

SITE, OTHER, _ = toy.SITES
ROUND = 2
SOUND = toy.update(round_index=ROUND)


def opened(kind: TaskKind = TaskKind.TRAIN, codec: Codec = IDENTITY) -> RoundVerdicts:
    """A round in which two sites were asked."""
    return RoundVerdicts(
        run_id=toy.RUN,
        round_index=ROUND,
        kind=kind,
        cohort=(SITE, OTHER),
        layout=toy.LAYOUT,
        codec=codec,
    )


def verdict(message: SiteMessage) -> tuple[FailureKind, str]:
    """What an open round says to a message that it refuses."""
    failure = opened().accept(message)
    assert failure is not None
    assert (failure.run_id, failure.site) == (toy.RUN, message.site)
    return failure.kind, failure.message


REFUSED = {
    "stranger": (
        toy.update(toy.SITES[2], round_index=ROUND),
        FailureKind.UNKNOWN,
        "was not asked",
    ),
    "other run": (
        replace(SOUND, run_id="run-2"),
        FailureKind.UNKNOWN,
        "answered run run-2, not run-1",
    ),
    "earlier round": (
        replace(SOUND, round_index=1),
        FailureKind.LATE,
        "answered round 1 in round 2",
    ),
    "model of another round": (
        replace(SOUND, based_on=ROUND),
        FailureKind.INVALID,
        "sent fragment 0 of what is based on the model of round 2, not the whole of 1",
    ),
    "part of an update": (
        replace(SOUND, fragment=1),
        FailureKind.INVALID,
        "sent fragment 1 of what is based on the model of round 1, not the whole of 1",
    ),
    "earlier round, not asked in this one": (
        toy.update(toy.SITES[2], round_index=1),
        FailureKind.LATE,
        "answered round 1 in round 2",
    ),
    "later round": (
        replace(SOUND, round_index=3),
        FailureKind.INVALID,
        "answered round 3 in round 2",
    ),
    "other kind": (
        toy.evaluation(round_index=ROUND),
        FailureKind.INVALID,
        "answered evaluate but its task was to train",
    ),
    "other layout": (
        replace(SOUND, layout_digest="0" * 64),
        FailureKind.INVALID,
        "trained a model with a different layout than this run's",
    ),
    "too short": (
        replace(SOUND, delta_d=SOUND.delta_d[:-1]),
        FailureKind.INVALID,
        "sent 7 values; the model has 8",
    ),
    "too many dimensions": (
        replace(SOUND, delta_d=SOUND.delta_d[:, None]),
        FailureKind.INVALID,
        "sent 8 values; the model has 8",
    ),
    "too few integers": (
        replace(SOUND, integers_m=SOUND.integers_m[:0]),
        FailureKind.INVALID,
        "sent 0 integer values; the model has 2",
    ),
    "double precision": (
        replace(SOUND, delta_d=SOUND.delta_d.astype(np.float64)),
        FailureKind.INVALID,
        "sent values of type float64, not float32",
    ),
    "short integers": (
        replace(SOUND, integers_m=SOUND.integers_m.astype(np.int32)),
        FailureKind.INVALID,
        "sent integer values of type int32, not int64",
    ),
    "masked update": (
        toy.masked(round_index=ROUND),
        FailureKind.INVALID,
        "sent a masked answer, but the job has no secure aggregation",
    ),
    "step of secure aggregation": (
        toy.secure_answer(round_index=ROUND),
        FailureKind.INVALID,
        "sent a masked answer, but the job has no secure aggregation",
    ),
    "masked update of an earlier round": (
        toy.masked(round_index=1),
        FailureKind.LATE,
        "answered round 1 in round 2",
    ),
    "own word": (
        toy.failure(round_index=ROUND),
        FailureKind.CRASHED,
        "no disk",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    """Each misfortune has its kind and a text that says what it was."""
    message, *expected = REFUSED[case]
    assert verdict(message) == tuple(expected)


@pytest.mark.parametrize("codec", [IDENTITY, FP16, BF16], ids=lambda c: c.name)
@pytest.mark.parametrize("sent", [IDENTITY, FP16, BF16], ids=lambda c: c.name)
def test_update_comes_in_the_words_of_the_rounds_codec(codec: Codec, sent: Codec):
    """Words of another are not read as if they were its own."""
    update = replace(SOUND, delta_d=sent.encode(SOUND.delta_d))
    failure = opened(codec=codec).accept(update)
    if codec is sent:
        assert failure is None
    else:
        assert failure is not None
        assert failure.kind is FailureKind.INVALID
        text = f"sent values of type {sent.dtype}, not {codec.dtype}"
        assert failure.message == text


def test_answer_may_be_refused_after_its_use():
    """With the kind that its use showed."""
    verdicts = opened()
    assert verdicts.accept(SOUND) is None
    failure = verdicts.revoke(SITE, "sent NaN", FailureKind.NOT_FINITE)
    assert failure.kind is FailureKind.NOT_FINITE
    assert (verdicts.answered, verdicts.failed) == ((), (("not_finite", 1),))


def test_loss_may_be_nan():
    """A model that diverged is honest about it."""
    sums = replace(SOUND.training, loss_sum=float("nan"))
    assert opened().accept(replace(SOUND, training=sums)) is None


def test_second_answer_is_a_duplicate():
    """The first one counts, once."""
    verdicts = opened()
    verdicts.accept(SOUND)
    second = verdicts.accept(SOUND)
    assert second is not None
    assert (second.kind, second.message) == (FailureKind.DUPLICATE, "answered twice")
    assert verdicts.answered == (SITE,)


@pytest.mark.parametrize(
    "case", ["double precision", "own word", "other kind", "too short", "masked update"]
)
def test_refused_answer_settles_its_site(case: str):
    """There is no second try."""
    verdicts = opened()
    verdicts.accept(REFUSED[case][0])
    second = verdicts.accept(SOUND)
    assert second is not None
    assert second.kind is FailureKind.DUPLICATE


@pytest.mark.parametrize("case", ["other run", "earlier round", "later round"])
def test_stray_message_settles_nothing(case: str):
    """The site's answer to this round may still come."""
    verdicts = opened()
    verdicts.accept(REFUSED[case][0])
    assert verdicts.accept(SOUND) is None


@pytest.mark.parametrize("kind", FailureKind)
def test_site_that_says_any_failure_is_settled(kind: FailureKind):
    """Also by kinds that only the server should give."""
    verdicts = opened()
    assert verdicts.accept(toy.failure(SITE, kind, round_index=ROUND)) is not None
    assert [failure.site for failure in verdicts.close()] == [OTHER]


def test_answer_after_the_deadline_is_late():
    """It is no duplicate: there was no first answer."""
    verdicts = opened()
    verdicts.accept(toy.failure(SITE, FailureKind.DEADLINE, round_index=ROUND))
    late = verdicts.accept(SOUND)
    assert late is not None
    assert (late.kind, late.message) == (
        FailureKind.LATE,
        "answered after its deadline",
    )


def test_close_reports_who_is_missing():
    """In the order of the cohort, and what comes then is late."""
    verdicts = opened()
    missing = verdicts.close()
    assert [(f.site, f.kind) for f in missing] == [
        (SITE, FailureKind.DEADLINE),
        (OTHER, FailureKind.DEADLINE),
    ]
    assert verdicts.failed == (("deadline", 2),)
    late = verdicts.accept(SOUND)
    assert late is not None
    assert late.kind is FailureKind.LATE


def test_revoked_answer_does_not_count():
    """And its site stays settled."""
    verdicts = opened()
    verdicts.accept(SOUND)
    failure = verdicts.revoke(SITE, "claims 0 examples")
    assert (failure.kind, failure.message) == (FailureKind.INVALID, "claims 0 examples")
    assert (verdicts.answered, verdicts.failed) == ((), (("invalid", 1),))
    assert [missing.site for missing in verdicts.close()] == [OTHER]


def test_update_where_an_evaluation_was_asked():
    """The other way round."""
    refused = opened(TaskKind.EVALUATE).accept(SOUND)
    assert refused is not None
    assert refused.message == "answered train but its task was to evaluate"


def test_complaints_name_sites():
    """In the order in which answers were refused, however that came about."""
    verdicts = opened()
    budget = toy.failure(OTHER, FailureKind.BUDGET, round_index=ROUND)
    verdicts.accept(SOUND)
    verdicts.revoke(SITE, "claims 0 examples")
    verdicts.accept(budget)
    assert verdicts.complaints == [f"{SITE}: claims 0 examples", f"{OTHER}: no disk"]
    assert verdicts.out_of_budget == [f"{OTHER}: no disk"]


def test_site_that_is_left_out_is_settled():
    """It fails the round, and is not missed at its end."""
    verdicts = opened()
    failure = verdicts.leave_out(SITE, "dealt a wrong share")
    assert failure.message == "left out: dealt a wrong share"
    assert verdicts.failed == (("invalid", 1),)
    assert [missing.site for missing in verdicts.close()] == [OTHER]


@pytest.mark.parametrize("digest", [toy.LAYOUT.digest, "0" * 64])
def test_masked_update_has_the_runs_layout(digest: str):
    """Its values cannot be looked at, and their number says nothing of their names."""
    verdicts = replace(opened(), in_secret=True)
    update = toy.masked(round_index=ROUND, layout_digest=digest)
    failure = verdicts.accept(update)
    if digest == toy.LAYOUT.digest:
        assert failure is None
        return
    assert failure is not None
    assert failure.kind is FailureKind.INVALID
    assert "different layout" in failure.message


STEP_REFUSED = {
    "earlier round": (
        toy.secure_answer(round_index=1),
        FailureKind.LATE,
        "survivors: answered round 1 too late",
    ),
    "other step": (
        replace(toy.secure_answer(round_index=ROUND), step=SecureStep.REVEAL),
        FailureKind.INVALID,
        "survivors: sent the wrong kind of answer",
    ),
    "own word": (
        toy.failure(round_index=ROUND),
        FailureKind.CRASHED,
        "survivors: no disk",
    ),
}


@pytest.mark.parametrize("case", STEP_REFUSED)
def test_refused_in_a_step(case: str):
    """It counts as a failure of the round, and leaves the site's task open."""
    message, *expected = STEP_REFUSED[case]
    verdicts = opened()
    failure = verdicts.accept_step(message, SecureStep.SURVIVORS)
    assert failure is not None
    assert [failure.kind, failure.message] == expected
    assert verdicts.failed == ((failure.kind.value, 1),)
    assert verdicts.accept(replace(SOUND, site=message.site)) is None


def test_no_ledger_has_spent_more_than_the_cap():
    """It would be the run's epsilon, whatever the others have spent."""
    for kind, spent, cap, is_sound in (
        (TaskKind.TRAIN, (8.0, 8.0), 8.0, True),
        (TaskKind.TRAIN, (math.nextafter(8.0, 9.0), None), 8.0, False),
        (TaskKind.TRAIN, (1e300, None), 8.0, False),
        (TaskKind.TRAIN, (1.0, 1e300), 8.0, False),
        (TaskKind.TRAIN, (0.1, None), 0.0, False),
        # A ledger that was recovered may be above, and still evaluates.
        (TaskKind.EVALUATE, (9.0, 8.0), 8.0, True),
        (TaskKind.EVALUATE, (1.0, 9.0), 8.0, False),
    ):
        found = PrivacySpent(epsilon=spent[0], delta=1e-5, held_out_epsilon=spent[1])
        judged = opened(kind)
        judged.epsilon_cap = cap
        answers = {
            TaskKind.TRAIN: replace(SOUND, spent=found),
            TaskKind.EVALUATE: SiteEvaluation(
                run_id=toy.RUN,
                round_index=ROUND,
                site=SITE,
                evaluation=SOUND.training,
                phases=(),
                based_on=ROUND - 1,
                spent=found,
            ),
        }
        failure = judged.accept(answers[kind])
        assert (failure is None) == is_sound, (kind, spent)
        assert is_sound or "states epsilon" in failure.message

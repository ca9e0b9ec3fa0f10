"""What rehearsed misfortunes do to answers."""

from typing import Any

import numpy as np
import pytest
from support import toy

from cloud_adapters.local.faults import FaultInjector, Restartable
from federation.clock import VirtualClock
from federation.compression.choice import codec_of
from federation.compression.codec import BF16, FP16, Codec, decoded
from federation.job.spec import FaultSpec
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)

SITE, OTHER, _ = toy.SITES


def spoilt(
    kind: str, *, clock: VirtualClock | None = None, seed: int = 0, **fields: Any
) -> list[SiteMessage]:
    """What becomes of a sound answer to the task of round 1."""
    task_fields = {k: fields.pop(k) for k in ("round_index",) if k in fields}
    task = toy.task(SITE, **task_fields)
    fault = FaultSpec(site=SITE, kind=kind, **fields)
    injector = FaultInjector([fault], clock=clock or VirtualClock(), seed=seed)
    return list(injector(task, lambda: toy.update(SITE, round_index=task.round_index)))


def only_update(messages: list[SiteMessage]) -> SiteUpdate:
    """The one message that there is."""
    (message,) = messages
    assert isinstance(message, SiteUpdate)
    return message


def spoilt_words(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """What becomes of a masked update of round 1."""
    update = toy.masked(SITE, **changes)
    injector = FaultInjector(
        [FaultSpec(site=SITE, kind=kind)], clock=VirtualClock(), seed=seed
    )
    (message,) = injector(toy.task(SITE, secure=b"head"), lambda: update)
    return message


def test_crash_is_a_failure_without_work():
    """The site is not even called."""
    (message,) = spoilt("crash")
    assert isinstance(message, SiteFailure)
    assert (message.kind, message.site) == (FailureKind.CRASHED, SITE)


def test_silent_says_nothing():
    """Not even that it failed."""
    assert spoilt("silent") == []


def test_hang_takes_its_time_and_answers():
    """Whether that is too late is for the grid to say."""
    clock = VirtualClock()
    assert only_update(spoilt("hang", clock=clock, seconds=90.0)).site == SITE
    assert clock.now() == 90.0


def test_duplicate_answers_twice():
    """The same."""
    first, second = spoilt("duplicate")
    assert first is second


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_one_value_is_not_finite(kind: str):
    """The others are as they were."""
    delta_d = only_update(spoilt(kind)).delta_d
    assert np.isfinite(delta_d).sum() == delta_d.size - 1
    assert str(delta_d[~np.isfinite(delta_d)][0]) == kind


@pytest.mark.parametrize("codec", [FP16, BF16], ids=lambda c: c.name)
@pytest.mark.parametrize("kind", ["nan", "inf", "garbage"])
def test_encoded_updates_are_spoilt_in_their_own_words(codec: Codec, kind: str):
    """So that the aggregator judges what a bad site could have sent."""
    words = codec.encode(toy.update(SITE).delta_d)
    fault = FaultSpec(site=SITE, kind=kind, scale=5.0)
    injector = FaultInjector([fault], clock=VirtualClock(), seed=0)
    answer = toy.update(SITE, delta_d=words)
    sent = only_update(list(injector(toy.task(SITE), lambda: answer))).delta_d
    assert sent.dtype == codec.dtype
    found_d = decoded(codec, sent)
    if kind == "garbage":
        assert np.linalg.norm(found_d) == pytest.approx(5.0, rel=0.01)
    else:
        assert [str(v) for v in found_d[~np.isfinite(found_d)]] == [kind]


@pytest.mark.parametrize("kind", ["nan", "inf", "garbage"])
@pytest.mark.parametrize("name", ["int8", "int4", "fp4", "top_k"])
def test_packed_updates_are_spoilt_in_their_bytes(name: str, kind: str):
    """Those that are not finite have a scale that no codec makes."""
    codec, size = codec_of(name), toy.LAYOUT.size
    answer = toy.update(SITE, delta_d=codec.encode(np.ones(size, np.float32)))
    injector = FaultInjector(
        [FaultSpec(site=SITE, kind=kind)], clock=VirtualClock(), seed=0
    )
    sent = only_update(list(injector(toy.task(SITE), lambda: answer))).delta_d
    assert sent.dtype == np.uint8
    assert sent.size == codec.num_words(size)
    assert sent.tobytes() != answer.delta_d.tobytes()
    if kind != "garbage":
        assert "negative or not finite" in codec.fault(sent, size)


def test_garbage_has_its_norm():
    """And no likeness to the update."""
    delta_d = only_update(spoilt("garbage", scale=5.0)).delta_d
    assert np.linalg.norm(delta_d) == pytest.approx(5.0)
    assert delta_d.dtype == np.float32


def test_garbage_is_the_same_in_every_run():
    """But not in every round and with every seed."""
    first = only_update(spoilt("garbage")).delta_d
    np.testing.assert_array_equal(first, only_update(spoilt("garbage")).delta_d)
    others = [spoilt("garbage", seed=1), spoilt("garbage", round_index=2)]
    assert not any(np.array_equal(first, only_update(m).delta_d) for m in others)


def test_wrong_length_is_one_short():
    """The smallest mistake."""
    assert only_update(spoilt("wrong_length")).delta_d.size == toy.LAYOUT.size - 1


def test_wrong_round_is_the_one_before():
    """Also in round 1."""
    assert only_update(spoilt("wrong_round")).round_index == 0


@pytest.mark.parametrize("kind", ["nan", "garbage", "wrong_length"])
def test_failure_passes_unspoilt(kind: str):
    """There is no update to spoil."""
    fault = FaultSpec(site=SITE, kind=kind)
    injector = FaultInjector([fault], clock=VirtualClock(), seed=0)
    failure = toy.failure(SITE)
    assert list(injector(toy.task(SITE), lambda: failure)) == [failure]


def test_sites_own_update_is_not_written_to():
    """The site may still need it."""
    update = toy.update(SITE)
    fault = FaultSpec(site=SITE, kind="nan")
    injector = FaultInjector([fault], clock=VirtualClock(), seed=0)
    injector(toy.task(SITE), lambda: update)
    assert np.isfinite(update.delta_d).all()


def test_masked_garbage_has_the_same_length():
    """Nobody can tell it from masked words; the header and the head stay."""
    sent, message = toy.masked(SITE), spoilt_words("garbage")
    assert isinstance(message, MaskedUpdate)
    assert message.words.dtype == np.uint8
    assert message.words.shape == sent.words.shape
    assert not np.array_equal(message.words, sent.words)
    np.testing.assert_array_equal(message.header_h, sent.header_h)
    assert message.body == sent.body


def test_masked_garbage_is_the_same_in_every_run():
    """But not with every seed."""
    first, again = spoilt_words("garbage").words, spoilt_words("garbage").words
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, spoilt_words("garbage", seed=1).words)


@pytest.mark.parametrize("word_bytes", [2, 3, 4])
def test_masked_wrong_length_is_one_word_short(word_bytes: int):
    """Whatever the width of the ring."""
    words = np.arange(word_bytes * toy.LAYOUT.size, dtype=np.uint8)
    message = spoilt_words("wrong_length", words=words)
    np.testing.assert_array_equal(message.words, words[:-word_bytes])


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_masked_words_cannot_be_not_finite(kind: str):
    """The site crashes instead, and says why."""
    message = spoilt_words(kind)
    assert isinstance(message, SiteFailure)
    assert message.kind is FailureKind.CRASHED
    assert message.message == f"rehearsed crash: masked words cannot carry {kind}"


def test_masked_update_of_a_slow_site_is_sound():
    """A site that hangs says what it would have said."""
    np.testing.assert_array_equal(spoilt_words("hang").words, toy.masked(SITE).words)


def test_masked_wrong_round_and_duplicate():
    """As for plain updates."""
    assert spoilt_words("wrong_round").round_index == 0
    injector = FaultInjector(
        [FaultSpec(site=SITE, kind="duplicate")], clock=VirtualClock(), seed=0
    )
    first, second = injector(toy.task(SITE), lambda: toy.masked(SITE))
    assert first is second


def secure_step(kind: str, round_index: int = 1, **fields: Any) -> list[SiteMessage]:
    """What becomes of an answer to a step of secure aggregation."""
    task = toy.secure_task(SITE, round_index=round_index)
    fault = FaultSpec(site=SITE, kind=kind, **fields)
    injector = FaultInjector([fault], clock=VirtualClock(), seed=0)
    return list(injector(task, lambda: toy.secure_answer(SITE)))


@pytest.mark.parametrize("kind", ["silent", "crash"])
def test_site_that_is_gone_takes_no_secure_step(kind: str):
    """In the very round of its fault, and not in its run's setup."""
    assert secure_step(kind) == []
    assert secure_step(kind, round_index=2, rounds=(2,)) == []
    for elsewhere in ({"round_index": 0}, {"round_index": 1, "rounds": (2,)}):
        (answer,) = secure_step(kind, **elsewhere)
        assert answer == toy.secure_answer(SITE)


@pytest.mark.parametrize(
    "kind",
    ["hang", "duplicate", "nan", "inf", "garbage", "wrong_length", "wrong_round"],
)
def test_other_faults_leave_secure_steps_alone(kind: str):
    """They spoil or delay updates; a late site that is asked continues."""
    assert secure_step(kind) == [toy.secure_answer(SITE)]


def test_other_sites_and_tasks_are_left_alone():
    """A fault strikes its site when it trains."""
    injector = FaultInjector(
        [FaultSpec(site=SITE, kind="silent")], clock=VirtualClock(), seed=0
    )
    for task in (toy.task(OTHER), toy.task(SITE, kind=TaskKind.EVALUATE)):
        answer = toy.update(task.site)
        assert list(injector(task, lambda answer=answer: answer)) == [answer]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"rounds": (2, 5)}, [2, 5]),
        ({"every": 3}, [3, 6]),
        ({"rounds": (2, 3), "every": 3}, [3]),
    ],
)
def test_rounds_in_which_it_strikes(fields: dict[str, Any], expected: list[int]):
    """Both conditions must hold."""
    struck = [r for r in range(1, 7) if not spoilt("silent", round_index=r, **fields)]
    assert struck == expected


def test_first_fault_that_strikes_wins():
    """One misfortune at a time."""
    faults = [
        FaultSpec(site=SITE, kind="silent", rounds=(9,)),
        FaultSpec(site=SITE, kind="crash"),
        FaultSpec(site=SITE, kind="silent"),
    ]
    injector = FaultInjector(faults, clock=VirtualClock(), seed=0)
    (message,) = injector(toy.task(SITE), lambda: toy.update(SITE))
    assert isinstance(message, SiteFailure)


class Forgetful:
    """A site that counts how often it was asked since it was made."""

    def __init__(self) -> None:
        self.asked, self.closed = 0, False

    def handle(self, task: Task) -> SiteMessage:
        self.asked += 1
        return toy.update(SITE, round_index=task.round_index)

    def close(self) -> None:
        self.closed = True


def test_restart_makes_the_site_anew_and_closes_the_old_one():
    """Before it answers: the new one does."""
    made: list[Forgetful] = []

    def make() -> Forgetful:
        made.append(Forgetful())
        return made[-1]

    restarts: list[str] = []
    site = Restartable(make)
    injector = FaultInjector(
        [FaultSpec(site=SITE, kind="restart", rounds=(2,))],
        clock=VirtualClock(),
        seed=0,
        restart=lambda name: (restarts.append(name), site.restart()),
    )
    for index in (1, 2, 3):
        task = toy.task(SITE, round_index=index)
        (message,) = injector(task, lambda task=task: site.handle(task))
        assert isinstance(message, SiteUpdate)
    assert restarts == [SITE]
    assert [(s.asked, s.closed) for s in made] == [(1, True), (2, False)]
    site.close()
    assert made[-1].closed


def test_a_lost_answer_is_the_end_of_work_that_was_done():
    """Unlike that of a silent site, which is not even called."""
    calls: list[str] = []

    def answer() -> SiteMessage:
        calls.append("worked")
        return toy.update(SITE)

    for kind in ("lost", "silent"):
        fault = FaultSpec(site=SITE, kind=kind)
        injector = FaultInjector([fault], clock=VirtualClock(), seed=0)
        assert injector(toy.task(SITE), answer) == ()
    assert calls == ["worked"]


def test_a_share_of_the_rounds_is_drawn_by_the_seed():
    """About so many, the same again with the same seed, and others at another site."""

    def struck(site: str, seed: int) -> list[int]:
        fault = FaultSpec(site=site, kind="lost", probability=0.5)
        injector = FaultInjector([fault], clock=VirtualClock(), seed=seed)
        return [
            index
            for index in range(1, 201)
            if not injector(toy.task(site, round_index=index), lambda: toy.update(SITE))
        ]

    first = struck(SITE, 1)
    assert 70 < len(first) < 130
    assert struck(SITE, 1) == first
    assert first not in (struck(SITE, 2), struck(OTHER, 1))

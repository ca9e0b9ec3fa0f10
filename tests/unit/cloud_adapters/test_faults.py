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


def test_hang_takes_its_time_and_answers():
    """Whether that is too late is for the grid to say."""
    clock = VirtualClock()
    assert only_update(spoilt("hang", clock=clock, seconds=90.0)).site == SITE
    assert clock.now() == 90.0


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


def test_sites_own_update_is_not_written_to():
    """The site may still need it."""
    update = toy.update(SITE)
    fault = FaultSpec(site=SITE, kind="nan")
    injector = FaultInjector([fault], clock=VirtualClock(), seed=0)
    injector(toy.task(SITE), lambda: update)
    assert np.isfinite(update.delta_d).all()


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

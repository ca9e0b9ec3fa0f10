"""Busy sites are waited for if, and only if, a round would be lost without them."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import pytest
from support import toy
from support.scripted_grid import ScriptedGrid, reply_to

from federation.clock import VirtualClock
from federation.ids import SiteId, TaskId
from federation.messages import FailureKind, Reply, SiteFailure, Task
from federation.rounds.failures import failure
from federation.rounds.gather import exchange
from federation.rounds.retrying_grid import RetryingGrid

DEADLINE = 32.0
C, A, B = toy.SITES


class Busy(ScriptedGrid):
    """Sites that work on something else until a time, or that fail."""

    def __init__(
        self,
        until: Mapping[SiteId, float],
        *,
        clock: VirtualClock,
        failed: Sequence[SiteId] = (),
    ) -> None:
        super().__init__()
        self._until, self._clock, self._failed = until, clock, failed
        self.asked: list[tuple[float, list[SiteId]]] = []

    def play(self, tasks: Sequence[tuple[TaskId, Task]]) -> Iterable[Reply]:
        now = self._clock.monotonic()
        self.asked.append((now, [task.site for _, task in tasks]))
        assert len(self.asked) < 100, "they are asked without an end"
        for task_id, task in tasks:
            if task.site in self._failed:
                said = failure(task, FailureKind.CRASHED, "failed")
            elif now < self._until.get(task.site, 0.0):
                said = failure(task, FailureKind.BUSY, "works")
            else:
                said = toy.update(task.site)
            yield reply_to(said, task_id, bytes_down=10)


class Working(Busy):
    """Such sites, whose own work takes time."""

    def __init__(
        self, until: Mapping[SiteId, float], *, clock: VirtualClock, seconds: float
    ) -> None:
        super().__init__(until, clock=clock)
        self._seconds = seconds
        self._ready: list[tuple[float, Reply]] = []

    def send(
        self,
        tasks: Sequence[Task],
        *,
        deadline_seconds: float,  # noqa: ARG002 -- of the seam
    ) -> Sequence[TaskId]:
        ids = self.number(tasks)
        now = self._clock.monotonic()
        for reply in self.play([*zip(ids, tasks, strict=True)]):
            is_busy = isinstance(reply.message, SiteFailure)
            self._ready.append((now + self._seconds * (not is_busy), reply))
        return ids

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        if not self._ready:
            return deque()
        now = self._clock.monotonic()
        when, reply = first = min(self._ready, key=lambda each: each[0])
        if timeout_seconds is not None and when > now + timeout_seconds:
            self._clock.sleep(timeout_seconds)
            return deque()
        self._ready.remove(first)
        self._clock.wait_until(when)
        return deque([reply])


def told(replies: Iterable[Reply]) -> list[tuple[TaskId, SiteId, str]]:
    return [
        (
            reply.task_id,
            reply.message.site,
            reply.message.kind.value
            if isinstance(reply.message, SiteFailure)
            else f"ok {reply.bytes_down}",
        )
        for reply in replies
    ]


def ask(grid: Busy, clock: VirtualClock, needed: int) -> list[Reply]:
    patient = RetryingGrid(grid, needed=needed, clock=clock)
    tasks = [toy.task(site) for site in toy.SITES]
    return list(exchange(patient, tasks, deadline_seconds=DEADLINE))


def test_no_one_waits_for_a_site_that_a_round_can_do_without():
    """Its state is reported when the others have answered."""
    clock = VirtualClock()
    grid = Busy({C: 5.0}, clock=clock)
    found = told(ask(grid, clock, needed=2))
    assert found == [(1, A, "ok 10"), (2, B, "ok 10"), (0, C, "busy")]
    assert len(grid.asked) == 1
    assert clock.monotonic() == 0.0


def test_busy_sites_are_asked_again_until_there_are_enough():
    """Under the ids that the caller knows, with the bytes of each question."""
    clock = VirtualClock()
    grid = Busy({C: 2.0, A: 5.0}, clock=clock)
    found = told(ask(grid, clock, needed=3))
    assert found == [(2, B, "ok 10"), (0, C, "ok 30"), (1, A, "ok 40")]
    asked = [(0.0, [C, A, B]), (1.0, [C, A]), (3.0, [C, A]), (7.0, [A])]
    assert grid.asked == asked


def test_the_rest_is_not_asked_again_once_there_are_enough():
    clock = VirtualClock()
    grid = Busy({C: 2.0, A: 1e9}, clock=clock)
    found = told(ask(grid, clock, needed=2))
    assert found == [(2, B, "ok 10"), (0, C, "ok 30"), (1, A, "busy")]


@pytest.mark.parametrize("failed", [(), (B,)])
def test_after_the_deadline_sites_stay_busy(failed: tuple[SiteId, ...]):
    """A failure is no answer. A few questions are asked, for each may send a model."""
    clock = VirtualClock()
    grid = Busy({C: 1e9}, clock=clock, failed=failed)
    found = told(ask(grid, clock, needed=3 - len(failed)))
    assert found[-1] == (0, C, "busy")
    assert DEADLINE <= clock.monotonic() < 1.3 * DEADLINE
    assert 5 <= len(grid.asked) <= 8


def test_a_site_is_asked_again_while_another_works():
    """It would be busy at the end if nobody asked until the other has answered."""
    clock = VirtualClock()
    grid = Working({C: 10.0, A: 20.0}, clock=clock, seconds=30.0)
    found = told(ask(grid, clock, needed=3))
    assert [kind.split()[0] for *_, kind in found] == ["ok"] * 3
    assert clock.monotonic() == 23.0 + 30.0


def test_no_one_waits_if_a_round_is_lost_in_any_case():
    """Sites would train, and pay for it, in vain."""
    clock = VirtualClock()
    grid = Busy({C: 5.0}, clock=clock, failed=[B])
    found = told(ask(grid, clock, needed=3))
    assert found == [(1, A, "ok 10"), (2, B, "crashed"), (0, C, "busy")]
    assert len(grid.asked) == 1


def test_an_answer_that_was_waited_for_says_so():
    """The pace of a run is not measured in such a round."""
    clock = VirtualClock()
    found = ask(Busy({C: 2.0}, clock=clock), clock, needed=3)
    awaited = {reply.message.site: reply.is_awaited for reply in found}
    assert awaited == {A: False, B: False, C: True}


def test_a_long_deadline_does_not_make_the_first_pause_long():
    """A part of a day would be 45 minutes, most of which the site is free."""
    clock = VirtualClock()
    grid = RetryingGrid(Busy({C: 5.0}, clock=clock), needed=1, clock=clock)
    replies = exchange(grid, [toy.task(C)], deadline_seconds=86_400.0)
    assert told(replies) == [(0, C, "ok 20")]
    assert clock.monotonic() == 10.0


def test_fewer_tasks_need_fewer_answers():
    """A step that asks one site is not waited for as if it asked all."""
    clock = VirtualClock()
    grid = RetryingGrid(Busy({C: 1.0}, clock=clock), needed=3, clock=clock)
    replies = exchange(grid, [toy.task(C)], deadline_seconds=DEADLINE)
    assert told(replies) == [(0, C, "ok 20")]


def test_a_caller_may_withdraw_or_wait_for_some_time_only():
    """No busy site is asked again for a caller that has left."""
    clock = VirtualClock()
    inner = Busy({C: 1e9, A: 1e9, B: 1e9}, clock=clock)
    grid = RetryingGrid(inner, needed=1, clock=clock)
    ids = grid.send([toy.task(site) for site in toy.SITES], deadline_seconds=DEADLINE)
    assert not grid.receive(timeout_seconds=0.5)
    assert clock.monotonic() == 0.5
    assert not grid.receive(timeout_seconds=1.0)
    assert clock.monotonic() == 1.5
    assert len(inner.asked) == 2
    grid.withdraw(ids)
    assert {*ids, *range(3, 6)} == inner.withdrawn[-1]
    assert not grid.receive()
    assert len(inner.asked) == 2
    assert clock.monotonic() == 1.5


def test_a_task_of_an_answered_call_is_not_kept():
    """It holds a model, which would take memory between rounds."""
    clock = VirtualClock()
    grid = RetryingGrid(Busy({}, clock=clock), needed=3, clock=clock)
    tasks = [toy.task(site) for site in toy.SITES]
    list(exchange(grid, tasks, deadline_seconds=DEADLINE))
    assert not grid._calls

"""The grid in virtual time: messages and work take as long as a job says.

A site is called when the events before its task have happened, in the thread of the
caller; its answer is handed on when its line has carried it. Nothing waits and nothing
looks at a wall clock, so a run has the same events every time. Byte counts are those of
the wire format. Answers that are under way at the same time are in memory together.
"""

import hashlib
import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np

from cloud_adapters.local.inproc_grid import (
    Fault,
    Returned,
    all_returned,
    answers_of,
    late_word,
    no_fault,
)
from federation.clock import VirtualClock
from federation.ids import SiteId, TaskId
from federation.messages import FailureKind, Reply, RoundTask, Task
from federation.protocols import SiteHandler
from federation.rounds.cost import message_seconds
from federation.rounds.failures import failure, no_answer
from federation.wire import frame as wire


class Absences:
    """When a site is away: it comes and goes at random, and always at the same times.

    The times between two changes are exponentially distributed: a Markov chain of two
    states in continuous time.
    """

    def __init__(self, *, share: float, seconds: float, seed: int, site: str) -> None:
        """Begin at 0, where the site is already away with the chance of ``share``.

        Args:
            share: Part of the time that it is away, below 1.
            seconds: Mean length of an absence.
            seed: The job's.
            site: Sites come and go independently of one another.
        """
        self._here = seconds * (1 - share) / share if share else math.inf
        self._away = seconds
        text = f"absences\x00{seed}\x00{site}".encode()
        self._generator = np.random.default_rng([*hashlib.sha256(text).digest()])
        is_away = self._generator.random() < share
        first = self._away * self._generator.standard_exponential() if is_away else 0.0
        self._next = (0.0, first)

    def next(self, since: float) -> tuple[float, float]:
        """Find the first absence that ends after a time, no earlier than before.

        Returns:
            When it begins and ends; infinity if there is none.
        """
        begin, end = self._next
        while end <= since:
            begin = end + self._here * self._generator.standard_exponential()
            end = begin + self._away * self._generator.standard_exponential()
        self._next = begin, end
        return self._next


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAbsences:
    """When a site is away, as a trace says.

    Attributes:
        spells: Begin and end of each absence, one after another.
        every: Seconds after which they repeat; infinity for never.
    """

    spells: Sequence[Sequence[float]]
    every: float = math.inf

    def next(self, since: float) -> tuple[float, float]:
        """Find the first absence that ends after a time; see ``Absences``."""
        turns = [0.0]
        if not math.isinf(self.every):
            turns = [self.every * (since // self.every + each) for each in (0, 1)]
        for offset in turns:
            # Not since - offset, which may be rounded to a time before the same end.
            end_of = partial(_end, offset)
            at = bisect_right(self.spells, since, key=end_of)
            if at < len(self.spells):
                return self.spells[at][0] + offset, end_of(self.spells[at])
        return math.inf, math.inf


def _end(offset: float, spell: Sequence[float]) -> float:
    return spell[1] + offset


def away_seconds(absences: Absences | KnownAbsences, until: float) -> float:
    """Add up absences from 0 until a time; they must not have been asked before."""
    found, (begin, end) = 0.0, absences.next(0.0)
    while begin < until:
        found += min(end, until) - begin
        begin, end = absences.next(end)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A site and its network line.

    Attributes:
        handler: Answers for the site.
        clock: The site's own: it says when the site has finished its work.
        down: Bytes a second to it.
        up: Bytes a second from it.
        latency_seconds: What a message takes beside its bytes.
        absences: When the site is away; None if it never is.
    """

    handler: SiteHandler
    clock: VirtualClock
    down: float
    up: float
    latency_seconds: float
    absences: Absences | KnownAbsences | None = None


class VirtualGrid:
    """Sites that work one after another, each in its own virtual time."""

    def __init__(
        self,
        machines: Mapping[SiteId, Machine],
        *,
        clock: VirtualClock,
        fault: Fault = no_fault,
        returned: Returned = all_returned,
        combine_seconds: float = 0.0,
        quorum: int = 0,
        tell_awaited: Callable[[Sequence[SiteId]], None] = lambda _: None,
    ) -> None:
        """Make a grid of machines, in the order of the job.

        Args:
            machines: The sites.
            clock: The aggregator's; ``receive`` moves it on.
            fault: May spoil answers, to rehearse misfortune.
            returned: See ``Grid``.
            combine_seconds: What the aggregator takes before the first task of a round.
            quorum: Sites, of those that are asked or at work, without which an exchange
                is of no use; 0 to wait for none.
            tell_awaited: Receives the sites that are away when an exchange begins to
                wait for its quorum, and what is left of them when it waits on.
        """
        self._machines = dict(machines)
        self._clock = clock
        self._fault = fault
        self.returned = returned
        self._open: dict[TaskId, tuple[Task, Reply]] = {}
        self._events: list[tuple[float, int, Callable[[], deque[Reply]]]] = []
        # Deadlines, of which those of tasks that are closed say nothing.
        self._ends: list[tuple[float, int, TaskId]] = []
        self._order = count()  # Of events at the same time: that of their making.
        self._num_sent = 0
        self._combine_seconds, self._newest = combine_seconds, 0
        self._quorum = quorum
        self._tell_awaited = tell_awaited

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Put tasks on their lines; see ``Grid``.

        Raises:
            ValueError: A task is for a site that the grid does not have.
        """
        unknown = [task.site for task in tasks if task.site not in self._machines]
        if unknown:
            raise ValueError(f"the grid has no sites {unknown}")
        rounds = [task.round_index for task in tasks if isinstance(task, RoundTask)]
        if max(rounds, default=0) > self._newest:
            self._newest = max(rounds)
            self._clock.sleep(self._combine_seconds)
            self._await_quorum(tasks, deadline_seconds)
        elif not rounds:  # A step of secure aggregation.
            self._await_quorum(tasks, deadline_seconds)
        sizes = wire.encoded_sizes(tasks)
        return [
            self._post(task, deadline_seconds, num_bytes)
            for task, num_bytes in zip(tasks, sizes, strict=True)
        ]

    def _await_quorum(self, tasks: Sequence[Task], deadline_seconds: float) -> None:
        """Wait for sites that are away, as the deployed coordinator does.

        Rounds that are bound to be lost would soon end the run.
        """
        machines = [(task.site, self._machines[task.site].absences) for task in tasks]
        # So many may be away.
        spare = max(0, len(tasks) + len(self._open) - self._quorum)
        end = self._clock.monotonic() + deadline_seconds
        while self._quorum and (now := self._clock.monotonic()) < end:
            spells = [(s, one.next(now)) for s, one in machines if one is not None]
            away = {site: until for site, (begin, until) in spells if begin <= now}
            if len(away) <= spare:
                return
            self._tell_awaited([*away])
            back = sorted(away.values())
            self._clock.wait_until(min(end, back[len(back) - spare - 1]))

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Let time pass until there is a reply."""
        end = None
        if timeout_seconds is not None:
            end = self._clock.monotonic() + timeout_seconds
        while self._open and (end is None or self._next_seconds() <= end):
            self._clock.wait_until(self._next_seconds())
            if not self._events or self._ends[0][:2] < self._events[0][:2]:
                _, _, task_id = heapq.heappop(self._ends)
                replies = self._settle(task_id, [self._open[task_id][1]])
            else:
                _, _, happen = heapq.heappop(self._events)
                replies = happen()
            if replies:
                return replies
        if self._open and end is not None:
            self._clock.wait_until(end)
        return deque()

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks; a site that has started continues, and its answer is late."""
        closed = [task_id for task_id in task_ids if task_id in self._open]
        return {task_id: self._open.pop(task_id)[1].bytes_down for task_id in closed}

    def _next_seconds(self) -> float:
        """When something happens next, while a task is open."""
        while self._ends[0][2] not in self._open:
            heapq.heappop(self._ends)
        return min(self._ends[0][0], self._events[0][0] if self._events else math.inf)

    def _at(self, seconds: float, happen: Callable[[], deque[Reply]]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), happen))

    def _post(self, task: Task, deadline_seconds: float, num_bytes: int) -> TaskId:
        machine, now = self._machines[task.site], self._clock.monotonic()
        task_id = TaskId(self._num_sent)
        self._num_sent += 1
        text = no_answer(deadline_seconds)
        missed = Reply(
            task_id=task_id,
            message=failure(task, FailureKind.DEADLINE, text),
            asked_seconds=now,
            answered_seconds=now + deadline_seconds,
            bytes_down=num_bytes,
            bytes_up=0,
        )
        self._open[task_id] = task, missed
        delay = machine.latency_seconds
        arrival = now + message_seconds(num_bytes, machine.down, delay)
        self._at(arrival, lambda: self._work(task_id))
        end = now + deadline_seconds, next(self._order), task_id
        heapq.heappush(self._ends, end)
        return task_id

    def _work(self, task_id: TaskId) -> deque[Reply]:
        """Let a site work on a task that has arrived, and send its answers back."""
        if task_id not in self._open:
            return deque()  # Withdrawn, or overdue before it came there.
        task, missed = self._open[task_id]
        machine, now = self._machines[task.site], self._clock.monotonic()
        if machine.clock.monotonic() > now:
            # At work on a task that nobody waits for. This one may be withdrawn, too.
            self._at(machine.clock.monotonic(), lambda: self._work(task_id))
            return deque()
        left = math.inf
        if machine.absences is not None:
            left, _ = machine.absences.next(now)
        if left <= now:
            return self._settle(task_id, [self._gone(task, missed, now)])
        machine.clock.wait_until(now)
        # This is the caller's thread: what interrupts it is no crash of a site.
        answers = answers_of(task, machine.handler, self._fault, crash=Exception)
        sent, delay = machine.clock.monotonic(), machine.latency_seconds
        replies = []
        for index, (message, num_bytes) in enumerate(answers):
            sent += message_seconds(num_bytes, machine.up, delay) - delay
            replies.append(
                replace(
                    missed,
                    message=message,
                    answered_seconds=sent + delay,
                    bytes_down=0 if index else missed.bytes_down,
                    bytes_up=num_bytes,
                )
            )
        last = replies[-1].answered_seconds
        if last > left:  # The work and the answer are lost.
            replies, last = [self._gone(task, missed, left)], left
        self._at(last, lambda: self._settle(task_id, replies))
        return deque()

    def _gone(self, task: Task, missed: Reply, seconds: float) -> Reply:
        """Say that a site is away."""
        message = failure(task, FailureKind.DISCONNECTED, "is away")
        return replace(missed, message=message, answered_seconds=seconds)

    def _settle(self, task_id: TaskId, replies: list[Reply]) -> deque[Reply]:
        """Pass on the answers to a task; of late ones only a note."""
        if self._open.pop(task_id, None) is not None:
            return deque(replies)
        return deque(late_word(replies))

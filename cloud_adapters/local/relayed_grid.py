"""A grid whose sites are behind relays: over any other grid, which reaches the sites.

A relay passes tasks on, waits for all its sites and sends one sum. In virtual time its
line to the aggregator takes as long as the job says; otherwise it takes no time. Bytes
are those of the wire format on both lines.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from federation.ids import SiteId, TaskId
from federation.messages import (
    FailureKind,
    RelayedSum,
    Reply,
    SiteMessage,
    Task,
)
from federation.protocols import Clock, Grid
from federation.rounds.cost import message_seconds
from federation.rounds.failures import failure
from federation.wire.relayed import down_sizes, up_sizes

Combine = Callable[
    [Sequence[Task], Sequence[SiteMessage]], tuple[RelayedSum | None, list[SiteMessage]]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLine:
    """A relay and its line to the aggregator.

    Attributes:
        name: The relay.
        sites: Its sites, in the order of the job.
        combine: Makes one sum of their answers.
        down: Bytes a second to the relay.
        up: Bytes a second from it.
        latency_seconds: What a message takes beside its bytes.
        lost_rounds: Rounds in which it gives no answer.
    """

    name: SiteId
    sites: Sequence[SiteId]
    combine: Combine
    down: float = math.inf
    up: float = math.inf
    latency_seconds: float = 0.0
    lost_rounds: Collection[int] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class _RelayedBatch:
    """Tasks that went to a relay together, and the answers so far, by outer id."""

    relay: RelayLine
    tasks: Mapping[TaskId, Task]
    bytes_down: Mapping[TaskId, int]
    asked: float
    deadline_seconds: float
    inner: dict[TaskId, TaskId] = field(default_factory=dict)
    replies: dict[TaskId, Reply] = field(default_factory=dict)
    sent: tuple[float, Callable[[], deque[Reply]]] | None = None


class RelayedGrid:
    """Sites behind relays; those of no relay are reached as before."""

    def __init__(
        self,
        grid: Grid,
        relays: Sequence[RelayLine],
        *,
        clock: Clock,
        in_order: bool = False,
    ) -> None:
        """Put relays before some sites of a grid.

        Args:
            grid: Reaches the sites.
            relays: Sites that none of them serves are reached directly.
            clock: The grid's.
            in_order: Whether sums come in the order in which their relays were asked,
                after the answers of sites without one: then floating-point sums are the
                same in every run.
        """
        self._grid, self._clock, self._in_order = grid, clock, in_order
        self._queue: deque[_RelayedBatch] = deque()
        self._relay_of = {site: relay for relay in relays for site in relay.sites}
        self._order = count()
        self._num_sent = 0
        self._alone: dict[TaskId, TaskId] = {}  # Outer ids by inner ones.
        self._batch_of: dict[TaskId, _RelayedBatch] = {}  # By inner id.
        self._open: set[TaskId] = set()
        self._bytes_down: dict[TaskId, int] = {}  # Of those behind relays.
        self._events: list[tuple[float, int, Callable[[], deque[Reply]]]] = []

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        """Who is back; see ``Grid``."""
        return self._grid.returned(sites, round_index)

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Send tasks to sites and relays; see ``Grid``."""
        ids = [TaskId(self._num_sent + index) for index in range(len(tasks))]
        self._num_sent += len(tasks)
        self._open.update(ids)
        alone: dict[TaskId, Task] = {}
        behind: dict[SiteId, dict[TaskId, Task]] = {}
        for task_id, task in zip(ids, tasks, strict=True):
            relay = self._relay_of.get(task.site)
            into = alone if relay is None else behind.setdefault(relay.name, {})
            into[task_id] = task
        sent = self._grid.send([*alone.values()], deadline_seconds=deadline_seconds)
        self._alone |= dict(zip(sent, alone, strict=True))
        for batch in behind.values():
            self._post(batch, deadline_seconds)
        return ids

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Wait for replies of sites without a relay, or for a relay's; see ``Grid``."""
        now = self._clock.monotonic
        end = math.inf if timeout_seconds is None else now() + timeout_seconds
        while self._open:
            if self._events and self._events[0][0] <= now():
                _, _, happen = heapq.heappop(self._events)
                replies = happen()
            else:
                until = min(end, self._events[0][0] if self._events else math.inf)
                wait = None if until == math.inf else max(0.0, until - now())
                came = self._grid.receive(wait)
                if not came and until == math.inf:
                    break  # Nothing is open, and nothing under way.
                if not came:
                    self._clock.sleep(max(0.0, until - now()))
                replies = self._sorted(came)
            if replies:
                return replies
            if now() >= end:
                break
        return deque()

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks; see ``Grid``."""
        gone = {*task_ids} & self._open
        inner = [one for one, outer in self._alone.items() if outer in gone]
        for one, batch in self._batch_of.items():
            if batch.inner[one] in gone:
                inner.append(one)
        sent = self._grid.withdraw(inner)
        closed = {one: self._bytes_down[one] for one in gone & self._bytes_down.keys()}
        closed |= {self._alone[o]: n for o, n in sent.items() if o in self._alone}
        for one in inner:
            self._alone.pop(one, None)
            self._batch_of.pop(one, None)
        self._open -= gone
        self._queue = deque(b for b in self._queue if self._open & b.tasks.keys())
        self._release()
        return closed

    def _at(self, seconds: float, happen: Callable[[], deque[Reply]]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), happen))

    def _post(self, tasks: Mapping[TaskId, Task], deadline_seconds: float) -> None:
        """Send tasks to a relay."""
        first, now = next(iter(tasks.values())), self._clock.monotonic()
        relay = self._relay_of[first.site]
        sizes = dict(zip(tasks, down_sizes([*tasks.values()]), strict=True))
        self._bytes_down |= sizes
        batch = _RelayedBatch(
            relay=relay,
            tasks=tasks,
            bytes_down=sizes,
            asked=now,
            deadline_seconds=deadline_seconds,
        )
        self._queue.append(batch)
        if first.round_index in relay.lost_rounds:
            text = f"relay {relay.name!r} gave no answer"
            self._send(
                batch, now, lambda: self._fail(batch, FailureKind.UNREACHABLE, text)
            )
            return
        size, delay = sum(sizes.values()), relay.latency_seconds
        seconds = message_seconds(size, relay.down, delay)
        # An answer is about as large as its task: the relay ends its round in time.
        back = message_seconds(size, relay.up, delay)
        left = max(0.0, deadline_seconds - seconds - back)
        self._at(now + seconds, lambda: self._start(batch, left))

    def _start(self, batch: _RelayedBatch, deadline_seconds: float) -> deque[Reply]:
        """Let a relay pass tasks on that have arrived there."""
        tasks = {one: task for one, task in batch.tasks.items() if one in self._open}
        sent = self._grid.send([*tasks.values()], deadline_seconds=deadline_seconds)
        batch.inner = dict(zip(sent, tasks, strict=True))
        self._batch_of |= dict.fromkeys(sent, batch)
        return deque()

    def _sorted(self, replies: deque[Reply]) -> deque[Reply]:
        """Pass on what is for the aggregator; keep what is for a relay."""
        found: deque[Reply] = deque()
        while replies:
            reply = replies.popleft()
            inner, site = reply.task_id, reply.message.site
            batch = self._batch_of.pop(inner, None)
            if batch is not None:
                batch.replies[batch.inner[inner]] = reply
                if len(batch.replies) == len(batch.inner):
                    self._combine(batch)
            elif site not in self._relay_of:
                outer = self._alone.pop(inner, TaskId(-1))
                self._open.discard(outer)
                found.append(replace(reply, task_id=outer))
                self._release()
            # What a site sends its relay late or twice does not leave the cloud.
        return found

    def _combine(self, batch: _RelayedBatch) -> None:
        """Let a relay make its sum, and send it."""
        ids = [one for one in batch.tasks if one in batch.replies]
        through, messages = batch.relay.combine(
            [batch.tasks[one] for one in ids],
            [batch.replies[one].message for one in ids],
        )
        sizes = up_sizes(through, messages)
        relay, now = batch.relay, self._clock.monotonic()
        due = now + message_seconds(sum(sizes), relay.up, relay.latency_seconds)
        if due > batch.asked + batch.deadline_seconds:
            text = f"relay {relay.name!r} gave no answer within its deadline"
            self._send(
                batch, due, lambda: self._fail(batch, FailureKind.DEADLINE, text)
            )
            return
        replies: deque[Reply] = deque()
        for task_id, message, size in zip(ids, messages, sizes, strict=True):
            inside = batch.replies[task_id]
            is_part = through is not None and message.site in through.sites
            replies.append(
                Reply(
                    task_id=task_id,
                    message=message,
                    asked_seconds=batch.asked,
                    answered_seconds=due,
                    bytes_down=batch.bytes_down[task_id],
                    bytes_up=size,
                    through=through if is_part else None,
                    inside_down=inside.bytes_down,
                    inside_up=inside.bytes_up,
                )
            )
        batch.replies.clear()  # The sum is in memory, no update.
        self._send(batch, due, lambda: self._settle(replies))

    def _send(
        self, batch: _RelayedBatch, due: float, happen: Callable[[], deque[Reply]]
    ) -> None:
        """Put what a relay sends on its line, when it is its turn."""
        batch.sent = due, happen
        if not self._in_order:
            self._queue.remove(batch)
            self._at(*batch.sent)
        self._release()

    def _release(self) -> None:
        """Put on the line what has waited for others."""
        while self._queue and self._queue[0].sent and not self._alone:
            batch = self._queue.popleft()
            assert batch.sent is not None  # noqa: S101 -- as the loop has checked
            due, happen = batch.sent
            self._at(max(due, self._clock.monotonic()), happen)

    def _settle(self, replies: deque[Reply]) -> deque[Reply]:
        found = deque(one for one in replies if one.task_id in self._open)
        self._open.difference_update(one.task_id for one in found)
        for one in replies:
            self._bytes_down.pop(one.task_id, None)
        return found

    def _fail(self, batch: _RelayedBatch, kind: FailureKind, text: str) -> deque[Reply]:
        """Report a relay's silence for each of its sites."""
        now = self._clock.monotonic()
        return self._settle(
            deque(
                Reply(
                    task_id=task_id,
                    message=failure(task, kind, text),
                    asked_seconds=batch.asked,
                    answered_seconds=now,
                    bytes_down=batch.bytes_down[task_id],
                    bytes_up=0,
                )
                for task_id, task in batch.tasks.items()
            )
        )

"""Waits for sites that are still working, if a round would be lost without them.

A site that misses its deadline goes on working for a while, and is busy when the next
round begins. Where enough other sites answer, no one waits for it. Where they do not,
that round would be lost within a second, and so would those that follow.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from federation.ids import SiteId, TaskId
from federation.messages import FailureKind, Reply, SiteFailure, Task
from federation.protocols import Clock, Grid

# Parts of a deadline: the first pause, which is doubled each time, and the last. Every
# question may send the model once more.
_FIRST_PAUSE, _LAST_PAUSE = 1 / 32, 1 / 4
# The deadline may be a day, and a site free in a moment: a coordinator was killed.
_FIRST_SECONDS = 10.0
# Late answers are taken in so often while nothing else is open.
_LOOK_SECONDS = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class _SentTasks:
    """One call of ``send``.

    Attributes:
        tasks: By the ids that the caller knows.
        deadline_seconds: For each of them.
        needed: How many answers make a round.
        open: Tasks that the grid works on.
        busy: Answers of sites that are to be asked again.
        answered: How many answers came.
        until: When no site is asked again, on the monotonic clock.
        next_time: When they are asked again.
        pause: Seconds until the time after that.
    """

    tasks: dict[TaskId, Task]
    deadline_seconds: float
    needed: int
    open: set[TaskId]
    busy: dict[TaskId, Reply] = field(default_factory=dict)
    answered: int = 0
    until: float | None = None
    next_time: float = 0.0
    pause: float = 0.0


class RetryingGrid:
    """A grid that asks busy sites again until enough sites have answered.

    It does so as soon as the others of a call cannot be enough, and for as long as the
    deadline of their tasks. Each then has the whole deadline for its answer. Bytes of
    earlier questions are added to those of the last.
    """

    def __init__(self, grid: Grid, *, needed: int, clock: Clock) -> None:
        """Wrap a grid.

        Args:
            grid: The way to the sites.
            needed: How many answers make a round.
            clock: Measures pauses.
        """
        self._grid, self._needed, self._clock = grid, needed, clock
        self._calls: list[_SentTasks] = []
        # Of tasks that were sent again: the id that the caller knows.
        self._first_ids: dict[TaskId, TaskId] = {}
        self._bytes_down: dict[TaskId, int] = {}

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        """The sites of some that are back; see ``Grid``."""
        return self._grid.returned(sites, round_index)

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Send tasks; see ``Grid``.

        Raises:
            ValueError: A task is for a site that the grid does not have.
        """
        ids = self._grid.send(tasks, deadline_seconds=deadline_seconds)
        if tasks:
            call = _SentTasks(
                tasks=dict(zip(ids, tasks, strict=True)),
                deadline_seconds=deadline_seconds,
                needed=min(self._needed, len(tasks)),
                open=set(ids),
            )
            self._calls.append(call)
        return ids

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Wait for replies; see ``Grid``. Busy sites may be asked again meanwhile."""
        begin = self._clock.monotonic()
        while True:
            found, wait = self._settled()
            if found:
                return found
            if timeout_seconds is not None:
                left = timeout_seconds - (self._clock.monotonic() - begin)
                wait = max(0.0, left if wait is None else min(wait, left))
            is_asking = any(call.open for call in self._calls)
            found = self._taken(self._grid.receive(wait))
            is_busy = any(call.busy for call in self._calls)
            is_over = (
                timeout_seconds is not None
                and self._clock.monotonic() - begin >= timeout_seconds
            )
            if found or is_over or not is_busy:
                return found
            if wait is not None and not is_asking:
                # The grid waits for nothing: it has returned immediately.
                self._clock.sleep(min(wait, _LOOK_SECONDS))

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks; see ``Grid``."""
        chosen = set(task_ids)
        sent_again = [new for new, old in self._first_ids.items() if old in chosen]
        closed = Counter[TaskId]()
        for task_id, num_bytes in self._grid.withdraw([*chosen, *sent_again]).items():
            closed[self._first_ids.get(task_id, task_id)] += num_bytes
        for call in self._calls:
            for task_id in chosen & call.tasks.keys():
                del call.tasks[task_id]
                call.open.discard(task_id)
                closed[task_id] += self._bytes_down.pop(task_id, 0)
                if task_id in call.busy:
                    closed[task_id] += call.busy.pop(task_id).bytes_down
        self._forget()
        return closed

    def _taken(self, replies: deque[Reply]) -> deque[Reply]:
        """Keep answers that a site is busy; pass on the rest."""
        found: deque[Reply] = deque()
        while replies:
            reply = replies.popleft()  # Only the receiver holds an update.
            task_id = self._first_ids.get(reply.task_id, reply.task_id)
            call = next((c for c in self._calls if task_id in c.open), None)
            earlier = 0
            if call is not None:
                call.open.discard(task_id)
                earlier = self._bytes_down.pop(task_id, 0)
            if task_id != reply.task_id:
                num_bytes = reply.bytes_down + earlier
                reply = replace(
                    reply, task_id=task_id, bytes_down=num_bytes, is_awaited=True
                )
            message = reply.message
            kind = message.kind if isinstance(message, SiteFailure) else None
            if call is not None and kind is FailureKind.BUSY:
                call.busy[task_id] = reply
                continue
            if call is not None:
                call.answered += kind is None
                del call.tasks[task_id]
            found.append(reply)
        self._forget()
        return found

    def _settled(self) -> tuple[deque[Reply], float | None]:
        """Ask again whom it is time to ask.

        Returns:
            Answers of busy sites for which no one waits any more; and seconds
            until one is to be asked again, if any is.
        """
        found: deque[Reply] = deque()
        waits: list[float] = []
        for call in self._calls:
            at_best = call.answered + len(call.open)
            if not call.busy or (call.open and at_best >= call.needed):
                continue
            now = self._clock.monotonic()
            if call.until is None:
                call.until = now + call.deadline_seconds
                first = _FIRST_PAUSE * call.deadline_seconds
                call.pause = min(first, _FIRST_SECONDS)
                call.next_time = now + call.pause
            is_vain = at_best + len(call.busy) < call.needed
            if at_best >= call.needed or is_vain or now >= call.until:
                if not call.open:
                    found.extend(call.busy.values())
                    call.busy.clear()
                    call.tasks.clear()
            elif now >= call.next_time:
                self._ask_again(call)
            else:
                waits.append(call.next_time - now)
        self._forget()
        return found, min(waits, default=None)

    def _ask_again(self, call: _SentTasks) -> None:
        again = {task_id: call.tasks[task_id] for task_id in call.busy}
        for task_id, reply in call.busy.items():
            self._bytes_down[task_id] = reply.bytes_down
        call.busy.clear()
        call.open |= again.keys()
        call.pause = min(2 * call.pause, _LAST_PAUSE * call.deadline_seconds)
        call.next_time = self._clock.monotonic() + call.pause
        tasks = list(again.values())
        ids = self._grid.send(tasks, deadline_seconds=call.deadline_seconds)
        self._first_ids |= dict(zip(ids, again, strict=True))

    def _forget(self) -> None:
        """Let go of calls without a task: a model must not be held for them."""
        self._calls = [call for call in self._calls if call.tasks]
        if not self._calls:
            self._first_ids.clear()

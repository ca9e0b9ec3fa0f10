"""The grid in one process: sites are called in threads, nothing is serialised.

Replies come in the order of the tasks, whatever the number of threads, so that
sums of floating-point updates are the same in every run. Byte counts are those
of the wire format. A task's deadline counts from when a thread takes it up: in a
simulation the sites share one machine, and waiting for it is nobody's fault.

Threads are daemons: a site that hangs for ever delays neither the round beyond its
deadline nor the end of the process.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from federation import wire
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    Reply,
    RoundTask,
    SiteFailure,
    SiteMessage,
)
from federation.protocols import Clock, SiteHandler

# Updates that threads may finish ahead of the one that is waited for.
MAX_AHEAD = 64
MAX_AHEAD_BYTES = 64 << 20

Fault = Callable[[RoundTask, Callable[[], SiteMessage]], Sequence[SiteMessage]]


def no_fault(
    task: RoundTask,  # noqa: ARG001 -- faults see the task
    answer: Callable[[], SiteMessage],
) -> Sequence[SiteMessage]:
    """Let a site answer as it does."""
    return (answer(),)


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One task of an exchange on its way through the threads."""

    task: RoundTask
    started: float | None = None
    finished: float = 0.0
    messages: Sequence[SiteMessage] | None = None
    abandoned: bool = False


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """The tasks of one call of ``exchange``; guarded by the grid's condition."""

    slots: list[_Slot]
    ahead: int
    waiting: deque[int] = field(default_factory=deque)
    yielded: int = 0
    closed: bool = False


class InProcessGrid:
    """Sites in threads of this process.

    Use it as a context manager: threads end with it, except those in which a site
    hangs.
    """

    def __init__(
        self,
        handlers: Mapping[SiteId, SiteHandler],
        *,
        clock: Clock,
        workers: int = 1,
        fault: Fault = no_fault,
    ) -> None:
        """Make a grid of the given sites.

        Args:
            handlers: What answers for each site, in the order of the job.
            clock: Measures deadlines and durations.
            workers: Sites that work at the same time.
            fault: May spoil answers, to rehearse misfortune.

        Raises:
            ValueError: There is no site or no worker.
        """
        if not handlers or workers < 1:
            raise ValueError("an in-process grid needs a site and a worker")
        self._handlers = dict(handlers)
        self._clock = clock
        self._fault = fault
        self._num_workers = min(workers, len(self._handlers))
        self._condition = threading.Condition()
        self._exchange: _Exchange | None = None
        self._busy: dict[SiteId, int] = {}
        self._late: deque[Reply] = deque()
        self._open = True
        self._threads: list[threading.Thread] = []
        for _ in range(self._num_workers):
            self._start_thread()

    def __enter__(self) -> Self:
        """Return the grid."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the threads."""
        self.close()

    def close(self) -> None:
        """End the threads; one in which a site hangs ends when the site does."""
        with self._condition:
            self._open = False
            hung = bool(self._busy)
            self._condition.notify_all()
        for thread in self._threads:
            if not hung:
                thread.join()

    def sites(self) -> Sequence[SiteId]:
        """Every site, in the order of the job."""
        return tuple(self._handlers)

    def exchange(
        self, tasks: Sequence[RoundTask], *, deadline_seconds: float
    ) -> Iterator[Reply]:
        """Have the sites work on their tasks; yield in the order of the tasks.

        Answers to tasks of earlier exchanges that missed their deadline come first.
        """
        exchange = _Exchange(
            slots=[_Slot(task=task) for task in tasks],
            ahead=self._ahead(tasks),
            waiting=deque(range(len(tasks))),
        )
        with self._condition:
            self._exchange = exchange
            self._condition.notify_all()
        try:
            for index in range(len(tasks)):
                yield from self._take_late()
                yield from self._replies(exchange, index, deadline_seconds)
        finally:
            with self._condition:
                exchange.closed = True
                exchange.waiting.clear()
                self._exchange = None

    def _ahead(self, tasks: Sequence[RoundTask]) -> int:
        largest = max((task.weights_d.nbytes for task in tasks), default=0)
        by_memory = MAX_AHEAD_BYTES // max(largest, 1)
        return min(MAX_AHEAD, max(by_memory, self._num_workers))

    def _take_late(self) -> Iterator[Reply]:
        while self._late:
            yield self._late.popleft()

    def _replies(
        self, exchange: _Exchange, index: int, deadline_seconds: float
    ) -> Iterator[Reply]:
        slot = exchange.slots[index]
        with self._condition:
            in_time = self._wait(slot, deadline_seconds)
            exchange.yielded += 1
            self._condition.notify_all()
            if not in_time:
                self._abandon(slot)
        if not in_time:
            text = f"gave no answer within {deadline_seconds:g} s"
            yield self._no_answer(slot, FailureKind.DEADLINE, text)
        elif not slot.messages:
            yield self._no_answer(slot, FailureKind.UNREACHABLE, "never answered")
        else:
            for message in slot.messages:
                yield _reply(slot, message)
        slot.messages = None  # The receiver alone holds an update now.

    def _wait(self, slot: _Slot, deadline_seconds: float) -> bool:
        """Wait, holding the condition, until a task is done or out of time."""
        while slot.messages is None:
            if slot.started is None:
                self._condition.wait()
                continue
            left = slot.started + deadline_seconds - self._clock.monotonic()
            if left <= 0:
                return False
            self._condition.wait(timeout=left)
        return True

    def _abandon(self, slot: _Slot) -> None:
        """Give a hanging site's thread up and start another in its place."""
        slot.abandoned = True
        slot.finished = self._clock.monotonic()
        self._start_thread()

    def _no_answer(self, slot: _Slot, kind: FailureKind, text: str) -> Reply:
        return _reply(slot, _failure(slot.task, kind, text), bytes_up=0)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="crossfed-site", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (claimed := self._claim()) is not None:
            slot = claimed
            messages = self._answer(slot)
            with self._condition:
                slot.finished = self._clock.monotonic()
                if slot.abandoned:
                    self._late.extend(_reply(slot, m) for m in messages)
                    return  # Another thread has taken this one's place.
                slot.messages = messages
                self._condition.notify_all()
            del slot, claimed, messages

    def _claim(self) -> _Slot | None:
        """Wait for a task that may be started; None when the grid is closed."""
        with self._condition:
            while self._open:
                exchange = self._exchange
                if exchange is not None and exchange.waiting:
                    index = exchange.waiting[0]
                    if index < exchange.yielded + exchange.ahead:
                        exchange.waiting.popleft()
                        slot = exchange.slots[index]
                        slot.started = self._clock.monotonic()
                        self._condition.notify_all()
                        return slot
                self._condition.wait()
            return None

    def _answer(self, slot: _Slot) -> Sequence[SiteMessage]:
        task = slot.task
        with self._condition:
            busy_with = self._busy.get(task.site)
            if busy_with is None:
                self._busy[task.site] = task.round_index
        if busy_with is not None:
            text = f"still works on round {busy_with}"
            return (_failure(task, FailureKind.BUSY, text),)
        handler = self._handlers[task.site]
        try:
            return self._fault(task, lambda: handler.handle(task))
        finally:
            with self._condition:
                self._busy.pop(task.site)


def _failure(task: RoundTask, kind: FailureKind, text: str) -> SiteFailure:
    return SiteFailure(
        run_id=task.run_id,
        round_index=task.round_index,
        site=task.site,
        kind=kind,
        message=text,
    )


def _reply(slot: _Slot, message: SiteMessage, *, bytes_up: int | None = None) -> Reply:
    if bytes_up is None:
        bytes_up = wire.encoded_size(message)
    return Reply(
        message=message,
        asked_seconds=slot.started or 0.0,
        answered_seconds=slot.finished,
        bytes_down=wire.encoded_size(slot.task),
        bytes_up=bytes_up,
    )

"""The grid in one process: sites are called in threads, nothing is serialised.

Replies come in the order of the tasks, whatever the number of threads, so that
sums of floating-point updates are the same in every run. Byte counts are those
of the wire format. A task's deadline counts from when a thread takes it up: in a
simulation the sites share one machine, and waiting for it is nobody's fault.

Threads are daemons: a site that hangs for ever delays neither the round beyond its
deadline nor the end of the process. Its thread is given up and another one started.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from federation import wire
from federation.errors import WireError
from federation.failures import failure
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    Reply,
    RoundTask,
    SiteFailure,
    SiteMessage,
    Task,
)
from federation.protocols import Clock, SiteHandler

# Updates that threads may finish ahead of the one that is waited for.
MAX_AHEAD = 64
MAX_AHEAD_BYTES = 64 << 20

# How long `close` waits for sites that are in the middle of their work: a process
# that ends while a thread is inside a C++ library may be aborted by it.
CLOSING_SECONDS = 1.0

Fault = Callable[[Task, Callable[[], SiteMessage]], Sequence[SiteMessage]]
_Answer = tuple[SiteMessage, int]  # What a site said, and its bytes on the wire.


def no_fault(
    task: Task,  # noqa: ARG001 -- faults see the task
    answer: Callable[[], SiteMessage],
) -> Sequence[SiteMessage]:
    """Let a site answer as it does."""
    return (answer(),)


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """One task of an exchange on its way through the threads.

    It is settled once it has replies. It is given up when its deadline passes
    while a site works on it, and left when nobody waits for its exchange any more:
    what the site then says is late.
    """

    task: Task
    index: int
    deadline_seconds: float
    bytes_down: int
    started: float = 0.0
    thread: threading.Thread | None = None
    replies: deque[Reply] | None = None
    given_up: bool = False
    left: bool = False

    def seconds_left(self, now: float) -> float:
        """Time until its deadline, once a site works on it."""
        return self.started + self.deadline_seconds - now


@dataclass(slots=True, kw_only=True, eq=False)
class _Exchange:
    """The tasks of one call of ``exchange``, and how many may be ahead."""

    slots: list[_Slot]
    ahead: int
    waiting: deque[_Slot] = field(default_factory=deque)
    num_taken: int = 0


class InProcessGrid:
    """Sites in threads of this process.

    Use it as a context manager: threads end with it, except those in which a site
    hangs. One exchange at a time: beginning another ends the one before.
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
        # The condition guards everything below, and every slot and exchange.
        self._condition = threading.Condition()
        self._open = True
        self._exchange: _Exchange | None = None
        self._working: set[_Slot] = set()  # Within their deadline, or left.
        self._busy: dict[SiteId, _Slot] = {}  # What each site is called for.
        self._late: deque[Reply] = deque()
        self._threads: set[threading.Thread] = set()  # Without those given up.
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
        """End the threads.

        Sites in the middle of their work get ``CLOSING_SECONDS`` to finish it; a
        thread in which a site hangs ends when the site does.
        """
        with self._condition:
            self._open = False
            at_work = {slot.thread for slot in self._working}
            patience = CLOSING_SECONDS / max(1, len(at_work))
            threads = tuple(self._threads)
            self._condition.notify_all()
        for thread in threads:
            thread.join(timeout=patience if thread in at_work else None)

    def sites(self) -> Sequence[SiteId]:
        """Every site, in the order of the job."""
        return tuple(self._handlers)

    def exchange(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Iterator[Reply]:
        """Have the sites work on their tasks; yield in the order of the tasks.

        Of an answer that missed its deadline only the word is kept that it came: a
        ``SiteFailure``, yielded before the next reply, of a later exchange if need be.

        Raises:
            ValueError: A task is for a site that the grid does not have; or, while
                replies are taken, the grid was closed or has begun another exchange.
        """
        unknown = [task.site for task in tasks if task.site not in self._handlers]
        if unknown:
            raise ValueError(f"the grid has no sites {unknown}")
        return self._run(tasks, deadline_seconds)

    def _run(self, tasks: Sequence[Task], deadline_seconds: float) -> Iterator[Reply]:
        slots = [
            _Slot(
                task=task,
                index=index,
                deadline_seconds=deadline_seconds,
                bytes_down=wire.encoded_size(task),
            )
            for index, task in enumerate(tasks)
        ]
        exchange = _Exchange(slots=slots, ahead=self._ahead(tasks))
        exchange.waiting.extend(slots)
        self._begin(exchange)
        try:
            for slot in slots:
                while self._late:
                    yield self._late.popleft()
                replies = self._take(exchange, slot)
                while replies:  # The receiver alone holds an update now.
                    yield replies.popleft()
        finally:
            with self._condition:
                self._leave(exchange)

    def _ahead(self, tasks: Sequence[Task]) -> int:
        models = (t.weights_d.nbytes for t in tasks if isinstance(t, RoundTask))
        largest = max(models, default=0)
        by_memory = MAX_AHEAD_BYTES // max(largest, 1)
        return min(MAX_AHEAD, max(by_memory, self._num_workers))

    def _begin(self, exchange: _Exchange) -> None:
        with self._condition:
            if self._exchange is not None:
                self._leave(self._exchange)
            self._exchange = exchange
            self._condition.notify_all()

    def _leave(self, exchange: _Exchange) -> None:
        """Forget an exchange; its sites at work have until their deadline."""
        for slot in exchange.slots:
            slot.left = True
            slot.replies = None
        exchange.waiting.clear()
        if self._exchange is exchange:
            self._exchange = None

    def _take(self, exchange: _Exchange, slot: _Slot) -> deque[Reply]:
        """Wait until a slot is settled and take its replies out."""
        with self._condition:
            while slot.replies is None:
                if not self._open or self._exchange is not exchange:
                    raise ValueError(
                        "the grid was closed, or has begun another exchange"
                    )
                next_deadline = self._give_up_overdue()
                if slot.replies is None:
                    self._condition.wait(timeout=next_deadline)
            replies, slot.replies = slot.replies, None
            exchange.num_taken += 1
            self._condition.notify_all()
            return replies

    def _give_up_overdue(self) -> float | None:
        """Give up every slot past its deadline; return seconds until the next."""
        now = self._clock.monotonic()
        for slot in [s for s in self._working if s.seconds_left(now) <= 0]:
            slot.given_up = True
            slot.replies = self._overdue(slot, now)
            self._working.remove(slot)
            if slot.thread is not None:
                self._threads.discard(slot.thread)
            self._start_thread()
            self._condition.notify_all()
        return min((s.seconds_left(now) for s in self._working), default=None)

    def _overdue(self, slot: _Slot, now: float) -> deque[Reply]:
        text = f"gave no answer within {slot.deadline_seconds:g} s"
        failed = failure(slot.task, FailureKind.DEADLINE, text)
        return deque([_reply(slot, failed, 0, now)])

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="crossfed-site", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        while (slot := self._claim()) is not None:
            replies = self._replies(slot)
            if not self._settle(slot, replies):
                return  # Another thread has taken this one's place.
            del slot, replies  # Not to keep an update while waiting for work.

    def _claim(self) -> _Slot | None:
        """Wait for a task that may be started; None when the grid is closed."""
        with self._condition:
            while self._open:
                slot = self._next_slot()
                if slot is not None:
                    slot.started = self._clock.monotonic()
                    slot.thread = threading.current_thread()
                    self._working.add(slot)
                    self._busy[slot.task.site] = slot
                    self._condition.notify_all()
                    return slot
                self._condition.wait()
            return None

    def _next_slot(self) -> _Slot | None:
        """Take the next task whose site is free; those of hung sites are settled."""
        exchange = self._exchange
        while exchange is not None and exchange.waiting:
            slot = exchange.waiting[0]
            if slot.index >= exchange.num_taken + exchange.ahead:
                return None
            earlier = self._busy.get(slot.task.site)
            if earlier is not None and not earlier.given_up:
                return None  # It has not answered an exchange that was left.
            exchange.waiting.popleft()
            if earlier is None:
                return slot
            text = f"still works on round {earlier.task.round_index}"
            failed = failure(slot.task, FailureKind.BUSY, text)
            slot.started = self._clock.monotonic()
            slot.replies = deque([_reply(slot, failed, 0, slot.started)])
            self._condition.notify_all()
        return None

    def _replies(self, slot: _Slot) -> deque[Reply]:
        """Call the site."""
        answers = self._call(slot.task)
        now = self._clock.monotonic()
        replies = deque(_reply(slot, *answer, now) for answer in answers)
        for index in range(1, len(replies)):  # The task travelled once.
            replies[index] = replace(replies[index], bytes_down=0)
        return replies

    def _call(self, task: Task) -> Sequence[_Answer]:
        try:
            messages = self._fault(task, lambda: self._handlers[task.site].handle(task))
            answers = [_checked(task, message) for message in messages]
        except WireError as error:
            answers = [_refusal(task, FailureKind.INVALID, str(error))]
        except BaseException as error:  # noqa: BLE001 -- the thread's own end: whatever
            # ends a site (SystemExit too) must neither hang the round nor end it.
            text = f"{type(error).__name__}: {error}"
            answers = [_refusal(task, FailureKind.CRASHED, text)]
        return answers or [_refusal(task, FailureKind.UNREACHABLE, "never answered")]

    def _settle(self, slot: _Slot, replies: deque[Reply]) -> bool:
        """Hand replies in; False if the thread was given up meanwhile."""
        now = replies[0].answered_seconds
        with self._condition:
            self._working.discard(slot)
            self._busy.pop(slot.task.site)
            in_time = slot.seconds_left(now) > 0
            if not in_time or slot.given_up or slot.left:
                self._late.extend(_late(replies))
            if not slot.given_up and not slot.left:
                slot.replies = replies if in_time else self._overdue(slot, now)
            self._condition.notify_all()
            return not slot.given_up


def _checked(task: Task, message: SiteMessage) -> _Answer:
    """Weigh a message, and see to it that a site speaks for itself alone.

    Raises:
        WireError: The message could not have travelled.
    """
    num_bytes = wire.encoded_size(message)
    if message.site != task.site:
        text = f"spoke for {message.site!r}"
        return failure(task, FailureKind.INVALID, text), num_bytes
    return message, num_bytes


def _refusal(task: Task, kind: FailureKind, text: str) -> _Answer:
    return failure(task, kind, text), 0


def _reply(slot: _Slot, message: SiteMessage, bytes_up: int, now: float) -> Reply:
    return Reply(
        message=message,
        asked_seconds=slot.started,
        answered_seconds=now,
        bytes_down=slot.bytes_down,
        bytes_up=bytes_up,
    )


def _late(replies: Iterable[Reply]) -> Iterator[Reply]:
    """Keep the word that answers came, not the updates: nobody may use them.

    The task's bytes were counted when its deadline passed. What was a failure
    anyway is not reported twice.
    """
    for reply in replies:
        message = reply.message
        if not isinstance(message, SiteFailure):
            late = failure(message, FailureKind.LATE, "answered after its deadline")
            yield replace(reply, message=late, bytes_down=0)

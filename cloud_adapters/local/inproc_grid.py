"""The grid in one process: sites are called in threads, nothing is serialised.

Replies come in the order of a round's tasks, whatever the number of threads, so that
sums of floating-point updates are the same in every run. Byte counts are those
of the wire format. A task's deadline counts from when a thread takes it up: in a
simulation the sites share one machine, and waiting for it is no site's fault.

Threads are daemons: a site that hangs for ever delays neither the round beyond its
deadline nor the end of the process. Its thread is given up and another one started.

Waking a thread takes longer than an idle site's answer, and a thread that is awake and
waits for the interpreter is woken in vain by every call of NumPy that lets go of it. So
quick sites and the receiver of their replies take turns: sites answer until no more may
start, then the receiver takes all replies while the sites wait.
"""

import math
import threading
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace

from federation.errors import WireError
from federation.ids import SiteId, TaskId
from federation.messages import (
    FailureKind,
    Reply,
    RoundTask,
    SiteFailure,
    SiteMessage,
    Task,
)
from federation.protocols import Clock, Closing, SiteHandler
from federation.rounds.failures import failure, no_answer, still_working
from federation.wire import frame as wire

# Updates that threads may finish ahead of the awaited one.
MAX_AHEAD = 64
MAX_AHEAD_BYTES = 64 << 20

# How long `close` waits for sites that are in the middle of their work: a process
# that ends while a thread is inside a C++ library may be aborted by it. Sites of a run
# that is over end their work after a step, of which several may share the processors.
CLOSING_SECONDS = 10.0

# A site that answers within the first is quick; a turn lasts at most as long as the
# second, lest one slow site hold up the replies of quick ones.
QUICK_SECONDS = 0.0005
TURN_SECONDS = 0.05

# The receiver wakes at least so often: the handler of a signal that came just before
# the wait, or to another thread, runs only when the main thread does.
AWAKE_SECONDS = 0.25

Fault = Callable[[Task, Callable[[], SiteMessage]], Sequence[SiteMessage]]
Returned = Callable[[Collection[SiteId], int], Collection[SiteId]]
Answer = tuple[SiteMessage, int]  # What a site said, and its bytes on the wire.


def no_fault(
    task: Task,  # noqa: ARG001 -- faults see the task
    answer: Callable[[], SiteMessage],
) -> Sequence[SiteMessage]:
    """Let a site answer without a fault."""
    return (answer(),)


def all_returned(
    sites: Collection[SiteId],
    _round_index: int,
) -> Collection[SiteId]:
    """Let all sites return immediately."""
    return sites


@dataclass(slots=True, kw_only=True, eq=False)
class _Errand:
    """One task inside the threads.

    It is settled once it has replies. It is given up when its deadline passes while a
    site works on it, and left when it is withdrawn: what the site then says is late.
    """

    task_id: TaskId
    task: Task
    deadline_seconds: float
    bytes_down: int
    started: float = 0.0
    thread: threading.Thread | None = None
    replies: deque[Reply] | None = None
    given_up: bool = False
    left: bool = False
    inside: bool = False

    def handled(self, handler: SiteHandler) -> "_Inside":
        """Note when the site itself is at work, and not a fault."""
        return _Inside(self, handler)

    def seconds_left(self, now: float) -> float:
        """Time until its deadline, once a site works on it."""
        return self.started + self.deadline_seconds - now


@dataclass(frozen=True, slots=True, eq=False)
class _Inside:
    """A site, while it is called for a task."""

    errand: _Errand
    handler: SiteHandler

    def handle(self, task: Task) -> SiteMessage:
        """Answer the task."""
        self.errand.inside = True
        try:
            return self.handler.handle(task)
        finally:
            self.errand.inside = False

    def close(self) -> None:
        """Leave the site as it is."""


@dataclass(slots=True, kw_only=True, eq=False)
class _TaskBatch:
    """The tasks of one call of ``send``.

    Attributes:
        slots: Those whose replies were not taken, in the order of the tasks.
        waiting: Those of them that no thread has taken up.
        ahead: Slots of the grid that may hold an update when one of these starts.
    """

    slots: deque[_Errand]
    waiting: deque[_Errand]
    ahead: int


class InProcessGrid(Closing):
    """Sites in threads of this process.

    Use it as a context manager: threads end with it, except those in which a site
    hangs. Several calls of ``send`` may be open: each site works on one task at a time.
    """

    def __init__(
        self,
        handlers: Mapping[SiteId, SiteHandler],
        *,
        clock: Clock,
        workers: int = 1,
        fault: Fault = no_fault,
        returned: Returned = all_returned,
    ) -> None:
        """Make a grid of the given sites.

        Args:
            handlers: What answers for each site, in the order of the job.
            clock: Measures deadlines and durations.
            workers: Sites that work at the same time.
            fault: May spoil answers, to rehearse misfortune.
            returned: See ``Grid``.

        Raises:
            ValueError: There is no site or no worker.
        """
        if not handlers or workers < 1:
            raise ValueError("an in-process grid needs a site and a worker")
        self._handlers = dict(handlers)
        self._clock = clock
        self._fault = fault
        self.returned = returned
        self._num_workers = min(workers, len(self._handlers))
        # The lock guards everything below, and every slot and batch. The receiver waits
        # for the first condition, sites for the second.
        self._lock = threading.Lock()
        self._to_receive = threading.Condition(self._lock)
        self._to_work = threading.Condition(self._lock)
        self._open = True
        self._quick = False  # Whether the last site to answer was.
        self._gathering = False  # The receiver lets replies gather.
        self._taking = False  # The receiver is next.
        self._num_sent = 0
        self._batches: list[_TaskBatch] = []
        self._num_held = 0  # Slots taken up whose replies were not taken.
        self._working: set[_Errand] = set()  # Within their deadline, or left.
        self._busy: dict[SiteId, _Errand] = {}  # What each site is called for.
        self._late: deque[Reply] = deque()
        self._threads: set[threading.Thread] = set()  # Without those given up.
        for _ in range(self._num_workers):
            self._start_thread()

    def close(self) -> None:
        """End the threads.

        Sites in the middle of their work, also those that were given up, get
        ``CLOSING_SECONDS`` to finish it; a thread in which a site hangs ends when the
        site does.
        """
        with self._lock:
            self._open = False
            busy = {slot.thread: slot for slot in self._busy.values()}
            threads = self._threads - busy.keys()
            self._to_receive.notify()
            self._to_work.notify_all()
        for thread in threads:
            thread.join()
        inside = [thread for thread, slot in busy.items() if slot.inside and thread]
        for thread in inside:
            thread.join(timeout=CLOSING_SECONDS / len(inside))

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Have the sites work on their tasks; see ``Grid``.

        Raises:
            ValueError: A task is for a site that the grid does not have, or the grid
                was closed.
        """
        unknown = [task.site for task in tasks if task.site not in self._handlers]
        if unknown:
            raise ValueError(f"the grid has no sites {unknown}")
        slots = [
            _Errand(
                task_id=TaskId(number),
                task=task,
                deadline_seconds=deadline_seconds,
                bytes_down=bytes_down,
            )
            for number, (task, bytes_down) in enumerate(
                zip(tasks, wire.encoded_sizes(tasks), strict=True),
                start=self._num_sent,
            )
        ]
        batch = _TaskBatch(
            slots=deque(slots), waiting=deque(slots), ahead=self._ahead(tasks)
        )
        with self._lock:
            self._check_open()
            self._num_sent += len(slots)
            if slots:
                self._batches.append(batch)
            self._to_work.notify_all()
        return [slot.task_id for slot in slots]

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Wait for the replies to one task: those of a ``send`` arrive in its order.

        Of an answer that missed its deadline, or whose task was withdrawn, only the
        word is kept that it came: a ``SiteFailure``, taken before any other reply.

        Raises:
            ValueError: The grid was closed.
        """
        end = math.inf
        if timeout_seconds is not None:
            end = self._clock.monotonic() + timeout_seconds
        with self._lock:
            while True:
                self._check_open()
                self._gather()
                replies = self._take()
                if replies or not self._batches:
                    return replies
                seconds_left = self._give_up_overdue()
                if seconds_left > 0:
                    seconds_left = min(seconds_left, end - self._clock.monotonic())
                    if seconds_left <= 0:
                        return replies
                    self._await_replies(seconds_left)

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks; a site at work on one has until its deadline."""
        closed: dict[TaskId, int] = {}
        with self._lock:
            for batch in self._batches:
                for slot in batch.slots:
                    slot.left = slot.task_id in task_ids
                    if slot.left:
                        slot.replies = None
                        closed[slot.task_id] = slot.bytes_down
                num_held = len(batch.slots) - len(batch.waiting)
                batch.slots = deque(s for s in batch.slots if not s.left)
                batch.waiting = deque(s for s in batch.waiting if not s.left)
                self._num_held -= num_held - len(batch.slots) + len(batch.waiting)
            self._batches = [batch for batch in self._batches if batch.slots]
            self._to_work.notify_all()
        return closed

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError("the grid was closed")

    def _ahead(self, tasks: Sequence[Task]) -> int:
        models = (t.weights_d.nbytes for t in tasks if isinstance(t, RoundTask))
        largest = max(models, default=0)
        by_memory = MAX_AHEAD_BYTES // max(largest, 1)
        return min(MAX_AHEAD, max(by_memory, self._num_workers))

    def _gather(self) -> None:
        """Let quick sites continue, unless their replies are being taken."""
        if not self._taking and self._settled() and self._goes_on():
            self._await_replies(TURN_SECONDS)

    def _await_replies(self, seconds: float) -> None:
        """Wait for something to take; with quick sites, for a whole batch."""
        self._gathering = self._quick
        longest = TURN_SECONDS if self._quick else AWAKE_SECONDS
        if not self._to_receive.wait(min(seconds, longest)):
            self._quick = False  # Until a site shows that it is.
        self._gathering = False

    def _goes_on(self) -> bool:
        """Whether quick sites answer and more of them may start."""
        return self._quick and any(
            batch.waiting and self._num_held < batch.ahead for batch in self._batches
        )

    def _settled(self) -> _TaskBatch | None:
        """The first batch whose next replies may be taken."""
        for batch in self._batches:
            if batch.slots[0].replies is not None:
                return batch
        return None

    def _take(self) -> deque[Reply]:
        """Take late replies, or else the replies to the first settled task."""
        if self._late:
            late, self._late = self._late, deque()
            return late
        batch = self._settled()
        self._taking = batch is not None and self._quick
        if not self._taking:
            self._to_work.notify_all()
        if batch is None:
            return deque()
        slot = batch.slots.popleft()
        if not batch.slots:
            self._batches.remove(batch)
        self._num_held -= 1
        replies, slot.replies = slot.replies, None
        return replies or deque()

    def _announce(self) -> None:
        """Wake the receiver if it has something to take, unless it lets more gather."""
        gathers = self._gathering and self._goes_on()
        if self._late or (not gathers and self._settled()):
            self._to_receive.notify()

    def _give_up_overdue(self) -> float:
        """Give up every slot past its deadline; return seconds until the next.

        That is 0 if there is a reply to take now.
        """
        now, given_up = self._clock.monotonic(), False
        for slot in [s for s in self._working if s.seconds_left(now) <= 0]:
            slot.given_up = given_up = True
            slot.replies = None if slot.left else self._overdue(slot, now)
            self._working.remove(slot)
            if slot.thread is not None:
                self._threads.discard(slot.thread)
            self._start_thread()
        if given_up:
            return 0.0
        # Of tasks that may start meanwhile as well: no claim need wake the receiver.
        started = (slot.seconds_left(now) for slot in self._working)
        waiting = (b.waiting[0].deadline_seconds for b in self._batches if b.waiting)
        return min((*started, *waiting), default=math.inf)

    def _overdue(self, slot: _Errand, now: float) -> deque[Reply]:
        text = no_answer(slot.deadline_seconds)
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

    def _claim(self) -> _Errand | None:
        """Wait for a task that may be started; None when the grid is closed."""
        with self._lock:
            if self._taking:
                self._to_work.wait(TURN_SECONDS)
            while self._open:
                slot = self._next_slot()
                if slot is not None:
                    slot.started = self._clock.monotonic()
                    slot.thread = threading.current_thread()
                    self._working.add(slot)
                    self._busy[slot.task.site] = slot
                    return slot
                self._to_work.wait()
            return None

    def _next_slot(self) -> _Errand | None:
        """Take the next task whose site is free; those of hung sites are settled."""
        for batch in self._batches:
            while batch.waiting and self._num_held < batch.ahead:
                slot = batch.waiting[0]
                earlier = self._busy.get(slot.task.site)
                if earlier is not None and not earlier.given_up:
                    break  # It works on another task.
                batch.waiting.popleft()
                self._num_held += 1
                if earlier is None:
                    return slot
                text = still_working(earlier.task.round_index)
                failed = failure(slot.task, FailureKind.BUSY, text)
                slot.started = self._clock.monotonic()
                slot.replies = deque([_reply(slot, failed, 0, slot.started)])
                self._announce()
        return None

    def _replies(self, slot: _Errand) -> deque[Reply]:
        """Call the site."""
        answers = answers_of(
            slot.task, slot.handled(self._handlers[slot.task.site]), self._fault
        )
        now = self._clock.monotonic()
        replies = deque(_reply(slot, *answer, now) for answer in answers)
        for index in range(1, len(replies)):  # The task travelled once.
            replies[index] = replace(replies[index], bytes_down=0)
        return replies

    def _settle(self, slot: _Errand, replies: deque[Reply]) -> bool:
        """Deliver replies; False if the thread was abandoned meanwhile."""
        now = replies[0].answered_seconds
        with self._lock:
            self._working.discard(slot)
            self._busy.pop(slot.task.site)
            self._quick = now - slot.started < QUICK_SECONDS
            in_time = slot.seconds_left(now) > 0
            if not slot.given_up and not slot.left:
                slot.replies = replies if in_time else self._overdue(slot, now)
            if not in_time or slot.given_up or slot.left:
                # After the word that the deadline has passed, if that was not taken.
                told = self._late if slot.replies is None else slot.replies
                told.extend(late_word(replies))
            self._announce()
            self._to_work.notify()
            return not slot.given_up


def answers_of(
    task: Task,
    handler: SiteHandler,
    fault: Fault,
    *,
    crash: type[BaseException] = BaseException,
) -> Sequence[Answer]:
    """Call a site and return its answers, or a failure if there is none.

    What it raises, if it is a ``crash``, is its failure.
    """
    try:
        messages = fault(task, lambda: handler.handle(task))
        answers = [_checked(task, message) for message in messages]
    except WireError as error:
        answers = [_refusal(task, FailureKind.INVALID, str(error))]
    except crash as error:  # The thread's own end: whatever
        # ends a site (SystemExit too) must neither hang the round nor end it.
        text = f"{type(error).__name__}: {error}"
        answers = [_refusal(task, FailureKind.CRASHED, text)]
    return answers or [_refusal(task, FailureKind.UNREACHABLE, "never answered")]


def _checked(task: Task, message: SiteMessage) -> Answer:
    """Measure a message, and check that it comes from its own site.

    Raises:
        WireError: The message could not have travelled.
    """
    num_bytes = wire.encoded_size(message)
    if message.site != task.site:
        text = f"answered for {message.site!r}"
        return failure(task, FailureKind.INVALID, text), num_bytes
    return message, num_bytes


def _refusal(task: Task, kind: FailureKind, text: str) -> Answer:
    return failure(task, kind, text), 0


def _reply(slot: _Errand, message: SiteMessage, bytes_up: int, now: float) -> Reply:
    return Reply(
        task_id=slot.task_id,
        message=message,
        asked_seconds=slot.started,
        answered_seconds=now,
        bytes_down=slot.bytes_down,
        bytes_up=bytes_up,
    )


def late_word(replies: Iterable[Reply]) -> Iterator[Reply]:
    """Note that answers came late, and drop their updates.

    The task's bytes were counted when its deadline passed, or when it was withdrawn.
    What was a failure anyway is not reported twice.
    """
    for reply in replies:
        message = reply.message
        if not isinstance(message, SiteFailure):
            late = failure(message, FailureKind.LATE, "answered after its deadline")
            yield replace(reply, message=late, bytes_down=0)

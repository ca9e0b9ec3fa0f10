"""How a site's agent leaves: immediately, or after the task that it works on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cloud_adapters.compute.notices import Look
from federation.messages import LeaveReason
from federation.protocols import Clock

LOOK_SECONDS = 2.0
# What the farewell, the disk and a busy machine need before the machine goes.
MARGIN_SECONDS = 20.0
# What is left of that for an answer, once training has ended: its update has to be
# prepared and sent.
ANSWER_SECONDS = 5.0
# How long a local step may go on once the site is to leave immediately; and how long
# its state may be written after that.
STEP_SECONDS = 0.9
WRITE_SECONDS = 22.0


@dataclass(kw_only=True)
class Departure:
    """Whether a site is about to leave, and why.

    Attributes:
        stopped: Set when it is to leave immediately.
        last: Set when it is to take no further task.
        hurry: Set when training is to end after its current step, so that its answer
            leaves in time.
        lost: Why it must not go on here; empty if it may.
        is_replaced: Whether another machine may be the site by now.
    """

    stopped: threading.Event = field(default_factory=threading.Event)
    last: threading.Event = field(default_factory=threading.Event)
    hurry: threading.Event = field(default_factory=threading.Event)
    lost: str = ""
    is_replaced: Callable[[], bool] = lambda: False
    _reason: LeaveReason | None = None
    _kept: threading.Condition = field(default_factory=threading.Condition)
    _lost: str = ""
    _is_at_steps: bool = False
    _is_writing: bool = False

    @contextmanager
    def at_work(self, lost: str) -> Iterator[None]:
        """Work on a task in a block; ``lost`` says what it means to end there."""
        self._lost = lost
        try:
            yield
        finally:
            self._lost = ""

    @property
    def is_at_work(self) -> bool:
        """Whether a task is at work."""
        return bool(self._lost)

    def last_words(self) -> str:
        """What a process says that ends without waiting."""
        return self._lost or "ended without waiting for the aggregator"

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Take local steps in a block whose state can be kept."""
        with self._marked("_is_at_steps"):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write the state of a step in a block: the process does not end meanwhile."""
        with self._marked("_is_writing"):
            yield

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        with self._kept:
            setattr(self, name, True)
        try:
            yield
        finally:
            with self._kept:
                setattr(self, name, False)
                self._kept.notify_all()

    def await_kept(self) -> None:
        """Wait until the step at work is kept, if it ends in time."""
        with self._kept:
            self._kept.wait_for(
                lambda: self._is_writing or not self._is_at_steps, STEP_SECONDS
            )
            self._kept.wait_for(lambda: not self._is_writing, WRITE_SECONDS)

    def now(self, reason: LeaveReason) -> None:
        """Leave immediately; the first reason counts."""
        self._reason = self._reason or reason
        self.last.set()
        self.stopped.set()

    def lose(self, fault: str, reason: LeaveReason) -> None:
        """Leave immediately, with an error."""
        self.lost = self.lost or fault
        self.now(reason)

    def soon(self, reason: LeaveReason) -> None:
        """Leave after the task that is at work, or now if there is none."""
        self._reason = self._reason or reason
        self.last.set()

    def at_once(self) -> LeaveReason | None:
        """Why the site leaves without finishing its task; None if it does not."""
        return self._reason if self.stopped.is_set() else None

    def after_this(self) -> LeaveReason | None:
        """Why the task at work is its last; None if it is not."""
        return self._reason


def watch(
    look: Look, departure: Departure, clock: Clock, listener: Callable[[str], None]
) -> None:
    """Leave in time when a cloud takes the machine back.

    The cloud is asked now, so that a machine that is about to go takes no task, and
    then again and again by a thread. The task at work may be finished if it ends
    before the machine goes: its answer then says that the site leaves, and nothing is
    lost. A task that would take longer ends after the local step that it is at: the
    steps that were taken are its result.

    Args:
        look: Asks the cloud.
        departure: What to tell.
        clock: Tells time.
        listener: Called with a word about a notice.
    """
    if (notice := look()) is not None:
        listener(f"{notice.text}: this site takes no task")
        departure.now(LeaveReason.SPOT)
        return

    def do() -> None:
        notice = None
        while notice is None:
            if departure.stopped.wait(LOOK_SECONDS):
                return
            notice = look()
        room = max(0.0, notice.seconds - MARGIN_SECONDS)
        end = clock.monotonic() + room
        listener(
            f"{notice.text} in {notice.seconds:.0f} s: this site leaves after its "
            f"task, within {room:.0f} s"
        )
        departure.soon(LeaveReason.SPOT)
        early = end - min(ANSWER_SECONDS, room / 2)
        departure.stopped.wait(max(0.0, early - clock.monotonic()))
        departure.hurry.set()
        departure.stopped.wait(max(0.0, end - clock.monotonic()))
        departure.now(LeaveReason.SPOT)

    threading.Thread(target=do, name="notices", daemon=True).start()

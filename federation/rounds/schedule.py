"""When sites get work, and when their answers become the next model.

A schedule is a pure policy: it sees which tasks are open and what has come back, and
says what to do next. ``Dispatcher`` does it. The synchronous round of FedAvg is
``Barrier``.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from federation.ids import SiteId, TaskId
from federation.messages import Reply, RoundTask
from federation.protocols import Grid


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that a site was sent.

    Attributes:
        round_index: The round in which it was sent.
        based_on: The round whose model it was sent.
        fragment: Which part of the model.
    """

    site: SiteId
    round_index: int
    based_on: int
    fragment: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """The end of a task: an answer, or the note that none will come.

    Attributes:
        counts: Whether the answer is a part of the next model.
    """

    task: OpenTask
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """What a schedule sees of a run.

    Attributes:
        round_index: The round whose result is the next model; 1 for the first.
        rounds: How many the job has.
        cohort: Sites that may be sent work in this round.
        open: Tasks without an answer, also of rounds before.
    """

    round_index: int
    rounds: int
    cohort: Sequence[SiteId]
    open: Collection[OpenTask]


@dataclass(frozen=True, slots=True)
class Send:
    """Send these sites the newest model; none of them has an open task."""

    sites: Sequence[SiteId]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a reply, no longer than ``until`` on the monotonic clock."""

    until: float | None = None


WAIT = Wait()


@dataclass(frozen=True, slots=True)
class Apply:
    """Turn the counted answers into the next model; open tasks stay open."""


@dataclass(frozen=True, slots=True)
class Done:
    """The run has its last model."""


Action = Send | Wait | Apply | Done


class Schedule(Protocol):
    """When to send and when to apply. Implementation: ``Barrier``."""

    def next(self, state: ScheduleView, inbox: Sequence[Arrival], now: float) -> Action:
        """Decide; without memory and without effect.

        Args:
            state: The run; not to be kept, for it changes.
            inbox: What has arrived since the last model, in its order; as ``state``.
            now: The monotonic clock.
        """
        ...

    def share(self, staleness: int) -> float:
        """The part of its weight that an answer keeps; 0 if it is too late.

        Args:
            staleness: Models that are newer than the one it is based on.
        """
        ...


class Barrier:
    """Every site of the cohort trains on the newest model; a round waits for all."""

    def next(
        self,
        state: ScheduleView,
        inbox: Sequence[Arrival],
        now: float,  # noqa: ARG002 -- the grid keeps deadlines
    ) -> Action:
        """Send once a round, wait while a task is open, apply."""
        if state.round_index > state.rounds:
            return Done()
        if state.open:
            return WAIT
        return Apply() if inbox or not state.cohort else Send(state.cohort)

    def share(self, staleness: int) -> float:
        """Ignore answers that are based on an older model."""
        return 0.0 if staleness else 1.0


BARRIER = Barrier()


class Dispatcher:
    """Executes a schedule: sends tasks over a grid, and passes replies on.

    Attributes:
        open: Tasks without an answer.
    """

    def __init__(self, grid: Grid, *, deadline_seconds: float) -> None:
        """Send nothing yet; a site has ``deadline_seconds`` for each task."""
        self._grid = grid
        self._deadline_seconds = deadline_seconds
        self._open: dict[TaskId, OpenTask] = {}
        self.open: Collection[OpenTask] = self._open.values()

    def replies(
        self,
        schedule: Schedule,
        state: ScheduleView,
        *,
        write: Callable[[Sequence[SiteId]], Sequence[RoundTask]],
        num_counted: Callable[[], int],
        now: Callable[[], float],
    ) -> Iterator[Reply]:
        """Yield the replies of a round until the schedule ends it.

        Args:
            schedule: Says what to do.
            state: The run; its ``open`` is that of this queue.
            write: Makes tasks for sites.
            num_counted: How many of the replies so far count.
            now: The monotonic clock.
        """
        inbox: list[Arrival] = []
        try:
            while True:
                action = schedule.next(state, inbox, now())
                if isinstance(action, Send):
                    self._send(write(action.sites))
                elif isinstance(action, Wait):
                    until = action.until
                    replies = self._grid.receive(
                        None if until is None else max(0.0, until - now())
                    )
                    if not replies and until is None:
                        # The grid has nothing more for them.
                        inbox += [Arrival(task, counts=False) for task in self.open]
                        self.withdraw()
                    while replies:
                        before = num_counted()
                        task = self._open.pop(replies[0].task_id, None)
                        yield replies.popleft()  # Only the receiver holds it now.
                        if task is not None:
                            counts = num_counted() > before
                            inbox.append(Arrival(task, counts=counts))
                else:
                    return
        except BaseException:
            self.withdraw()
            raise

    def _send(self, tasks: Sequence[RoundTask]) -> None:
        ids = self._grid.send(tasks, deadline_seconds=self._deadline_seconds)
        for task_id, task in zip(ids, tasks, strict=True):
            self._open[task_id] = OpenTask(
                task.site, task.round_index, task.based_on, task.fragment
            )

    def withdraw(self) -> None:
        """Close all tasks that are open."""
        self._grid.withdraw([*self._open])
        self._open.clear()

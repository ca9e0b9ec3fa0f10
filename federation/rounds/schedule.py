"""When sites get work, and when their answers become the next model.

A schedule is a pure policy: it sees which tasks are open and what has come back, and
says what to do next. ``Dispatcher`` does it. The synchronous round of FedAvg is
``Barrier``; ``Buffered`` is FedBuff (Nguyen et al. 2022, arXiv:2106.06639).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Protocol

from federation.ids import SiteId, TaskId
from federation.job.spec import JobSpec
from federation.messages import FailureKind, Reply, RoundTask, Task
from federation.protocols import Grid
from federation.rounds.failures import failure

SURPLUS = "others had answered already"


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
        seconds: When it came, on the monotonic clock.
    """

    task: OpenTask
    counts: bool
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """What a schedule sees of a run.

    Attributes:
        round_index: The round whose result is the next model; 1 for the first.
        rounds: How many the job has.
        cohort: Sites that may be sent work in this round.
        open: Tasks without an answer, also of rounds before.
        begin: When the tasks of the round were sent, on the monotonic clock.
        patience: For how many seconds from then on a round whose quorum has answered
            waits for a site, where deadlines are learnt; 0 for no longer than for the
            others, and until the grid gives it up for sites that are not in it.
        buffered: Says how many updates count by now, where sums tell: some of a sum may
            have come before, or never. By default each answer that counts is one.
        waiting: Sites that are to be sent nothing although they have no open task:
            they keep an update, or wait for the others of its sum.
    """

    round_index: int
    rounds: int
    cohort: Sequence[SiteId]
    open: Collection[OpenTask]
    begin: float = 0.0
    patience: Mapping[SiteId, float] = field(default_factory=dict)
    buffered: Callable[[], int] | None = None
    waiting: Collection[SiteId] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Send these sites the newest model; none of them has an open task."""

    sites: Sequence[SiteId]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a reply, no longer than ``until`` on the monotonic clock.

    Attributes:
        until: None for as long as the grid has something for an open task.
        most: Replies after which the schedule decides again, of those that come
            together; None for all.
    """

    until: float | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Apply:
    """Turn the counted answers into the next model.

    Attributes:
        gives_up: Whether open tasks are closed; else they stay open.
        has_enough: Whether that is because nobody needs their answers, late or not.
    """

    gives_up: bool = False
    has_enough: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """The run has its last model."""


Action = Send | Wait | Apply | Done

# Seconds: answers of equal sites differ by as much where a round takes no time.
_LEAST_GRACE = 1.0
_LEARNT_GRACE = 0.5


def grace_seconds(grace: float | str, took: float) -> float:
    """How long to wait for what is late after so many seconds."""
    part = _LEARNT_GRACE if isinstance(grace, str) else grace
    return max(_LEAST_GRACE, part * took)


class Schedule(Protocol):
    """When to send and when to apply. Implementations: ``Barrier``, ``Buffered``."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """Every site of the cohort trains on the newest model, and a round waits for all.

    With a grace it waits for late sites only a while after the quorum: the adaptive
    grace window of Decoupled DiLoCo (arXiv:2604.21428). The sites that answer set the
    pace, so that one frozen site holds up no round for a whole deadline. Where
    deadlines are learnt, each site sets its own: see ``aggregator.methods.site_times``.

    Attributes:
        quorum: Answers after which the others are late.
        grace: How much longer to wait for them, as a part of what the quorum took;
            ``learnt`` for the view's ``patience``; None to wait until the grid gives
            them up.
        least: Seconds after the quorum for which the others are waited for at least.
        enough: Answers after which none of the others is waited for; None for all. With
            more sites asked than that, this is the over-selection of Bonawitz et al.
            2019, arXiv:1902.01046, section 4.3.
    """

    quorum: int = 0
    grace: float | str | None = None
    least: float = 0.0
    enough: int | None = None

    def next(self, state: ScheduleView, inbox: Sequence[Arrival], now: float) -> Action:
        """Send once a round, wait while a task is open and the grace lasts, apply."""
        if state.round_index > state.rounds:
            return Done()
        if state.open:
            if self._has_enough(inbox):
                return Apply(gives_up=True, has_enough=True)
            until = self._until(state, inbox)
            if until is None or now < until:
                return Wait(until)
            return Apply(gives_up=True)
        return Apply() if inbox or not state.cohort else Send(state.cohort)

    def _has_enough(self, inbox: Sequence[Arrival]) -> bool:
        enough = self.enough
        if enough is None or len(inbox) < enough:
            return False
        return sum(arrival.counts for arrival in inbox) >= enough

    def _until(self, state: ScheduleView, inbox: Sequence[Arrival]) -> float | None:
        """When the grace ends; None as long as too few answers count."""
        if self.grace is None or len(inbox) < self.quorum:
            return None
        counted = (arrival.seconds for arrival in inbox if arrival.counts)
        reached = next(islice(counted, max(0, self.quorum - 1), None), None)
        if reached is None:
            return None
        if isinstance(self.grace, str):
            return _last_deadline(state, inbox, reached)
        grace = grace_seconds(self.grace, reached - state.begin)
        return reached + max(grace, self.least)

    def share(self, staleness: int) -> float:
        """Ignore answers that are based on an older model."""
        return 0.0 if staleness else 1.0


def _last_deadline(
    state: ScheduleView, inbox: Sequence[Arrival], reached: float
) -> float | None:
    """When the learnt deadlines of all open tasks are over; None if one has none.

    If all who answered took longer than their own, the round is slow for everybody, as
    one of more steps: then the others have as many times longer.
    """
    known = state.patience
    if any(task.site not in known for task in state.open):
        return None
    parts = [
        (arrival.seconds - state.begin) / given
        for arrival in inbox
        if arrival.counts and (given := known.get(arrival.task.site))
    ]
    longest = max(known[task.site] for task in state.open)
    end = state.begin + longest * max(1.0, min(parts, default=1.0))
    return max(end, reached + _LEAST_GRACE)


BARRIER = Barrier()


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffered:
    """Applies as soon as some answers count, and sends each model to who is idle.

    Algorithm 1 of arXiv:2106.06639, with all sites at work. A site trains on one model
    at most once, so it waits only if it is so fast that no new model is there yet.

    Attributes:
        size: K, the answers that make a model: no more, but for sums.
        max_staleness: The most models that may be newer than the one that an answer is
            based on.
        groups: Sites that get their tasks together.
    """

    size: int
    max_staleness: int
    groups: Sequence[frozenset[SiteId]] = ()

    def next(
        self,
        state: ScheduleView,
        inbox: Sequence[Arrival],
        now: float,  # noqa: ARG002 -- the grid keeps deadlines
    ) -> Action:
        """Apply a full buffer; else send to idle sites; else wait."""
        if state.round_index > state.rounds:
            return Done()
        counted = {arrival.task.site for arrival in inbox if arrival.counts}
        buffered = len(counted) if state.buffered is None else state.buffered()
        if buffered >= self.size:
            is_last = state.round_index == state.rounds
            return Apply(gives_up=is_last, has_enough=is_last)
        busy = {task.site for task in state.open}
        busy |= {arrival.task.site for arrival in inbox} | {*state.waiting}
        for group in self.groups:
            if not busy.isdisjoint(group):
                busy |= group
        idle = [site for site in state.cohort if site not in busy]
        if idle:
            return Send(idle)
        if not state.open:
            return Apply()
        # A sum counts as a whole, whoever is in it.
        return Wait(most=self.size - buffered if state.buffered is None else None)

    def share(self, staleness: int) -> float:
        """Weigh an answer by the root of its age: section 5.2 of arXiv:2106.06639."""
        return 0.0 if staleness > self.max_staleness else (1.0 + staleness) ** -0.5


def schedule_of(job: JobSpec) -> Schedule:
    """Return the schedule that a job asks for."""
    if job.buffer_size is None:
        return Barrier(
            quorum=job.minimum_sites,
            grace=job.schedule.grace,
            enough=job.enough_answers,
        )
    return Buffered(
        size=job.buffer_size,
        max_staleness=job.schedule.max_staleness,
        groups=[frozenset(map(SiteId, group)) for group in job.schedule.groups],
    )


def evaluation_schedule(job: JobSpec, num_sites: int, slowest: float) -> Schedule:
    """Return the schedule by which a job's sites evaluate the final model.

    Its grace is that of a round, and as many sites may be missing. But a slow site,
    which still trains for a round that has ended, has as long as it usually takes.

    Args:
        job: Whose grace and quorum a round has.
        num_sites: How many are asked, also where a round asks fewer.
        slowest: Seconds that the slowest answer of the run has taken.
    """
    grace = job.schedule.grace
    return Barrier(
        quorum=num_sites - (job.cohort_size - job.minimum_sites),
        grace=_LEARNT_GRACE if isinstance(grace, str) else grace,
        least=slowest,
    )


def waits_for_all(job: JobSpec) -> bool:
    """Whether no round ends before its last answer.

    Then answers may be held back until those of other sites have come.
    """
    if job.schedule.replicas:
        return False
    answers = (job.buffer_size, job.enough_answers)
    return answers == (None, None) and job.schedule.grace is None


def unneeded(reply: Reply) -> Reply:
    """Return a reply without its content, since others had answered before."""
    text = failure(reply.message, FailureKind.SURPLUS, SURPLUS)
    return replace(reply, message=text)


class Tally(Protocol):
    """What a round knows of its answers. Implementation: ``RoundRecord``.

    Attributes:
        withdrawn: Receives, for each site whose task is closed without an answer, the
            bytes that were sent for it.
        surplus: Receives those of them whose answers nobody needs.
    """

    withdrawn: dict[SiteId, int]
    surplus: set[SiteId]

    @property
    def num_usable(self) -> int:
        """Answers that count by now."""
        ...

    def is_usable(self, site: SiteId) -> bool:
        """Whether an answer of a site is among them."""
        ...


class Dispatcher:
    """Executes a schedule: sends tasks over a grid, and passes replies on.

    Attributes:
        open: Tasks without an answer.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        deadline_seconds: float,
        copies: Mapping[SiteId, Collection[SiteId]] = MappingProxyType({}),
    ) -> None:
        """Send nothing yet.

        Args:
            grid: Where tasks are sent.
            deadline_seconds: How long a site has for each task.
            copies: Of a site those that do the same work. Once its answer counts, their
                tasks are withdrawn.
        """
        self._grid = grid
        self._deadline_seconds = deadline_seconds
        self._copies = copies
        self._open: dict[TaskId, OpenTask] = {}
        self._held: deque[Reply] = deque()  # Received, and not passed on.
        self._surplus: set[tuple[SiteId, int]] = set()
        self.open: Collection[OpenTask] = self._open.values()

    def replies(
        self,
        schedule: Schedule,
        state: ScheduleView,
        *,
        write: Callable[[Sequence[SiteId]], Sequence[Task]],
        tally: Tally,
        now: Callable[[], float],
    ) -> Iterator[Reply]:
        """Yield the replies of a round until the schedule ends it.

        Args:
            schedule: Says what to do.
            state: The run; its ``open`` is that of this queue.
            write: Makes tasks for sites.
            tally: Says which of the replies so far count.
            now: The monotonic clock.
        """
        inbox: list[Arrival] = []
        try:
            while True:
                action = schedule.next(state, inbox, now())
                if isinstance(action, Send):
                    self.send(write(action.sites))
                    # Not before: sending may wait for sites that are away.
                    state = replace(state, begin=now())
                elif isinstance(action, Wait):
                    if not self._held:
                        self._held = self._received(action.until, inbox, now)
                    most = len(self._held) if action.most is None else action.most
                    yield from self._passed_on(most, inbox, tally, now)
                else:
                    if isinstance(action, Apply) and action.gives_up:
                        self._give_up(self._open, tally, surplus=action.has_enough)
                        yield from self.rest()
                    return
        except BaseException:
            self.withdraw()
            self._held.clear()
            raise

    def rest(self) -> Iterator[Reply]:
        """Yield replies that came with those that made the last model."""
        while self._held:
            yield self.labelled(self._held.popleft())

    def _passed_on(
        self,
        most: int,
        inbox: list[Arrival],
        tally: Tally,
        now: Callable[[], float],
    ) -> Iterator[Reply]:
        """Yield replies, and note which of them count once they were received."""
        for _ in range(min(most, len(self._held))):
            before = tally.num_usable
            task = self._open.pop(self._held[0].task_id, None)
            # Only the receiver holds it now.
            yield self.labelled(self._held.popleft())
            more = tally.num_usable - before
            if task is not None:
                inbox.append(Arrival(task, more > 0, now()))
                copies = self._copies.get(task.site, ()) if more > 0 else ()
                if copies:  # Else there may be thousands of open tasks to look at.
                    same = [k for k, one in self._open.items() if one.site in copies]
                    self._give_up(same, tally, surplus=True)
            if more not in {0, 1}:  # Of a relay's sum all answers count, or none.
                inbox[:] = [
                    replace(one, counts=tally.is_usable(one.task.site)) for one in inbox
                ]

    def _received(
        self, until: float | None, inbox: list[Arrival], now: Callable[[], float]
    ) -> deque[Reply]:
        """Wait for replies; close all tasks if the grid has nothing more for them."""
        left = None if until is None else max(0.0, until - now())
        replies = self._grid.receive(left)
        if not replies and until is None:
            inbox += [Arrival(task, counts=False) for task in self.open]
            self.withdraw()
        return replies

    def send(self, tasks: Sequence[Task]) -> None:
        """Send tasks, also steps of secure aggregation between two models."""
        ids = self._grid.send(tasks, deadline_seconds=self._deadline_seconds)
        for task_id, task in zip(ids, tasks, strict=True):
            model = (0, 0)
            if isinstance(task, RoundTask):
                model = task.based_on, task.fragment
            self._open[task_id] = OpenTask(task.site, task.round_index, *model)

    def labelled(self, reply: Reply) -> Reply:
        """Return a reply, without its content if its task was closed as surplus."""
        message = reply.message
        if (message.site, message.round_index) not in self._surplus:
            return reply
        return unneeded(reply)

    def _give_up(
        self, task_ids: Collection[TaskId], tally: Tally, *, surplus: bool
    ) -> None:
        sent = self.withdraw(task_ids, as_surplus=surplus)
        tally.withdrawn |= {task.site: n for task, n in sent.items()}
        tally.surplus |= {task.site for task in sent if surplus}

    def withdraw(
        self, task_ids: Collection[TaskId] | None = None, *, as_surplus: bool = False
    ) -> Mapping[OpenTask, int]:
        """Close open tasks, and return the bytes sent for each.

        Args:
            task_ids: Which ones; all by default.
            as_surplus: Whether nobody needs their answers.
        """
        ids = [*(self._open if task_ids is None else task_ids)]
        sent = self._grid.withdraw(ids) if ids else {}
        closed = {self._open.pop(task_id): sent.get(task_id, 0) for task_id in ids}
        if as_surplus:
            self._surplus |= {(task.site, task.round_index) for task in closed}
        return closed

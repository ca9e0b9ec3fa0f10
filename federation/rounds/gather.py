"""How a cohort's work becomes one update of the global model.

A seam between the round loop and what the aggregator may see: ``PlainGather`` reads
every update; the gather of ``aggregator.secure_sum`` learns their sum and nothing else.

Shape suffixes: d float values of the model.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np

from federation.errors import InvalidUpdate, QuorumNotMet
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.members import Members
from federation.messages import (
    NO_ANCHOR,
    FailureKind,
    MaskedUpdate,
    RelayedSum,
    Reply,
    RoundTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    StateName,
    Task,
    TaskKind,
)
from federation.protocols import CombineRule, Grid, RunState, WeightedUpdate
from federation.rounds.failures import failure
from federation.rounds.round_record import RoundRecord
from federation.rounds.schedule import (
    BARRIER,
    Dispatcher,
    Schedule,
    ScheduleView,
    evaluation_schedule,
    unneeded,
)
from federation.vectors import Vector, Words


def exchange(
    grid: Grid, tasks: Sequence[Task], *, deadline_seconds: float
) -> Iterator[Reply]:
    """Send tasks and yield every reply until all tasks are closed.

    Among the replies are those to earlier tasks. Nothing else may receive from the grid
    meanwhile. What is still open when the caller stops is withdrawn.

    Raises:
        ValueError: A task is for a site that the grid does not have.
    """
    still_open = set(grid.send(tasks, deadline_seconds=deadline_seconds))
    try:
        while still_open:
            replies = grid.receive()
            if not replies:
                return
            while replies:
                still_open.discard(replies[0].task_id)
                yield replies.popleft()  # Only the receiver holds an update now.
    finally:
        grid.withdraw(still_open)


_NOBODY: frozenset[SiteId] = frozenset()
_STALE_IN_A_ROW = 3  # Updates after which a person is told.
_Answer = TypeVar("_Answer", SiteUpdate, MaskedUpdate)


def whole_sums(
    sound: Iterable[tuple[_Answer, Reply]], record: RoundRecord
) -> Iterator[list[tuple[_Answer, Reply]]]:
    """Yield each answer that came alone, and all answers of each relay's sum.

    One site's words cannot be taken out of a sum. So if one of its answers is not
    sound, the others are refused.

    Args:
        sound: Sound answers, on arrival.
        record: The round, which receives what is refused.

    Yields:
        One answer, or those of one sum in the order of its sites. The receiver clears
        the list, so that an update's memory is free before the next one lands.
    """
    open_sums: dict[RelayedSum, list[tuple[_Answer, Reply]]] = {}
    for answer, reply in sound:
        through = reply.through
        if through is None:
            parts = [(answer, reply)]
        else:
            parts = open_sums.setdefault(through, [])
            parts.append((answer, reply))
            record.pending.add(answer.site)
            if len(parts) < len(through.sites):
                continue
            record.pending.difference_update(through.sites)
            del open_sums[through]
        del answer, reply, through
        yield parts
    record.pending.clear()
    for left in open_sums.values():
        _refuse_incomplete(left, record)


def _refuse_incomplete(
    parts: Sequence[tuple[SiteUpdate | MaskedUpdate, Reply]], record: RoundRecord
) -> None:
    """Refuse answers of a sum of which another one is not sound."""
    through = parts[0][1].through
    assert through is not None  # noqa: S101 -- it came in a sum
    others = {*through.sites} - {update.site for update, _ in parts}
    text = (
        f"relay {through.update.site!r} added its update to that of "
        f"{', '.join(sorted(others))}, which does not count"
    )
    revoke_all(parts, record, text)


def revoke_all(
    parts: Iterable[tuple[SiteUpdate | MaskedUpdate, Reply]],
    record: RoundRecord,
    reason: str,
    kind: FailureKind = FailureKind.INVALID,
) -> None:
    """Refuse answers that were accepted, for one reason."""
    for _, reply in parts:
        record.revoke(reply, reason, kind)


class Gather(Protocol):
    """Asks the sites. Implementations: without masks here, secure ones elsewhere.

    Attributes:
        schedule: When it sends, and when a round ends.
    """

    schedule: Schedule

    def cohort(
        self, members: Members, drawn: Sequence[SiteId]
    ) -> tuple[Members, tuple[SiteId, ...]]:
        """Choose which of the drawn sites a round asks.

        Args:
            members: Who takes part in the run.
            drawn: The sites of the round.

        Returns:
            Who takes part by now: sites that are gone do if there are too few others.
            And the sites to ask.
        """
        ...

    def update(self, record: RoundRecord, out_d: Vector) -> Vector:
        """Let the record's cohort train, and combine their updates.

        Args:
            record: The round; it receives every answer.
            out_d: Shape ``(d,)``; may be overwritten.

        Returns:
            The combined update, of the part of the model that the round exchanges: in
            ``out_d``, or in other memory. Then ``out_d`` is as it was.

        Raises:
            QuorumNotMet: Too few answers count.
        """
        ...

    def evaluation(self, record: RoundRecord) -> None:
        """Let the record's cohort evaluate the model of its state.

        Raises:
            QuorumNotMet: Too few results count, so none is known.
        """
        ...


def present_cohort(
    members: Members,
    drawn: Sequence[SiteId],
    *,
    quorum: int,
    replica_of: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Members, tuple[SiteId, ...]]:
    """Ask the sites that have not left, if these are enough; see ``Gather.cohort``."""
    there = members.present(drawn)
    # A quorum counts the answers of replicas once.
    quorum += len(there) - len({replica_of.get(site, site) for site in there})
    members = members.for_round(drawn, back=(), quorum=quorum)
    return members, members.present(drawn)


@dataclass(slots=True, eq=False)
class PlainGather:
    """Every update is seen, checked and folded in on arrival.

    Attributes:
        grid: The way to the sites.
        weight_of: How much an update counts.
        combine: Combines the updates.
        schedule: When to ask whom.
        fault_of: What is wrong with an answer, which then does not count. It takes the
            local steps that were chosen for the answer's round, if any.
        rule_of: From the global weights of a round to the rule that combines its
            updates, where that depends on them; in place of ``combine``.
    """

    job: JobSpec
    _: KW_ONLY
    grid: Grid
    weight_of: Callable[[SiteUpdate], float]
    combine: CombineRule
    schedule: Schedule = BARRIER
    fault_of: Callable[[SiteUpdate | SiteEvaluation, range | None], str] = (
        lambda _answer, _steps: ""
    )
    rule_of: Callable[[Vector], CombineRule] | None = None
    _dispatcher: Dispatcher = field(init=False)
    # Of each site those with the same data.
    _copies: Mapping[SiteId, frozenset[SiteId]] = field(init=False)
    # Of each site the round of the newest model that it is known to have.
    _held: dict[SiteId, int] = field(init=False, default_factory=dict)
    # Of each update of the round its weight, and the part of a fresh one's that it is.
    _shares: list[tuple[float, float]] = field(init=False, default_factory=list)
    # Seconds that the slowest answer of all has taken, also of late ones.
    _slowest: float = field(init=False, default=0.0)
    # Of each site its updates in a row that were based on too old a model.
    _stale: Counter[SiteId] = field(init=False, default_factory=Counter)

    def __post_init__(self) -> None:
        """Open the dispatcher."""
        schedule = self.job.schedule
        self._copies = {
            SiteId(site): frozenset(SiteId(other) for other in group if other != site)
            for group in schedule.replicas
            for site in group
        }
        self._dispatcher = Dispatcher(
            self.grid,
            deadline_seconds=schedule.round_deadline_seconds,
            copies=self._copies,
        )

    def cohort(
        self, members: Members, drawn: Sequence[SiteId]
    ) -> tuple[Members, tuple[SiteId, ...]]:
        """Ask all sites that have not left; see ``Gather``."""
        job = self.job
        return present_cohort(
            members, drawn, quorum=job.minimum_sites, replica_of=job.replica_of
        )

    def update(self, record: RoundRecord, out_d: Vector) -> Vector:
        """Train; see ``Gather``."""
        rule = self.rule_of(record.state.weights_d) if self.rule_of else self.combine
        self._shares.clear()
        delta_d = rule(self._sound_updates(record), out_d)
        if self.job.buffer_size is not None:
            part = len(self._shares) / len(self.job.sites)
            delta_d *= part_of_step(self._shares, part)
        return delta_d

    def evaluation(self, record: RoundRecord) -> None:
        """Evaluate; see ``Gather``."""
        for task, num_bytes in self._dispatcher.withdraw(as_surplus=True).items():
            record.give_up(task.site, num_bytes)
        schedule = evaluation_schedule(self.job, len(record.cohort), self._slowest)
        replies = self._replies(schedule, record, rounds=record.round_index)
        record.collect_evaluations(self._faultless(replies, record))

    def _replies(
        self, schedule: Schedule, record: RoundRecord, *, rounds: int
    ) -> Iterator[Reply]:
        """Ask the record's cohort by a schedule."""
        return self._dispatcher.replies(
            schedule,
            ScheduleView(
                round_index=record.round_index,
                rounds=rounds,
                cohort=record.cohort,
                open=self._dispatcher.open,
                patience=record.patience,
            ),
            write=lambda sites: round_tasks(record, sites=sites, held=self._held),
            tally=record,
            now=record.clock.monotonic,
        )

    def _faultless(
        self, replies: Iterable[Reply], record: RoundRecord
    ) -> Iterator[Reply]:
        """Replace by failures faulty answers, and the second one from the same data."""
        for reply in replies:
            message = reply.message
            # Another round may have had other steps: up to the most of the job.
            is_current = message.round_index == record.round_index
            steps = record.steps_of.get(message.site, record.steps)
            steps = steps if is_current else None
            if not isinstance(message, SiteFailure):
                took = reply.answered_seconds - reply.asked_seconds
                self._slowest = max(self._slowest, took)
            if not isinstance(message, SiteUpdate | SiteEvaluation):
                yield reply
            elif not self._copies.get(message.site, _NOBODY).isdisjoint(
                record.verdicts.answered
            ):
                yield unneeded(reply)
            elif fault := self.fault_of(message, steps):
                refused = failure(message, FailureKind.INVALID, fault)
                yield replace(reply, message=refused)
            else:
                yield reply
            del message, reply  # One update at a time: the next is about to land.

    def _sound_updates(self, record: RoundRecord) -> Iterator[WeightedUpdate]:
        """Ask the cohort and yield each answer that counts, on arrival.

        Raises:
            QuorumNotMet: Fewer sites than the quorum gave one.
        """
        job, verdicts = self.job, record.verdicts
        verdicts.carry(self._dispatcher.open)
        replies = self._replies(self.schedule, record, rounds=job.rounds)
        sound = record.sound(self._faultless(replies, record), SiteUpdate)
        for parts in whole_sums(sound, record):
            try:
                shares = [self._share(record, one) for one, _ in parts]
                weights = [
                    share * self.weight_of(one)
                    for share, (one, _) in zip(shares, parts, strict=True)
                ]
            except InvalidUpdate as error:
                revoke_all(parts, record, str(error))
            else:
                refused: list[SiteId] = []
                yield self._weighted(record, parts[0][0], sum(weights), refused)
                if refused:
                    text = "sent NaN or infinite values"
                    revoke_all(parts, record, text, FailureKind.NOT_FINITE)
                else:
                    self._count(record, parts, weights)
                    self._shares += zip(weights, shares, strict=True)
            parts.clear()  # One update at a time: the next is about to land.
        if verdicts.num_answered < job.minimum_sites:
            raise QuorumNotMet(f"{verdicts.num_answered} of {job.minimum_sites} sites")

    def _count(
        self,
        record: RoundRecord,
        parts: Sequence[tuple[SiteUpdate, Reply]],
        weights: Sequence[float],
    ) -> None:
        for (update, reply), weight in zip(parts, weights, strict=True):
            record.count(update, reply, weight)
            self._held[update.site] = update.based_on

    def _weighted(
        self,
        record: RoundRecord,
        update: SiteUpdate,
        weight: float,
        refused: list[SiteId],
    ) -> WeightedUpdate:
        """Hand an update to the rule; its site is ``refused`` if it is not finite."""
        words, site = update.delta_d, update.site
        codec = record.verdicts.codec_of(site)
        values = codec.values(words, size=record.layout.size, seed=update.round_index)
        return WeightedUpdate(
            site=site,
            delta_d=values,
            weight=weight,
            handed_over=values is words and words.flags.carray,
            refuse=lambda: refused.append(site),
        )

    def _share(self, record: RoundRecord, update: SiteUpdate) -> float:
        """The part of its weight that an update keeps.

        Raises:
            InvalidUpdate: None, by the schedule.
        """
        share = self.schedule.share(record.state.round_index - update.based_on)
        self._stale[update.site] = 0 if share else self._stale[update.site] + 1
        if self._stale[update.site] == _STALE_IN_A_ROW and self.job.buffer_size:
            most = self.job.schedule.max_staleness
            record.events.warned(
                f"none of the work of site {update.site!r} counts: of its last "
                f"{_STALE_IN_A_ROW} updates each began more than {most} models ago; "
                "raise schedule.max_staleness, or lower training.local_steps or set "
                'schedule.allocation = "capacity", so that it takes fewer steps'
            )
        if not share:
            raise InvalidUpdate(
                f"is based on the model of round {update.based_on}, which is too old"
            )
        return share


def part_of_step(shares: Sequence[tuple[float, float]], part: float) -> np.float32:
    """Find the part of the step of all sites that a buffer takes.

    Each update counts as in a round of all N sites, 1/N of it, and less the older the
    model is that it began with: the sum of a buffer is not divided by these shares
    (arXiv:2106.06639, Algorithm 1).

    Args:
        shares: Of each update its weight, and the part of a fresh one's that it is.
        part: How many updates the buffer holds, over N.
    """
    kept = sum(weight for weight, _ in shares)
    whole = sum(weight / share for weight, share in shares)
    return np.float32(part * kept / whole if whole else 0.0)


def round_tasks(
    record: RoundRecord,
    *,
    sites: Sequence[SiteId] | None = None,
    secure: Callable[[SiteId], bytes] = lambda _site: b"",
    held: Mapping[SiteId, int] = MappingProxyType({}),
    states: Mapping[SiteId, StateName] = MappingProxyType({}),
) -> list[RoundTask]:
    """Write the tasks of a round's cohort, or of some sites; all share the weights.

    ``secure`` gives what secure aggregation says to a site beside the model, ``held``
    the round of the model that it has, ``states`` the state that it begins with.
    """
    state, change = record.state, record.state.change
    integers_m = state.integers_m.view()
    integers_m.flags.writeable = False
    trains = record.kind is TaskKind.TRAIN

    def model(site: SiteId) -> tuple[Words, str]:
        if change is None or not has_before(record, held, site):
            return whole(), ""
        return change.words, change.after

    @cache
    def whole() -> Words:
        words = record.sent()
        if not (record.links.sums and state.round_index and state.optimizer):
            return words
        # A site that takes the steps itself goes on from the optimiser's state.
        moments = [state.optimizer[name] for name in sorted(state.optimizer)]
        return np.concatenate([words, *moments])

    task = partial(
        RoundTask,
        run_id=record.run_id,
        round_index=record.round_index,
        kind=record.kind,
        layout_digest=record.layout.digest,
        integers_m=integers_m,
        evaluate=evaluates(record.job, state),
        evaluate_after=record.job.aggregation.weights == "dynamic",
        based_on=state.round_index,
    )
    no_state = StateName(0, "")
    return [
        task(
            site=site,
            weights_d=sent[0],
            changed_to=sent[1],
            secure=secure(site),
            anchor=state.anchors.get(site, NO_ANCHOR),
            counted=state.counted.get(site, 0) if trains else 0,
            num_steps=len(steps) if steps else 0,
            first_step=steps.start if steps else 0,
            state_round=begins.round_index,
            state_context=begins.context,
        )
        for site in (record.cohort if sites is None else sites)
        for sent, begins in ((model(site), states.get(site, no_state)),)
        for steps in (record.steps_of.get(site, record.steps),)
    ]


def has_before(record: RoundRecord, held: Mapping[SiteId, int], site: SiteId) -> bool:
    """Whether a site has the model from which the newest change began."""
    state = record.state
    return state.change is not None and held.get(site) == state.round_index - 1


def evaluates(job: JobSpec, state: RunState) -> bool:
    """Whether sites that train from a state evaluate its model first."""
    every = job.evaluation.every
    return every > 0 and state.round_index % every == 0

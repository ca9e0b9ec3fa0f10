"""One round: verdicts on answers, sums over those that count, and events.

Shape suffixes: d float values of the model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from federation import events
from federation.compression.apart import fitted
from federation.errors import ProtocolError
from federation.ids import RunId, SiteId
from federation.job.adapter_ranks import codecs_by_site
from federation.job.spec import JobSpec
from federation.members import Members
from federation.messages import (
    FailureKind,
    LeaveReason,
    MaskedUpdate,
    MetricSums,
    Reply,
    SecureAnswer,
    SecureStep,
    SiteEvaluation,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    TaskKind,
    join_anchors,
)
from federation.protocols import Clock, RoundTime, RunState
from federation.resources import CLOCK, UsageMeter
from federation.rounds.local_work import is_by_capacity
from federation.rounds.round_events import RoundEvents
from federation.rounds.round_sums import RoundSums
from federation.rounds.round_verdicts import RoundVerdicts
from federation.vectors import Layout, Words

# Of a site that is not there.
_ABSENT = frozenset({FailureKind.DISCONNECTED, FailureKind.UNREACHABLE})
# Of an answer that comes when nobody waits for it any more.
_TOO_LATE = frozenset({FailureKind.LATE, FailureKind.SURPLUS})
# They precede a round only where there are no keys, as after a restart.
_SETUP = frozenset(
    (SecureStep.COMMIT, SecureStep.DRAW, SecureStep.ADVERTISE, SecureStep.CONFIRM)
)
_Answer = TypeVar("_Answer", SiteUpdate, MaskedUpdate, SiteEvaluation)


@dataclass(kw_only=True, eq=False)
class RoundRecord:
    """What one round collects besides the combined update.

    Its methods take replies, which concern all three parts; what concerns one of them
    takes that part.

    Attributes:
        state: The state that the round begins with.
        cohort: The sites that are asked.
        layout: Layout of the model.
        clock: Time.
        emit: Where events go.
        kind: What the sites are asked for.
        skipped: Numbers that no round had, between that of the state and this one.
        meter: Measures what the round takes of the aggregator.
        round_index: Number of the round, from 1.
        members: Who takes part, as far as this round has shown.
        states: What each site is known to have kept, as far as this round has shown.
        links: The codecs of both directions, for the model.
        verdicts: Which sites were asked, which answered, and what does not count.
        sums: What sound answers add up to.
        events: Emits what happens.
        status: How the round has ended; empty until then.
        counted: For each site whose update has a weight, the round of its task.
        steps: Local steps of the run that sites take; None for the job's number.
        steps_of: Those of each site, if sites take different numbers of steps.
        times: What each site's answer that counts took.
        training: Sums of the training of each update that counts, if sites report it.
        pending: Sites whose answers are in a relay's sum that is not complete.
        withdrawn: For each site whose task was closed without an answer, the bytes
            that were sent for it.
        surplus: Those of them whose answers nobody needs.
        late: For how many seconds each site that missed the deadline was waited for.
        overdue: What answers took that came too late, by site and round.
        patience: For how many seconds the round waits for a site; see
            ``federation.rounds.schedule.ScheduleView``.
        is_usual: Whether it exchanges what most rounds do. Those that set up keys, or
            have no scale of the levels yet, take longer for as many steps.
    """

    job: JobSpec
    state: RunState
    run_id: RunId
    cohort: tuple[SiteId, ...]
    layout: Layout
    clock: Clock
    emit: events.Emit
    kind: TaskKind = TaskKind.TRAIN
    skipped: int = 0
    meter: UsageMeter = CLOCK
    status: str = field(init=False, default="")
    counted: dict[SiteId, int] = field(init=False, default_factory=dict)
    steps: range | None = field(init=False, default=None)
    steps_of: dict[SiteId, range] = field(init=False, default_factory=dict)
    times: dict[SiteId, RoundTime] = field(init=False, default_factory=dict)
    training: dict[SiteId, MetricSums] = field(init=False, default_factory=dict)
    pending: set[SiteId] = field(init=False, default_factory=set)
    withdrawn: dict[SiteId, int] = field(init=False, default_factory=dict)
    surplus: set[SiteId] = field(init=False, default_factory=set)
    late: dict[SiteId, float] = field(init=False, default_factory=dict)
    overdue: dict[tuple[SiteId, int], float] = field(init=False, default_factory=dict)
    patience: dict[SiteId, float] = field(init=False, default_factory=dict)
    is_usual: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        """Open the round."""
        self.round_index = self.state.round_index + 1 + self.skipped
        self.members = self.state.members
        self.states = dict(self.state.states)
        private = self.job.privacy
        self.links = fitted(self.job.communication.links, self.layout)
        self._asked_in_vain: Mapping[SiteId, str] = {}
        self._known_away = self.members.end_round().away()
        self._sent_d: Words | None = None
        # Of an exchange only for evaluation, whose bytes go with the metrics.
        self._evaluation_replies: dict[SiteId, Reply] = {}
        self.verdicts = RoundVerdicts(
            run_id=self.run_id,
            round_index=self.round_index,
            kind=self.kind,
            cohort=self.cohort,
            layout=self.layout,
            in_secret=private.secure_aggregation.enabled,
            based_on=self.state.round_index,
            codec=self.links.up,
            codecs=codecs_by_site(self.job, self.layout),
            epsilon_cap=private.differential_privacy.target_epsilon or 0.0,
        )
        start = self.clock.monotonic()
        self.sums = RoundSums(clock=self.clock, start=start, meter=self.meter)
        self.events = RoundEvents(
            round_index=self.round_index, clock=self.clock, start=start, emit=self.emit
        )
        if self.kind is TaskKind.TRAIN:
            self.events.started(self.cohort)

    def sent(self) -> Words:
        """The round's model as all sites are sent it; not to be written to.

        Raises:
            BeyondCodec: The codec of the way down cannot encode it.
        """
        if self._sent_d is None:
            weights_d = self.state.weights_d
            if self.job.buffer_size is not None:
                # A task may wait at a grid in this process while the memory of older
                # models is used again.
                weights_d = weights_d.copy()
            words = self.links.whole.encode(weights_d, seed=self.round_index)
            self._sent_d = words.view()
            self._sent_d.flags.writeable = False
        return self._sent_d

    def sound(
        self, replies: Iterable[Reply], kind: type[_Answer]
    ) -> Iterator[tuple[_Answer, Reply]]:
        """Yield the answers that may be used, on arrival; emit every failure."""
        for reply in replies:
            message = reply.message
            self.sums.add_bytes(reply)
            self.is_usual &= not reply.is_awaited
            failure = self.verdicts.accept(message)
            self._note_leaving(failure or message)
            if failure is not None:
                self._note_failure(failure, reply)
            elif isinstance(message, kind):
                yield message, reply
            # The caller is done with this update: let its memory go before the
            # next one lands.
            del reply, message
        for failure in self.verdicts.close(self.surplus):
            self._note_failure(failure, None)
        self.sums.end_phase("exchange")

    def _note_failure(self, failure: SiteFailure, reply: Reply | None) -> None:
        if failure.kind is FailureKind.DEADLINE or (
            failure.kind is FailureKind.SURPLUS and reply is None
        ):
            since = self.sums.start if reply is None else reply.asked_seconds
            self.late[failure.site] = self.clock.monotonic() - since
        elif reply is not None and failure.kind in _TOO_LATE:
            self._note_overdue(reply)
        bytes_down = 0 if reply else self.withdrawn.pop(failure.site, 0)
        self.sums.bytes_down += bytes_down
        self.events.failed(failure, reply, bytes_down=bytes_down)

    def _note_overdue(self, reply: Reply) -> None:
        about = reply.message.site, reply.message.round_index
        self.overdue[about] = reply.answered_seconds - reply.asked_seconds

    @property
    def num_usable(self) -> int:
        """Answers that count by now; see ``Tally``."""
        return self.verdicts.num_answered - len(self.pending)

    def is_usable(self, site: SiteId) -> bool:
        """Whether an answer of a site is among them."""
        return site in self.verdicts.answered and site not in self.pending

    def num_steps_of(self, site: SiteId) -> int:
        """Local steps of a site; 0 where the aggregator does not choose them."""
        return len(self.steps_of.get(site, self.steps) or ())

    def give_up(self, site: SiteId, bytes_down: int) -> None:
        """Record a task of an earlier round that nobody needs any more."""
        self.events.failed(self.verdicts.surplus(site), None, bytes_down=bytes_down)

    def count(self, update: SiteUpdate, reply: Reply, weight: float) -> None:
        """Add the report of a sound update, which counts ``weight``."""
        if weight:
            self.counted[update.site] = update.round_index
        self.sums.add_update(update, is_fresh=update.based_on == self.state.round_index)
        self.sums.last_trained = trained = _seconds_of(update, "train")
        if update.training is not None:
            self.training[update.site] = update.training
        self.times[update.site] = RoundTime(
            round_index=update.round_index,
            num_steps=update.num_steps,
            seconds=reply.answered_seconds - reply.asked_seconds,
            train_seconds=trained,
            evaluate_seconds=_seconds_of(update, "evaluate") or 0.0,
        )
        self.events.answered(update, reply, weight)

    def count_masked(self, update: MaskedUpdate, reply: Reply) -> None:
        """Note that a masked update was folded in, and when; no more is known."""
        if self.kind is TaskKind.EVALUATE:
            self._evaluation_replies[update.site] = reply
            return  # In training the reply would keep a whole update in memory.
        self.sums.add_spent(update.site, update.spent)
        self.times[update.site] = RoundTime(
            round_index=update.round_index,
            num_steps=self.num_steps_of(update.site),
            seconds=reply.answered_seconds - reply.asked_seconds,
        )
        self.events.answered(update, reply, None)

    def revoke(
        self,
        reply: Reply,
        reason: str,
        kind: FailureKind = FailureKind.INVALID,
    ) -> None:
        """Refuse an accepted update, for a reason that only its use showed."""
        failure = self.verdicts.revoke(reply.message.site, reason, kind)
        self.events.failed(failure, reply)

    def leave_out(self, sites: Mapping[SiteId, str]) -> None:
        """Settle sites of the cohort that are not asked, each with the reason."""
        for site, reason in sites.items():
            self.events.failed(self.verdicts.leave_out(site, reason), None)

    def change_members(self, members: Members) -> None:
        """Update which sites take part; emit the excluded ones if they change.

        That a round has ended for a site that was leaving is no news.
        """
        self.members = members
        away = members.end_round().away()
        if away != self._known_away:
            self._known_away = away
            self.events.left_out(members)

    def ask(self, members: Members) -> None:
        """Record which sites may be asked, before any is.

        Sites that are gone may be asked as if they were silent. That is news only if
        they are not gone again when the round ends.
        """
        noted = members.noted
        if any(members.of(s).replaced > self.members.of(s).replaced for s in noted):
            self.change_members(members)
        self._asked_in_vain = members.asked_in_vain(self.members)
        self.members = members

    def _note_leaving(self, message: SiteMessage) -> None:
        """Record that a site leaves, if its message says so."""
        if isinstance(message, SiteFailure):
            if message.kind is FailureKind.LEAVING:
                known = message.message in {*LeaveReason}
                reason = message.message if known else "for an unknown reason"
                self.change_members(self.members.leave(message.site, reason))
            elif message.kind in _ABSENT and message.site in self._asked_in_vain:
                reason = self._asked_in_vain[message.site]
                self.change_members(self.members.leave(message.site, reason))
        elif not isinstance(message, SecureAnswer) and message.leaving is not None:
            members = self.members.leave(
                message.site, message.leaving.value, finishes=True
            )
            self.change_members(members)

    def take_step(
        self,
        step: SecureStep,
        replies: Iterable[Reply],
        accept: Callable[[SecureAnswer], None],
        round_index: int | None = None,
    ) -> None:
        """Record the answers to a step of secure aggregation; emit every failure.

        ``accept`` uses an answer, or raises ``ProtocolError``: then it does not count.
        ``round_index`` is that of the sum, if it began in an earlier round.
        """
        if step in _SETUP:
            self.is_usual = False
        counted: list[Reply] = []
        for reply in replies:
            message = reply.message
            self.sums.add_bytes(reply)
            failure = self.verdicts.accept_step(message, step, round_index)
            if failure is None and isinstance(message, SecureAnswer):
                try:
                    accept(message)
                except ProtocolError as error:
                    failure = self.verdicts.fail_step(message.site, step, str(error))
            if failure is None:
                counted.append(reply)
            else:
                if failure.kind in {FailureKind.LEAVING, *_ABSENT}:
                    self._note_leaving(message)
                if failure.kind is FailureKind.LATE:
                    self._note_overdue(reply)
                self.events.failed(failure, reply)
        self.events.step_taken(step.value, counted)
        self.sums.end_phase(step.value)

    def collect_evaluations(self, replies: Iterable[Reply]) -> None:
        """Record the answers to an exchange for evaluation only."""
        for answer, reply in self.sound(replies, SiteEvaluation):
            self.sums.evaluations[answer.site] = answer.evaluation
            self._evaluation_replies[answer.site] = reply

    def finish_evaluation(self) -> None:
        """Emit the final model's metrics, or that there are none."""
        self.change_members(self.members)
        replies = self._evaluation_replies
        self.events.evaluated(self.state.round_index, self.verdicts, self.sums, replies)
        if self.sums.pooled_evaluation() is None:
            if replies:  # Masked results that nothing could open.
                self.events.step_taken(self.kind.value, tuple(replies.values()))
            self.events.warned("no site evaluated the final model")

    def finish(self, status: str) -> None:
        """Emit the metrics of the round's model, and the round's outcome."""
        self.status = status
        self.change_members(self.members)
        self.events.evaluated(self.state.round_index, self.verdicts, self.sums, {})
        steps: tuple[int, ...] = ()
        if self.steps_of and is_by_capacity(self.job):
            steps = tuple(len(self.steps_of[site]) for site in self.cohort)
        self.events.finished(status, self.cohort, self.verdicts, self.sums, steps)

    def add_to(self, new_state: RunState) -> RunState:
        """Return the state after the round with what it has shown of sites."""
        return replace(
            new_state,
            anchors=join_anchors(self.state.anchors, self.sums.anchors),
            states=self.states,
            suspicions=self.verdicts.suspicions or self.state.suspicions,
            members=self.members.end_round(),
        )


def _seconds_of(update: SiteUpdate, phase: str) -> float | None:
    """How long a phase of a site's work took, if the site says so."""
    found = [each.seconds for each in update.phases if each.name == phase]
    return sum(found) if found else None

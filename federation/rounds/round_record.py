"""What one round collects besides the combined update, and the events it emits.

Shape suffixes: d float values of the model, m integer values of the model.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from federation import events
from federation.compression.codec import Links
from federation.ids import RunId, SiteId
from federation.messages import (
    NO_ANCHOR,
    FailureKind,
    LedgerAnchor,
    MaskedUpdate,
    MetricSums,
    Phase,
    PrivacySpent,
    Reply,
    SecureAnswer,
    SecureStep,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.protocols import Clock, Suspicions
from federation.resources import CLOCK, Usage, UsageMeter
from federation.rounds.round_state import RoundState
from federation.rounds.schedule import OpenTask
from federation.vectors import IntegerVector, Layout, Role, Vector, Words


class RoundRecord:
    """Judges replies, adds up what sound ones report, and tells what happened.

    Attributes:
        run_id: The run.
        round_index: The round.
        cohort: The sites that are asked.
        clock: Time.
        update_norm: Euclidean norm of the combined update, once it is known.
        update_clip: What each site's update was clipped to, in weight units, where
            that is agreed upon.
        next_clip: What they are clipped to in the next round, where that adapts.
        anchors: How many charges the ledger of each site held that answered.
        out_of_budget: What sites said whose privacy budget does not allow the round.
        suspicions: What all rounds have shown of sites by now; None if this round has
            shown nothing.
        links: The codecs of both directions.
        complaints: What is wrong with each answer that does not count, or with its
            absence, with the name of the site before it.
    """

    def __init__(
        self,
        *,
        run_id: RunId,
        round_index: int,
        cohort: tuple[SiteId, ...],
        layout: Layout,
        clock: Clock,
        emit: events.Emit,
        kind: TaskKind = TaskKind.TRAIN,
        in_secret: bool = False,
        model_round: int | None = None,
        links: Links = Links(),  # noqa: B008 -- immutable
        meter: UsageMeter = CLOCK,
    ) -> None:
        """Open a round; ``in_secret`` is that of ``RoundState``.

        ``model_round`` is the round whose model the sites are sent, if it is not the
        one before; ``links`` are the codecs of both directions. ``meter`` measures what
        the round takes of the aggregator.
        """
        self.run_id = run_id
        self.round_index = round_index
        self._model_round = round_index - 1 if model_round is None else model_round
        self._kind = kind
        self.cohort = cohort
        self.update_norm: float | None = None
        self.update_clip: float | None = None
        self.next_clip: float | None = None
        self.anchors: dict[SiteId, LedgerAnchor] = {}
        self.suspicions: Suspicions | None = None
        self.out_of_budget: list[str] = []
        self.complaints: list[str] = []
        self._layout = layout
        self.clock = clock
        self._emit = emit
        self._start = self._phase_start = clock.monotonic()
        self._phases: list[Phase] = []
        self._usage = Usage(clock, meter)
        self._state = RoundState(
            run_id=run_id,
            round_index=round_index,
            kind=kind,
            cohort=cohort,
            layout=layout,
            in_secret=in_secret,
            based_on=self._model_round,
            codec=links.up,
        )
        self.links = links
        self._sent_d: Words | None = None
        self._bytes_down = self._bytes_up = 0
        self._training: MetricSums | None = None
        self._epsilon: float | None = None
        self._evaluations: dict[str, MetricSums] = {}
        self._secret_evaluation: MetricSums | None = None
        self._journeys: dict[str, Reply] = {}
        self._step = ""  # The step of secure aggregation that is under way.
        self._step_replies: list[Reply] = []
        self._largest_m: IntegerVector | None = None
        if kind is TaskKind.TRAIN:
            emit(
                events.RoundStarted(
                    at=clock.now(), round_index=round_index, cohort=cohort
                )
            )

    def sent(self, weights_d: Vector) -> Words:
        """The round's model as all sites are sent it; not to be written to.

        Raises:
            BeyondCodec: The codec of the way down cannot encode it.
        """
        if self._sent_d is None:
            words = self.links.whole.encode(weights_d, seed=self.round_index)
            self._sent_d = words.view()
            self._sent_d.flags.writeable = False
        return self._sent_d

    def carry(self, tasks: Collection[OpenTask]) -> None:
        """Expect answers to tasks of earlier rounds; ``tasks`` is followed as it is.

        A site whose task is open at the end of the round has missed nothing.
        """
        self._state.carry(tasks)

    def sound_updates(
        self, replies: Iterable[Reply]
    ) -> Iterator[tuple[SiteUpdate, Reply]]:
        """Yield the updates that may be used, as they came; emit every failure."""
        for reply in replies:
            message = reply.message
            if self._is_sound(reply) and isinstance(message, SiteUpdate):
                yield message, reply
            # The caller is done with this update: let its memory go before the
            # next one lands.
            del reply, message
        self._close()
        self.end_phase("exchange")

    def count(self, update: SiteUpdate, reply: Reply, weight: float) -> None:
        """Add up what an update reports beside its vector.

        Args:
            update: A sound update.
            reply: How it came.
            weight: What it counts.
        """
        self._note_spent(update.site, update.spent)
        if update.training is not None:
            self._training = _pool(self._training, update.training)
        if update.evaluation is not None:
            self._evaluations[update.site] = update.evaluation
        if self._largest_m is None:
            self._largest_m = update.integers_m.copy()
        else:
            np.maximum(self._largest_m, update.integers_m, out=self._largest_m)
        self._emit(
            events.SiteAnswered(
                at=self.clock.now(),
                round_index=self.round_index,
                site=update.site,
                asked_seconds=reply.asked_seconds - self._start,
                answered_seconds=reply.answered_seconds - self._start,
                bytes_down=reply.bytes_down,
                bytes_up=reply.bytes_up,
                num_examples=update.num_examples or None,
                num_steps=update.num_steps,
                weight=weight,
                training=update.training,
                evaluation=update.evaluation,
                phases=update.phases,
                spent=update.spent,
                resources=update.resources,
            )
        )

    def masked_updates(
        self, replies: Iterable[Reply]
    ) -> Iterator[tuple[MaskedUpdate, Reply]]:
        """Yield the masked updates that may be used; emit every failure."""
        for reply in replies:
            message = reply.message
            if self._is_sound(reply) and isinstance(message, MaskedUpdate):
                yield message, reply
            del reply, message  # One at a time, as in ``sound_updates``.
        self._close()
        self.end_phase("exchange")

    def protocol_answers(
        self, replies: Iterable[Reply], step: SecureStep
    ) -> Iterator[tuple[SecureAnswer, Reply]]:
        """Yield the answers to a step of secure aggregation; emit every failure.

        What the caller does not ``refuse`` has counted once the answers are at
        their end, and is emitted as the step. Who fails here fails in this round,
        also if its update is in the sum.
        """
        self._step = step.value
        self._step_replies = []
        for reply in replies:
            message = reply.message
            self._bytes_down += reply.bytes_down
            self._bytes_up += reply.bytes_up
            if 0 < message.round_index < self.round_index:  # Setups have no round.
                text = f"answered round {message.round_index} too late"
                self.refuse(message.site, reply, text, FailureKind.LATE)
            elif isinstance(message, SecureAnswer) and message.step is step:
                self._step_replies.append(reply)
                yield message, reply
            elif isinstance(message, SiteFailure):
                self._fail_step(message, reply)
            else:
                self.refuse(message.site, reply, "answered something else")
        self._emit_step(step.value, self._step_replies)
        self.end_phase(step.value)

    def refuse(
        self,
        site: SiteId,
        reply: Reply,
        reason: str,
        kind: FailureKind = FailureKind.INVALID,
    ) -> None:
        """Emit that an answer to a step of secure aggregation does not count."""
        self._step_replies = [kept for kept in self._step_replies if kept is not reply]
        failure = SiteFailure(
            run_id=self.run_id,
            round_index=self.round_index,
            site=site,
            kind=kind,
            message=reason,
        )
        self._fail_step(failure, reply)

    def _fail_step(self, failure: SiteFailure, reply: Reply) -> None:
        self._state.count_failed(failure.kind)
        message = f"{self._step}: {failure.message}"
        self._emit_failure(replace(failure, message=message), reply)

    def warn(self, message: str) -> None:
        """Emit what a person should know of the round and no other event says."""
        self._emit(events.Warned(at=self.clock.now(), message=message))

    def count_masked(self, update: MaskedUpdate, reply: Reply) -> None:
        """Emit that a masked update was folded in; nothing else of it is known."""
        if self._kind is TaskKind.EVALUATE:
            self._journeys[update.site] = reply
            return  # In training the reply would keep a whole update in memory.
        self._note_spent(update.site, update.spent)
        self._emit(
            events.SiteAnswered(
                at=self.clock.now(),
                round_index=self.round_index,
                site=update.site,
                asked_seconds=reply.asked_seconds - self._start,
                answered_seconds=reply.answered_seconds - self._start,
                bytes_down=reply.bytes_down,
                bytes_up=reply.bytes_up,
                num_examples=None,
                num_steps=None,
                weight=None,
                training=None,
                evaluation=None,
                phases=(),
                spent=update.spent,
            )
        )

    def count_sums(
        self, *, training: MetricSums | None, evaluation: MetricSums | None
    ) -> None:
        """Take in what the sites report together and not one by one."""
        self._training = training
        self._secret_evaluation = evaluation

    def leave_out(self, sites: Mapping[SiteId, str]) -> None:
        """Settle sites of the cohort that are not asked, each with the reason."""
        for site, reason in sites.items():
            failure = SiteFailure(
                run_id=self.run_id,
                round_index=self.round_index,
                site=site,
                kind=FailureKind.INVALID,
                message=f"left out: {reason}",
            )
            self._state.accept(failure)
            self._emit_failure(failure, None)

    def announce_left_out(self, sites: Mapping[SiteId, str]) -> None:
        """Emit which sites later rounds go on without, now that it has changed."""
        self._emit(
            events.SitesLeftOut(
                at=self.clock.now(),
                round_index=self.round_index,
                sites=tuple(sites),
                reasons=tuple(sites.values()),
            )
        )

    def compare_groups(
        self,
        groups: Sequence[tuple[SiteId, ...]],
        *,
        norms: Sequence[float | None],
        distances: Sequence[float | None],
        remarks: Sequence[str],
    ) -> None:
        """Emit what a robust rule over groups has combined: ``GroupsCompared``."""
        self._emit(
            events.GroupsCompared(
                at=self.clock.now(),
                round_index=self.round_index,
                groups=tuple(groups),
                norms=tuple(norms),
                distances=tuple(distances),
                remarks=tuple(remarks),
            )
        )

    def revoke(
        self, update: SiteUpdate | MaskedUpdate, reply: Reply, reason: str
    ) -> None:
        """Refuse an update after all, for a reason that only its use showed."""
        self._emit_failure(self._state.revoke(update.site, reason), reply)

    def combined_integers(self, integers_m: IntegerVector) -> IntegerVector:
        """Integer values after the round: the largest where the role is ``max``."""
        if self._largest_m is None:
            return integers_m
        largest = self._layout.integer_mask(Role.MAX)
        return np.where(largest, self._largest_m, integers_m)

    def collect_evaluations(self, replies: Iterable[Reply]) -> None:
        """Take in the answers to an exchange for evaluation alone."""
        for reply in replies:
            message = reply.message
            if self._is_sound(reply) and isinstance(message, SiteEvaluation):
                self._evaluations[message.site] = message.evaluation
                self._journeys[message.site] = reply
        self._close()

    def finish_evaluation(self) -> None:
        """Emit the final model's metrics, or that there are none."""
        self._emit_evaluated()
        if self._pooled_evaluation() is None:
            if self._journeys:  # Masked results that nothing could open.
                self._emit_step(self._kind.value, tuple(self._journeys.values()))
            self.warn("no site evaluated the final model")

    @property
    def num_counted(self) -> int:
        """Updates that count so far."""
        return len(self._state.answered)

    def end_phase(self, name: str) -> None:
        """Note that the aggregator's time since the last note went to ``name``."""
        now = self.clock.monotonic()
        self._phases.append(
            Phase(
                name=name,
                start_seconds=self._phase_start - self._start,
                seconds=now - self._phase_start,
            )
        )
        self._phase_start = now

    def finish(self, status: str) -> None:
        """Emit what the round came to, before it is made durable.

        In this order a crash in between leaves a line too many, which the round that
        runs again replaces. In the other it would leave a line too few for ever.
        """
        self._emit_evaluated()
        self._emit(
            events.RoundFinished(
                at=self.clock.now(),
                round_index=self.round_index,
                status=status,
                asked=self.cohort,
                answered=self._state.answered,
                failed=self._state.failed,
                bytes_down=self._bytes_down,
                bytes_up=self._bytes_up,
                seconds=self.clock.monotonic() - self._start,
                phases=tuple(self._phases),
                training=self._training,
                update_norm=self.update_norm if status == "completed" else None,
                update_clip=self.update_clip if status == "completed" else None,
                epsilon=self._epsilon,
                resources=self._usage.so_far(),
            )
        )

    def _note_spent(self, site: SiteId, spent: PrivacySpent | None) -> None:
        if spent is not None:
            self._epsilon = max(self._epsilon or 0.0, spent.epsilon)
            before = self.anchors.get(site, NO_ANCHOR)
            self.anchors[site] = before.joined(spent.anchor)

    def _is_sound(self, reply: Reply) -> bool:
        self._bytes_down += reply.bytes_down
        self._bytes_up += reply.bytes_up
        failure = self._state.accept(reply.message)
        if failure is not None:
            self._emit_failure(failure, reply)
        return failure is None

    def _close(self) -> None:
        for failure in self._state.close():
            self._emit_failure(failure, None)

    def _emit_failure(self, failure: SiteFailure, reply: Reply | None) -> None:
        complaint = f"{failure.site}: {failure.message}"
        self.complaints.append(complaint)
        if failure.kind is FailureKind.BUDGET:
            self.out_of_budget.append(complaint)
        now = self.clock.monotonic()
        asked = self._start if reply is None else reply.asked_seconds
        answered = now if reply is None else reply.answered_seconds
        self._emit(
            events.SiteFailed(
                at=self.clock.now(),
                round_index=self.round_index,
                site=failure.site,
                kind=failure.kind,
                message=failure.message,
                asked_seconds=asked - self._start,
                answered_seconds=answered - self._start,
                bytes_down=0 if reply is None else reply.bytes_down,
                bytes_up=0 if reply is None else reply.bytes_up,
            )
        )

    def _emit_step(self, step: str, replies: Sequence[Reply]) -> None:
        self._emit(
            events.StepTaken(
                at=self.clock.now(),
                round_index=self.round_index,
                step=step,
                sites=tuple(reply.message.site for reply in replies),
                bytes_down=tuple(reply.bytes_down for reply in replies),
                bytes_up=tuple(reply.bytes_up for reply in replies),
            )
        )

    def _pooled_evaluation(self) -> MetricSums | None:
        pooled = self._secret_evaluation
        for sums in self._evaluations.values():
            pooled = _pool(pooled, sums)
        return pooled

    def _emit_evaluated(self) -> None:
        """Emit the metrics of the model that this round began with."""
        pooled = self._pooled_evaluation()
        if pooled is None:
            return
        in_secret = self._secret_evaluation is not None
        sites = self._state.answered if in_secret else tuple(self._evaluations)
        # Of an exchange for evaluation alone; else they came with the updates.
        journeys = self._journeys if self._kind is TaskKind.EVALUATE else {}
        self._emit(
            events.ModelEvaluated(
                at=self.clock.now(),
                round_index=self._model_round,
                pooled=pooled,
                sites=sites,
                by_site=tuple(self._evaluations.values()),
                bytes_down=tuple(
                    journeys[s].bytes_down if s in journeys else 0 for s in sites
                ),
                bytes_up=tuple(
                    journeys[s].bytes_up if s in journeys else 0 for s in sites
                ),
                spent=tuple(_spent(journeys[s] for s in sites if s in journeys)),
            )
        )


def _spent(replies: Iterable[Reply]) -> Iterator[PrivacySpent]:
    for reply in replies:
        message = reply.message
        if isinstance(message, SiteEvaluation | MaskedUpdate) and message.spent:
            yield message.spent


def _pool(total: MetricSums | None, more: MetricSums) -> MetricSums:
    return more if total is None else total + more

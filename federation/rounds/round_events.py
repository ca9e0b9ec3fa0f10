"""Events of one round: what is emitted when."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from federation import events
from federation.ids import SiteId
from federation.members import Members
from federation.messages import (
    MaskedUpdate,
    PrivacySpent,
    Reply,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
)
from federation.protocols import Clock
from federation.rounds.round_sums import COMPLETED, RoundSums
from federation.rounds.round_verdicts import RoundVerdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvents:
    """Emits what happens in a round, with times from its start.

    Attributes:
        clock: Time.
        start: When the round began, on the monotonic clock.
        emit: Where events go.
    """

    round_index: int
    clock: Clock
    start: float
    emit: events.Emit

    def started(self, cohort: tuple[SiteId, ...]) -> None:
        """Emit ``RoundStarted``: tasks are about to go out."""
        self.emit(
            events.RoundStarted(
                at=self.clock.now(), round_index=self.round_index, cohort=cohort
            )
        )

    def answered(
        self, update: SiteUpdate | MaskedUpdate, reply: Reply, weight: float | None
    ) -> None:
        """Emit ``SiteAnswered``; of a masked update only its arrival."""
        plain = update if isinstance(update, SiteUpdate) else None
        self.emit(
            events.SiteAnswered(
                at=self.clock.now(),
                round_index=self.round_index,
                site=update.site,
                asked_seconds=reply.asked_seconds - self.start,
                answered_seconds=reply.answered_seconds - self.start,
                bytes_down=reply.bytes_down,
                bytes_up=reply.bytes_up,
                num_examples=(plain.num_examples or None) if plain else None,
                num_steps=plain.num_steps if plain else None,
                weight=weight,
                training=plain.training if plain else None,
                evaluation=plain.evaluation if plain else None,
                phases=plain.phases if plain else (),
                spent=update.spent,
                resources=plain.resources if plain else None,
                staleness=self.round_index - 1 - update.based_on,
            )
        )

    def failed(
        self, failure: SiteFailure, reply: Reply | None, *, bytes_down: int = 0
    ) -> None:
        """Emit ``SiteFailed``; if there was no reply, with the bytes of the task."""
        now = self.clock.monotonic()
        # A late answer is to a task of an earlier round, and none may never be asked.
        asked = self.start if reply is None else max(self.start, reply.asked_seconds)
        answered = now if reply is None else max(asked, reply.answered_seconds)
        self.emit(
            events.SiteFailed(
                at=self.clock.now(),
                round_index=self.round_index,
                site=failure.site,
                kind=failure.kind,
                message=failure.message,
                asked_seconds=asked - self.start,
                answered_seconds=answered - self.start,
                bytes_down=bytes_down if reply is None else reply.bytes_down,
                bytes_up=0 if reply is None else reply.bytes_up,
            )
        )

    def step_taken(self, step: str, replies: Sequence[Reply]) -> None:
        """Emit ``StepTaken`` with the replies that count."""
        self.emit(
            events.StepTaken(
                at=self.clock.now(),
                round_index=self.round_index,
                step=step,
                sites=tuple(reply.message.site for reply in replies),
                bytes_down=tuple(reply.bytes_down for reply in replies),
                bytes_up=tuple(reply.bytes_up for reply in replies),
            )
        )

    def warned(self, message: str) -> None:
        """Emit a warning that no other event contains."""
        self.emit(events.Warned(at=self.clock.now(), message=message))

    def left_out(self, members: Members) -> None:
        """Emit which sites later rounds exclude, after a change."""
        self.emit(events.left_out(members, self.round_index, at=self.clock.now()))

    def evaluated(
        self,
        model_round: int,
        verdicts: RoundVerdicts,
        sums: RoundSums,
        replies: Mapping[SiteId, Reply],
    ) -> None:
        """Emit ``ModelEvaluated`` if any site evaluated the model.

        Args:
            model_round: Rounds that made the model.
            verdicts: Verdicts of the round.
            sums: Sums of the round.
            replies: Of an exchange only for evaluation; else they came with updates.
        """
        pooled = sums.pooled_evaluation()
        if pooled is None:
            return
        in_secret = sums.secret_evaluation is not None
        sites = tuple(sums.evaluations)
        if in_secret:
            sites = sums.evaluators or verdicts.answered
        found = [replies.get(site) for site in sites]
        self.emit(
            events.ModelEvaluated(
                at=self.clock.now(),
                round_index=model_round,
                pooled=pooled,
                sites=sites,
                by_site=tuple(sums.evaluations.values()),
                bytes_down=tuple(r.bytes_down if r else 0 for r in found),
                bytes_up=tuple(r.bytes_up if r else 0 for r in found),
                spent=tuple(_spent(r for r in found if r)),
            )
        )

    def finished(
        self,
        status: str,
        cohort: tuple[SiteId, ...],
        verdicts: RoundVerdicts,
        sums: RoundSums,
        steps: tuple[int, ...],
    ) -> None:
        """Emit ``RoundFinished``, before the result is made durable.

        In this order a crash in between leaves a line too many, which the round that
        runs again replaces. In the other it would leave a line too few for ever.
        """
        completed = status == COMPLETED
        self.emit(
            events.RoundFinished(
                at=self.clock.now(),
                round_index=self.round_index,
                status=status,
                asked=cohort,
                answered=verdicts.answered,
                failed=verdicts.failed,
                bytes_down=sums.bytes_down,
                bytes_up=sums.bytes_up,
                inside_down=sums.inside_down,
                inside_up=sums.inside_up,
                seconds=self.clock.monotonic() - self.start,
                phases=tuple(sums.phases),
                training=sums.training,
                update_norm=sums.update_norm if completed else None,
                update_clip=sums.update_clip if completed else None,
                epsilon=sums.epsilon,
                resources=sums.usage.so_far(),
                steps=steps,
            )
        )


def _spent(replies: Iterator[Reply]) -> Iterator[PrivacySpent]:
    for reply in replies:
        message = reply.message
        if isinstance(message, SiteEvaluation | MaskedUpdate) and message.spent:
            yield message.spent

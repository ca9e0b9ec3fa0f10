"""A trainer whose work takes time on a virtual clock."""

from dataclasses import dataclass

from federation.clock import VirtualClock
from federation.messages import NO_ANCHOR, LedgerAnchor, MetricSums, PrivacySpent
from federation.protocols import LocalUpdate, LocalWeights, Trainer
from federation.vectors import IntegerVector, Layout, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTrainer:
    """Trains as another trainer does, at a constant speed.

    Attributes:
        trainer: Does the work.
        clock: The site's; moves on by what the work takes.
        seconds_per_step: Time of an optimiser step.
        seconds_per_evaluation: Time of an evaluation.
    """

    trainer: Trainer
    clock: VirtualClock
    seconds_per_step: float
    seconds_per_evaluation: float

    def layout(self) -> Layout:
        """Layout of the model."""
        return self.trainer.layout()

    def pay(
        self,
        *,
        round_index: int,
        trains: bool,
        evaluations: int,
        anchor: LedgerAnchor = NO_ANCHOR,
    ) -> None:
        """Charge the site's privacy budget, in no time."""
        self.trainer.pay(
            round_index=round_index,
            trains=trains,
            evaluations=evaluations,
            anchor=anchor,
        )

    def fit(
        self, weights_d: Vector, integers_m: IntegerVector, *, round_index: int
    ) -> LocalWeights | LocalUpdate:
        """Train; every step takes its time."""
        result = self.trainer.fit(weights_d, integers_m, round_index=round_index)
        self.clock.sleep(result.num_steps * self.seconds_per_step)
        return result

    def evaluate(
        self, weights_d: Vector, integers_m: IntegerVector, *, round_index: int
    ) -> MetricSums:
        """Evaluate; that takes its time, too."""
        sums = self.trainer.evaluate(weights_d, integers_m, round_index=round_index)
        self.clock.sleep(self.seconds_per_evaluation)
        return sums

    def spent(self) -> PrivacySpent | None:
        """What the site's privacy ledger says."""
        return self.trainer.spent()

"""A trainer around another one, for those that change one of its answers."""

from federation.messages import NO_ANCHOR, LedgerAnchor, MetricSums, PrivacySpent
from federation.protocols import LocalUpdate, LocalWeights, Trainer
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Vector


class ForwardingTrainer:
    """A ``federation.protocols.Trainer`` that has another one do everything."""

    def __init__(self, trainer: Trainer) -> None:
        """Hand everything on to ``trainer``."""
        self._trainer = trainer

    def layout(self) -> Layout:
        """Layout of the model."""
        return self._trainer.layout()

    def pay(
        self,
        *,
        round_index: int,
        trains: bool,
        evaluations: int,
        anchor: LedgerAnchor = NO_ANCHOR,
    ) -> None:
        """Charge the site's privacy budget."""
        self._trainer.pay(
            round_index=round_index,
            trains=trains,
            evaluations=evaluations,
            anchor=anchor,
        )

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
    ) -> LocalWeights | LocalUpdate:
        """Train."""
        return self._trainer.fit(
            weights_d, integers_m, round_index=round_index, kept=kept
        )

    def evaluate(
        self, weights_d: Vector, integers_m: IntegerVector, *, round_index: int
    ) -> MetricSums:
        """Evaluate."""
        return self._trainer.evaluate(weights_d, integers_m, round_index=round_index)

    def spent(self) -> PrivacySpent | None:
        """What the site's privacy ledger says."""
        return self._trainer.spent()

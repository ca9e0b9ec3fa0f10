"""A trainer with a witness: what leaves a site, seen as it leaves.

For audits: the adversary of record-level privacy sees every update of a site.
"""

from collections.abc import Callable

from federation.errors import SiteError
from federation.messages import (
    NO_ANCHOR,
    LedgerAnchor,
    MetricSums,
    PrivacySpent,
)
from federation.protocols import LocalUpdate, LocalWeights, Trainer
from federation.vectors import IntegerVector, Layout, Vector

Witness = Callable[[Vector, LocalWeights], None]


class ObservedTrainer:
    """A ``federation.protocols.Trainer`` around another one."""

    def __init__(self, trainer: Trainer, witness: Witness) -> None:
        """Show the witness the weights before each round, and what came of them.

        The arrays are the trainer's own and change after the call.
        """
        self._trainer = trainer
        self._witness = witness

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
        """Have the trainer pay."""
        self._trainer.pay(
            round_index=round_index,
            trains=trains,
            evaluations=evaluations,
            anchor=anchor,
        )

    def fit(
        self, weights_d: Vector, integers_m: IntegerVector, *, round_index: int
    ) -> LocalWeights | LocalUpdate:
        """Train and tell."""
        result = self._trainer.fit(weights_d, integers_m, round_index=round_index)
        if not isinstance(result, LocalWeights):
            raise SiteError("a single update with noise for the sum is not observed")
        self._witness(weights_d, result)
        return result

    def evaluate(
        self, weights_d: Vector, integers_m: IntegerVector, *, round_index: int
    ) -> MetricSums:
        """Evaluate; the witness does not hear of it."""
        return self._trainer.evaluate(weights_d, integers_m, round_index=round_index)

    def spent(self) -> PrivacySpent | None:
        """What the trainer says."""
        return self._trainer.spent()

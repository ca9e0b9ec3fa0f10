"""A trainer around another one, as a base for those that change one method."""

from typing import Unpack

from federation.messages import MetricSums, PrivacySpent
from federation.protocols import (
    EvaluateArguments,
    FitArguments,
    LocalUpdate,
    LocalWeights,
    RoundCharges,
    Trainer,
    WorksAhead,
)
from federation.vectors import Arrays, IntegerVector, Layout, Vector


class ForwardingTrainer:
    """A ``federation.protocols.Trainer`` that passes every call to another one."""

    def __init__(self, trainer: Trainer) -> None:
        """Hand everything on to ``trainer``."""
        self._trainer = trainer

    def layout(self) -> Layout:
        """Layout of the model."""
        return self._trainer.layout()

    def pay(self, **charges: Unpack[RoundCharges]) -> None:
        """Charge the site's privacy budget."""
        self._trainer.pay(**charges)

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[FitArguments],
    ) -> LocalWeights | LocalUpdate:
        """Train."""
        return self._trainer.fit(weights_d, integers_m, **arguments)

    def work_ahead(
        self, round_index: int, kept: Arrays, first_step: int | None = None
    ) -> None:
        """Begin with a round's first steps, if the other trainer can."""
        if isinstance(self._trainer, WorksAhead):
            self._trainer.work_ahead(round_index, kept, first_step)

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[EvaluateArguments],
    ) -> MetricSums:
        """Evaluate."""
        return self._trainer.evaluate(weights_d, integers_m, **arguments)

    def spent(self) -> PrivacySpent | None:
        """The spending in the site's privacy ledger."""
        return self._trainer.spent()

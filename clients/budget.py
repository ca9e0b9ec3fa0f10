"""A trainer that asks the site's privacy ledger before anything private leaves.

The ledger is charged, durably, before the work: what a crash interrupts stays charged.
What would tell of single records without noise is withheld: the losses of training,
and how many examples the site holds.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from federation.messages import MetricSums, PrivacySpent
from federation.protocols import LocalResult, Trainer
from federation.vectors import IntegerVector, Layout, Vector
from privacy.dp.events import Event
from privacy.dp.held_out import HeldOutMechanism
from privacy.dp.ledger import Ledger


class ClippingTrainer(Trainer, Protocol):
    """A trainer that can bound what a single record adds to held-out sums."""

    def evaluate_clipped(
        self, weights_d: Vector, integers_m: IntegerVector, *, max_loss: float
    ) -> MetricSums:
        """Sums over the site's held-out data, each prediction's loss clipped."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """What a site releases, as its ledger is told.

    Attributes:
        round_event: The private steps of one round.
        held_out: Noise for held-out results; None if these are public.
        max_loss: What a held-out prediction's loss is clipped to, in nats.
        random_bytes: Source of the keys of the held-out noise.
    """

    round_event: Event
    held_out: HeldOutMechanism | None
    max_loss: float
    random_bytes: Callable[[int], bytes] = os.urandom


class BudgetedTrainer:
    """A ``federation.protocols.Trainer`` around a private one and a ledger."""

    def __init__(
        self, trainer: ClippingTrainer, ledger: Ledger, releases: Releases
    ) -> None:
        """Charge what ``trainer`` does to ``ledger``.

        Args:
            trainer: Takes private steps, as ``releases.round_event`` says.
            ledger: The site's own, of this run.
            releases: What each piece of work costs.
        """
        self._trainer = trainer
        self._ledger = ledger
        self._releases = releases
        # Evaluation does not say of which round it is; it is of the next to come.
        self._round_index = 0

    def layout(self) -> Layout:
        """Layout of the model."""
        return self._trainer.layout()

    def fit(
        self, weights_d: Vector, integers_m: IntegerVector, *, round_index: int
    ) -> LocalResult:
        """Charge a round and train.

        Raises:
            BudgetExceeded: The round is beyond the budget; nothing was trained.
            PrivacyError: The ledger cannot vouch for what was spent.
        """
        self._ledger.charge(
            self._releases.round_event, round_index=round_index, purpose="train"
        )
        self._round_index = round_index
        result = self._trainer.fit(weights_d, integers_m, round_index=round_index)
        return replace(result, num_examples=0, training=None)

    def evaluate(self, weights_d: Vector, integers_m: IntegerVector) -> MetricSums:
        """Charge a release of held-out results and add noise to it, if that is asked.

        Raises:
            BudgetExceeded: It is beyond the budget of the held-out records.
            PrivacyError: The ledger cannot vouch for what was spent.
        """
        held_out = self._releases.held_out
        if held_out is None:
            return self._trainer.evaluate(weights_d, integers_m)
        self._ledger.charge(
            held_out.event(), round_index=self._round_index, purpose="evaluate"
        )
        sums = self._trainer.evaluate_clipped(
            weights_d, integers_m, max_loss=self._releases.max_loss
        )
        return held_out.release(sums, self._releases.random_bytes)

    def spent(self) -> PrivacySpent:
        """What the ledger says by now."""
        ledger = self._ledger
        return PrivacySpent(
            epsilon=ledger.epsilon("train"),
            delta=ledger.terms.delta,
            held_out_epsilon=(
                None if self._releases.held_out is None else ledger.epsilon("evaluate")
            ),
        )

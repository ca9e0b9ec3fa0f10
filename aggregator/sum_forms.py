"""The two forms of a run's secure sums: words of the ring, or numbers of few levels.

Steps between few levels follow from the sums before, and sites that have the newest
model may be sent the words of its sum in place of the next.

Shape suffixes: d float values of the model, b blocks.
"""

import math

from aggregator.masked_round import OpenedSum, SecretSum
from federation.compression.fragments import Fragment, fragment_of
from federation.compression.rotation import padded
from federation.rounds.round_record import RoundRecord
from federation.vectors import Allocate
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.level_sum import LevelSum, rotation_of
from privacy.secagg.arithmetic.levels import (
    LevelPlan,
    first_plan,
    next_plan,
    rounding_norm,
)
from privacy.secagg.protocol import train


class RingSums:
    """Makes the sums of a run's rounds, of words of the ring.

    Attributes:
        divisor: What sites divide the newest sum by, if tasks have it in place of a
            model; otherwise 0.
    """

    divisor: float = 0.0

    def __init__(self, contract: Contract, size: int, allocate: Allocate) -> None:
        """Begin a run of a model of so many values."""
        self.contract, self.size, self.allocate = contract, size, allocate

    def begin(self, _record: RoundRecord) -> tuple[LevelPlan | None, SecretSum]:
        """Plan a round, and return the plan, if sites need one, with an empty sum."""
        return None, MaskedSum(self.size, self.contract.ring(), allocate=self.allocate)

    def follow(self, one: OpenedSum, record: RoundRecord) -> None:
        """Prepare for the next round, after a sum that was opened."""


class LevelSums(RingSums):
    """Makes the sums of a run's rounds, of numbers of levels."""

    def __init__(self, contract: Contract, size: int, allocate: Allocate) -> None:
        """Begin a run of a model of so many values."""
        super().__init__(contract, size, allocate)
        self._next_plans: dict[Fragment, LevelPlan] = {}
        self._first_planned = 0  # The newest round without a scale of the levels.

    def begin(self, record: RoundRecord) -> tuple[LevelPlan | None, SecretSum]:
        """Plan a round's levels and steps, and begin its sum."""
        contract, fragment = self.contract, self._fragment(record)
        known = self._next_plans.get(fragment)
        if known is None:
            self._first_planned = record.round_index
        if record.round_index <= self._first_planned + 1:  # That sum goes down next.
            record.is_usual = False
        size = fragment.size(self.size)
        plan = known or first_plan(
            size, num_sites=contract.num_sites, clip_norm=contract.clip_norm
        )
        return plan, LevelSum(
            size,
            plan,
            num_sites=contract.num_sites,
            rotation=rotation_of(contract.run_id),
            clip_norm=contract.clip_norm,
            allocate=self.allocate,
        )

    def follow(self, one: OpenedSum, record: RoundRecord) -> None:
        """Plan the next round's levels by a sum that was opened."""
        total, fragment = one.total, self._fragment(record)
        assert isinstance(total, LevelSum)  # noqa: S101  # As ``begin`` has made it.
        record.sums.opened_w, record.sums.fragment = total.words_w, fragment
        self.divisor = one.totals[train.WEIGHT]
        squares = one.totals[train.ENERGY] * self.contract.clip_norm**2
        size = padded(fragment.size(self.size))
        variance = squares / (len(one.opened.survivors) * size)
        if self._first_planned == record.round_index:
            self._warn_of_rounding(record, total.plan, variance * size)
        found = next_plan(
            self.contract.levels, energies_b=total.energies_b, variance=variance
        )
        if found is not None:
            self._next_plans[fragment] = found

    def _fragment(self, record: RoundRecord) -> Fragment:
        """The part of the model that a round exchanges."""
        return fragment_of(record.round_index, self.contract.fragments)

    def _warn_of_rounding(
        self, record: RoundRecord, plan: LevelPlan, energy: float
    ) -> None:
        """Warn if a first plan, which follows from the clip norm, is too coarse.

        Args:
            record: Of the round.
            plan: Of its levels.
            energy: Mean square of the norm of what a site rounded, in weight units.
        """
        found = math.sqrt(energy)
        if found < rounding_norm(plan):
            record.events.warned(
                f"round {record.round_index}: rounding changes updates by more than "
                f"their own norm, of about {found:.3g}, since "
                f"privacy.secure_aggregation.clip_norm = {self.contract.clip_norm:g} "
                "is so far above it: set it to a few times that norm"
            )

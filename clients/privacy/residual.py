"""What few levels have left out of a site's updates, from round to round.

A site adds to its next update what rounding left out of the last one. It also stores
the words that it sent: if the sum of that round is opened without them, the whole
update comes back, so nothing is lost by being late. The signed survivors decide. A
round whose outcome the site does not know counts as spent: no update is counted twice.

The residual is as private as the update. It stays in the site's own store, next to the
state of its optimiser, and is rotated as updates are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.training.site_state import RESIDUAL, KeptState
from federation.compression.fragments import fragment_of
from federation.compression.rotation import padded
from federation.errors import CorruptObject
from federation.mapped import own
from federation.vectors import Arrays, Vector, is_finite
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.arithmetic.digits import Lanes
from privacy.secagg.arithmetic.levels import LevelPlan, return_

_LEFT, _WORDS, _STEPS = (f"{RESIDUAL}/{name}" for name in ("left", "words", "steps"))
_DRIFT = f"{RESIDUAL}/drift"
_ROUND, _LEVELS = "residual_round", "residual_levels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A site's residual after a round.

    Attributes:
        left_d: What the round's words left out: rotated, of padded length.
        words_w: The words, without masks.
        plan: What they were rounded by.
        drift_d: Where rounds exchange one fragment of the model: how far the site's own
            values of the others are from the model, shape ``(d,)``.
    """

    left_d: Vector
    words_w: Lanes
    plan: LevelPlan
    round_index: int
    drift_d: Vector | None = None

    def arrays(self) -> Arrays:
        """Arrays to store."""
        found: dict[str, NDArray[Any]] = {
            _LEFT: self.left_d,
            _WORDS: self.words_w,
            _STEPS: self.plan.steps_b,
        }
        return found if self.drift_d is None else {**found, _DRIFT: self.drift_d}

    def facts(self) -> dict[str, int]:
        """Plain values to store beside them."""
        return {_ROUND: self.round_index, _LEVELS: self.plan.levels}

    def settled(self, contract: Contract, *, left_out: bool) -> Vector:
        """Return what to add to the next update; the residual itself is used up.

        Args:
            contract: Contract of the run.
            left_out: Whether the round's sum was opened without this site.
        """
        if left_out:
            digits = self.plan.digits(contract.num_sites)
            fragment = fragment_of(self.round_index, contract.fragments)
            left_f = fragment.take(self.left_d)
            return_(left_f, self.words_w, plan=self.plan, digits=digits)
            fragment.put_(left_f, self.left_d)
        return self.left_d


def stored(kept: KeptState, contract: Contract) -> Residual | None:
    """Read the residual out of a site's state; None if there is none.

    Raises:
        CorruptObject: It is not of this model or contract.
    """
    arrays, facts = kept.arrays, kept.facts
    if _LEFT not in arrays:
        return None
    left_d, drift_d = arrays[_LEFT], arrays.get(_DRIFT)
    try:
        plan = LevelPlan(levels=int(facts[_LEVELS]), steps_b=arrays[_STEPS])
        digits = plan.digits(contract.num_sites)
        words_w, round_index = arrays[_WORDS], int(facts[_ROUND])
        size = fragment_of(round_index, contract.fragments).size(contract.num_values)
        is_whole = (
            left_d.dtype == np.float32
            and left_d.shape == (padded(contract.num_values),)
            and words_w.dtype == np.uint64
            and words_w.shape == (digits.num_words(size),)
            and is_finite(left_d)
            and (drift_d is None) == (contract.fragments == 1)
            and (drift_d is None or drift_d.shape == (contract.num_values,))
        )
    except (KeyError, ValueError) as error:
        raise _damaged(str(error)) from error
    if not is_whole:
        raise _damaged("it has another size")
    return Residual(
        left_d=own(left_d),
        words_w=words_w,
        plan=plan,
        round_index=round_index,
        drift_d=drift_d,
    )


def _damaged(fault: str) -> CorruptObject:
    return CorruptObject(
        f"the stored residual of this site does not belong to this run: {fault}. "
        "Delete the site's state-* of the run to start without it"
    )

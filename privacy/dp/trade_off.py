"""The trade-off curve of a mechanism, which bounds every attack.

An attack on one record has a false positive rate and a true positive rate. That a
mechanism is (epsilon, delta)-private for all pairs of a curve at once bounds the second
by the first, from end to end (Dong, Roth and Su 2019, arXiv:1905.02383, Proposition 6:
f-differential privacy). One pair alone bounds it well in one place only.

Shape suffixes: e epsilons, n rates.
"""

import numpy as np
from numpy.typing import NDArray

Rates = NDArray[np.float64]

# Pairs of the curve. With fewer the bound is looser and still holds.
EPSILONS: Rates = np.concatenate(
    (np.linspace(0, 10, 201), np.geomspace(10.25, 100, 60))
)


class TradeOff:
    """The largest true positive rate for each false positive rate, and the inverse."""

    def __init__(self, deltas_e: Rates, epsilons_e: Rates = EPSILONS) -> None:
        """Take the pairs of the curve.

        Args:
            deltas_e: Delta of each epsilon, an upper bound, shape ``(e,)``.
            epsilons_e: From 0 on, shape ``(e,)``.
        """
        # From TPR <= e^eps FPR + delta, and from the same of the opposite attack.
        shrink_e = np.exp(-epsilons_e)
        self._slopes = np.concatenate((1 / shrink_e, shrink_e))
        self._offsets = np.concatenate((deltas_e, 1 - shrink_e * (1 - deltas_e)))

    def most_true_positives(self, false_positives_n: Rates) -> Rates:
        """Bound the true positive rate, for rates of shape ``(n,)``."""
        lines = self._slopes * false_positives_n[:, None] + self._offsets
        found: Rates = np.clip(lines.min(axis=1), 0, 1)
        return found

    def least_false_positives(self, true_positives: float) -> float:
        """Bound the false positive rate from below, for one rate."""
        found = ((true_positives - self._offsets) / self._slopes).max()
        return max(0.0, float(found))

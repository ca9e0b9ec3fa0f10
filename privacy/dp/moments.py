"""Noised means and deviations of records, which standardise features.

Each record adds ``(u_1 .. u_f, u_1^2 .. u_f^2, 1)`` to a sum, where ``u`` is a feature
scaled from its public bounds to -1 to 1 and clipped there. One record more or less
moves the sum by at most ``sqrt(2 f + 1)``, and by that much if it is in a corner. The
Gaussian mechanism releases the sum; mean and deviation follow from it alone.

Where persons are protected, a person adds the mean of what its records would add: that
has the same bound, with any number of records.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privacy.counts import coarse
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import GaussianMechanism

Array = NDArray[np.float64]

# Contributions are whole multiples of this, so that float64 adds up 2^32 of them
# without rounding.
_GRID = 2.0**-20

# Records that are looked at on average: the mechanism clips sums of 2^20 and more.
MOST_RECORDS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsMechanism:
    """Releases mean and deviation of each feature.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        num_features: f.
        num_records: Records there are, or persons if these are protected; only the
            coarse number is used.
    """

    noise_multiplier: float
    num_features: int
    num_records: int

    @property
    def rate(self) -> float:
        """Probability that each record, or person, is used, independently."""
        return min(1.0, MOST_RECORDS / coarse(self.num_records))

    def event(self) -> PrivacyEvent:
        """The release, as the accountant sees it."""
        mechanism = self._mechanism()
        return PrivacyEvent(
            noise_multiplier=mechanism.effective_multiplier,
            sampling_rate=self.rate,
            steps=1,
            slack=mechanism.slack,
        )

    def contributions(self, units: Array) -> Array:
        """Return what each record adds to the sum, bounded for any values.

        Args:
            units: Shape ``(n, f, ...)``, features in units of their bounds. Over
                further axes a record's values are averaged. NaN counts as 0.

        Returns:
            Shape ``(n, 2 f + 1)``, each row of norm at most ``sqrt(2 f + 1)``.
        """
        clipped = np.clip(np.nan_to_num(units, nan=0.0), -1.0, 1.0)
        parts = clipped.reshape(len(units), self.num_features, -1)
        moments = [parts.mean(2), (parts**2).mean(2), np.ones((len(units), 1))]
        # The grid holds -1, 0 and 1: rounding to it leaves no bound.
        on_grid = np.rint(np.concatenate(moments, axis=1) / _GRID) * _GRID
        return np.clip(on_grid, -1.0, 1.0)

    def of_persons(self, totals: Array, sizes: NDArray[np.int64]) -> Array:
        """Return what each person adds to the sum, whatever the company.

        Args:
            totals: Sums of the contributions of each person's records, which are exact,
                shape ``(p, 2 f + 1)``.
            sizes: Number of these records, each at least 1, shape ``(p,)``.

        Returns:
            Shape ``(p, 2 f + 1)``, each row of norm at most ``sqrt(2 f + 1)``.
        """
        on_grid = np.rint(totals / sizes[:, np.newaxis] / _GRID) * _GRID
        return np.clip(on_grid, -1.0, 1.0)

    def release(
        self, sums: Array, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> Array:
        """Add noise to sums of contributions, shape ``(2 f + 1,)``.

        Args:
            sums: Exact; they are not written to.
            random_bytes: Source of fresh keys.
        """
        noisy = np.array(sums, dtype=np.float64)
        self._mechanism().release_(noisy, random_bytes)
        return noisy

    def read(self, noisy: Array) -> tuple[Array, Array]:
        """Compute mean and deviation of each feature from what was released.

        Returns:
            Means from -1 to 1, and deviations above 0 and at most 1. A variance that
            is below the error of its estimate counts as that.
        """
        mechanism = self._mechanism()
        error = mechanism.noise_std * mechanism.step
        count = max(float(noisy[-1]), error)
        mean = np.clip(noisy[: self.num_features] / count, -1.0, 1.0)
        square = noisy[self.num_features : -1] / count
        least = max(error / count, _GRID)
        return mean, np.sqrt(np.clip(square - mean**2, least, 1.0))

    def _mechanism(self) -> GaussianMechanism:
        size = 2 * self.num_features + 1
        return GaussianMechanism(
            clip_norm=math.sqrt(size), noise_multiplier=self.noise_multiplier, size=size
        )

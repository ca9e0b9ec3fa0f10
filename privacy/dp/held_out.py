"""Held-out results with noise: how many predictions, how many right, and their loss.

Held-out records are other records than those that are trained on. What they cost is
therefore accounted apart, and both guarantees hold side by side (parallel
composition; McSherry, PINQ, SIGMOD 2009, theorem 4).
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from federation.messages import MetricSums
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import GaussianMechanism

# The loss of a prediction is clipped to this many nats: guessing among 256 tokens
# costs 5.5. A larger bound would need more noise; a smaller one would hide more of
# how wrong a model is that is wrong and sure of it.
MAX_LOSS = 6.0

_NUM_SUMS = 3
_MANTISSA_BITS = 24  # of float32
_FINEST_GRID = 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutMechanism:
    """Adds noise to the sums over a site's held-out records.

    Each record adds at most 1 to each of three sums: its predictions and its right
    predictions over ``predictions``, and its loss over ``predictions * MAX_LOSS``.
    So the sums of neighbouring data differ by at most ``sqrt(3)``.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        predictions: Most predictions of one record: 1 for classification, the
            tokens of a window for a language model.
        num_records: Held-out records; only its order of magnitude is used.
    """

    noise_multiplier: float
    predictions: int
    num_records: int

    def event(self) -> PrivacyEvent:
        """One release, as the accountant sees it: of all records, not of a sample."""
        mechanism = self._mechanism()
        return PrivacyEvent(
            noise_multiplier=mechanism.effective_multiplier,
            sampling_rate=1.0,
            steps=1,
            slack=mechanism.slack,
        )

    def release(
        self, sums: MetricSums, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> MetricSums:
        """Add noise to sums over records of clipped loss.

        Args:
            sums: Exact; the loss of each prediction was clipped to ``MAX_LOSS``.
            random_bytes: Source of fresh keys.

        Returns:
            Sums that may leave the site: at least one prediction, of which none to
            all are right, and a loss of 0 to ``MAX_LOSS`` each.
        """
        scales = np.array([1, 1, MAX_LOSS]) * self.predictions
        exact = np.array([sums.count, sums.correct, sums.loss_sum]) / scales
        grid = self._grid
        noisy = (np.rint(exact / grid) * grid).astype(np.float32)
        self._mechanism().release_(noisy, random_bytes)
        count, correct, loss = noisy.astype(np.float64) * scales
        count = max(1, round(count))
        return MetricSums(
            count=count,
            loss_sum=min(max(loss, 0.0), MAX_LOSS * count),
            correct=min(max(round(correct), 0), count),
        )

    def standard_deviation(self) -> float:
        """Of the noise on the number of right predictions."""
        mechanism = self._mechanism()
        return mechanism.noise_std * mechanism.step * self.predictions

    @property
    def _grid(self) -> float:
        """Multiples of this, up to four times the records, are exact in float32."""
        bits = math.ceil(math.log2(max(4 * self.num_records, 2)))
        return max(_FINEST_GRID, 2.0 ** (bits - _MANTISSA_BITS))

    def _mechanism(self) -> GaussianMechanism:
        return GaussianMechanism(
            # Bringing a sum to the grid moves each of the two by half a step.
            clip_norm=math.sqrt(_NUM_SUMS) * (1 + self._grid),
            noise_multiplier=self.noise_multiplier,
            size=_NUM_SUMS,
        )

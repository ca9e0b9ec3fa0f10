"""Held-out results with noise: how many predictions, their loss and their metrics.

Held-out records are other records than those that are trained on. What they cost is
therefore accounted apart, and both guarantees hold side by side (parallel
composition; McSherry, PINQ, SIGMOD 2009, theorem 4).
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from federation.job.metrics import CORRECT, MAX_LOSS, Metric
from federation.messages import MetricSums
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import GaussianMechanism

_MANTISSA_BITS = 24  # of float32
_FINEST_GRID = 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutMechanism:
    """Adds noise to the sums over a site's held-out records.

    Each record adds at most 1 to each of k parts: its predictions over ``predictions``,
    and its loss and metrics over ``predictions`` times the most that their bounds
    allow. All cells of a histogram are one part: a record of one prediction adds to
    one cell, and the Euclidean norm of what several add is at most the sum of their
    absolute values. So the sums of neighbouring data, which differ by one record that
    was added or removed, differ by at most ``sqrt(k)`` in Euclidean norm, with
    ``k = 2 + metrics that are no cells + histograms`` (Dwork and Roth, The Algorithmic
    Foundations of Differential Privacy, 2014, example 3.2 and theorem A.1).

    Attributes:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        predictions: Most predictions of one record: 1 for classification, the
            tokens of a window for a language model.
        num_records: Held-out records; only its order of magnitude is used.
        loss: Bounds of the loss of one prediction.
        metrics: Bounds of the job's metrics, by name.
    """

    noise_multiplier: float
    predictions: int
    num_records: int
    loss: Metric = Metric(low=0.0, high=MAX_LOSS)  # noqa: RUF009 -- immutable
    metrics: Mapping[str, Metric] = field(default_factory=lambda: CORRECT)

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
            sums: Exact; what each prediction adds was clipped to its bounds.
            random_bytes: Source of fresh keys.

        Returns:
            Sums that may leave the site: at least one prediction, and loss and metrics
            that so many predictions can have. Cells of histograms may be negative.
        """
        reach = [metric.reach for metric in (*self.metrics.values(), self.loss)]
        scales = np.array([1, *reach]) * self.predictions
        named = [sums.metrics[name] for name in self.metrics]
        exact = np.array([sums.count, *named, sums.loss_sum]) / scales
        grid = self._grid
        noisy = (np.rint(exact / grid) * grid).astype(np.float32)
        self._mechanism().release_(noisy, random_bytes)
        first, *values, loss = (noisy.astype(np.float64) * scales).tolist()
        count = max(1, round(first))
        return MetricSums(
            count=count,
            loss_sum=_possible(loss, self.loss, count),
            metrics={
                name: _possible(value, metric.with_noise, count)
                for (name, metric), value in zip(
                    self.metrics.items(), values, strict=True
                )
            },
        )

    def standard_deviation(self) -> float:
        """Standard deviation of the noise on the number of correct predictions."""
        mechanism = self._mechanism()
        return mechanism.noise_std * mechanism.step * self.predictions

    @property
    def _grid(self) -> float:
        """Multiples of this, up to four times the records, are exact in float32."""
        bits = math.ceil(math.log2(max(4 * self.num_records, 2)))
        return max(_FINEST_GRID, 2.0 ** (bits - _MANTISSA_BITS))

    def _mechanism(self) -> GaussianMechanism:
        histograms = [metric.histogram for metric in self.metrics.values()]
        num_parts = 2 + histograms.count("") + len({*histograms} - {""})
        return GaussianMechanism(
            # Bringing a sum to the grid moves each of the two by half a step. A cell
            # that a record does not add to is not moved: its sum is exact in float64.
            clip_norm=math.sqrt(num_parts) * (1 + self._grid),
            noise_multiplier=self.noise_multiplier,
            size=2 + len(self.metrics),
        )


def _possible(value: float, metric: Metric, count: int) -> float:
    """The nearest sum that is possible for a number of predictions."""
    found = min(max(value, metric.low * count), metric.high * count)
    return round(found) if metric.is_whole else found

"""A stated surrogate of local training, where only scheduling is studied.

Nothing is trained. A site takes its local steps on the noisy quadratic model of Zhang
et al. 2019 (arXiv:1907.04164, section 3) in closed form, so that updates, their age and
their weights have the effects of real ones. With the rate ``a``, which is the job's
``lr`` but at most 1, and batches of ``b`` records, the loss of weights ``w`` at site
``i`` and the weights after ``n`` steps are::

    L_i(w) = mean((w - w_i)^2) / 2               w_i = w* + z_i / 2
    w_n    = w_i + q (w - w_i) + s e             q   = (1 - a)^n
    s^2    = a^2 (1 - q^2) / (1 - (1 - a)^2) / b

with ``w*``, ``z_i`` and ``e`` from the standard normal distribution: places in a table
that all sites share, since draws of their own would take most of the time. The first
loss is near 0.6, the least of all sites together near 0.1. A metric with bounds has the
part ``exp(-L)`` of its range, as the correct predictions of a softmax have on average.

Shape suffix: d values of the model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack
from zlib import crc32

import numpy as np

from clients import randomness
from federation.ids import SiteId
from federation.job.metrics import Metric, evaluated_of, metrics_of
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from federation.protocols import (
    EvaluateArguments,
    FitArguments,
    LocalWeights,
    RoundCharges,
)
from federation.vectors import IntegerVector, Layout, Vector

NOTICE = (
    'simulation.training = "surrogate": nothing is trained, and losses and metrics '
    "follow a formula instead of data"
)
_UNLIKE = np.float32(0.5)  # How far the sites' optima are from the common one.
_PLACES = 8  # Size of the table, in models.


def draws(job: JobSpec, layout: Layout) -> Vector:
    """Draw the table of a simulation; its first d values are w*."""
    generator = randomness.stream(job.seed, "surrogate")
    return generator.standard_normal(_PLACES * layout.size, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateTrainer:
    """A ``federation.protocols.Trainer`` that computes where training would lead.

    Attributes:
        table: See ``draws``.
        num_examples: Training examples that the site holds.
        num_held_out: Held-out ones.
    """

    job: JobSpec
    site: SiteId
    of_layout: Layout
    table: Vector
    num_examples: int
    num_held_out: int

    def layout(self) -> Layout:
        """Layout of the model."""
        return self.of_layout

    def pay(self, **_: Unpack[RoundCharges]) -> None:
        """Keep no ledger: no records are used."""

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[FitArguments],
    ) -> LocalWeights:
        """Go where a round's local steps lead from the global weights."""
        training, steps = self.job.training, arguments.get("steps")
        num_steps = len(steps) if steps else training.local_steps or 0
        batch = training.batch_size * training.accumulate
        rate = min(training.optimizer.lr, 1.0)
        kept = (1.0 - rate) ** num_steps
        around = (1.0 - kept**2) / (1.0 - (1.0 - rate) ** 2) / batch
        best_d = self._best()
        noise_d = self._drawn(f"{self.site} {arguments['round_index']}")
        local_d = np.float32(rate * math.sqrt(around)) * noise_d
        local_d += best_d + np.float32(kept) * (weights_d - best_d)
        loss = (_loss(weights_d, best_d) + _loss(local_d, best_d)) / 2
        return LocalWeights(
            weights_d=local_d,
            integers_m=integers_m,
            num_examples=self.num_examples,
            num_steps=num_steps,
            training=_sums(num_steps * batch, loss, metrics_of(training)),
        )

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,  # noqa: ARG002 -- of the seam
        **_: Unpack[EvaluateArguments],
    ) -> MetricSums:
        """The loss of weights, for as many predictions as the site has records."""
        loss, metrics = _loss(weights_d, self._best()), evaluated_of(self.job.training)
        return _sums(self.num_held_out, loss, metrics)

    def spent(self) -> None:
        """There is no privacy ledger."""

    def _best(self) -> Vector:
        """Find the optimum of this site anew: kept, it would be a model for each."""
        optimum_d = self.table[: self.of_layout.size]
        return optimum_d + _UNLIKE * self._drawn(self.site)

    def _drawn(self, purpose: str) -> Vector:
        """The draws for a purpose, beside those of w*."""
        size = self.of_layout.size
        first = size + crc32(purpose.encode()) % ((_PLACES - 2) * size + 1)
        return self.table[first : first + size]


def _loss(weights_d: Vector, best_d: Vector) -> float:
    away_d = weights_d - best_d
    return float(np.vdot(away_d, away_d)) / (2 * max(1, len(away_d)))


def _sums(count: int, loss: float, metrics: Mapping[str, Metric]) -> MetricSums:
    found = {name: _of_range(metric, count, loss) for name, metric in metrics.items()}
    return MetricSums(count=count, loss_sum=count * loss, metrics=found)


def _of_range(metric: Metric, count: int, loss: float) -> float:
    if math.isinf(metric.reach):
        return 0.0
    value = count * (metric.low + (metric.high - metric.low) * math.exp(-loss))
    return round(value) if metric.is_whole else value

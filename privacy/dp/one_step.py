"""Distribution of the privacy loss of one step, on a grid that dominates it.

Connect the dots (Doroshenko et al., arXiv:2207.04380, Algorithm 1): the distribution
on multiples of a width whose divergence agrees with the true one at each of them, and
is above it between them. Truncation and distribution functions are dp-accounting's.
The rest is its method for all cells at once: the library goes from cell to cell, which
for small steps was nearly all of an accountant's time.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Cells = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Losses:
    """Loss of one step in one direction: ``probs[i]`` at ``(lowest + i) * width``."""

    lowest: int
    probs: _Cells
    infinite: float


def distributions(
    noise_multiplier: float, sampling_rate: float, width: float
) -> tuple[Losses, Losses]:
    """The loss of a Poisson-sampled Gaussian if the record is removed, and if added.

    Args:
        noise_multiplier: Standard deviation over sensitivity, > 0.
        sampling_rate: Probability of the record to be in the step, in (0, 1].
        width: Width of a cell, > 0, in units of epsilon.

    Guarantee:
        Each dominates the true distribution but for the rounding of floats, by which
        a divergence may be off by some 2^-52; a cell that it makes negative counts
        as zero.
    """
    # Slow to import, and only a site that accounts needs it.
    from dp_accounting.pld import privacy_loss_mechanism  # noqa: PLC0415

    directions = privacy_loss_mechanism.AdjacencyType

    def found(direction: Any) -> Losses:
        loss = privacy_loss_mechanism.GaussianPrivacyLoss(
            noise_multiplier, sampling_prob=sampling_rate, adjacency_type=direction
        )
        bounds = loss.connect_dots_bounds()
        low = math.floor(bounds.epsilon_lower / width)
        high = max(low + 1, math.ceil(bounds.epsilon_upper / width))
        epsilons = np.arange(low, high + 1) * np.float64(width)
        sign = -1.0 if direction is directions.ADD else 1.0
        return _connect(low, _deltas(loss, epsilons, sign), width)

    removed = found(directions.REMOVE)
    # Without sampling both directions are the same.
    return removed, removed if sampling_rate == 1 else found(directions.ADD)


def _connect(low: int, deltas: _Cells, width: float) -> Losses:
    """Find the distribution with these divergences at multiples of the width."""
    falls = np.diff(np.minimum.accumulate(deltas))
    step = math.expm1(width)
    probs = np.empty_like(deltas)
    probs[0] = 1 - deltas[0] + falls[0] / step
    probs[1:-1] = (falls[1:] - falls[:-1] * math.exp(width)) / step
    probs[-1] = falls[-1] / math.expm1(-width)
    return Losses(low, np.maximum(probs, np.float64(0)), float(deltas[-1]))


def _deltas(loss: Any, epsilons: _Cells, sign: float) -> _Cells:
    """Divergence of one direction, 1 for removed and -1 for added, for each epsilon.

    It is ``P(x <= c) - exp(epsilon) * Q(x <= c)`` where the loss is at least epsilon
    up to c, and falls. A sampled loss of epsilon is one of
    ``log(1 + (exp(epsilon) - 1) / q)`` without sampling when the record is removed,
    and with both signs turned when it is added; beyond the logarithm's range all
    losses are above epsilon, or none. Where c is a little off, the difference hardly
    is: it is largest at c.
    """
    rate, turned = loss.sampling_prob, sign * epsilons
    near = np.maximum(np.expm1(np.minimum(turned, 1.0)) / rate, -1.0)
    far = np.maximum(turned, 1.0)
    with np.errstate(divide="ignore"):
        whole = np.where(
            turned < 1.0,
            np.log1p(near),
            # The same, for what is too large for an exponential.
            far - math.log(rate) + np.log1p((rate - 1) * np.exp(-far)),
        )
    # Inverse of the loss (-sign / 2 - x) / noise^2 of a Gaussian of sensitivity 1.
    cutoffs = -sign / 2 - sign * whole * loss.standard_deviation**2
    deltas = loss.mu_upper_cdf(cutoffs) - np.exp(
        epsilons + loss.mu_lower_log_cdf(cutoffs)
    )
    # Where all of Q is below the cutoff the difference loses its digits.
    all_below = -np.expm1(np.minimum(epsilons, 0.0))
    np.copyto(deltas, all_below, where=np.isposinf(cutoffs))
    found: _Cells = np.clip(deltas, 0, 1)
    return found

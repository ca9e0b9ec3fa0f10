"""Composition of privacy loss distributions, fast enough for every round.

The distribution of one step's privacy loss comes from ``one_step``. Here many steps
are added up by Fourier transform on one fixed grid, whose transforms are kept: a
further round costs one inverse transform a direction, where dp-accounting would
start again. Every approximation errs upwards:

- the grid's distributions dominate;
- a loss above the window counts as infinite, with the probability of the Chernoff
  bound; one below it wraps around to a larger loss;
- a cell that rounding made negative counts as zero, and one that it made positive
  stays. With millions of steps and the smallest deltas that is an overestimate of
  percents, and more beyond.

Two neighbouring data sets differ in one record that is added or removed, for the whole
run; the two directions are therefore composed apart and the larger epsilon counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from privacy.dp import gaussian
from privacy.dp.one_step import Losses, distributions

# Overestimate of epsilon that the grid may cost, in standard deviations of the
# composed loss; epsilon is three to six of them. The overestimate is at most about
# 0.65 * steps * width^2 (measured; `tests/unit/privacy/dp/test_accountant.py`).
GRID_ERROR = 2e-3

# Steps for which a grid is made at least; when they are spent the next grid is for
# four times as many. One for far more steps than are taken is far too fine and wide:
# at 4096 an epsilon after a hundred steps took thirty times as long.
_FIRST_CAPACITY = 1 << 8
_GROWTH = 4

# A single Gaussian is cheap to resolve as finely as so many steps would be.
_FEWEST = 64

# Rounding of a step's divergence, some units in the last place of a probability near
# 1. Divergences of compositions are means of such ones, so that errors add up.
_STEP_ROUNDING = 2.0**-51

# Part of delta that a window may cost on its upper side.
_WINDOW_SHARE = 1e-6

# An epsilon above this is reported as infinite: it protects no one, and e^epsilon must
# stay a number.
MAX_EPSILON = 500.0

# The window of a whole curve is made for a delta as small as this.
_LEAST_DELTA = 2.0**-40

# Below this the loss of a single step is beyond MAX_EPSILON.
_MIN_MULTIPLIER = 0.02

_MAX_CELLS = 1 << 23
_MAX_WIDTH = 0.05


class Mechanism(NamedTuple):
    """One step: noise multiplier and sampling rate."""

    noise_multiplier: float
    sampling_rate: float


@dataclass(frozen=True, slots=True)
class _Direction:
    """State of one direction: a window, and transforms in it."""

    lowest: int  # First cell of the window, in widths.
    length: int
    spectra: Mapping[Mechanism, NDArray[np.complex128]]
    infinite: Mapping[Mechanism, float]
    outside: float


@dataclass(frozen=True, slots=True)
class _Lattice:
    width: float
    directions: tuple[_Direction, ...]


def epsilon(steps: Mapping[Mechanism, int], delta: float) -> float:
    """Smallest epsilon of the given steps of each mechanism; an upper bound.

    Args:
        steps: How often each mechanism is used, at least once.
        delta: In (0, 1).

    Returns:
        An upper bound; infinity above ``MAX_EPSILON``.
    """
    merged = _merge_gaussians(steps)
    if not merged:
        return 0.0
    if any(mechanism.noise_multiplier < _MIN_MULTIPLIER for mechanism in merged):
        return math.inf
    if len(merged) == 1 and (only := next(iter(merged))).sampling_rate == 1:
        # Exact, and a grid of its own would be made for every number of releases.
        return gaussian.epsilon(only.noise_multiplier, delta, limit=MAX_EPSILON)
    delta -= _STEP_ROUNDING * sum(steps.values())
    if delta <= 0:
        return math.inf
    # The window for a delta a little smaller: delta may shrink by slack every round.
    coarse = 2.0 ** math.floor(math.log2(delta))
    capacities = tuple(sorted((m, _capacity(m, n)) for m, n in merged.items()))
    grid = _grid(capacities, coarse)
    return max(
        _epsilon(direction, grid.width, merged, delta) for direction in grid.directions
    )


def deltas(
    steps: Mapping[Mechanism, int], epsilons: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Smallest delta for each epsilon of the given steps; an upper bound.

    Args:
        steps: How often each mechanism is used, at least once.
        epsilons: From 0 on, shape ``(e,)``.

    Returns:
        Upper bounds, at most 1, shape ``(e,)``.
    """
    merged = _merge_gaussians(steps)
    if not merged:
        return np.zeros_like(epsilons)
    if any(mechanism.noise_multiplier < _MIN_MULTIPLIER for mechanism in merged):
        return np.ones_like(epsilons)
    capacities = tuple(sorted((m, _capacity(m, n)) for m, n in merged.items()))
    grid = _grid(capacities, _LEAST_DELTA)
    found = np.maximum(
        *(
            _deltas(direction, grid.width, merged, epsilons)
            for direction in grid.directions
        )
    )
    return np.minimum(found + _STEP_ROUNDING * sum(steps.values()), np.float64(1))


def _merge_gaussians(steps: Mapping[Mechanism, int]) -> dict[Mechanism, int]:
    """Replace releases without sampling by one Gaussian, which is exact."""
    merged = {m: n for m, n in steps.items() if m.sampling_rate < 1}
    precision = math.fsum(
        n / m.noise_multiplier**2 for m, n in steps.items() if m.sampling_rate == 1
    )
    if precision:
        merged[Mechanism(1 / math.sqrt(precision), 1.0)] = 1
    return merged


def _capacity(mechanism: Mechanism, steps: int) -> int:
    if mechanism.sampling_rate == 1:
        return 1  # They were merged.
    capacity = _FIRST_CAPACITY
    while capacity < steps:
        capacity *= _GROWTH
    return capacity


def _width(capacities: tuple[tuple[Mechanism, int], ...]) -> float:
    """Width of a cell that keeps ``GRID_ERROR`` when every capacity is spent."""
    variance = math.fsum(n * _variance(mechanism) for mechanism, n in capacities)
    count = max(_FEWEST, sum(n for _, n in capacities))
    return min(_MAX_WIDTH, math.sqrt(GRID_ERROR * math.sqrt(variance) / count))


def _variance(mechanism: Mechanism) -> float:
    """Variance of a step's loss when the record is removed, by quadrature."""
    deviation, rate = mechanism
    noise = np.linspace(-10.0, 10.0, 4001)
    density = np.exp(-(noise**2) / 2)
    weights, losses = [], []
    for share, shift in ((1 - rate, 0.0), (rate, 1 / deviation)):
        exponent = (noise + shift) / deviation - 0.5 / deviation**2
        unsampled = math.log1p(-rate) if rate < 1 else -math.inf
        losses.append(np.logaddexp(unsampled, math.log(rate) + exponent))
        weights.append(share * density)
    loss, weight = np.concatenate(losses), np.concatenate(weights)
    mean = np.average(loss, weights=weight)
    return float(np.average((loss - mean) ** 2, weights=weight))


@lru_cache(maxsize=16)
def _grid(capacities: tuple[tuple[Mechanism, int], ...], delta: float) -> _Lattice:
    width = _width(capacities)
    while True:
        losses = {m: distributions(*m, width) for m, _ in capacities}
        windows = [
            _window({m: pair[side] for m, pair in losses.items()}, capacities, delta)
            for side in (0, 1)
        ]
        if max(high - low for low, high in windows) <= _MAX_CELLS:
            break
        width *= 2
    return _Lattice(
        width,
        tuple(
            _direction({m: pair[side] for m, pair in losses.items()}, window, delta)
            for side, window in enumerate(windows)
        ),
    )


def _window(
    losses: Mapping[Mechanism, Losses],
    capacities: tuple[tuple[Mechanism, int], ...],
    delta: float,
) -> tuple[int, int]:
    """Cells that hold the composed loss, by Chernoff's bound on both sides.

    The logarithm of the moment generating function is convex, zero at 0 and, for a
    privacy loss, zero at -1; so it is not negative at the orders that are used, and
    the bound for all of the capacity holds for fewer steps.
    """
    low, high = -math.inf, math.inf
    cost = math.log(1 / (_WINDOW_SHARE * delta))
    lengths = [_moments_scale(losses[m], n) for m, n in capacities]
    scale = 1 / max(lengths)
    for order in np.geomspace(0.05, 100, 28) * scale:
        up = sum(n * _log_moment(losses[m], order) for m, n in capacities)
        high = min(high, (up + cost) / order)
        down = sum(n * _log_moment(losses[m], -order) for m, n in capacities)
        low = max(low, -(max(down, 0.0) + cost) / order)
    return math.floor(low), math.ceil(high) + 1


def _moments_scale(losses: Losses, steps: int) -> float:
    """Standard deviation of so many steps, in cells."""
    cells = losses.lowest + np.arange(len(losses.probs))
    # Not as products of vectors: the threads of BLAS cost more than they save.
    mean = float((cells * losses.probs).sum())
    square = float(((cells - mean) ** 2 * losses.probs).sum())
    return math.sqrt(steps * square) + 1


def _log_moment(losses: Losses, order: float) -> float:
    """Logarithm of E[exp(order * loss)], the loss in cells."""
    exponents = order * (losses.lowest + np.arange(len(losses.probs)))
    top = float(exponents.max())
    # Smaller terms do not matter, and denormal numbers are slow.
    terms = np.exp(np.maximum(exponents - top, -600.0))
    return top + math.log(float((terms * losses.probs).sum()))


def _direction(
    losses: Mapping[Mechanism, Losses], window: tuple[int, int], delta: float
) -> _Direction:
    low, high = window
    widest = max(len(found.probs) for found in losses.values())
    length = _even_length(max(high - low, widest))
    spectra = {}
    for mechanism, found in losses.items():
        cells = np.zeros(length)
        # Loss zero first: a phase near zero keeps its digits in a high power.
        places = (found.lowest + np.arange(len(found.probs))) % length
        cells[places] = found.probs
        spectra[mechanism] = np.fft.rfft(cells)
    return _Direction(
        lowest=low,
        length=length,
        spectra=spectra,
        infinite={m: found.infinite for m, found in losses.items()},
        outside=_WINDOW_SHARE * delta,
    )


def _even_length(cells: int) -> int:
    """A length with a fast Fourier transform: 2^a, or 3 or 5 times that."""
    power = 1 << max(cells - 1, 1).bit_length()
    return next(n for n in (power * 5 // 8, power * 3 // 4, power) if n >= cells)


def _epsilon(
    direction: _Direction,
    width: float,
    steps: Mapping[Mechanism, int],
    delta: float,
) -> float:
    """Epsilon of one direction: the smallest that leaves no more than delta."""
    losses, probs, infinite = _losses(direction, width, steps)
    if not len(losses):
        return math.inf if infinite >= delta else 0.0
    return _invert(losses, probs, infinite, delta)


def _deltas(
    direction: _Direction,
    width: float,
    steps: Mapping[Mechanism, int],
    epsilons: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Find delta of one direction for each epsilon."""
    losses, probs, infinite = _losses(direction, width, steps)
    above, weighed = _tails(losses, probs, infinite)
    first = np.searchsorted(losses, epsilons, side="right")
    above, weighed = np.append(above, infinite), np.append(weighed, 0.0)
    # Beyond the last loss nothing is weighed, and no exponential is needed.
    factors = np.exp(np.minimum(epsilons, MAX_EPSILON))
    found: NDArray[np.float64] = above[first] - factors * weighed[first]
    return np.clip(found, 0, 1)


def _losses(
    direction: _Direction, width: float, steps: Mapping[Mechanism, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Compose one direction: losses above 0, and the probability of each.

    The third value is the probability of an infinite loss, or one too large to count.
    """
    spectrum: Any = 1.0
    log_finite = 0.0
    for mechanism, count in steps.items():
        spectrum = spectrum * _power(direction.spectra[mechanism], count)
        log_finite += count * math.log1p(-direction.infinite[mechanism])
    probs = np.fft.irfft(spectrum, direction.length)
    infinite = direction.outside - math.expm1(log_finite)
    # Cell i of the transform is loss i modulo the length; only losses above 0 matter.
    top = direction.lowest + direction.length
    first = max(direction.lowest, 1)
    cells = np.arange(first, max(top, first))
    losses: NDArray[np.float64] = cells * np.float64(width)
    probs = np.maximum(probs[cells % direction.length], np.float64(0))
    if len(losses) and losses[-1] > MAX_EPSILON:
        kept = int(np.searchsorted(losses, MAX_EPSILON))
        infinite += float(probs[kept:].sum())
        losses, probs = losses[:kept], probs[:kept]
    return losses, probs, infinite


def _tails(
    losses: NDArray[np.float64], probs: NDArray[np.float64], infinite: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of p, and of p * exp(-loss), over each loss and those above it.

    delta(epsilon) = sum over losses above epsilon of p * (1 - exp(epsilon - loss)),
    plus the probability of an infinite loss (arXiv:2207.04380, equation 1).
    """
    above = infinite + np.cumsum(probs[::-1])[::-1]
    weighed = np.cumsum((probs * np.exp(-losses))[::-1])[::-1]
    return above, weighed


def _power(values: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    """Powers by squaring: ten times as fast as NumPy's, which take logarithms."""
    found, square = np.ones_like(values), values
    while count:
        if count & 1:
            found = found * square
        square = square * square
        count >>= 1
    return found


def _invert(
    losses: NDArray[np.float64],
    probs: NDArray[np.float64],
    infinite: float,
    delta: float,
) -> float:
    if infinite >= delta:
        return math.inf
    above, weighed = _tails(losses, probs, infinite)
    # delta(epsilon) where epsilon is just below each loss, and at 0.
    left = above - np.exp(losses) * weighed
    # The last of them is what is infinite, and that is below delta.
    enough = min(int(np.searchsorted(-left, -delta)), len(losses) - 1)
    if above[enough] <= delta:
        # Not even an epsilon of 0 is needed; elsewhere only rounding can do this.
        return float(losses[enough]) if enough else 0.0
    return max(0.0, math.log((above[enough] - delta) / weighed[enough]))

"""Slow second implementations in plain Python, which share no code with the product."""

import math
from collections.abc import Callable, Iterable, Sequence

from federation.job.spec import ServerOptimizerSpec


def weighted_mean(
    rows: Sequence[Sequence[float]], weights: Sequence[float]
) -> list[float]:
    """Coordinate by coordinate, with exactly rounded sums."""
    return [
        math.fsum(w * v for w, v in zip(weights, column, strict=True))
        / math.fsum(weights)
        for column in zip(*rows, strict=True)
    ]


def contributor_mean(
    rows: Sequence[Sequence[float]], weights: Sequence[float]
) -> list[float]:
    """Coordinate by coordinate, over the rows that are not 0 there."""
    found = []
    for column in zip(*rows, strict=True):
        pairs = [(w, v) for w, v in zip(weights, column, strict=True) if v]
        total = math.fsum(w for w, _ in pairs)
        found.append(math.fsum(w * v for w, v in pairs) / total if pairs else 0.0)
    return found


def trimmed_mean(rows: Sequence[Sequence[float]], cut: int) -> list[float]:
    """Sort every column and average what is left between the cuts."""
    means = []
    for column in zip(*rows, strict=True):
        kept = sorted(column)[cut : len(column) - cut]
        means.append(math.fsum(kept) / len(kept))
    return means


def krum_scores(rows: Sequence[Sequence[float]], byzantine_sites: int) -> list[float]:
    """Sum of squared distances to the nearest n - f - 2 others, per row."""
    scores = []
    for i, row in enumerate(rows):
        distances = sorted(
            math.fsum((a - b) ** 2 for a, b in zip(row, other, strict=True))
            for j, other in enumerate(rows)
            if j != i
        )
        scores.append(math.fsum(distances[: len(rows) - byzantine_sites - 2]))
    return scores


def average(theta: float, updates: Iterable[float], spec: ServerOptimizerSpec) -> float:
    """Walk along the updates."""
    for update in updates:
        theta = theta + spec.lr * update
    return theta


def momentum(
    theta: float, updates: Iterable[float], spec: ServerOptimizerSpec
) -> float:
    """Heavy ball on one scalar weight."""
    v = 0.0
    for update in updates:
        v = spec.momentum * v - update
        theta = theta - spec.lr * v
    return theta


def nesterov(
    theta: float, updates: Iterable[float], spec: ServerOptimizerSpec
) -> float:
    """DiLoCo's outer step on one scalar weight."""
    v = 0.0
    for update in updates:
        g = -update
        v = spec.momentum * v + g
        theta = theta - spec.lr * (g + spec.momentum * v)
    return theta


def delayed_nesterov(
    theta: float, updates: Iterable[float], spec: ServerOptimizerSpec, *, period: int
) -> float:
    """Algorithm 3 of arXiv:2401.09135 with c = 0, on one scalar weight."""
    m = delta = 0.0
    for t, update in enumerate(updates):
        g = -update
        delta += g
        if (t + 1) % period == 0:
            m = spec.momentum * m + delta
            theta -= spec.lr * (spec.momentum * m + g)
            delta = 0.0
        else:
            theta -= spec.lr * g
    return theta


def running_sum(
    theta: float, updates: Iterable[float], spec: ServerOptimizerSpec
) -> float:
    """FedDyn's server step on one scalar weight."""
    total = 0.0
    for update in updates:
        total += update
        theta += spec.lr * (update + total)
    return theta


def adagrad(theta: float, updates: Iterable[float], spec: ServerOptimizerSpec) -> float:
    """FedAdagrad, arXiv:2003.00295 Algorithm 2, on one scalar weight."""
    return _adaptive(theta, updates, spec, lambda v, square: v + square)


def adam(theta: float, updates: Iterable[float], spec: ServerOptimizerSpec) -> float:
    """FedAdam, the same algorithm."""
    b = spec.beta2
    return _adaptive(theta, updates, spec, lambda v, square: b * v + (1 - b) * square)


def yogi(theta: float, updates: Iterable[float], spec: ServerOptimizerSpec) -> float:
    """FedYogi, the same algorithm."""

    def second_moment(v: float, square: float) -> float:
        sign = float(v > square) - float(v < square)
        return v - (1 - spec.beta2) * square * sign

    return _adaptive(theta, updates, spec, second_moment)


def _adaptive(
    theta: float,
    updates: Iterable[float],
    spec: ServerOptimizerSpec,
    second_moment: Callable[[float, float], float],
) -> float:
    m, v = 0.0, spec.tau**2
    for update in updates:
        m = spec.beta1 * m + (1 - spec.beta1) * update
        v = second_moment(v, update**2)
        theta = theta + spec.lr * m / (math.sqrt(v) + spec.tau)
    return theta

"""Epsilon of the Gaussian mechanism without sampling, in closed form."""

import math

# A loss of a single release beyond this is MAX_EPSILON of ``composition`` and more,
# and the tails below would underflow.
_MIN_MULTIPLIER = 0.03
_HALVINGS = 80


def epsilon(noise_multiplier: float, delta: float, *, limit: float) -> float:
    """Smallest epsilon of one release, as an upper bound.

    Inverts ``delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 -
    epsilon/mu)`` for ``mu = 1 / noise_multiplier`` (Balle and Wang 2018,
    arXiv:1805.06530, Theorem 8) by bisection. Any number of releases is one, with
    the root of the sum of their ``mu`` squared.

    Args:
        noise_multiplier: Standard deviation over L2 sensitivity, > 0.
        delta: In (0, 1), far above the 1e-15 that the difference of the two terms
            may be wrong by.
        limit: Above it the answer is infinity; at most 500.

    Returns:
        The upper end of the last bisection; infinity above ``limit``.
    """
    if noise_multiplier < _MIN_MULTIPLIER:
        return math.inf
    mu = 1 / noise_multiplier
    if _delta(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, limit
    if _delta(high, mu) > delta:
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _delta(middle, mu) > delta:
            low = middle
        else:
            high = middle
    return high


def _delta(epsilon: float, mu: float) -> float:
    tail = math.exp(epsilon) * _below(-mu / 2 - epsilon / mu)
    return _below(mu / 2 - epsilon / mu) - tail


def _below(value: float) -> float:
    """Probability that a standard normal value is smaller."""
    return math.erfc(-value / math.sqrt(2)) / 2

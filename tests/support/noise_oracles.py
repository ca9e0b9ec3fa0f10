"""Distributions of the noise, computed in other ways than the product's.

Also a keystream whose words a test chooses.
"""

from collections.abc import Callable, Iterator, Sequence

import mpmath
import numpy as np
from numpy.typing import NDArray

from privacy.keystream import KEY_BYTES, Keystream

mpmath.mp.dps = 80


class ChosenWords(Keystream):
    """A stream of given 64-bit words, then of zeros."""

    def __init__(self, words: Sequence[int]) -> None:
        """Take the words in the order in which they are read."""
        self._words = list(words)

    def read_into(self, out: NDArray[np.uint8], size: int) -> None:
        """Hand out the next words."""
        num = size // 8
        here, self._words = self._words[:num], self._words[num:]
        padded = np.array(here + [0] * (num - len(here)), np.uint64)
        out[:size] = padded.view(np.uint8)


def rounded_pmf(sigma: float, k: int) -> mpmath.mpf:
    """P[round(N(0, sigma^2)) = k] by the complementary error function."""
    k, root = abs(k), mpmath.mpf(sigma) * mpmath.sqrt(2)
    low, high = (2 * k - 1) / (2 * root), (2 * k + 1) / (2 * root)
    return (mpmath.erfc(low) - mpmath.erfc(high)) / 2


def smeared_pmf(variance: float, width: int, k: int) -> mpmath.mpf:
    """P[round(N(0, variance) + width U) = k] with U uniform on (-1/2, 1/2).

    The distribution function of the sum is a difference of the antiderivative
    ``z Phi(z) + phi(z)`` of the Gaussian's.
    """
    std = mpmath.sqrt(mpmath.mpf(variance))

    def antiderivative(x: mpmath.mpf) -> mpmath.mpf:
        z = x / std
        return std * (z * mpmath.ncdf(z) + mpmath.npdf(z))

    def below(x: mpmath.mpf) -> mpmath.mpf:
        half = mpmath.mpf(width) / 2
        return (antiderivative(x + half) - antiderivative(x - half)) / width

    k, half = mpmath.mpf(abs(k)), mpmath.mpf(1) / 2
    return below(-k + half) - below(-k - half)


def combined_distance(first: float, factor: int, second: float) -> mpmath.mpf:
    """Total variation between ``factor R(first) + R(second)`` and its stand-in."""
    variance = mpmath.mpf(factor * first) ** 2 + mpmath.mpf(second) ** 2
    reach = int(mpmath.ceil(14 * mpmath.sqrt(variance)))
    around = int(14 * first) + 1
    coarse = {j: rounded_pmf(first, j) for j in range(-around, around + 1)}
    fine = {k: rounded_pmf(second, k) for k in range(int(14 * second) + 2)}
    total = mpmath.mpf(0)
    for k in range(-reach, reach + 1):
        exact = mpmath.fsum(
            weight * fine.get(abs(k - factor * j), 0) for j, weight in coarse.items()
        )
        total += abs(exact - smeared_pmf(variance, factor, k))
    return total / 2


def known_bytes() -> Callable[[int], bytes]:
    """Keys that a test can draw again."""
    numbers: Iterator[int] = iter(range(1, 1000))

    def draw(size: int) -> bytes:
        is_key = size == KEY_BYTES
        return next(numbers).to_bytes(size, "big") if is_key else b"\1" * size

    return draw

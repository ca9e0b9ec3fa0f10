"""One release of many sums of whole numbers, in parts with noise of their own.

Every record changes part f, in the Euclidean norm, by at most ``D_f``: contributions
are whole numbers, so that nothing is rounded and this bound is exact. Part f gets
Gaussian noise of standard deviation ``s_f = z D_f / sqrt(share_f)`` with shares that
add up to 1. Divided by ``s_f``, all sums together move by at most

    sqrt(sum_f (D_f / s_f)^2) = sqrt(sum_f share_f) / z = 1 / z

in noise of standard deviation 1. So the table is one Gaussian mechanism of noise
multiplier z, and a split of its privacy that is stated before.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.job.statistics_table import Stage, Table
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import SLACK
from privacy.dp.noise import MAX_SIGMA, MIN_SIGMA, RoundedGaussian
from privacy.keystream import KEY_BYTES, Keystream, open_keystream

Integers = NDArray[np.int64]

MAX_STD = 2.0**48  # Beside sums below 2^62, and 13 standard deviations.
_COARSE_STEP = 2.0**24


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNoise:
    """Noise of one part.

    Attributes:
        most: Largest sum of squares of what a record adds to its sums, at least 1.
        share: Its share of the privacy, in (0, 1].
    """

    most: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMechanism:
    """Releases sums with noise; see the module.

    Guarantee:
        A release is the Gaussian mechanism of ``event``, for tables that differ by one
        record, but for its slack: the distance of all draws from rounded Gaussians,
        below 2^-100 for 2^18 sums.

    Attributes:
        noise_multiplier: z.
        parts: Noise of each part, by name; shares add up to 1 at most.

    Raises:
        ValueError: Noise is too large for whole numbers of 64 bits.
    """

    noise_multiplier: float
    parts: Mapping[str, PartNoise]

    def __post_init__(self) -> None:
        """Refuse noise that sums have no room for."""
        if sum(part.share for part in self.parts.values()) > 1 + 2.0**-40:
            raise ValueError("the shares of the parts add up to more than 1")
        for name in self.parts:
            if self._sigma(name) > MAX_STD:
                raise ValueError(f"the noise of {name} is beyond 2^48 steps")

    def event(self) -> PrivacyEvent:
        """The release, as the accountant sees it."""
        return PrivacyEvent(
            noise_multiplier=self.noise_multiplier,
            sampling_rate=1.0,
            steps=1,
            slack=SLACK,
        )

    def standard_deviation(self, name: str) -> float:
        """Standard deviation of the noise of each sum of a part, in its steps."""
        levels = _levels(self._sigma(name))
        return math.sqrt(sum(k * k * noise.variance for k, noise in levels))

    def release(
        self,
        sums: Mapping[str, Integers],
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> Mapping[str, Integers]:
        """Add noise to the sums of all parts.

        Args:
            sums: By part, shape ``(v,)``, below 2^62. Others are returned as they are.
            random_bytes: Source of a fresh key.
        """
        levels = {name: _levels(self._sigma(name)) for name in self.parts}
        num_bytes = sum(
            noise.bytes_per_draw * sums[name].size
            for name, found in levels.items()
            for _, noise in found
        )
        keystream = open_keystream(random_bytes(KEY_BYTES), num_bytes=num_bytes)
        return {
            name: sums_v + _draw(levels[name], sums_v.size, keystream)
            if name in levels
            else sums_v
            for name, sums_v in sums.items()
        }

    def _sigma(self, name: str) -> float:
        part = self.parts[name]
        # The square root is rounded up, and a bound of integers with it.
        bound = math.isqrt(part.most - 1) + 1 if part.most > 2**52 else part.most**0.5
        sigma = self.noise_multiplier * bound / math.sqrt(part.share)
        return max(MIN_SIGMA, sigma * (1 + 2.0**-40))


def mechanism_of(table: Table, stage: Stage, noise_multiplier: float) -> TableMechanism:
    """Noise of a stage's sums at one site, by the split of the job."""
    shares = table.shares(stage)
    parts = {
        part.name: PartNoise(most=part.most, share=shares[part.name])
        for part in stage.parts
        if part.most
    }
    return TableMechanism(noise_multiplier=noise_multiplier, parts=parts)


def _levels(sigma: float) -> list[tuple[int, RoundedGaussian]]:
    """Factors and draws whose weighted sum has at least this standard deviation.

    Beyond what a draw can hold it is ``k R1 + R2`` with the standard deviation of R2
    three times k; why that is a rounded Gaussian is in ``RoundedGaussian``.
    """
    if sigma <= MAX_SIGMA:
        return [(1, RoundedGaussian(sigma=sigma))]
    k = math.ceil(sigma / _COARSE_STEP)
    fine = RoundedGaussian(sigma=3.0 * k)
    coarse = RoundedGaussian(sigma=math.sqrt(sigma**2 - 9.0 * k * k) / k * (1 + 2**-40))
    return [(k, coarse), (1, fine)]


def _draw(
    levels: list[tuple[int, RoundedGaussian]], size: int, keystream: Keystream
) -> Integers:
    total_v = np.zeros(size, np.int64)
    for k, noise in levels:
        draw_v = np.zeros(size, np.int32)
        noise.add_(draw_v, keystream)
        total_v += np.int64(k) * draw_v
    return total_v

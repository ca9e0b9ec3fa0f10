"""The Gaussian mechanism on the integer grid: round a sum, add noise, release.

Proofs, and what is not proved, are in ``docs/explanation/differential-privacy.md``.
Clipping each record's contribution is in ``privacy.dp_sgd``, the distribution of the
noise in ``privacy.dp.noise``, what repeated releases cost in the accountant.

Shape suffixes: d values of the sum, c values of one chunk.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.vectors import Vector
from privacy.dp.noise import MAX_SIGMA, MIN_SIGMA, RoundedGaussian
from privacy.keystream import (
    KEY_BYTES,
    SPARE_BYTES,
    Keystream,
    aligned,
    open_keystream,
)

RandomBytes = Callable[[int], bytes]

Sum = Vector | np.ndarray[tuple[int], np.dtype[np.float64]]
_TYPES = (np.float32, np.float64)

MAX_SIZE = 1 << 32

_FINEST_EXPONENT, _LARGEST_EXPONENT = -60, 60  # of the clip norm; float32 has room
_STEP_BITS = 16  # a clip norm is at least 2^16 steps
_MAX_INFLATION = 1.002  # of the sensitivity by rounding; steps are refined to keep it
_DITHER_BITS = 16  # rounding is random in multiples of 2^-16 of a step
_VALUE_BITS = 36  # values are clipped to this many: with the dither's, 52 of 53
SLACK = 2.0**-60
_ROUND_UP = 1 + 2.0**-40  # far more than the error of the formulas below
_CHUNK = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianMechanism:
    """Release a sum of clipped records with Gaussian noise.

    The sum is rounded stochastically to multiples of ``step``, and a rounded Gaussian
    is added: ``step * (SR(sum / step) + RG(noise_std))``.

    Two sums are neighbours if they differ by at most ``clip_norm`` in Euclidean norm:
    one record added or removed. Rounded with the same dither, they differ by the
    stochastic rounding of that one record's contribution. So the bound that Kairouz,
    Liu and Steinke (arXiv:2102.06387, Theorem 1) prove for one rounded vector holds
    for the sum, but with the dither's probability of 2^-61 instead of by rounding
    again until it holds.

    Guarantee:
        A release is the Gaussian mechanism of sensitivity ``sensitivity`` and
        standard deviation at least ``noise_multiplier * sensitivity``, amplified by
        Poisson sampling where the sum is over a sample, but for ``slack``, which is
        added to delta for every release. It is stated for sums of at most 2^30 values
        and epsilons of at most 12. The arrays that are handed over must keep the
        bound on neighbours, including what their summation rounded.

    Attributes:
        clip_norm: C, the largest Euclidean norm of a record's contribution, in the
            units of the sum, from 2^-60 to 2^60.
        noise_multiplier: z, the standard deviation asked for, over the sensitivity.
        size: d, the number of values of the sum, 1 to ``MAX_SIZE``.

    Raises:
        ValueError: An attribute is out of range.
    """

    clip_norm: float
    noise_multiplier: float
    size: int

    def __post_init__(self) -> None:
        """Refuse values that the grid cannot represent."""
        smallest, largest = 2.0**_FINEST_EXPONENT, 2.0**_LARGEST_EXPONENT
        if not smallest <= self.clip_norm <= largest:
            raise ValueError(
                f"clip_norm must be in [2^-60, 2^60], not {self.clip_norm}"
            )
        if not 1 <= self.size <= MAX_SIZE:
            raise ValueError(f"size must be 1 to 2^32, not {self.size}")
        steps = self.sensitivity / self.step
        if not MIN_SIGMA <= self.noise_multiplier * steps < MAX_SIGMA:
            raise ValueError(
                f"noise_multiplier must be in [{MIN_SIGMA / steps:.3g}, "
                f"{MAX_SIGMA / steps:.3g}] for {self.size} values, not "
                f"{self.noise_multiplier}"
            )

    @property
    def step(self) -> float:
        """Step of the grid, gamma: a power of two of at most C / 2^16.

        Multiplying by a power of two is exact, so nothing is left to prove about
        that. The step is halved until rounding adds less than 0.2 % to the noise.
        """
        step = 2.0 ** (math.frexp(self.clip_norm)[1] - 1 - _STEP_BITS)
        while self._sensitivity(step) > _MAX_INFLATION * self.clip_norm:
            step /= 2
        return step

    @property
    def sensitivity(self) -> float:
        """Largest distance of neighbouring sums on the grid, in the units of C."""
        return self._sensitivity(self.step)

    @property
    def slack(self) -> float:
        """Add this to delta for every release.

        Half of it is the dither's. The other half covers the distance of the noise
        from a Gaussian, under 2^-110 per value: over 2^30 values, and times
        ``1 + e^epsilon`` for an epsilon of 12, it is less than 2^-61.
        """
        return SLACK

    @property
    def noise_std(self) -> float:
        """Standard deviation of the Gaussian that is added, in steps of the grid."""
        return self._noise().std

    @property
    def effective_multiplier(self) -> float:
        """Standard deviation divided by sensitivity, for the accountant."""
        return self.noise_std * self.step / self.sensitivity

    def release_(self, sum_d: Sum, random_bytes: RandomBytes = os.urandom) -> None:
        """Replace a sum by its noised version, which may be released.

        Never fails because of the values: an error would tell something about them.
        NaN counts as 0; values are clipped at 2^36 steps, some hundred thousand clip
        norms or more: for 100 million values at least 2^18.

        Args:
            sum_d: Sum over records, shape ``(d,)``, float32 or float64, contiguous;
                written over.
            random_bytes: Source of two fresh keys of 32 bytes.

        Raises:
            ValueError: The array has another shape or type.
        """
        if sum_d.dtype not in _TYPES or sum_d.shape != (self.size,):
            raise ValueError(
                f"the sum must be a float32 or float64 array of shape ({self.size},), "
                f"not {sum_d.dtype}{sum_d.shape}"
            )
        if not sum_d.flags.c_contiguous or not sum_d.flags.writeable:
            raise ValueError(
                "the sum is changed in place, so it must be contiguous and writeable"
            )
        step, noise = self.step, self._noise()
        rounding = _Rounding(_stream(random_bytes, 2 * self.size), step)
        keystream = _stream(random_bytes, noise.bytes_per_draw * self.size)
        noise_c = aligned(_CHUNK, np.int32)
        for start in range(0, self.size, _CHUNK):
            chunk_c = sum_d[start : start + _CHUNK]
            grid_c = rounding.round(chunk_c)
            noise_c.fill(0)
            noise.add_(noise_c[: chunk_c.size], keystream)
            np.add(grid_c, noise_c[: chunk_c.size], out=grid_c)
            np.multiply(grid_c, step, out=chunk_c, casting="same_kind")

    def _noise(self) -> RoundedGaussian:
        steps = self.sensitivity / self.step
        return RoundedGaussian(sigma=self.noise_multiplier * steps * _ROUND_UP)

    def _sensitivity(self, step: float) -> float:
        """The bound of Theorem 1, and of the worst case, for one step of the grid."""
        root = math.sqrt(self.size)
        # Both sums are first brought to multiples of 2^-16 steps.
        norm = self.clip_norm + step * 2.0**-_DITHER_BITS * root
        tail = math.sqrt(2 * math.log(2 / SLACK))
        likely = norm**2 + step**2 * self.size / 4
        likely += tail * step * (norm + step * root / 2)
        return min(norm + step * root, math.sqrt(likely)) * _ROUND_UP


class _Rounding:
    """Stochastic rounding with its buffers; every operation on the values is exact."""

    def __init__(self, keystream: Keystream, step: float) -> None:
        self._keystream = keystream
        self._per_unit = 2.0**_DITHER_BITS / step
        self._raw = aligned(2 * _CHUNK + SPARE_BYTES, np.uint8)
        self._exact_c = aligned(_CHUNK, np.float64)

    def round(self, chunk_c: Sum) -> NDArray[np.float64]:
        """Round values to whole steps; the next call writes over the result."""
        size = chunk_c.size
        exact_c = self._exact_c[:size]
        np.copyto(exact_c, chunk_c)
        np.multiply(exact_c, self._per_unit, out=exact_c)
        limit = 2.0 ** (_VALUE_BITS + _DITHER_BITS)
        np.clip(exact_c, -limit, limit, out=exact_c)
        if math.isnan(float(exact_c.sum())):
            np.nan_to_num(exact_c, copy=False)
        np.rint(exact_c, out=exact_c)
        self._keystream.read_into(self._raw, 2 * size)
        np.add(exact_c, self._raw[: 2 * size].view(np.uint16), out=exact_c)
        np.multiply(exact_c, 2.0**-_DITHER_BITS, out=exact_c)
        return np.floor(exact_c, out=exact_c)


def _stream(random_bytes: RandomBytes, num_bytes: int) -> Keystream:
    key = random_bytes(KEY_BYTES)
    return open_keystream(key, num_bytes=num_bytes)

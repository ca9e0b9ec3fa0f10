"""Noise that adds up inside a secure sum: how much each site must add.

Source: DIFFERENTIAL_PRIVACY.md, sections 4.2 and 4.3. Every site adds a rounded
Gaussian to its words before it masks them, so that nobody sees a sum without noise.
A site knows its own noise, and those who collude know each other's; a site that
drops out takes its noise with it. What the others bring must be enough by itself.

The noise is drawn in ``privacy.dp.noise``; what it costs is for an accountant.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from privacy.secagg.arithmetic.ring import RingSpec

# A sum of rounded Gaussians this wide is one Gaussian, rounded, but for 2^-226.
MIN_NOISE_STD = 4.0  # of a share, in steps: section 4.2
MAX_INFLATION = 1.02  # of the sensitivity by rounding: section 4.3
_FLOAT_ERROR = 2.0**-20  # of the clip norm: eight roundings of float32 in ``seal_``
_PER_VALUE = 1 + 2.0**-20  # steps that rounding may move two values apart
_ROUND_UP = 1 + 2.0**-40
_ROUND_DOWN = 1 + 2.0**-45  # less, or a plan would not reach what it was made for
_HALVINGS = 80


def honest_shares(threshold: int, colluding: int) -> int:
    """Noise shares h that an adversary does not know: ``h = t - n_C``.

    Args:
        threshold: t, updates without which no sum is opened.
        colluding: n_C, sites whose noise the adversary knows; at least 1, for a site
            that looks at the sum knows its own.

    Raises:
        ValueError: There is no share left.
    """
    if colluding < 1:
        raise ValueError(
            "colluding must be at least 1: a participant knows its own noise"
        )
    if threshold <= colluding:
        raise ValueError(
            f"a sum may hold {threshold} updates: if {colluding} sites collude, no "
            "other noise is left"
        )
    return threshold - colluding


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseShare:
    """What one site adds to its words, so that the sum is private.

    Guarantee:
        Let two vectors of weight units be neighbours if they are at most
        ``sensitivity`` apart, or be clipped to that norm while the other is 0. Sealed
        under a ring of ``ring_spec`` with the same rounding key, they are at most
        ``ring_sensitivity`` steps apart: besides the distance itself, rounding with
        the same dither moves two values at most one step apart, and float32 at most
        2^-20 of the clip norm, all values together. No chance is involved. The sum
        over at least ``threshold`` sites holds ``honest`` independent rounded
        Gaussians of standard deviation ``noise_std`` that the adversary does not
        know; as a post-processing of one Gaussian (docs/explanation/
        differential-privacy.md) they are the Gaussian mechanism with
        ``effective_multiplier``, in every ring without ``faults``.

    Attributes:
        multiplier: z, standard deviation of the honest noise together, over the
            sensitivity.
        sensitivity: Delta, in weight units.
        size: Values that noise is added to.
        threshold: t, updates without which no sum is opened.
        colluding: n_C, sites whose noise the adversary may know; at least 1.

    Raises:
        ValueError: No share is left that the adversary does not know.
    """

    multiplier: float
    sensitivity: float
    size: int
    threshold: int
    colluding: int

    def __post_init__(self) -> None:
        """Refuse plans in which the adversary knows every share."""
        honest_shares(self.threshold, self.colluding)

    @property
    def honest(self) -> int:
        """h, shares that the adversary does not know: ``honest_shares``."""
        return honest_shares(self.threshold, self.colluding)

    def ring_sensitivity(self, spec: RingSpec) -> float:
        """Largest distance of neighbours on the ring's grid, in steps."""
        exact = spec.scale * (self.sensitivity + _FLOAT_ERROR * spec.clip_norm)
        return (exact + _PER_VALUE * math.sqrt(self.size)) * _ROUND_UP

    def noise_std(self, spec: RingSpec) -> float:
        """Standard deviation of one site's noise that ``spec`` asks for, in steps."""
        share = self.multiplier * self.ring_sensitivity(spec) / math.sqrt(self.honest)
        return share * _ROUND_UP

    def effective_multiplier(self, spec: RingSpec) -> float:
        """What the noise in a ring is worth; in that of ``ring_spec`` ``multiplier``.

        Accountants are told ``multiplier``, below which no site's policy lets a ring.
        """
        honest = spec.noise_std * math.sqrt(self.honest)
        return honest / (self.ring_sensitivity(spec) * _ROUND_DOWN)

    def ring_spec(self, *, bits: int, num_sites: int, clip_norm: float) -> RingSpec:
        """Make the ring that has room for the noise.

        Noise takes room, which makes the grid coarser, which makes the noise smaller
        in its steps: the least that is enough is found by bisection.

        Args:
            bits: Width of the ring, 24 or 32.
            num_sites: N.
            clip_norm: Largest norm of an update, in weight units.

        Raises:
            ValueError: There is no room, rounding would add more than 2 % to the
                sensitivity, or the grid is too coarse for the noise; the message says
                what to change.
        """

        def ring(noise_std: float) -> RingSpec:
            return RingSpec(
                bits=bits,
                num_sites=num_sites,
                clip_norm=clip_norm,
                noise_std=noise_std,
            )

        low, high = 0.0, self.noise_std(ring(0.0))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._is_enough(ring, middle):
                high = middle
            else:
                low = middle
        spec = ring(high)
        self._check(spec)
        return spec

    def _is_enough(self, ring: Callable[[float], RingSpec], noise_std: float) -> bool:
        """Whether shares of so many steps are enough, or more than there is room for.

        More noise makes a coarser grid, which asks for less noise: from some share
        on all are enough.
        """
        try:
            return self.noise_std(ring(noise_std)) <= noise_std
        except ValueError:
            return True

    def faults(self, spec: RingSpec) -> Iterator[str]:
        """Say why a ring has less noise than the share relies on, if it does."""
        if spec.noise_std < MIN_NOISE_STD:
            yield (
                f"shares of {spec.noise_std:.3g} steps are fewer than "
                f"{MIN_NOISE_STD:.0f}, too few for the sum to be Gaussian"
            )
        elif self.effective_multiplier(spec) < self.multiplier:
            yield (
                f"{spec.noise_std} steps give a noise multiplier of "
                f"{self.effective_multiplier(spec)}, but this site relies on "
                f"{self.multiplier}"
            )

    def _check(self, spec: RingSpec) -> None:
        inflation = self.ring_sensitivity(spec) / (spec.scale * self.sensitivity)
        if inflation > MAX_INFLATION:
            raise ValueError(
                f"rounding {self.size} values to {spec.bits} bits adds "
                f"{100 * (inflation - 1):.1f} % to the sensitivity, more than "
                f"{100 * (MAX_INFLATION - 1):.0f} %: use more bits, a smaller "
                "clip_norm of secure aggregation, or a larger one of differential "
                "privacy"
            )
        if spec.noise_std < MIN_NOISE_STD:
            raise ValueError(
                f"each site's share of the noise would be {spec.noise_std:.3g} steps "
                f"of the grid, fewer than {MIN_NOISE_STD:.0f}, too few for the sum to "
                "be Gaussian: use more noise, more bits, or a smaller clip_norm of "
                "secure aggregation"
            )

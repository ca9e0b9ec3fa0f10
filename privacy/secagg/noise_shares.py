"""Noise that adds up inside a secure sum: how much of it each site must bring.

Source: DIFFERENTIAL_PRIVACY.md, sections 4.2 and 4.3. Every site adds a rounded
Gaussian to its words before it masks them, so that nobody sees a sum without noise.
A site knows its own noise, and those who collude know each other's; a site that
drops out takes its noise with it. What the others bring must be enough by itself.

The noise is drawn in ``privacy.dp.ring_noise``; what it costs is for an accountant.
"""

import math
from dataclasses import dataclass

from privacy.secagg.ring import RingSpec

MAX_INFLATION = 1.02  # of the sensitivity by rounding: section 4.3
_FLOAT_ERROR = 2.0**-20  # of the clip norm: eight roundings of float32 in ``seal_``
_PER_VALUE = 1 + 2.0**-20  # steps that rounding may move two values apart
_ROUND_UP = 1 + 2.0**-40
_ATTEMPTS = 60


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
        raise ValueError("whoever takes part knows the noise of one site, its own")
    if threshold <= colluding:
        raise ValueError(
            f"of {threshold} updates in a sum {colluding} may be the adversary's, and "
            "nobody's noise is left"
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
        ``effective_multiplier``.

    Attributes:
        multiplier: z, standard deviation of the honest noise together, over the
            sensitivity.
        sensitivity: Delta, in weight units.
        size: Values that noise is added to.
        honest: h, shares that the adversary does not know: ``honest_shares``.
    """

    multiplier: float
    sensitivity: float
    size: int
    honest: int

    def ring_sensitivity(self, spec: RingSpec) -> float:
        """Largest distance of neighbours on the ring's grid, in steps."""
        exact = spec.scale * (self.sensitivity + _FLOAT_ERROR * spec.clip_norm)
        return (exact + _PER_VALUE * math.sqrt(self.size)) * _ROUND_UP

    def noise_std(self, spec: RingSpec) -> float:
        """Standard deviation of one site's noise that ``spec`` asks for, in steps."""
        share = self.multiplier * self.ring_sensitivity(spec) / math.sqrt(self.honest)
        return share * _ROUND_UP

    def effective_multiplier(self, spec: RingSpec) -> float:
        """What the accountant is to be told of a ring with its ``noise_std``."""
        honest = spec.noise_std * math.sqrt(self.honest)
        return honest / (self.ring_sensitivity(spec) * _ROUND_UP)

    def ring_spec(self, *, bits: int, num_sites: int, clip_norm: float) -> RingSpec:
        """Make the ring that has room for the noise.

        Noise takes room, which makes the grid coarser, which makes the noise smaller
        in its steps: the two are brought into line from above.

        Args:
            bits: Width of the ring, 24 or 32.
            num_sites: N.
            clip_norm: Largest norm of an update, in weight units.

        Raises:
            ValueError: There is no room, or rounding would add more than 2 % to the
                sensitivity; the message says what to change.
        """

        def ring(noise_std: float) -> RingSpec:
            return RingSpec(
                bits=bits,
                num_sites=num_sites,
                clip_norm=clip_norm,
                noise_std=noise_std,
            )

        quiet = ring(0.0)
        # With noise sigma the scale is at most (1 - c sigma) times the quiet one.
        per_std = (quiet.noise_tail_of(1.0)) / ((1 << (bits - 1)) - 1)
        wanted = self.noise_std(quiet)
        noise_std = wanted / (1 + per_std * wanted)
        for _ in range(_ATTEMPTS):
            spec = ring(noise_std)
            if self.noise_std(spec) <= noise_std:
                self._check_inflation(spec)
                return spec
            noise_std *= 1 + 2.0**-20
            noise_std = max(noise_std, min(wanted, self.noise_std(spec)))
        spec = ring(wanted)
        self._check_inflation(spec)
        return spec

    def _check_inflation(self, spec: RingSpec) -> None:
        inflation = self.ring_sensitivity(spec) / (spec.scale * self.sensitivity)
        if inflation > MAX_INFLATION:
            raise ValueError(
                f"rounding {self.size} values to {spec.bits} bits adds "
                f"{100 * (inflation - 1):.1f} % to what one of the protected may "
                f"change, more than {100 * (MAX_INFLATION - 1):.0f} %: take more "
                "bits, a smaller clip_norm of secure aggregation, or a larger one of "
                "differential privacy"
            )

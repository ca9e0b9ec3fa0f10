"""A clip norm that follows the updates: a private quantile of their norms.

Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, arXiv:1905.03871. Each site says in
one bit whether its update was within the clip norm. The sum of the bits, with noise,
moves the clip norm towards the quantile that was asked for (section 2, geometric
updates; Theorem 1 for the noise).
"""

import math

from privacy.dp.noise import RoundedGaussian
from privacy.keystream import KEY_BYTES, Keystream

# The clip norm stays within this factor of the first: scaled by it, updates are far
# from the largest float32, and no site reports whether one is beyond that.
CLIP_RANGE = 2.0**20
BIT_SHARE = 0.1  # of 1 / z^2 that the bits may use up
_MAX_STEP = 2 * math.log(CLIP_RANGE)
_BIT_STEPS = 1024  # of the grid on which a bit gets its noise
_BIT_SENSITIVITY = 0.5  # bits are sent as +-1/2: equation after Theorem 1


def split(multiplier: float) -> tuple[float, float]:
    """Divide noise between the sum of updates and the sum of bits.

    Args:
        multiplier: z, what both releases together must be worth.

    Returns:
        z of the updates, and the standard deviation of the noise on the sum of bits:
        ``z^-2 = z_updates^-2 + (2 sigma_b)^-2``.
    """
    updates = multiplier / math.sqrt(1 - BIT_SHARE)
    return updates, _BIT_SENSITIVITY * multiplier / math.sqrt(BIT_SHARE)


def together(updates: float, bit_std: float) -> float:
    """Noise multiplier of one Gaussian mechanism that equals both releases."""
    return 1 / math.hypot(1 / updates, _BIT_SENSITIVITY / bit_std)


def noisy_bit(*, is_within: bool, std: float, key: bytes) -> float:
    """One site's bit, as +-1/2, with its share of the noise.

    Args:
        is_within: Whether the update was within the clip norm.
        std: Standard deviation of this site's share.
        key: 32 fresh bytes, used once.

    Returns:
        A multiple of 2^-10.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key must have {KEY_BYTES} bytes")
    noise = RoundedGaussian(sigma=std * _BIT_STEPS).draw(Keystream(key))
    return (_BIT_STEPS // 2 * (1 if is_within else -1) + noise) / _BIT_STEPS


def next_clip(
    clip: float, *, first: float, within: float, quantile: float, rate: float
) -> float:
    """Clip norm of the next round: ``C exp(-rate (within - quantile))``.

    Args:
        clip: C of this round.
        first: C of the first round; the result is within ``CLIP_RANGE`` of it.
        within: Share of the updates within it; with noise, so not always in [0, 1].
        quantile: gamma, the share that is wanted.
        rate: eta, learning rate.
    """
    # One round's noise must not throw it away: nothing real is outside of [0, 1].
    error = min(1.0, max(0.0, within)) - quantile
    # Nor a rate: exp has a largest argument.
    factor = math.exp(max(-_MAX_STEP, min(_MAX_STEP, -rate * error)))
    return min(max(clip * factor, first / CLIP_RANGE), first * CLIP_RANGE)

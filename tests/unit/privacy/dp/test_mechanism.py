"""The Gaussian mechanism: its numbers, and its release against exact arithmetic."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from privacy.dp.mechanism import GaussianMechanism
from privacy.dp.noise import RoundedGaussian
from privacy.keystream import Keystream, open_keystream

SIZES = [1, 10, 1000, 10**6, 10**7, 10**8]


def _mechanism(**changes: float) -> GaussianMechanism:
    settings = {"clip_norm": 1.5, "noise_multiplier": 1.1, "size": 40_000} | changes
    return GaussianMechanism(**settings)  # type: ignore[arg-type]


def _keys(first: int = 0) -> Callable[[int], bytes]:
    """A source of numbered keys in place of the system's."""
    numbers = itertools.count(first)
    return lambda size: next(numbers).to_bytes(size, "big")


def _sum(size: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(7).normal(0, scale, size).astype(np.float32)


def test_rounding_inflates_the_noise_hardly():
    """At most 0.2 %, on a grid of at least 2^16 steps whose step is a power of two."""
    for size, clip_norm in itertools.product(SIZES, [1.0, 1.9999, 1e-6, 3e7]):
        mechanism = _mechanism(clip_norm=clip_norm, size=size)
        assert 1 < mechanism.sensitivity / clip_norm <= 1.002, (size, clip_norm)
        assert mechanism.step <= clip_norm / 2**16, (size, clip_norm)
        assert math.frexp(mechanism.step)[0] == 0.5, (size, clip_norm)


def test_sensitivity_is_the_published_bound():
    """Theorem 1 of arXiv:2102.06387 with beta = 2^-61, in exact arithmetic."""
    mechanism = _mechanism(clip_norm=1.0, size=10**6)
    step, root = 2.0**-16, 10.0**3
    tail = math.sqrt(2 * math.log(2.0**61))
    expected = math.sqrt(
        1 + step**2 * root**2 / 4 + tail * step * (1 + step * root / 2)
    )
    # Bringing both sums to 2^-16 steps adds 2^-32 * 1000.
    assert expected < mechanism.sensitivity < expected + 2.4e-7


def test_sensitivity_of_few_values_is_the_worst_case():
    """C + gamma sqrt(d) is less than the bound with a tail when d is small."""
    mechanism = _mechanism(clip_norm=1.0, size=4)
    assert mechanism.sensitivity == pytest.approx(1 + 2 * 2.0**-16, abs=1e-9)


def test_multiplier_is_at_least_the_one_asked_for():
    """And not more than a billionth above it."""
    for size, multiplier in itertools.product(SIZES, [0.01, 0.5, 1.1, 7.7, 200.0]):
        mechanism = _mechanism(size=size, noise_multiplier=multiplier)
        inflated = mechanism.noise_std * mechanism.step / mechanism.sensitivity
        given = mechanism.effective_multiplier
        assert inflated == given, (size, multiplier)
        assert 1 <= given / multiplier < 1 + 1e-9, (size, multiplier)


def test_slack_covers_the_noise_of_a_large_model():
    """Half is the dither's; the rest holds 2^30 values at epsilon 12."""
    mechanism = _mechanism(size=1 << 30, noise_multiplier=100.0)
    distance = RoundedGaussian(sigma=mechanism.noise_std).distance
    assert 2.0**-61 + (1 << 30) * distance * (1 + math.exp(12)) < mechanism.slack


def test_release_is_what_exact_arithmetic_makes_of_it():
    """Fractions for the rounding, the noise from its own stream, two keys in order."""
    mechanism = _mechanism()
    values = _sum(mechanism.size)
    released = values.copy()
    mechanism.release_(released, _keys(5))
    raw = np.empty(2 * values.size + 15, np.uint8)
    Keystream((5).to_bytes(32, "big")).read_into(raw, 2 * values.size)
    dither = raw[: 2 * values.size].view("<u2").tolist()
    noise = np.zeros(values.size, np.int32)
    gaussian = RoundedGaussian(sigma=mechanism.noise_std)
    stream = open_keystream((6).to_bytes(32, "big"), num_bytes=16 * values.size)
    for start in range(0, values.size, 1 << 14):
        gaussian.add_(noise[start : start + (1 << 14)], stream)
    step = Fraction(mechanism.step)
    for k in (0, 1, 2, 16_383, 16_384, 39_999):
        fine = round(Fraction(float(values[k])) / step * 2**16)
        exact = (fine + dither[k]) // 2**16 + int(noise[k])
        assert released[k] == np.float32(exact * step)


def test_released_noise_has_the_standard_deviation_that_is_claimed():
    """Over 2^20 values, key fixed: 1 % is 14 standard errors."""
    mechanism = _mechanism(size=1 << 20)
    values = _sum(mechanism.size)
    released = values.copy()
    mechanism.release_(released, _keys())
    noise = (released - values).astype(np.float64)
    claimed = mechanism.noise_multiplier * mechanism.clip_norm
    assert noise.std() == pytest.approx(claimed, rel=0.01)
    assert abs(noise.mean()) < 6 * claimed / 2**10


def test_rounding_has_no_bias():
    """A third of a step, a million times with noise of one step: six errors."""
    mechanism = _mechanism(size=1 << 20, clip_norm=1.0, noise_multiplier=2.0**-16)
    released = np.full(mechanism.size, mechanism.step / 3, np.float32)
    mechanism.release_(released, _keys())
    mean = released.astype(np.float64).mean() / mechanism.step
    assert abs(mean - 1 / 3) < 6 * 1.2 / 2**10


def test_every_release_takes_two_fresh_keys():
    """Rounding and noise never share a key, nor do two releases."""
    asked = []
    keys = _keys()

    def random_bytes(size: int) -> bytes:
        asked.append(size)
        return keys(size)

    mechanism = _mechanism()
    first, second = (np.zeros(mechanism.size, np.float32) for _ in range(2))
    mechanism.release_(first, random_bytes)
    mechanism.release_(second, random_bytes)
    assert asked == [32, 32, 32, 32]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(mechanism.size)


def test_keys_come_from_the_system_by_default():
    """Two releases of zeros have nothing in common."""
    mechanism = _mechanism()
    first, second = (np.zeros(mechanism.size, np.float32) for _ in range(2))
    mechanism.release_(first)
    mechanism.release_(second)
    # The probability of a false alarm is 6e-7.
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(mechanism.size)


def test_values_that_are_no_numbers_raise_nothing():
    """NaN counts as 0, infinity as the largest value of the grid."""
    mechanism = _mechanism(size=5)
    odd = np.array([np.nan, np.inf, -np.inf, 1e38, 1.0], np.float32)
    plain = np.array([0, 1e30, -1e30, 1e38, 1.0], np.float32)
    mechanism.release_(odd, _keys())
    mechanism.release_(plain, _keys())
    assert plain.tolist() == odd.tolist()
    largest = 2.0**36 * mechanism.step
    assert odd[1] == pytest.approx(largest, rel=1e-3)
    assert odd[2] == pytest.approx(-largest, rel=1e-3)


@pytest.mark.parametrize("size", [1, 10**8])
def test_sum_of_many_records_is_not_clipped(size: int):
    """Every value may be that of a hundred thousand records that all agree."""
    mechanism = _mechanism(size=size)
    assert 2.0**36 * mechanism.step > 1e5 * mechanism.clip_norm
    sums = np.full(1, 1e5 * mechanism.clip_norm, np.float32)
    released = sums.copy()
    _mechanism(size=1).release_(released)
    assert released == pytest.approx(sums, abs=20 * mechanism.clip_norm)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": math.nan}, "clip_norm"),
        ({"clip_norm": 1e30}, "clip_norm"),
        ({"size": 0}, "size"),
        ({"size": (1 << 32) + 1}, "size"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": 1e4}, "noise_multiplier"),
    ],
)
def test_attribute_out_of_range_is_refused(changes: dict[str, float], named: str):
    """The message names the attribute."""
    with pytest.raises(ValueError, match=named):
        _mechanism(**changes)


def test_sums_in_float64_are_released_alike():
    """What float32 can hold gives the same; what it cannot is not lost before noise."""
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1.0, size=3)
    keys = iter([bytes(32), b"n" * 32] * 2)
    narrow = np.array([1.5, -2.25, 1e3], np.float32)
    wide = narrow.astype(np.float64)
    mechanism.release_(narrow, lambda _: next(keys))
    mechanism.release_(wide, lambda _: next(keys))
    np.testing.assert_array_equal(wide.astype(np.float32), narrow)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(4, np.float32),
        np.zeros(5, np.float16),
        np.zeros((5, 1), np.float32),
        np.zeros(10, np.float32)[::2],
    ],
)
def test_other_arrays_are_refused(values: np.ndarray):
    """And nothing of them is overwritten."""
    with pytest.raises(ValueError, match=r"float32|contiguous"):
        _mechanism(size=5).release_(values)
    assert not values.any()

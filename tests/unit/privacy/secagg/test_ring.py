"""The ring: bounds that exclude wrapping, and sums back to floats."""

import itertools
import math

import numpy as np
import pytest
from support.secagg_parties import entropy

from privacy.dp.noise import RingNoise
from privacy.keystream import unpack_24
from privacy.secagg.arithmetic.ring import (
    NOISE_TAIL,
    Inputs,
    RingSpec,
    SumOutOfRange,
    decode_sum_,
    num_values,
)
from privacy.secagg.arithmetic.seal import seal_

ALL_BITS = pytest.mark.parametrize("bits", [16, 24, 32])


def _spec(bits: int = 32, num_sites: int = 4, noise_std: float = 0.0) -> RingSpec:
    return RingSpec(bits=bits, num_sites=num_sites, clip_norm=2.0, noise_std=noise_std)


def num_steps(spec: RingSpec) -> int:
    """What an element of the sum of all sites may come to."""
    held = Inputs(num_updates=spec.num_sites, weight=float(spec.num_sites))
    return math.floor(spec.largest_sum(held))


@ALL_BITS
def test_no_sum_can_wrap(bits: int):
    """Neither the values nor, but for its tail, the noise."""
    for num_sites, noise_std in itertools.product([2, 3, 16, 64], [0.0, 3.7]):
        if bits == 16 and (num_sites > 16 or noise_std):
            continue  # Refused, as the next tests show.
        spec = _spec(bits, num_sites, noise_std)
        tail = NOISE_TAIL * noise_std * math.sqrt(num_sites)
        largest = num_sites * spec.amplitude + tail
        assert largest <= 2 ** (bits - 1) - 1, (num_sites, noise_std)


def test_16_bits_have_no_room_for_noise():
    with pytest.raises(ValueError, match="no room for noise"):
        _spec(16, 2, 4.0)


def test_amplitude_is_the_largest_that_fits():
    """Of the specification's section 3, for known numbers."""
    assert _spec(32, 2).amplitude == 2**30 - 1
    assert _spec(24, 64).amplitude == 131_071
    assert _spec(32, 4, 1000.0).amplitude == (2**31 - 1 - 24_000) // 4


@ALL_BITS
def test_largest_value_rounds_to_the_amplitude_or_less(bits: int):
    spec = _spec(bits, 16)
    assert math.ceil(spec.scale * spec.clip_norm) <= spec.amplitude
    assert spec.scale * spec.clip_norm > spec.amplitude * 0.99 - 1


def test_bound_of_elements_makes_finer_steps():
    fine = RingSpec(bits=32, num_sites=4, clip_norm=2.0, element_bound=0.02)
    assert fine.scale == pytest.approx(100 * _spec().scale)


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 20},
        {"num_sites": 1},
        {"clip_norm": 0.0},
        {"clip_norm": math.nan},
        {"clip_norm": math.inf},
        {"clip_norm": 1.1e12},
        {"element_bound": -1.0},
        {"element_bound": 1e-25},
        {"clip_norm": 1e-320},
        {"noise_std": -1.0},
        {"noise_std": math.inf},
        {"bits": 24, "num_sites": 600_000},
        {"bits": 16, "num_sites": 17},
        {"bits": 16, "noise_std": 1e4},
    ],
)
def test_ring_without_room_is_refused(change: dict[str, float]):
    fields = {"bits": 32, "num_sites": 4, "clip_norm": 2.0} | change
    with pytest.raises(ValueError, match=r"."):
        RingSpec(**fields)  # type: ignore[arg-type]


def test_16_bits_are_for_16_sites():
    """Section 3 of the specification; wider rings take more."""
    assert _spec(16, 16).amplitude == 2047
    with pytest.raises(ValueError, match=r"16 bits .*for 17 sites"):
        _spec(16, 17)
    assert _spec(24, 17).amplitude == (2**23 - 1) // 17


@pytest.mark.parametrize(
    ("bits", "dtype"), [(16, np.uint16), (24, np.uint32), (32, np.uint32)]
)
def test_sum_is_read_in_twos_complement(bits: int, dtype: type):
    """And divided by the scale and by the divisor."""
    spec = _spec(bits)
    largest = num_steps(spec) // 2
    integers = np.array([0, 1, -1, largest, -largest, 77])
    words = (integers % 2**bits).astype(dtype)
    expected = (integers / (spec.scale * 2.5)).astype(np.float32)
    np.testing.assert_array_equal(expected, decode_sum_(words, spec, divisor=2.5))


def test_packed_sum_is_read():
    spec = _spec(24)
    words = np.frombuffer(bytes.fromhex("010000ffffff"), np.uint8)
    expected = (np.array([1, -1]) / spec.scale).astype(np.float32)
    np.testing.assert_array_equal(expected, decode_sum_(words, spec))


def test_idle_byte_of_24_bits_is_ignored():
    spec = _spec(24)
    words = np.array([0xAB000002], np.uint32)
    assert decode_sum_(words, spec).tolist() == [np.float32(2 / spec.scale)]


def test_sum_of_32_bits_stays_in_its_memory():
    words = np.zeros(10, np.uint32)
    assert np.shares_memory(words, decode_sum_(words, _spec()))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [16, 32])
def test_value_beyond_the_sites_is_an_alarm(bits: int, sign: int):
    spec = _spec(bits, 7)
    words = np.array([sign * (num_steps(spec) + 1) % 2**bits])
    with pytest.raises(SumOutOfRange, match="the sum reach"):
        decode_sum_(words.astype(spec.wire_dtype), spec)


@ALL_BITS
def test_norm_beyond_the_sites_is_an_alarm(bits: int):
    """Each value is possible by itself, ten of them are not."""
    spec = _spec(bits, 7)
    words = np.full(10, num_steps(spec) // 2, np.uint16 if bits == 16 else np.uint32)
    with pytest.raises(SumOutOfRange, match="norm of the sum"):
        decode_sum_(words, spec)


@pytest.mark.parametrize("bits", [24, 32])
def test_noise_has_room_in_the_norm(bits: int):
    """The noise alone, at its usual norm, is no alarm."""
    spec = _spec(bits, 4, 100.0)
    rng = np.random.default_rng(0)
    noise = np.rint(rng.normal(0, 200, 5000)).astype(np.int64) % 2**bits
    decode_sum_(noise.astype(np.uint32), spec)


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.nan, math.inf])
def test_divisor_is_positive(divisor: float):
    with pytest.raises(ValueError, match="divisor"):
        decode_sum_(np.zeros(3, np.uint32), _spec(), divisor=divisor)


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (32, np.zeros(3, np.uint16)),
        (16, np.zeros(3, np.uint32)),
        (32, np.zeros((3, 1), np.uint32)),
        (32, np.zeros(6, np.uint32)[::2]),
        (24, np.zeros(4, np.uint8)),
    ],
)
def test_words_of_another_ring_are_refused(bits: int, words: np.ndarray):
    with pytest.raises(ValueError, match=r"words|flat"):
        num_values(words, _spec(bits))


WEIGHTS = (0.25, 1.0, 0.03)


def honest_sum(spec: RingSpec, update_d: np.ndarray, seed: int) -> np.ndarray:
    """Words of three sites that all send the same update, clipped; with their noise."""
    total = np.zeros(update_d.size, np.uint32)
    spans = ((0, update_d.size),)
    for number, weight in enumerate(WEIGHTS):
        keys = entropy(f"{seed}/{number}")
        noise = RingNoise(noise_std=spec.noise_std, spans=spans, random_bytes=keys)
        sealed = seal_(
            update_d.copy(),
            spec,
            weight=weight,
            masks=(),
            rounding_key=keys(32),
            noise=noise if spec.noise_std else None,
        )
        words = sealed.words_w
        if spec.bits == 24:
            words = unpack_24(words, np.empty(update_d.size, np.uint32))
        total += words.astype(np.uint32)
    return total if spec.bits > 16 else total.astype(np.uint16)


@ALL_BITS
@pytest.mark.parametrize("noise_std", [0.0, 4.0, 3000.0])
@pytest.mark.parametrize("size", [1, 3, 5000])
def test_honest_sites_at_their_bound_are_no_alarm(
    bits: int, noise_std: float, size: int
):
    """All at the clip norm, in one direction, whatever rounding and noise draw."""
    spec = _spec(bits, 5, noise_std if bits > 16 else 0.0)
    held = Inputs(num_updates=3, weight=sum(WEIGHTS))
    for seed in range(20):
        update_d = np.zeros(size, np.float32)
        update_d[: 1 + seed * size // 20] = 9.0
        decode_sum_(honest_sum(spec, update_d, seed), spec, held=held)


@pytest.mark.parametrize("noise_std", [0.0, 3000.0])
def test_sum_of_less_weight_than_its_updates_is_an_alarm(noise_std: float):
    """Of the weight that they have it passes, and of 1 % less it does not."""
    spec = _spec(32, 5, noise_std)
    words = honest_sum(spec, np.full(1000, 1.0, np.float32), 0)
    held = Inputs(num_updates=3, weight=sum(WEIGHTS))
    decode_sum_(words.copy(), spec, held=held, divisor=held.weight)
    less = Inputs(num_updates=3, weight=0.99 * held.weight)
    with pytest.raises(SumOutOfRange, match=r"norm of the sum .* a site lied"):
        decode_sum_(words, spec, held=less, divisor=less.weight)


def test_bound_of_elements_is_no_lie_of_light_updates():
    """It bounds the weighted update, so small weights do not make elements smaller."""
    spec = RingSpec(bits=32, num_sites=3, clip_norm=8.0, element_bound=0.5)
    held = Inputs(num_updates=2, weight=0.6)
    words = np.full(4, 2 * int(spec.largest_scaled), np.uint32)
    sum_d = decode_sum_(words.copy(), spec, held=held)
    np.testing.assert_allclose(sum_d, 1.0, rtol=1e-3)
    with pytest.raises(SumOutOfRange):
        decode_sum_(words // 2 * 3, spec, held=held)


def test_noise_leaves_a_lie_little_room():
    """Beside noise of ten times the bound a lie has no more than a few of it."""
    size = 1_000_000
    spec = RingSpec(bits=32, num_sites=4, clip_norm=1.0, noise_std=1e7)
    held = Inputs(num_updates=4, weight=4.0)
    bound = 4 * spec.scale
    noise = 2e7 * math.sqrt(size)
    assert 5 < noise / bound < 50
    largest = spec.largest_sum_norm(size, held)
    # What is at right angles to the noise, as any vector nearly is.
    assert math.sqrt(largest**2 - noise**2) < 3 * bound


def test_mean_that_is_no_float_is_an_alarm():
    """A weight next to nothing makes no infinite weights."""
    spec = RingSpec(bits=32, num_sites=3, clip_norm=2.0)
    words = np.array([round(spec.scale * 2.0)], np.uint32)
    with pytest.raises(SumOutOfRange, match="beyond float32"):
        decode_sum_(words, spec, divisor=1e-39)

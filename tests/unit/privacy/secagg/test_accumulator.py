"""The aggregator's sum of masked updates."""

import numpy as np
import pytest

from privacy.keystream import CHUNK_WORDS, Mask
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.ring import RingSpec, SumOutOfRange
from privacy.secagg.arithmetic.seal import encode_, seal_

ALL_BITS = pytest.mark.parametrize("bits", [16, 24, 32])
NUM_SITES = 3
SIZE = 2 * CHUNK_WORDS + 77


def _spec(bits: int) -> RingSpec:
    return RingSpec(bits=bits, num_sites=NUM_SITES, clip_norm=1e3)


def _self_mask(site: int, sign: int = 1) -> Mask:
    return Mask(key=bytes([site + 1]) * 32, sign=sign)


def _sealed(site: int, bits: int, *, masked: bool = True) -> np.ndarray:
    update_d = np.random.default_rng(site).standard_normal(SIZE, dtype=np.float32)
    return seal_(
        update_d,
        _spec(bits),
        weight=0.25 * (site + 1),
        masks=[_self_mask(site)] if masked else [],
        rounding_key=bytes([100 + site]) * 32,
    ).words_w


@ALL_BITS
@pytest.mark.parametrize("threads", [1, 2])
def test_sum_is_the_integer_sum(bits: int, threads: int):
    """Bit for bit what unmasked updates sum to."""
    masked, plain = (MaskedSum(SIZE, _spec(bits), threads=threads) for _ in range(2))
    for site in range(NUM_SITES):
        masked.fold_(_sealed(site, bits))
        plain.fold_(_sealed(site, bits, masked=False))
    masked.apply_masks_([_self_mask(site, -1) for site in range(NUM_SITES)])
    np.testing.assert_array_equal(plain.decode(), masked.decode())


@ALL_BITS
def test_mean_is_that_of_the_updates(bits: int):
    """Within the rounding of the ring."""
    spec, total, plain = _spec(bits), MaskedSum(SIZE, _spec(bits)), np.zeros(SIZE)
    for site in range(NUM_SITES):
        rng = np.random.default_rng(site)
        plain += 0.25 * (site + 1) * rng.standard_normal(SIZE, dtype=np.float32)
        total.fold_(_sealed(site, bits, masked=False))
    error = np.abs(total.decode(divisor=1.5) - plain / 1.5).max()
    assert error <= NUM_SITES / (1.5 * spec.scale) + 1e-6


@ALL_BITS
def test_mask_that_was_left_is_an_alarm(bits: int):
    """Mostly by the norm: values leave the range of a full ring too seldom."""
    total = MaskedSum(SIZE, _spec(bits))
    total.fold_(_sealed(0, bits))
    with pytest.raises(SumOutOfRange, match="the round is lost"):
        total.decode()


def test_updates_are_not_kept():
    """One vector of words, whatever the number of sites."""
    total = MaskedSum(SIZE, _spec(32))
    words = _sealed(0, 32)
    total.fold_(words)
    words[:] = 0
    total.apply_masks_([_self_mask(0, -1)])
    assert np.abs(total.decode()).max() > 0


def test_no_masks_change_nothing():
    total = MaskedSum(SIZE, _spec(32))
    total.apply_masks_([])
    assert not total.decode().any()


def test_more_updates_than_sites_are_refused():
    """The ring has no room for them."""
    total = MaskedSum(SIZE, _spec(32))
    words = np.zeros(SIZE, np.uint32)
    for _ in range(NUM_SITES):
        total.fold_(words)
    with pytest.raises(ValueError, match="all 3 updates"):
        total.fold_(words)


def test_update_of_another_length_is_refused():
    with pytest.raises(ValueError, match="cannot be added"):
        MaskedSum(3, _spec(32)).fold_(np.zeros(4, np.uint32))


def test_decoded_sum_takes_no_more():
    total = MaskedSum(3, _spec(32))
    total.decode()
    with pytest.raises(ValueError, match="decoded"):
        total.fold_(np.zeros(3, np.uint32))


def test_one_encoded_update_comes_back():
    update_d = np.linspace(-1, 1, 1001, dtype=np.float32)
    total = MaskedSum(update_d.size, _spec(32))
    before = update_d.copy()
    encoded = encode_(update_d, _spec(32), weight=1.0, rounding_key=bytes(32))
    total.fold_(encoded.words_w)
    np.testing.assert_allclose(total.decode(), before, atol=1 / _spec(32).scale)

"""Properties of the ring, for any updates, weights, widths and lengths."""

import random

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support import ring_oracles

from privacy import keystream as prg
from privacy.keystream import Mask
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.arithmetic.seal import encode_, seal_

pytestmark = pytest.mark.slow

BITS = st.sampled_from([16, 24, 32])
KEYS = st.binary(min_size=32, max_size=32)
VALUES = st.floats(-100, 100, width=32)


@st.composite
def _cohort(draw: st.DrawFn) -> tuple[list[np.ndarray], list[float]]:
    num_sites, size = draw(st.integers(2, 6)), draw(st.integers(1, 40))
    row = st.lists(VALUES, min_size=size, max_size=size)
    updates = [np.array(draw(row), np.float32) for _ in range(num_sites)]
    weights = [draw(st.floats(0.01, 1.0)) for _ in range(num_sites)]
    return updates, weights


@given(cohort=_cohort(), bits=BITS, seed=st.integers(0, 2**32 - 1))
def test_masked_sum_is_the_integer_reference(
    cohort: tuple[list[np.ndarray], list[float]], bits: int, seed: int
):
    """Bit for bit, with pairwise and self masks."""
    updates, weights = cohort
    num_sites, size = len(updates), updates[0].size
    spec = RingSpec(bits=bits, num_sites=num_sites, clip_norm=1e4)
    rng = np.random.default_rng(seed)
    pair = {(i, j): rng.bytes(32) for j in range(num_sites) for i in range(j)}
    own, rounding = ([rng.bytes(32) for _ in updates] for _ in range(2))
    total, expected = MaskedSum(size, spec), np.zeros(size, np.int64)
    for site, (update_d, weight) in enumerate(zip(updates, weights, strict=True)):
        expected += ring_oracles.rounded(
            update_d.tolist(), weight * spec.scale, rounding[site]
        )
        masks = [Mask(key=own[site], sign=1)] + [
            Mask(key=key, sign=1 if site == i else -1)
            for (i, j), key in pair.items()
            if site in (i, j)
        ]
        sealed = seal_(
            update_d, spec, weight=weight, masks=masks, rounding_key=rounding[site]
        )
        total.fold_(sealed.words_w)
    total.apply_masks_([Mask(key=key, sign=-1) for key in own])
    np.testing.assert_array_equal(
        (expected / spec.scale).astype(np.float32), total.decode()
    )


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)),
    bits=BITS,
    clip_norm=st.floats(1e-6, 1e6),
    weight=st.floats(0.01, 1.0),
    key=KEYS,
)
def test_no_update_exceeds_the_amplitude(
    values: list[float], bits: int, clip_norm: float, weight: float, key: bytes
):
    """Whatever its norm."""
    spec = RingSpec(bits=bits, num_sites=5, clip_norm=clip_norm)
    update_d = np.array(values, np.float32)
    words = encode_(update_d, spec, weight=weight, rounding_key=key).words_w
    half = 2 ** (bits - 1)
    for word in ring_oracles.as_integers(words, bits):
        assert abs((word + half) % (2 * half) - half) <= spec.amplitude


@given(
    size=st.integers(0, 300),
    first_word=st.integers(0, 2**40),
    cut=st.integers(0, 300),
    bits=st.sampled_from([16, 32, 64]),
    key=KEYS,
)
def test_stream_does_not_depend_on_where_it_is_cut(
    size: int, first_word: int, cut: int, bits: int, key: bytes
):
    """Nor on where it is entered."""
    whole, added = np.zeros(size, f"<u{bits // 8}"), Mask(key=key, sign=1)
    parts = whole.copy()
    prg.apply_masks_(whole, [added], first_word=first_word)
    cut = min(cut, size)
    prg.apply_masks_(parts[:cut], [added], first_word=first_word)
    prg.apply_masks_(parts[cut:], [added], first_word=first_word + cut)
    np.testing.assert_array_equal(whole, parts)


@given(values=st.lists(st.integers(0, 2**24 - 1), max_size=50))
def test_packing_round_trips(values: list[int]):
    words = np.array(values, np.uint32)
    packed = np.zeros(3 * words.size, np.uint8)
    prg.pack_24(words, packed)
    np.testing.assert_array_equal(words, prg.unpack_24(packed, np.zeros_like(words)))


@given(keys=st.lists(KEYS, min_size=2, max_size=5), order=st.randoms())
def test_order_of_masks_does_not_matter(keys: list[bytes], order: random.Random):
    masks = [Mask(key=key, sign=1 if key[0] % 2 else -1) for key in keys]
    words = np.zeros((2, 33), np.uint32)
    prg.apply_masks_(words[0], masks)
    order.shuffle(masks)
    prg.apply_masks_(words[1], masks)
    assert words[0].tolist() == words[1].tolist()

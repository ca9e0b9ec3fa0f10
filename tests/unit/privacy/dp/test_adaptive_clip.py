"""A clip norm that follows the updates: its noise, and where it goes."""

import math
import os

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.secagg_parties import entropy

from privacy.dp.adaptive_clip import (
    BIT_SHARE,
    CLIP_RANGE,
    next_clip,
    noisy_bit,
    split,
    together,
)
from privacy.secagg.arithmetic.header import decode_header, encode_header
from privacy.secagg.protocol import train

EMPTY = dict.fromkeys(train.HEADER_SLOTS, 0)


@given(multiplier=st.floats(0.1, 1e4))
def test_both_releases_are_worth_what_was_asked_for(multiplier: float):
    """``z^-2 = z_u^-2 + (2 sigma_b)^-2``, and a tenth of it is the bits'."""
    updates, bit_std = split(multiplier)
    assert together(updates, bit_std) == pytest.approx(multiplier, rel=1e-12)
    assert multiplier**2 / (2 * bit_std) ** 2 == pytest.approx(BIT_SHARE, rel=1e-12)


def test_bits_with_a_twentieth_of_the_sites_in_noise():
    """The paper's choice for 1,000 clients: at z = 1 the updates' is 1.0002."""
    # Theorem 1 of arXiv:1905.03871 with sigma_b = n / 20 = 50.
    assert together(1 / math.sqrt(1 - 1 / 100**2), 50.0) == pytest.approx(1.0)


@pytest.mark.slow
def test_noise_of_the_bits_has_the_variance_that_is_asked_for():
    """Of 1,000 bits of each kind; false alarm 1e-9."""
    random_bytes, std, count = entropy("bits"), 3.7, 1000
    for is_within, mean in ((True, 0.5), (False, -0.5)):
        drawn = np.array(
            [
                noisy_bit(is_within=is_within, std=std, key=random_bytes(32))
                for _ in range(count)
            ]
        )
        assert abs(drawn.mean() - mean) < 6 * std / math.sqrt(count)
        assert abs(drawn.var() / std**2 - 1) < 6 * math.sqrt(2 / count)


def test_bit_without_a_fresh_key_is_refused():
    """A short key is a mistake."""
    with pytest.raises(ValueError, match="32 bytes"):
        noisy_bit(is_within=True, std=1.0, key=os.urandom(16))


@given(
    bits=st.lists(st.booleans(), min_size=2, max_size=64),
    std=st.sampled_from([0.01, 0.7, 12.0, 200.0]),
    key=st.binary(min_size=32, max_size=32),
)
def test_header_holds_bits_exactly(bits: list[bool], std: float, key: bytes):
    """Also with noise: multiples of 2^-10 lose nothing in steps of 2^-32."""
    spec = train.header_spec(len(bits), train.slots_of(train.CORRECT, adapts=True))  # type: ignore[attr-defined]
    values = [noisy_bit(is_within=bit, std=std, key=key) for bit in bits]
    assert all((1024 * value).is_integer() for value in values)
    total_h = np.zeros(len(spec.slots), np.uint64)
    for value in values:
        total_h += encode_header(spec, {**EMPTY, train.WITHIN_CLIP: value})
    assert decode_header(spec, total_h)[train.WITHIN_CLIP] == math.fsum(values)


def _followed(
    norms: np.ndarray, *, quantile: float, rate: float, rounds: int, first: float
) -> list[float]:
    """Clip norms of a population that stays as it is, without noise."""
    clips = [first]
    for _ in range(rounds):
        clips.append(
            next_clip(
                clips[-1],
                first=first,
                within=float((norms <= clips[-1]).mean()),
                quantile=quantile,
                rate=rate,
            )
        )
    return clips


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("first", [0.01, 3.0, 100.0])
def test_clip_norm_finds_the_quantile(quantile: float, first: float):
    """From far below and far above: within 5 % after 400 rounds of eta 0.2."""
    norms = np.exp(np.random.default_rng(2).normal(size=1001))
    clips = _followed(norms, quantile=quantile, rate=0.2, rounds=400, first=first)
    assert clips[-1] == pytest.approx(float(np.quantile(norms, quantile)), rel=0.05)


def test_far_away_it_moves_by_a_constant_factor():
    """Geometric steps: ``exp(eta gamma)`` up, ``exp(-eta (1 - gamma))`` down."""
    norms = np.full(10, 50.0)
    up = _followed(norms, quantile=0.9, rate=0.2, rounds=5, first=1.0)
    down = _followed(norms, quantile=0.9, rate=0.2, rounds=5, first=1000.0)
    assert up == pytest.approx([math.exp(0.18 * k) for k in range(6)])
    assert down == pytest.approx([1000 * math.exp(-0.02 * k) for k in range(6)])


@pytest.mark.parametrize("within", [-40.0, 0.0, 1.0, 40.0])
def test_noise_of_one_round_does_not_throw_it_away(within: float):
    """What noise takes out of [0, 1] counts as its nearer end."""
    found = next_clip(1.0, first=1.0, within=within, quantile=0.5, rate=0.2)
    assert math.exp(-0.1) <= found <= math.exp(0.1)


@pytest.mark.parametrize(
    ("within", "reach"), [(0.0, CLIP_RANGE), (1.0, 1 / CLIP_RANGE)]
)
def test_clip_norm_stays_in_reach_of_the_first(within: float, reach: float):
    """Sites would refuse one beyond it; a rate of any size leads no further."""
    for rate, rounds in ((0.2, 500), (1e6, 2)):
        clip = 3.0
        for _ in range(rounds):
            clip = next_clip(clip, first=3.0, within=within, quantile=0.5, rate=rate)
        assert clip == 3.0 * reach

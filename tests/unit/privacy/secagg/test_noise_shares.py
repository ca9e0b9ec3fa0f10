"""How much noise a site brings to a secure sum, and the ring that has room for it."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from privacy.secagg.arithmetic.noise_shares import (
    MAX_INFLATION,
    MIN_NOISE_STD,
    NoiseShare,
    honest_shares,
)
from privacy.secagg.arithmetic.ring import RingSpec


def _share(**changes: Any) -> NoiseShare:
    usual: dict[str, Any] = {
        "multiplier": 4.8,
        "sensitivity": 1.0,
        "size": 1000,
        "threshold": 5,
        "colluding": 1,
    }
    return NoiseShare(**(usual | changes))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[NoiseShare, RingSpec]:
    num_sites = draw(st.integers(2, 64))
    threshold = draw(st.integers(2 * num_sites // 3 + 1, num_sites))
    clip_norm = draw(st.floats(1e-6, 1e6))
    share = NoiseShare(
        multiplier=draw(st.floats(0.3, 100)),
        sensitivity=clip_norm * draw(st.floats(1e-4, 1)),
        size=draw(st.integers(1, 10**9)),
        threshold=threshold,
        colluding=draw(st.integers(1, threshold - 1)),
    )
    bits = draw(st.sampled_from([24, 32]))
    try:
        ring = share.ring_spec(bits=bits, num_sites=num_sites, clip_norm=clip_norm)
    except ValueError:
        assume(condition=False)
    return share, ring


@given(case=_cases())
def test_shares_of_honest_sites_are_enough(case: tuple[NoiseShare, RingSpec]):
    """Without rounding of numbers: with twice the digits that a float has."""
    share, ring = case
    assert share.effective_multiplier(ring) >= share.multiplier
    assert not list(share.faults(ring))
    honest = share.threshold - share.colluding
    distance = ring.scale * share.sensitivity + math.sqrt(share.size)
    assert ring.noise_std * math.sqrt(honest) > share.multiplier * distance


@given(case=_cases())
def test_shares_are_not_much_more_than_enough(case: tuple[NoiseShare, RingSpec]):
    """Rounding adds 2 % at the most, and the search for the ring nothing."""
    share, ring = case
    honest = share.threshold - share.colluding
    bare = share.multiplier * ring.scale * share.sensitivity / math.sqrt(honest)
    assert ring.noise_std <= bare * MAX_INFLATION * (1 + 1e-9)


@given(case=_cases())
def test_ring_has_room_for_updates_and_noise(case: tuple[NoiseShare, RingSpec]):
    """Twelve standard deviations of the noise of all sites on top of all updates."""
    share, ring = case
    tail = 12 * ring.noise_std * math.sqrt(ring.num_sites)
    assert ring.num_sites * ring.amplitude + tail <= 2 ** (ring.bits - 1) - 1
    assert ring.noise_std >= MIN_NOISE_STD
    assert share.ring_sensitivity(ring) >= ring.scale * share.sensitivity


def test_shares_that_nobody_else_knows():
    """``h = t - n_C``; whoever takes part knows one."""
    assert [honest_shares(t, 1) for t in (2, 3, 6, 11, 43)] == [1, 2, 5, 10, 42]
    assert honest_shares(11, 10) == 1


@pytest.mark.parametrize(
    ("threshold", "colluding", "text"),
    [
        (3, 0, "knows its own noise"),
        (3, 3, "a sum may hold 3 updates: if 3 sites collude"),
        (3, 4, "other noise is left"),
    ],
)
def test_no_share_left_is_refused(threshold: int, colluding: int, text: str):
    """By the rule and by what is made from it."""
    with pytest.raises(ValueError, match=text):
        honest_shares(threshold, colluding)
    with pytest.raises(ValueError, match=text):
        _share(threshold=threshold, colluding=colluding)


def test_coarse_ring_is_refused():
    """The trap of a large model: here 24 bits, which 32 would cure."""
    share = _share(size=10**8, sensitivity=0.01, threshold=4)
    with pytest.raises(ValueError, match=r"to 24 bits adds .* %.* use more bits"):
        share.ring_spec(bits=24, num_sites=4, clip_norm=1.0)
    assert share.ring_spec(bits=32, num_sites=4, clip_norm=1.0).bits == 32


def test_inflation_that_is_refused_is_named():
    """In percent, as it would be."""
    with pytest.raises(ValueError, match=r"100000000 values to 24 bits adds 9\.0 %"):
        _share(size=10**8).ring_spec(bits=24, num_sites=5, clip_norm=1.0)


def test_noise_of_few_steps_is_refused():
    """A sum of rounded Gaussians is Gaussian from four steps on: section 4.2."""
    share = _share(multiplier=0.18, size=1, sensitivity=1.5e-4, threshold=16)
    with pytest.raises(ValueError, match=r"would be 3\.\d+ steps .* fewer than 4"):
        share.ring_spec(bits=24, num_sites=16, clip_norm=1.0)


def test_noise_without_room_is_refused():
    """Twelve deviations of it leave nothing for updates."""
    with pytest.raises(ValueError, match="an amplitude of"):
        _share(multiplier=1e9).ring_spec(bits=24, num_sites=5, clip_norm=1.0)


def test_a_ring_of_another_plan_has_faults():
    """Less noise; more sites that know theirs; noise of few steps."""
    share = _share()
    ring = share.ring_spec(bits=24, num_sites=5, clip_norm=1.0)
    assert not list(share.faults(ring))
    assert not list(share.faults(replace(ring, noise_std=ring.noise_std * 1.01)))
    (fault,) = share.faults(replace(ring, noise_std=ring.noise_std * (1 - 1e-5)))
    assert "noise multiplier of 4.79" in fault
    assert list(replace(share, colluding=2).faults(ring))
    (fault,) = replace(share, multiplier=1e-9).faults(replace(ring, noise_std=3.9))
    assert "fewer than 4" in fault

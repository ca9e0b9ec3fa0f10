"""How far the mean that comes out of the ring is from the mean that went in."""

import numpy as np
import pytest
from support.secagg_parties import Parties

from federation.vectors import Vector
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.arithmetic.ring import decode_sum_
from privacy.secagg.arithmetic.seal import encode_

SIZE = 1_000_000
STD = 1e-3
CLIP_NORM = 1.01  # the norm of such an update is 1.00
BOUND = 1e-2  # ten standard deviations of an element


def _update(site: int) -> Vector:
    rng = np.random.default_rng(site)
    return np.float32(STD) * rng.standard_normal(SIZE, dtype=np.float32)


def _error(contract: Contract) -> float:
    """Relative Euclidean error of the weighted mean of one update from each site.

    Without masks, whose sum is zero: the words are the same with them.
    """
    ring = contract.ring()
    weights_n = np.linspace(0.4, 1.0, contract.num_sites)
    words, exact_d = np.zeros(SIZE, ring.wire_dtype), np.zeros(SIZE)
    for site, weight in enumerate(weights_n.tolist()):
        update_d = _update(site)
        exact_d += weight * update_d.astype(np.float64)
        key = bytes([site]) * 32
        words += encode_(update_d, ring, weight=weight, rounding_key=key).words_w
    exact_d /= weights_n.sum()
    difference_d = decode_sum_(words, ring, divisor=float(weights_n.sum())) - exact_d
    return float(np.linalg.norm(difference_d) / np.linalg.norm(exact_d))


@pytest.mark.slow
@pytest.mark.parametrize("num_sites", [2, 16, pytest.param(64, marks=pytest.mark.long)])
def test_bounded_elements_give_the_mean_to_1e_6(num_sites: int):
    """At 32 bits, whatever the clip norm is; it sets no grid any more."""
    parties = Parties(num_sites)
    for clip_norm in (CLIP_NORM, 10.0):
        contract = parties.contract(clip_norm=clip_norm, element_bound=BOUND)
        assert _error(contract) <= 1e-6


@pytest.mark.slow
def test_bound_of_elements_is_what_makes_the_difference():
    """Without it the clip norm sets the grid, and 1e-6 is missed by far."""
    assert _error(Parties(16).contract(clip_norm=CLIP_NORM)) > 3e-6
    assert _error(Parties(16).contract(clip_norm=10.0)) > 3e-5

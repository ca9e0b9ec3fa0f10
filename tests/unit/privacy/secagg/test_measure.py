"""Measuring an update in one pass."""

import numpy as np
import pytest

from privacy.keystream import CHUNK_WORDS
from privacy.secagg.arithmetic.measurement import NORM_ERROR, measure, subtract_
from privacy.secagg.arithmetic.ring import UpdateNotFinite

SIZES = [0, 1, 255, 256, 257, CHUNK_WORDS + 1, 17 * CHUNK_WORDS + 300]


def _vector(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_norm_is_that_of_float64(size: int, threads: int):
    """To the error that the clip factor allows for; threads change nothing."""
    update_d = _vector(size)
    expected = float(np.linalg.norm(update_d.astype(np.float64)))
    actual = measure(update_d, threads=threads)
    assert abs(expected - actual.norm) <= NORM_ERROR * expected
    assert actual.norm == measure(update_d).norm


@pytest.mark.parametrize("size", SIZES)
def test_bounds_hold_for_every_element(size: int):
    update_d = _vector(size)
    bounds = measure(update_d).bounds
    assert bounds.size == -(-size // CHUNK_WORDS)
    assert (np.abs(update_d) <= np.repeat(bounds, CHUNK_WORDS)[:size]).all()


def test_norm_of_squares_beyond_float32():
    assert measure(np.full(4, 1e30, np.float32)).norm == pytest.approx(2e30, rel=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_difference_is_taken_and_measured(size: int):
    local_d, global_d = _vector(size), _vector(size, seed=1)
    expected = local_d - global_d
    measured = subtract_(local_d, global_d)
    np.testing.assert_array_equal(expected, local_d)
    assert measured.norm == measure(expected).norm


def test_difference_that_is_not_finite_is_refused():
    with pytest.raises(UpdateNotFinite):
        subtract_(np.array([3e38], np.float32), np.array([-3e38], np.float32))


def test_vectors_of_different_length_are_refused():
    with pytest.raises(ValueError, match="3 local and 2 global"):
        subtract_(_vector(3), _vector(2))

"""The shared rotation against plain matrices in float64, and integers in Python."""

import hashlib

import numpy as np
import pytest

from federation.compression.rotation import BLOCK_VALUES, SIDE, Rotation

SEED = b"run-1"
MOST = (1 << 24) // BLOCK_VALUES - 1  # 4,095: the largest whole number in float32.


def hadamard(order: int) -> np.ndarray:
    """Entry (i, j) is minus one to the number of common bits: no recursion."""
    bits = np.array([[(i & j).bit_count() for j in range(order)] for i in range(order)])
    return 1.0 - 2.0 * (bits % 2)


def signs(seed: bytes) -> np.ndarray:
    """One bit a sign, the highest of a byte first."""
    data = hashlib.shake_256(b"crossfed/rotation" + seed).digest(BLOCK_VALUES // 8)
    bits = [byte >> shift & 1 for byte in data for shift in range(7, -1, -1)]
    return 1.0 - 2.0 * np.array(bits, np.float64).reshape(SIDE, SIDE)


def plain(block_v: np.ndarray) -> np.ndarray:
    """R(X) of one block, in float64."""
    matrix = hadamard(SIDE)
    square = signs(SEED) * block_v.reshape(SIDE, SIDE).astype(np.float64)
    return ((square @ matrix).T @ matrix / SIDE).reshape(-1)


def plain_inverse(block_v: np.ndarray) -> np.ndarray:
    """R^-1 of whole numbers, before its division by 64: exact in int64."""
    matrix = hadamard(SIDE).astype(np.int64)
    whole = (block_v.reshape(SIDE, SIDE) @ matrix).T @ matrix
    return (signs(SEED).astype(np.int64) * whole).reshape(-1)


def random_d(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_rotation_is_that_of_plain_matrices():
    """Block by block, to the precision of float32."""
    given = random_d(3 * BLOCK_VALUES)
    found = Rotation(SEED).forward(given.copy(), out=np.empty_like(given), factor=0.5)
    for begin in range(0, given.size, BLOCK_VALUES):
        block = slice(begin, begin + BLOCK_VALUES)
        np.testing.assert_allclose(plain(given[block]) / 2, found[block], atol=2e-6)


@pytest.mark.slow
def test_rotation_is_a_kronecker_product():
    """Of two Hadamard matrices of 64: the rows of one of 4,096, in another order."""
    given = random_d(BLOCK_VALUES)
    large = np.kron(hadamard(SIDE), hadamard(SIDE))
    signed = signs(SEED).reshape(-1) * given
    expected = (large @ signed / SIDE).reshape(SIDE, SIDE).T.reshape(-1)
    np.testing.assert_allclose(expected, plain(given), atol=1e-9)


def test_rotation_keeps_norms_and_spreads_a_single_value():
    """A value of its own in a block becomes 4,096 of one size."""
    given = random_d(2 * BLOCK_VALUES, seed=1)
    found = Rotation(SEED).forward(given.copy(), out=np.empty_like(given))
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(given), rel=1e-6)
    single = np.zeros(BLOCK_VALUES, np.float32)
    single[77] = 64.0
    found = Rotation(SEED).forward(single, out=np.empty(BLOCK_VALUES, np.float32))
    assert set(np.abs(found)) == {1.0}


@pytest.mark.parametrize("exact", [True, False])
def test_backward_undoes_forward(*, exact: bool):
    """To the precision of float32, also where the products are made in it."""
    given = random_d(2 * BLOCK_VALUES, seed=2)
    rotation = Rotation(SEED)
    turned = rotation.forward(given.copy(), out=np.empty_like(given))
    again = rotation.backward(turned, np.ones(2), exact=exact)
    np.testing.assert_allclose(given, again, atol=1e-5)


def extreme_blocks() -> np.ndarray:
    """Random numbers of both signs, and those that a row of the matrix adds up."""
    rng = np.random.default_rng(3)
    drawn = rng.integers(-MOST, MOST, 2 * BLOCK_VALUES, endpoint=True)
    row = np.kron(hadamard(SIDE)[5], hadamard(SIDE)[41])
    return np.concatenate([drawn, MOST * row, np.full(BLOCK_VALUES, MOST)])


def test_whole_numbers_are_rotated_back_exactly_up_to_the_limit():
    """In float32 as in float64, bit for bit, and as in integers."""
    numbers = extreme_blocks()
    steps_b = np.array([0.1, 3e-7, 12.5, 1.0])
    rotation, found = Rotation(SEED), {}
    for exact in (True, False):
        given = numbers.astype(np.float32)
        found[exact] = rotation.backward(given, steps_b, exact=exact)
    assert found[True].tobytes() == found[False].tobytes()
    for b, step in enumerate(steps_b):
        block = slice(b * BLOCK_VALUES, (b + 1) * BLOCK_VALUES)
        whole = plain_inverse(numbers[block].astype(np.int64))
        assert np.abs(whole).max() < 1 << 24
        expected = (whole.astype(np.float64) * (step / SIDE)).astype(np.float32)
        assert np.array_equal(
            expected, found[True][block]
        )  # Of zeros, the sign differs.


def test_the_limit_is_where_float32_begins_to_round():
    """A block whose numbers add up to more is no longer exact in it."""
    numbers = np.full(BLOCK_VALUES, 2 * MOST + 1)
    numbers[0] -= 1
    wide = Rotation(SEED).backward(numbers.astype(np.float32), np.ones(1), exact=False)
    whole = plain_inverse(numbers.astype(np.int64)).astype(np.float64) / SIDE
    assert np.array_equal(whole.astype(np.float32), wide)
    assert int(np.abs(whole * SIDE).max()) % 2 == 1  # Beyond 2^24 float32 has none.

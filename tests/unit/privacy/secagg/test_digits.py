"""Digits in words: they never carry, and whatever is no sum is refused."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support import xsa_reference
from support.examples import few

from federation.compression.rotation import BLOCK_VALUES
from federation.job.privacy_job import LEVELS
from privacy.secagg.arithmetic.digits import Digits, finest_levels
from privacy.secagg.arithmetic.ring import SumOutOfRange

FIRST_BITS = 16
COUNTS = range(2, 65)
EVERY_COUNT = pytest.mark.parametrize("num_sites", COUNTS)


def levels_of(num_sites: int) -> tuple[int, ...]:
    """Those of jobs, and those of a first round."""
    return (*LEVELS, finest_levels(num_sites, FIRST_BITS))


def packed(digits: Digits, values_d: np.ndarray) -> np.ndarray:
    words_w = np.empty(digits.num_words(values_d.size), np.uint64)
    for group in digits.groups(values_d.size):
        digits.pack(
            values_d[group.begin : group.end], words_w[group.first : group.last]
        )
    return words_w


def unpacked(digits: Digits, words_w: np.ndarray, size: int) -> np.ndarray:
    values_d = np.empty(size, np.float32)
    for group in digits.groups(size):
        part = words_w[group.first : group.last]
        digits.unpack(part, values_d[group.begin : group.end])
    return values_d


@EVERY_COUNT
def test_words_of_all_sites_never_carry(num_sites: int):
    """All at the largest digit: the sum's digits are all at theirs."""
    for levels in levels_of(num_sites):
        digits = Digits(levels=levels, num_sites=num_sites)
        assert (
            digits.base**digits.per_word
            <= 1 << 64
            < digits.base ** (digits.per_word + 1)
        )
        top = np.full(2 * BLOCK_VALUES, levels - 1, np.float32)
        one_w = packed(digits, top)
        assert max(one_w.tolist()) * num_sites < 1 << 64  # In Python: no wrap.
        found = unpacked(digits, one_w * np.uint64(num_sites), top.size)
        assert set(found) == {num_sites * (levels - 1)}


@pytest.mark.slow
@few(60)
@given(
    num_sites=st.integers(2, 64),
    choice=st.integers(0, len(LEVELS)),
    blocks=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_sum_of_words_is_the_sum_of_digits(
    num_sites: int, choice: int, blocks: int, seed: int
):
    """For groups of every length."""
    levels = levels_of(num_sites)[choice]
    digits = Digits(levels=levels, num_sites=num_sites)
    rng = np.random.default_rng(seed)
    size = blocks * BLOCK_VALUES
    rows = [rng.integers(0, levels, size).astype(np.float32) for _ in range(3)]
    most = np.full(size, levels - 1, np.float32)
    rows = (rows + [most] * num_sites)[:num_sites]
    total_w = np.zeros(digits.num_words(size), np.uint64)
    for row in rows:
        total_w += packed(digits, row)
    assert np.array_equal(sum(rows), unpacked(digits, total_w, size))
    assert np.array_equal(rows[0], unpacked(digits, packed(digits, rows[0]), size))


@pytest.mark.parametrize(
    ("levels", "num_sites", "size"),
    [(4, 4, 1), (3, 5, 18 * 4096), (256, 64, 5 * 4096), (16, 17, 9 * 4096 - 5)],
)
def test_words_are_those_of_plain_integers(levels: int, num_sites: int, size: int):
    """As another program packs them, which was written from the documentation."""
    digits = Digits(levels=levels, num_sites=num_sites)
    length = -(-size // BLOCK_VALUES) * BLOCK_VALUES
    drawn = np.random.default_rng(5).integers(0, levels, length)
    words = xsa_reference.packed(drawn.tolist(), size, digits.base)
    assert words == packed(digits, drawn.astype(np.float32)).tolist()
    assert len(words) == digits.num_words(size)


@pytest.mark.parametrize(
    ("levels", "num_sites", "per_word", "bits"),
    [(4, 4, 17, 64 / 17), (3, 4, 20, 3.2), (256, 4, 6, 64 / 6), (16, 17, 8, 8.0)],
)
def test_bits_of_a_value(levels: int, num_sites: int, per_word: int, bits: float):
    """What a run sends; the last of these fills words to the last number."""
    digits = Digits(levels=levels, num_sites=num_sites)
    assert (per_word, bits) == (digits.per_word, digits.bits_per_value)


def test_first_rounds_have_16_bits():
    """Their sums are as fine as fits, and no finer."""
    for num_sites in COUNTS:
        levels = finest_levels(num_sites, FIRST_BITS)
        assert num_sites * (levels - 1) < 1 << 16 <= num_sites * levels, num_sites
        assert Digits(levels=levels, num_sites=num_sites).per_word == 4, num_sites


@pytest.mark.parametrize("above", [0, 1, 12345])
def test_words_beyond_their_digits_are_refused(above: int):
    """base^k itself, and all above it up to 2^64."""
    digits = Digits(levels=4, num_sites=4)
    size = digits.per_word * BLOCK_VALUES
    words_w = np.zeros(digits.num_words(size), np.uint64)
    words_w[7] = digits.base**digits.per_word + above
    with pytest.raises(SumOutOfRange, match="beyond 17 digits of base 13: a site lied"):
        unpacked(digits, words_w, size)
    words_w[7] = digits.base**digits.per_word - 1
    assert unpacked(digits, words_w, size).max() == digits.base - 1


def test_digits_without_a_value_are_refused():
    """The last words of a short group have fewer values than places."""
    digits = Digits(levels=4, num_sites=4)
    words_w = packed(digits, np.zeros(BLOCK_VALUES, np.float32))
    assert words_w.size * digits.per_word > BLOCK_VALUES
    words_w[-1] = digits.base ** (digits.per_word - 1)
    with pytest.raises(SumOutOfRange, match="digits without a value"):
        unpacked(digits, words_w, BLOCK_VALUES)


@pytest.mark.parametrize(
    ("levels", "num_sites", "said"),
    [(1, 4, "have no sum"), (4, 1, "have no sum"), (1 << 40, 1 << 30, "overflow")],
)
def test_levels_without_a_sum_are_refused(levels: int, num_sites: int, said: str):
    """Fewer than two of either, and more than a word has room for."""
    with pytest.raises(ValueError, match=said):
        Digits(levels=levels, num_sites=num_sites)

"""Poisson sampling: the threshold, its edges and the distribution."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from support.noise_oracles import ChosenWords

from privacy.dp.poisson import poisson_indices
from privacy.keystream import Keystream

KEY = bytes(range(32))


@pytest.mark.parametrize("rate", [0.02, 0.5, 1 / 3, 2.0**-40, 1 - 2.0**-53])
def test_record_is_chosen_below_the_exact_threshold(rate: float):
    """The word floor(rate 2^64) is the first that leaves its record out."""
    threshold = math.floor(Fraction(rate) * 2**64)
    stream = ChosenWords([threshold, threshold - 1, (1 << 64) - 1, 0])
    assert poisson_indices(4, rate, stream).tolist() == [1, 3]


@pytest.mark.parametrize("num_records", [0, 1, 16_384, 16_385, 40_000])
def test_rates_zero_and_one_leave_nothing_to_chance(num_records: int):
    """Nobody, and everybody in order."""
    none = poisson_indices(num_records, 0.0, Keystream(KEY))
    every = poisson_indices(num_records, 1.0, Keystream(KEY))
    assert none.tolist() == []
    assert every.tolist() == list(range(num_records))
    assert none.dtype == every.dtype == np.int64


def test_records_go_by_their_own_word():
    """Across chunks: record i is chosen by the stream's i-th 64 bits."""
    num_records, rate = 50_000, 0.3
    raw = np.empty(8 * num_records + 15, np.uint8)
    Keystream(KEY).read_into(raw, 8 * num_records)
    words = raw[: 8 * num_records].view("<u8").tolist()
    threshold = math.floor(Fraction(rate) * 2**64)
    expected = [i for i, word in enumerate(words) if word < threshold]
    assert expected == poisson_indices(num_records, rate, Keystream(KEY)).tolist()


def test_counts_are_binomial():
    """Chi-square of 4,000 counts in ten bins, key fixed: false alarm 2e-4."""
    stream, num_records, rate = Keystream(KEY), 1000, 0.02
    counts = [poisson_indices(num_records, rate, stream).size for _ in range(4000)]
    edges = np.concatenate([[-1], np.arange(14, 27, 1.5) // 1, [num_records]])
    expected = 4000 * np.diff(stats.binom.cdf(edges, num_records, rate))
    found = np.diff([sum(c <= edge for c in counts) for edge in edges])
    chi2 = ((found - expected) ** 2 / expected).sum()
    assert 1e-4 < stats.chi2.sf(chi2, expected.size - 1) < 1 - 1e-4


def test_draws_follow_each_other_in_the_stream():
    """Two draws from one stream are not the same draw."""
    stream = Keystream(KEY)
    first, second = (poisson_indices(1000, 0.5, stream).tolist() for _ in range(2))
    assert first != second


@pytest.mark.parametrize("rate", [-0.1, 1.0001, math.nan, math.inf])
def test_rate_out_of_range_is_refused(rate: float):
    """The message names the rate."""
    with pytest.raises(ValueError, match=f"{rate}"):
        poisson_indices(10, rate, Keystream(KEY))


def test_negative_number_of_records_is_refused():
    """The message names the number."""
    with pytest.raises(ValueError, match="-1"):
        poisson_indices(-1, 0.5, Keystream(KEY))

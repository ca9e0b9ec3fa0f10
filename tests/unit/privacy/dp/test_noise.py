"""Rounded Gaussians: exact weights and tables, then statistics of 2^24 draws.

Keys are fixed, so that no test fails by chance; the stated rates are those at which
a correct sampler would have failed when the keys were chosen.
"""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from support import noise_oracles
from support.noise_oracles import ChosenWords

from privacy.dp import noise
from privacy.dp.mechanism import GaussianMechanism
from privacy.dp.noise import RoundedGaussian, half_weights, truncation_distance
from privacy.keystream import Keystream, open_keystream

KEYS = [bytes([k]) * 32 for k in range(8)]
DRAWS = 1 << 24


def _draw(sigma: float, key: bytes = KEYS[0], size: int = DRAWS) -> np.ndarray:
    values = np.zeros(size, np.int32)
    gaussian = RoundedGaussian(sigma=sigma)
    num_bytes = size * gaussian.bytes_per_draw
    gaussian.add_(values, open_keystream(key, num_bytes=num_bytes))
    return values


def _chi2_p(found: np.ndarray, expected: np.ndarray) -> float:
    """Tail probability of Pearson's statistic."""
    chi2 = ((found - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(chi2, found.size - 1))


@pytest.mark.parametrize("sigma", [0.5, 0.731, 1.0, 4.0, 63.7, 632.5, 1024.0])
def test_weights_are_the_distribution_to_one_unit(sigma: float):
    """Against differences of erfc with 80 digits, in the body and far in the tail."""
    weights = half_weights(sigma)
    assert sum(weights) == 1 << 127
    for k in {1, 2, 3, *(int(f * sigma) for f in (0.5, 1, 2, 5, 9, 12.9, 13.5))} - {0}:
        exact = noise_oracles.rounded_pmf(sigma, k) * 2**128
        assert 0 <= exact - weights[k] < 1
    centre = noise_oracles.rounded_pmf(sigma, 0) * 2**128
    assert abs(2 * weights[0] - centre) < truncation_distance(sigma) * 2**128


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0, 64.0, 682.0])
def test_table_holds_exactly_the_weights(sigma: float):
    """Adding up what the cells give to every value gives the weights back."""
    table, weights = noise._table(sigma), half_weights(sigma)
    num_cells = table.thresholds_m.size
    bits = num_cells.bit_length() - 1
    capacity = 1 << (128 - bits)
    found: dict[int, int] = {}
    for cell in range(num_cells):
        assert int(table.thresholds_m[cell]) % num_cells == cell
        high = int(table.thresholds_m[cell]) >> bits
        threshold = (high << 64) + int(table.low_m[cell])
        for part, value in (
            (threshold, table.values_2m[cell]),
            (capacity - threshold, table.values_2m[num_cells + cell]),
        ):
            found[int(value)] = found.get(int(value), 0) + part
    expected = {k: w for k, w in enumerate(weights) if w} | {
        -k: w for k, w in enumerate(weights) if w
    }
    expected[0] = 2 * weights[0]
    assert expected == {k: part for k, part in found.items() if part}


def test_tie_is_settled_by_the_next_word():
    """A word equal to its threshold so far goes by 64 further bits, once per tie."""
    table = noise._table(4.0)
    cell = next(c for c in range(20) if table.low_m[c] > 1 << 32)
    own = table.values_2m[cell]
    other = table.values_2m[table.thresholds_m.size + cell]
    threshold, low = int(table.thresholds_m[cell]), int(table.low_m[cell])
    assert own != other
    values = np.zeros(2, np.int32)
    stream = ChosenWords([threshold, threshold, low - 1, low])
    RoundedGaussian(sigma=4.0).add_(values, stream)
    assert [own, other] == values.tolist()


def test_word_beside_its_threshold_is_no_tie():
    """One step of the fraction below is the cell's own value, one above its alias."""
    table = noise._table(4.0)
    cell, num_cells = 5, table.thresholds_m.size
    threshold = int(table.thresholds_m[cell])
    values = np.zeros(2, np.int32)
    stream = ChosenWords([threshold - num_cells, threshold + num_cells])
    RoundedGaussian(sigma=4.0).add_(values, stream)
    own, other = table.values_2m[cell], table.values_2m[num_cells + cell]
    assert [own, other] == values.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [4.0, 682.0, 1024.0, 1.0e5, 2.0**26])
def test_variance_of_many_draws(sigma: float):
    """Within 0.25 %, seven standard errors: false alarm 3e-12."""
    gaussian = RoundedGaussian(sigma=sigma)
    draws = _draw(sigma).astype(np.float64)
    assert abs(draws @ draws / DRAWS / gaussian.variance - 1) < 0.0025
    assert abs(draws.mean()) < 6 * math.sqrt(gaussian.variance / DRAWS)
    assert np.abs(draws).max() <= gaussian.largest


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.5, 4.0, 64.0, 682.0])
def test_frequencies_of_many_draws(sigma: float):
    """Chi-square over all values, the tails together: false alarm 2e-4."""
    draws = _draw(sigma, KEYS[1])
    reach = int(3 * sigma)
    edges = np.arange(-reach, reach + 2) - 0.5
    edges[[0, -1]] = -np.inf, np.inf
    expected = DRAWS * np.diff(stats.norm.cdf(edges / sigma))
    clipped = np.clip(draws, -reach, reach) + reach
    found = np.bincount(clipped, minlength=expected.size)
    assert expected.min() > 10
    assert 1e-4 < _chi2_p(found, expected) < 1 - 1e-4


@pytest.fixture(scope="module", params=[1025.0, 1.0e5, 2.0**26])
def of_levels(request: pytest.FixtureRequest) -> tuple[float, np.ndarray]:
    """A deviation that takes several levels, and draws."""
    return request.param, _draw(request.param, KEYS[2])


@pytest.mark.slow
def test_levels_leave_no_trace_of_the_spacing(of_levels: tuple[float, np.ndarray]):
    """Uniform modulo the coarse level's spacing: chi-square, false alarm 2e-4."""
    sigma, draws = of_levels
    spacing = noise._levels(sigma)[0][0]
    found = np.bincount(draws % spacing, minlength=spacing)
    assert 1e-4 < _chi2_p(found, np.full(spacing, DRAWS / spacing)) < 1 - 1e-4


@pytest.mark.slow
def test_levels_together_are_gaussian(of_levels: tuple[float, np.ndarray]):
    """Chi-square in 256 bins: false alarm 2e-4."""
    sigma, draws = of_levels
    std = math.sqrt(RoundedGaussian(sigma=sigma).variance)
    # Bins of whole cells, which a shift finds: a search would take ten times as long.
    bits = max(0, round(math.log2(std / 1024)))
    cells = draws >> bits
    counts = np.bincount(cells - cells.min())
    first = np.rint(std * stats.norm.ppf(np.arange(1, 256) / 256) / 2**bits)
    starts = [0, *(first.astype(int) - cells.min())]
    found = np.add.reduceat(counts, starts)
    edges = np.concatenate([[-np.inf], first * 2**bits - 0.5, [np.inf]])
    expected = DRAWS * np.diff(stats.norm.cdf(edges / std))
    assert 1e-4 < _chi2_p(found, expected) < 1 - 1e-4


@pytest.mark.parametrize("sigma", [1024.5, 1.0e5, 3.3e6, 2.0**26])
def test_levels_add_up_to_what_was_asked(sigma: float):
    """Never less, hardly more, and with the finer level wide enough."""
    gaussian = RoundedGaussian(sigma=sigma)
    levels = noise._levels(sigma)
    exact = mpmath.sqrt(sum(mpmath.mpf(k) ** 2 * mpmath.mpf(s) ** 2 for k, s in levels))
    assert exact >= gaussian.std >= sigma > gaussian.std * (1 - 1e-12)
    assert levels[-1][0] == 1
    assert all(s <= 1024 for _, s in levels)
    for index, (k, s) in enumerate(levels[:-1]):
        finer = sum((j * r) ** 2 for j, r in levels[index + 1 :])
        assert 2 * math.pi**2 / (k**2 / finer + 1 / s**2) > 250 * math.log(2)


@pytest.mark.parametrize(
    ("first", "factor", "second"), [(1.0, 2, 1.5), (1.0, 3, 2.0), (1.5, 2, 3.0)]
)
def test_combination_is_within_its_bound(first: float, factor: int, second: float):
    """``k R1 + R2`` against ``round(N + k U)``, where the distance can be seen."""
    ratio = (first * second) ** 2 / ((factor * first) ** 2 + second**2)
    bound = 1.01 * mpmath.exp(-2 * mpmath.pi**2 * ratio)
    assert bound / 100 < noise_oracles.combined_distance(first, factor, second) <= bound


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_sum_of_two_sites_noise_is_a_rounded_gaussian(sigma: float):
    """The sum is ``round(N(0, 2 sigma^2) + U)`` but for ``exp(-pi^2 sigma^2)``."""
    bound = mpmath.exp(-((mpmath.pi * sigma) ** 2))
    distance = noise_oracles.combined_distance(sigma, 1, sigma)
    assert bound / 100 < distance <= bound


@pytest.mark.slow
def test_noise_of_other_keys_and_of_later_draws_is_unrelated():
    """Correlations of 2^24 draws below 5 / sqrt(D): false alarm 6e-7 each."""
    sigma = 682.0
    stream = open_keystream(KEYS[3], num_bytes=16 * DRAWS)
    draws = [np.zeros(DRAWS, np.int32) for _ in range(2)]
    for values in draws:
        RoundedGaussian(sigma=sigma).add_(values, stream)
    draws.append(_draw(sigma, KEYS[4]))
    draws = [values.astype(np.float64) for values in draws]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        correlation = draws[a] @ draws[b] / DRAWS / sigma**2
        assert abs(correlation) < 5 / math.sqrt(DRAWS)


@pytest.mark.slow
def test_sites_with_the_same_seeds_draw_unrelated_noise():
    """What torch and NumPy are seeded with has no part in it: false alarm 6e-7."""
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1.0, size=DRAWS)
    sums = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)  # noqa: NPY002  # This is what a careless site would do.
        sums.append(np.zeros(DRAWS, np.float32))
        mechanism.release_(sums[-1])
    correlation = np.corrcoef(*sums)[0, 1]  # type: ignore[call-overload]
    assert abs(correlation) < 5 / math.sqrt(DRAWS)


def test_noise_is_added_modulo_the_word():
    """Words of a ring wrap; what is there already stays below the noise."""
    start = np.array([0, 1, (1 << 32) - 1, 1 << 31] * 5000, np.uint32)
    words = start.copy()
    RoundedGaussian(sigma=1.0e5).add_(words, Keystream(KEYS[5]))
    alone = _draw(1.0e5, KEYS[5], words.size)
    expected = (start.astype(np.int64) + alone) % (1 << 32)
    assert expected.tolist() == words.tolist()


def test_longest_draw_leaves_room_for_a_value():
    """The largest noise and a value of 30 bits fit in a signed word."""
    assert RoundedGaussian(sigma=noise.MAX_SIGMA).largest + (1 << 30) + 1 < 1 << 31


@pytest.mark.parametrize("sigma", [0.0, -1.0, 0.49, 2.0**26 + 1, math.nan, math.inf])
def test_sigma_out_of_range_is_refused(sigma: float):
    """Before any table is built."""
    with pytest.raises(ValueError, match="standard deviation"):
        RoundedGaussian(sigma=sigma)


@pytest.mark.parametrize(
    "values", [np.zeros(3, np.int64), np.zeros(3, np.float32), np.zeros((2, 2), "i4")]
)
def test_other_arrays_are_refused(values: np.ndarray):
    """Noise in the wrong width would be no noise."""
    with pytest.raises(ValueError, match="int32 or uint32"):
        RoundedGaussian(sigma=4.0).add_(values, Keystream(KEYS[0]))

"""What the page on differential privacy says that mistakes cost, computed again.

Every figure is computed from the product's accountant, or, where a mistake is no
Poisson-sampled Gaussian, from a privacy loss distribution made here.
"""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as distributions
from numpy.typing import NDArray
from scipy import stats

from privacy.dp import accountant
from privacy.dp.calibration import noise_multiplier
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import SLACK
from privacy.secagg.agreement.contract import smallest_threshold

PAGE = Path(__file__).resolve().parents[4] / "docs/explanation/differential-privacy.md"
RATE, STEPS, DELTA = 0.02, 2000, 1e-6
EPOCHS, BATCHES = 40, 50
NOISE = 0.8925  # of the run that serves for all


def _epsilon(
    noise: float, rate: float = RATE, steps: int = STEPS, delta: float = DELTA
) -> float:
    event = PrivacyEvent(
        noise_multiplier=noise, sampling_rate=rate, steps=steps, slack=SLACK
    )
    return accountant.epsilon([event], delta)


def _cells(start: str) -> list[str]:
    """The cells of a table's row, found by how it begins."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in lines if line.startswith(f"| {start}"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def _composed(
    pmf: NDArray[np.float64], other: NDArray[np.float64], times: int
) -> float:
    """Epsilon that pairs of distributions have at the least."""
    logs = [
        {k: math.log(p) for k, p in enumerate(each.tolist()) if p > 0}
        for each in (other, pmf)
    ]
    pair = distributions.from_two_probability_mass_functions(
        logs[0], logs[1], pessimistic_estimate=False, value_discretization_interval=1e-4
    )
    return float(pair.self_compose(times).get_epsilon_for_delta(DELTA))


def test_run_that_serves_for_all():
    """Epsilon 8 takes the multiplier that the page names."""
    found = noise_multiplier(8, DELTA, RATE, STEPS, slack=SLACK)
    assert pytest.approx(NOISE, rel=1e-3) == found
    assert f"{_epsilon(NOISE):.2f}" == "8.00"


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ("Batches of a list in known order", lambda: _epsilon(NOISE, 1, EPOCHS)),
        ("The sample drawn from", lambda: _epsilon(NOISE, 1, EPOCHS)),
        ("The best of ten runs", lambda: _epsilon(NOISE, steps=10 * STEPS)),
        ("A second run", lambda: _epsilon(NOISE, steps=2 * STEPS)),
        ("Joint noise over several", lambda: _epsilon(0.8)),
        ("Joint noise of two", lambda: _epsilon(0.8)),
    ],
)
def test_cost_of_a_mistake(row: str, want: Callable[[], float]):
    """Figures with one digit."""
    assert re.search(rf"\b{want():.1f}\b", _cells(row)[1])


@pytest.mark.parametrize(
    ("row", "column", "want"),
    [
        ("Joint noise over several", 0, lambda: _epsilon(0.8 * math.sqrt(5))),
        ("Joint noise of two", 0, lambda: _epsilon(0.8 * math.sqrt(2))),
        ("A tenth of the steps", 1, lambda: _epsilon(NOISE, steps=11 * STEPS // 10)),
        ("Sums in float32", 1, lambda: _epsilon(NOISE / 1.008)),
        ("Clipping in float32", 1, lambda: _epsilon(NOISE / 1.001)),
        ("Delta 1e-3", 1, lambda: _epsilon(NOISE, delta=1e-3)),
    ],
)
def test_cost_of_a_small_mistake(row: str, column: int, want: Callable[[], float]):
    """Figures with two digits."""
    assert re.search(rf"\b{want():.2f}\b", _cells(row)[column])


def test_batch_normalisation_leaves_nothing():
    """A record's own part, and twice C for each of the others."""
    assert math.isinf(_epsilon(NOISE / (1 + 2 * BATCHES * STEPS / 100)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("records", "want", "interval"), [(2, "18.2", 5e-3), (10, "161.6", 1e-2)]
)
def test_records_of_one_person(records: int, want: str, interval: float):
    """All together: a mixture of Gaussians by how many of them are in a step."""
    weights = stats.binom.pmf(range(records + 1), records, RATE)
    loss = distributions.from_mixture_gaussian_mechanism(
        NOISE,
        list(range(records + 1)),
        weights.tolist(),
        value_discretization_interval=interval,
    )
    found = loss.self_compose(STEPS).get_epsilon_for_delta(DELTA)
    assert f"{found:.1f}" == want
    assert want in _cells("Ten records of one person")[1]


@pytest.mark.slow
def test_shuffled_batches_are_not_poisson():
    """The largest sum of an epoch alone: others -C, the record C or nothing.

    Seen from where the others are, all sums are 0 but the record's: 2 C with it, C
    without.
    """
    edges = np.concatenate([[-np.inf], np.linspace(-8, 10, 4001), [np.inf]]) / NOISE

    def largest(shift: float) -> NDArray[np.float64]:
        below = (BATCHES - 1) * stats.norm.logcdf(edges)
        above = -np.expm1(below + stats.norm.logcdf(edges - shift / NOISE))
        return np.maximum(-np.diff(above), 0)

    found = _composed(largest(2), largest(1), EPOCHS)
    row = _cells("Batches of a shuffled list")[1]
    assert row == f"at least {found:.1f}, at most {_epsilon(NOISE, 1, EPOCHS):.1f}"


@pytest.mark.slow
def test_batches_of_a_fixed_size_are_not_poisson():
    """One record replaced by its opposite, in a sample of a fixed share."""
    edges = np.concatenate([[-np.inf], np.linspace(-9, 9, 3001), [np.inf]])

    def gaussian(mean: float) -> NDArray[np.float64]:
        z = (edges - mean) / NOISE
        lower, upper = np.diff(stats.norm.cdf(z)), -np.diff(stats.norm.sf(z))
        return np.where(z[:-1] > 0, upper, lower)

    one, other = (
        (1 - RATE) * gaussian(0) + RATE * gaussian(mean) for mean in (1.0, -1.0)
    )
    found = _composed(one, other, STEPS)
    stated = float(_cells("Batches of a fixed size")[1].split()[2].rstrip(":"))
    assert stated <= found < stated + 0.1


def _ring_of_16_bits(size: int) -> float:
    """Epsilon if half of the ring is for the noise of 4 sites, of which 2 count.

    Rounding adds to the sensitivity as the page has it for one site.
    """
    noise_std = (2**15 - 1) / 2 / (12 * math.sqrt(4))
    step = 4 / (noise_std * math.sqrt(2))  # of C: multiplier 4
    likely = math.sqrt(2 * math.log(2**61)) * step * (1 + step * math.sqrt(size) / 2)
    inflation = min(
        1 + step * math.sqrt(size), math.sqrt(1 + step**2 * size / 4 + likely)
    )
    return _epsilon(4 / inflation, 1, 100, 1e-5)


def test_a_coarse_ring_wastes_the_noise():
    """Far beyond what the same noise is worth on a fine grid."""
    said, found, _ = _cells("A ring of 16 bits")
    assert f"{_epsilon(4, 1, 100, 1e-5):.1f} at delta" in said
    assert found.startswith(f"{_ring_of_16_bits(10**6):.1f} for a million")
    assert math.isinf(_ring_of_16_bits(10**8))


def test_noise_in_floating_point_tells_which_sum_it_hides():
    """How many released values are no float32 sum of 1 and anything."""
    draws = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32)
    released = draws * np.float32(NOISE)
    one, near = np.float32(1), released - np.float32(1)
    reachable = np.zeros(released.shape, bool)
    for noise in (
        near,
        np.nextafter(near, np.float32(-9)),
        np.nextafter(near, np.float32(9)),
    ):
        reachable |= one + noise == released
    assert f"{100 * (1 - reachable.mean()):.0f} %" in _cells("Noise in floating")[1]


def test_epsilon_of_joint_noise():
    """The row of epsilons: shares that count, of sites with a multiplier of 0.8."""
    sites = [int(cell) for cell in _cells("N | 2 | 4 | 8")[1:]]
    shares = [max(1, smallest_threshold(num) - 1) for num in sites]
    assert [int(cell) for cell in _cells("h |")[1:]] == shares
    found = [f"{_epsilon(0.8 * math.sqrt(share)):.2f}" for share in shares]
    assert _cells("epsilon where each site alone")[1:] == found


def test_signal_to_noise_of_whole_sites():
    """sqrt(N (N - 1)) / (z sqrt d) for the z of 100 rounds."""
    noise = noise_multiplier(8, 1e-3, 1, 100)
    assert f"{noise:.2f}" == "4.80"
    sizes = [10, 330, 1000, 10**6]
    for num in (2, 16, 64):
        row = [float(cell) for cell in _cells(f"{num} | ")[1:]]
        counted = math.sqrt(num * (num - 1))
        found = [counted / (noise * math.sqrt(size)) for size in sizes]
        assert row == pytest.approx(found, rel=0.3, abs=5e-5)
        assert row[0] == pytest.approx(found[0], abs=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "event", [(NOISE, RATE, STEPS, DELTA), (0.7, 0.001, 10_000, 1e-6)]
)
def test_what_another_accountant_would_hide(event: Sequence[float]):
    """Opacus's approximation by the central limit theorem, which is used nowhere."""
    from opacus.accountants import GaussianAccountant  # noqa: PLC0415 - slow.

    noise, rate, steps, delta = event
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says itself that it is none too exact.
        approximate = GaussianAccountant()
        approximate.history = [(noise, rate, int(steps))]
        hidden = approximate.get_epsilon(delta)
    exact = _epsilon(noise, rate, int(steps), delta)
    assert f"{hidden:.2f} for {exact:.2f}" in _cells("Opacus's `gdp`")[1]

"""The best of a random number of trials: its cost, and the draw of the number."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from privacy.dp import accountant
from privacy.dp.calibration import noise_multiplier
from privacy.dp.events import PrivacyEvent
from privacy.dp.mechanism import GaussianMechanism
from privacy.dp.selection import DISTRIBUTIONS, RandomTrials, epsilon_of_best

# Without sampling, which is quick to account for.
EVENT = PrivacyEvent(noise_multiplier=20.0, sampling_rate=1.0, steps=30)
ORDERS = np.array([1.5, 2.0, 8.0, 64.0, 1e6, 1e9])
HOWTO = Path(__file__).parents[4] / "docs/howto/tune.md"
SHAPES = {"logarithmic": 0, "geometric": 1}


def no_deltas(_: np.ndarray) -> np.ndarray:
    raise AssertionError("only a Poisson number of trials needs them")


@pytest.mark.parametrize("distribution", SHAPES)
def test_pure_privacy_costs_what_the_papers_say(distribution: str):
    """(2 + eta) epsilon: Papernot and Steinke, Corollary 3."""
    trials = RandomTrials(distribution=distribution, mean=30)
    pure = np.full_like(ORDERS, 0.1)
    found = trials.renyi_of_best(ORDERS, pure, no_deltas)
    assert found[-1] == pytest.approx((2 + SHAPES[distribution]) * 0.1, abs=1e-6)
    assert (
        np.diff(found) <= 0
    ).all()  # The number of trials costs less at high orders.


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("mean", [2.0, 300.0])
def test_epsilon_is_that_of_another_implementation(distribution: str, mean: float):
    """Of dp-accounting, which for Poisson takes a looser delta than ours."""
    orders, _ = accountant.renyi([EVENT])
    other = RdpAccountant(orders=orders)
    step = dp_accounting.PoissonSampledDpEvent(
        EVENT.sampling_rate, dp_accounting.GaussianDpEvent(EVENT.noise_multiplier)
    )
    run = dp_accounting.SelfComposedDpEvent(step, EVENT.steps)
    shape = SHAPES.get(distribution, math.inf)
    other.compose(dp_event.RepeatAndSelectDpEvent(run, mean, shape))
    delta = 1e-5
    found = epsilon_of_best(
        [EVENT], delta, RandomTrials(distribution=distribution, mean=mean)
    )
    # Ours leaves a part of delta to the slack of the noise.
    expected = other.get_epsilon(delta * (1 - 2**-6))
    if distribution == "poisson":
        assert 0.5 * expected < found <= expected + 1e-9
    else:
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_best_costs_more_than_one_trial_and_less_than_all():
    """And more with a larger number of trials."""
    one = accountant.epsilon([EVENT], 1e-5, "rdp")
    all_of_them = accountant.epsilon([EVENT] * 30, 1e-5)
    for distribution in DISTRIBUTIONS:
        few, many = (
            epsilon_of_best(
                [EVENT], 1e-5, RandomTrials(distribution=distribution, mean=mean)
            )
            for mean in (3, 30)
        )
        assert one < few < many < all_of_them


def test_what_the_how_to_says_of_ten_trials():
    """The row of its table: trials of epsilon 1, with 1,000 sampled steps."""
    noise = noise_multiplier(1.0, 1e-5, sampling_rate=0.02, steps=1000)
    trial = PrivacyEvent(noise_multiplier=noise, sampling_rate=0.02, steps=1000)
    found = (
        epsilon_of_best([trial], 1e-5, RandomTrials(distribution=name, mean=10))
        for name in ("logarithmic", "geometric", "poisson")
    )
    cells = " | ".join(f"{epsilon:.2f}" for epsilon in found)
    assert f"| 10 | {cells} |" in HOWTO.read_text("utf-8")


def test_slack_that_uses_up_delta_bounds_nothing():
    """It adds up over the trials, in both directions; no release costs nothing."""
    trials = RandomTrials(distribution="geometric", mean=10)
    slack = replace(EVENT, slack=1e-9)
    assert epsilon_of_best([slack], 1e-5, trials) == math.inf
    assert epsilon_of_best([], 1e-5, trials) == 0.0


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_probabilities_add_up_to_one_and_have_the_mean(distribution: str):
    """Of which the bounds are computed."""
    trials = RandomTrials(distribution=distribution, mean=7)
    table = list(itertools.islice(trials._probabilities(), 500))
    assert float(sum(p for _, p in table)) == pytest.approx(1.0, abs=1e-9)
    assert float(sum(k * p for k, p in table)) == pytest.approx(7.0, abs=1e-6)
    assert table[0][0] == (0 if distribution == "poisson" else 1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_number_is_drawn_by_its_distribution(distribution: str):
    """At evenly spaced points of its distribution function, and at both ends."""
    trials = RandomTrials(distribution=distribution, mean=4)
    points = [((2 * i + 1) << 255) // 200 for i in range(200)]
    drawn = [trials.draw(lambda _, p=p: p.to_bytes(32, "big")) for p in points]
    assert drawn == sorted(drawn)
    assert np.mean(drawn) == pytest.approx(4, abs=0.2)
    assert trials.draw(bytes) == (0 if distribution == "poisson" else 1)
    assert trials.draw(lambda size: b"\xff" * size) > 30


@pytest.mark.parametrize("mean", [150.0, 10_000.0])
def test_a_poisson_number_is_near_a_large_mean(mean: float):
    """Although the chance of no trial at all is then too small for 60 digits."""
    trials = RandomTrials(distribution="poisson", mean=mean)
    middle = trials.draw(lambda size: b"\x80" + bytes(size - 1))
    assert middle == pytest.approx(mean, abs=1)


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [("fixed", 10.0), ("geometric", 1.0), ("geometric", math.nan), ("poisson", 1e6)],
)
def test_numbers_without_a_bound_are_refused(distribution: str, mean: float):
    """A number of trials that is fixed, for one."""
    with pytest.raises(ValueError, match="not"):
        RandomTrials(distribution=distribution, mean=mean)


def test_noise_in_force_follows_the_clip_norm_by_less_than_the_margin():
    """What a search with other clip norms relies on: 2^-10 of the noise."""
    found = [
        GaussianMechanism(
            clip_norm=clip_norm, noise_multiplier=1.25, size=size
        ).effective_multiplier
        for clip_norm in (1e-6, 0.05, 0.3, 1.0, 1.9, 7.0, 1e3)
        for size in (1, 1000, 10**8)
    ]
    assert min(found) >= 1.25
    assert max(found) * (1 - 2**-10) <= 1.25

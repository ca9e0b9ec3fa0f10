"""Trade-off curves: against the closed form, sampling, and single pairs."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent
from privacy.dp.trade_off import EPSILONS, TradeOff

RATES = np.array([0.0, 1e-6, 1e-4, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999, 1.0])
SAMPLED = PrivacyEvent(noise_multiplier=2.5, sampling_rate=0.39, steps=120)


def released(noise: float, steps: int = 1) -> PrivacyEvent:
    return PrivacyEvent(noise_multiplier=noise, sampling_rate=1.0, steps=steps)


@pytest.mark.parametrize("noise", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 9])
def test_curve_of_releases_is_that_of_the_gaussian(noise: float, steps: int):
    """arXiv:1905.02383, equation 6; a bound from above, and within a percent."""
    found = accountant.trade_off([released(noise * math.sqrt(steps), steps)])
    exact = norm.cdf(norm.ppf(RATES) + 1 / noise)
    curve = found.most_true_positives(RATES)
    assert (curve >= exact - 1e-12).all()
    assert curve[2:] == pytest.approx(exact[2:], rel=0.01)


def test_curve_holds_where_the_ledger_s_epsilon_does():
    """Each pair of the accountant's own is a point that the curve does not exceed."""
    curve = accountant.trade_off([SAMPLED])
    for delta in (1e-8, 1e-5, 1e-3, 0.1):
        epsilon = accountant.epsilon([SAMPLED], delta)
        allowed = np.exp(epsilon) * RATES + delta
        # As many pairs as the curve has are a little looser between them.
        assert (curve.most_true_positives(RATES) <= 1.03 * allowed + 1e-9).all()


def test_no_attack_on_a_sampled_mechanism_exceeds_its_curve():
    """The likelihood ratio of all steps is the best attack there is."""
    rng = np.random.default_rng(1)
    noise, rate, steps, runs = 1.5, 0.3, 20, 40_000
    event = PrivacyEvent(noise_multiplier=noise, sampling_rate=rate, steps=steps)

    def ratios(*, is_in: bool) -> np.ndarray:
        seen = noise * rng.normal(size=(runs, steps))
        if is_in:
            seen += rng.random((runs, steps)) < rate
        shifted = np.exp((seen - 0.5) / noise**2)
        return np.log1p(rate * (shifted - 1)).sum(axis=1)

    inside, out = np.sort(ratios(is_in=True)), np.sort(ratios(is_in=False))
    curve = accountant.trade_off([event])
    for share in (0.001, 0.01, 0.1, 0.5, 0.9):
        threshold = out[int((1 - share) * runs)]
        hits = (inside >= threshold).mean()
        allowed = float(curve.most_true_positives(np.array([share]))[0])
        error = math.sqrt(hits * (1 - hits) / runs) + math.sqrt(share / runs)
        assert hits < allowed + 5 * error
        assert hits > 0.8 * allowed - 5 * error


def test_inverse_is_the_inverse():
    """Where the curve is neither 0 nor 1."""
    curve = accountant.trade_off([SAMPLED])
    rates = np.linspace(0.001, 0.5, 20)
    for rate, hits in zip(rates, curve.most_true_positives(rates), strict=True):
        assert curve.least_false_positives(float(hits)) == pytest.approx(rate)
    assert curve.least_false_positives(0.0) == 0.0


def test_more_is_allowed_with_less_noise_more_steps_and_more_slack():
    """From end to end."""
    usual = accountant.trade_off([SAMPLED]).most_true_positives(RATES)
    for event in (
        PrivacyEvent(noise_multiplier=1.25, sampling_rate=0.39, steps=120),
        PrivacyEvent(noise_multiplier=2.5, sampling_rate=0.39, steps=240),
        PrivacyEvent(noise_multiplier=2.5, sampling_rate=0.6, steps=120),
        PrivacyEvent(noise_multiplier=2.5, sampling_rate=0.39, steps=120, slack=1e-5),
    ):
        more = accountant.trade_off([event]).most_true_positives(RATES)
        assert (more >= usual).all()
        assert (more > usual).any()


def test_nothing_released_allows_guessing_and_no_noise_allows_all():
    """The two ends."""
    nothing = accountant.trade_off([])
    assert nothing.most_true_positives(RATES) == pytest.approx(RATES, abs=1e-9)
    everything = accountant.trade_off([released(0.001)])
    assert (everything.most_true_positives(RATES) == 1).all()
    assert TradeOff(np.ones_like(EPSILONS)).least_false_positives(1.0) == 0.0

"""Noise is as much as the target needs, and advice can be followed to the letter."""

import math
import re

import pytest

from federation.errors import JobError
from privacy.dp import accountant, budget, calibration
from privacy.dp.errors import PrivacyUnreachable
from privacy.dp.events import PrivacyEvent


def spent(noise: float, rate: float, steps: int, delta: float) -> float:
    found = PrivacyEvent(noise_multiplier=noise, sampling_rate=rate, steps=steps)
    return accountant.epsilon([found], delta)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "want"), [(1, 3.90), (3, 1.58), (8, 0.892)])
def test_published_multipliers(target: float, want: float):
    """q = 0.02, 2,000 steps, delta = 1e-6; half a percent."""
    found = calibration.noise_multiplier(target, 1e-6, 0.02, 2000)
    assert found == pytest.approx(want, rel=0.005)
    assert target * 0.999 <= spent(found, 0.02, 2000, 1e-6) <= target


@pytest.mark.parametrize("target", [0.1, 1.0, 10.0])
def test_whole_batches_are_calibrated_too(target: float):
    """Without sampling it is the Gaussian mechanism."""
    found = calibration.noise_multiplier(target, 1e-5, 1.0, 10)
    assert target * 0.999 <= spent(found, 1.0, 10, 1e-5) <= target


def test_large_targets_get_the_least_noise():
    """There is an end to how little is given."""
    found = calibration.noise_multiplier(400.0, 1e-3, 1.0, 1)
    assert found == calibration.MIN_NOISE_MULTIPLIER


@pytest.mark.slow
def test_advice_reaches_the_target():
    """Each way that the message names, by itself."""
    target, delta, rate, steps = 0.1, 1e-5, 0.5, 1000
    with pytest.raises(PrivacyUnreachable, match="cannot be reached") as caught:
        calibration.noise_multiplier(target, delta, rate, steps)
    text = str(caught.value)
    assert isinstance(caught.value, JobError)
    assert caught.value.key == "privacy.differential_privacy.target_epsilon"
    found = re.search(
        r"at least ([\d.]+); or at most (\d+) steps.*; or ([\d.]+) times as many", text
    )
    assert found is not None, text
    enough, fewer, times = float(found[1]), int(found[2]), float(found[3])
    calibration.noise_multiplier(enough, delta, rate, steps)
    calibration.noise_multiplier(target, delta, rate, fewer)
    calibration.noise_multiplier(target, delta, rate / times, steps)


def test_slack_can_use_up_delta():
    """No noise helps, and the message says what does."""
    with pytest.raises(PrivacyUnreachable, match="at most 50 steps") as caught:
        calibration.noise_multiplier(1.0, 1e-5, 0.1, 100, slack=1e-7)
    assert "at least 2e-05" in str(caught.value)
    calibration.noise_multiplier(1.0, 1e-5, 1.0, 49, slack=1e-7)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_targets_are_positive(target: float):
    """Refused otherwise."""
    with pytest.raises(ValueError, match="epsilon_cap"):
        calibration.noise_multiplier(target, 1e-5, 0.1, 10)


@pytest.mark.parametrize(
    ("records", "want"),
    [(1, 0.1), (10, 0.01), (1437, 6e-5), (180_000, 5e-7), (10**6, 1e-7), (11, 9e-3)],
)
def test_default_delta_is_the_rule_rounded_down(records: int, want: float):
    """To one digit, and itself accepted."""
    assert budget.default_delta(records) == want
    budget.check_delta(want, records)


def test_too_large_a_delta_is_refused():
    """The message names the largest, and the default."""
    with pytest.raises(JobError, match=r"0\.0001 .* = 6\.96e-05; .* 6e-05") as caught:
        budget.check_delta(1e-4, 1437)
    assert caught.value.key == "privacy.differential_privacy.delta"


@pytest.mark.parametrize("delta", [1e-11, 0.0, -1.0, math.nan])
def test_too_small_a_delta_is_refused(delta: float):
    """It could not be told from rounding."""
    with pytest.raises(JobError, match="the smallest delta"):
        budget.check_delta(delta, 100)


def test_a_site_fills_one_batch():
    """Its sampling rate is at most one."""
    budget.check_records(64, 64)
    with pytest.raises(JobError, match="63 training records, fewer than"):
        budget.check_records(63, 64)


def test_what_is_released_beside_the_steps_is_paid_for():
    """By more noise; and where it takes all, nobody is advised to train less."""
    beside = PrivacyEvent(noise_multiplier=2.0, sampling_rate=1.0, steps=1)
    alone = calibration.noise_multiplier(4.0, 1e-5, 0.1, 100)
    found = calibration.noise_multiplier(4.0, 1e-5, 0.1, 100, beside=[beside])
    assert found > alone
    steps = PrivacyEvent(noise_multiplier=found, sampling_rate=0.1, steps=100)
    assert 3.99 < accountant.epsilon([steps, beside], 1e-5) <= 4.0
    with pytest.raises(PrivacyUnreachable, match=r"use 1\.\d+ of it; give"):
        calibration.noise_multiplier(1.0, 1e-5, 0.1, 100, beside=[beside])

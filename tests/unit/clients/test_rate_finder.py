"""A learning rate and a batch size, found by a short training."""

import math
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job

from clients.training import rate_finder
from clients.training.local_federation import Federation
from clients.training.rate_finder import FoundSettings
from deploy.wiring.parts import build_federation
from federation.errors import JobError, SiteError
from federation.ids import SiteId

SITE = SiteId("site-0")


def find(federation: Federation, **options: Any) -> FoundSettings:
    settings = {"low": 1e-3, "high": 100.0, "steps": 40, **options}
    return rate_finder.find_settings(federation, SITE, **settings)


def test_a_loss_diverges_far_above_the_least_one():
    """Not in its first steps, unless it is not finite."""
    assert not rate_finder.has_diverged([1.0, 5.0])
    assert not rate_finder.has_diverged([1.0, 1.0, 1.0, 1.0, 4.0])
    assert rate_finder.has_diverged([1.0, 1.0, 1.0, 1.0, 4.1])
    assert rate_finder.has_diverged([math.nan])


def test_a_skipped_step_is_no_divergence():
    """Its loss may be infinite for its batch alone; five in a row are not chance."""
    record = rate_finder.RangeRecord()
    for rate, loss in enumerate([2.0, math.inf, math.nan, 1.0, math.inf, 0.5]):
        record.add(rate, loss, is_skipped=not math.isfinite(loss))
    assert not record.diverged
    assert (record.rates, record.losses) == ([0, 3, 5], [2.0, 1.0, 0.5])
    for rate in range(6, 11):
        assert not record.diverged
        record.add(rate, math.inf, is_skipped=True)
    assert record.diverged
    assert record.rates == [0, 3, 5, 6]


def test_an_infinite_loss_of_a_step_that_was_taken_diverges():
    """At the first rate of those that float16 skipped directly before."""
    record = rate_finder.RangeRecord()
    record.add(1.0, 2.0, is_skipped=True)  # A finite loss counts.
    record.add(2.0, math.inf, is_skipped=True)
    record.add(3.0, math.inf, is_skipped=False)
    assert record.diverged
    assert (record.rates, record.losses) == ([1.0, 2.0], [2.0, math.inf])


def test_the_steepest_fall_is_before_the_least_loss():
    """By the logarithm of the rate; a fall that comes after a rise is chance."""
    rates = np.geomspace(1e-3, 1e3, 7)
    assert rate_finder.steepest(rates, [5, 5, 4.5, 2, 1, 9, 1.5]) == pytest.approx(1.0)
    assert rate_finder.steepest(rates, [1, 2, 3, 4, 5, 6, 7]) is None
    assert rate_finder.steepest(rates[:4], [4, 3, 2, 1]) is None


def test_noise_scale_is_that_of_drawn_gradients():
    """Each record's gradient is (3, 4), of squared norm 25, and noise of variance 4."""
    rng = np.random.default_rng(0)
    size, batches = 50, 400
    noise = rng.normal(scale=2.0, size=(batches, size, 2)).mean(1)
    gradients = np.array([3.0, 4.0]) + noise
    squares = (gradients**2).sum(1).tolist()
    mean = float((gradients.mean(0) ** 2).sum())
    found = rate_finder.noise_scale(squares, mean, size)
    assert found == pytest.approx(2 * 4 / 25, rel=0.15)
    assert rate_finder.noise_scale([1.0, 1.0], 0.0, 4) == math.inf
    assert rate_finder.noise_scale([1.0, 1.0], 1.0, 4) == 0.0


def test_settings_of_a_classifier_are_found_and_repeatable():
    """Batches are of all records of a step; the model of the run does not change."""
    training = {"local_steps": 1, "batch_size": 8, "accumulate": 2}
    federation = build_federation(small_job(training=training))
    found = find(federation)
    assert found.rate is not None
    assert 1e-3 < found.rate < 10
    assert 0 < found.noise_scale < math.inf
    assert found.batch_size == 16
    assert found.rates.rates[0] == pytest.approx(1e-3)
    steps = np.diff(np.log(found.rates.rates))
    np.testing.assert_allclose(steps, np.log(1e5) / 39)
    assert found.rates.losses[0] == pytest.approx(math.log(3), rel=1e-5)
    assert find(federation) == found


def test_noise_in_float16_is_that_in_float32():
    """Gradients are scaled there, and the noise scale is a ratio."""
    found = [
        find(build_federation(small_job(training={"local_steps": 1, "precision": p})))
        for p in ("fp32", "fp16")
    ]
    full, half = (each.noise_scale for each in found)
    assert half == pytest.approx(full, rel=0.02)


def test_a_range_that_is_too_high_diverges():
    found = find(build_federation(small_job()), low=1e4, high=1e8)
    assert found.rates.diverged
    assert len(found.rates.losses) < 40
    assert found.rate is None


def test_a_site_with_few_records_has_no_noise_scale():
    source = {"source": "support.small_jobs:blobs", "options": {"num_train": 15}}
    with pytest.raises(SiteError, match="has 15 training records, and 16 are needed"):
        find(build_federation(small_job(data=source)))


@pytest.mark.parametrize(("low", "high", "steps"), [(1.0, 0.1, 40), (0.1, 1.0, 4)])
def test_a_range_must_grow_over_several_steps(low: float, high: float, steps: int):
    with pytest.raises(JobError, match="use 0 < low < high and at least 5 steps"):
        find(build_federation(small_job()), low=low, high=high, steps=steps)


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        (
            {
                "aggregation": {"weights": "uniform"},
                "privacy": {
                    "differential_privacy": {"unit": "record", "target_epsilon": 3.0}
                },
            },
            "privacy.differential_privacy.unit",
        ),
        ({"training": {"task": "trainer", "local_steps": 1}}, "training.task"),
    ],
)
def test_jobs_whose_search_would_mislead_are_refused(tables: dict[str, Any], key: str):
    """With differential privacy, since no ledger would charge it."""
    with pytest.raises(JobError) as caught:
        rate_finder.check_findable(small_job(**tables))
    assert caught.value.key == key

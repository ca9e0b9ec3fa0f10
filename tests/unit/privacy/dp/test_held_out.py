"""Held-out sums with noise."""

import itertools

import numpy as np
import pytest

from federation.job.metrics import Metric
from federation.messages import MetricSums
from privacy.dp.held_out import MAX_LOSS, HeldOutMechanism  # type: ignore[attr-defined]

pytestmark = pytest.mark.slow

TRUE = MetricSums(count=1000, loss_sum=700.0, metrics={"correct": 800})


def keys(seed: int):
    """A fixed source of keys, so that no test fails by chance."""
    rng = np.random.default_rng(seed)
    return rng.bytes


def mechanism(noise_multiplier: float = 2.0, predictions: int = 1) -> HeldOutMechanism:
    return HeldOutMechanism(
        noise_multiplier=noise_multiplier, predictions=predictions, num_records=1000
    )


def test_noise_is_unbiased_and_of_the_size_that_is_said():
    """Within five standard errors of 2,000 releases."""
    noisy = mechanism()
    source = keys(1)
    found = np.array(
        [
            (sums.count, sums.metrics["correct"], sums.loss_sum / MAX_LOSS)
            for sums in (noisy.release(TRUE, source) for _ in range(2000))
        ]
    )
    sigma = noisy.standard_deviation()
    assert sigma == pytest.approx(2.0 * np.sqrt(3), rel=0.01)
    error = 5 * sigma / np.sqrt(len(found))
    true = (TRUE.count, TRUE.metrics["correct"], TRUE.loss_sum / MAX_LOSS)
    assert np.abs(found.mean(0) - true).max() < error
    assert found.std(0) == pytest.approx(np.full(3, sigma), rel=0.06)


def test_every_release_has_fresh_noise():
    """From the system's entropy by default."""
    noisy = mechanism()
    found = {noisy.release(TRUE).loss_sum for _ in range(8)}
    assert len(found) == 8


def test_tokens_count_as_one_record_together():
    """The noise grows with what one window adds."""
    one, many = mechanism().standard_deviation(), mechanism(predictions=64)
    assert many.standard_deviation() == pytest.approx(64 * one)


@pytest.mark.parametrize("seed", range(20))
def test_result_is_a_possible_one(seed: int):
    """Of next to nothing, noise makes no negative count and no impossible share."""
    found = mechanism(20.0).release(
        MetricSums(count=1, loss_sum=0.0, metrics={"correct": 0}), keys(seed)
    )
    assert 0 <= found.metrics["correct"] <= found.count
    assert found.count >= 1
    assert 0 <= found.loss_sum <= MAX_LOSS * found.count


def test_event_is_a_release_of_everything():
    """No amplification by sampling is claimed."""
    event = mechanism().event()
    assert event.sampling_rate == 1.0
    assert event.steps == 1
    assert event.noise_multiplier >= 2.0


@pytest.mark.parametrize("num_records", [1, 1000, 10**6, 10**9])
def test_neighbours_stay_within_the_sensitivity(num_records: int):
    """On the grid and in float32, whatever one record adds."""
    noisy = HeldOutMechanism(
        noise_multiplier=1.0, predictions=1, num_records=num_records
    )
    grid, bound = noisy._grid, noisy._mechanism().clip_norm
    base = np.array([num_records, num_records * 0.7, num_records * 0.123456789])
    for added in itertools.product((0.0, 1.0), (0.0, 1.0), (0.0, 0.987654321, 1.0)):
        sums = [np.rint(v / grid) * grid for v in (base, base + added)]
        exact = [v.astype(np.float32).astype(np.float64) for v in sums]
        assert all(np.array_equal(a, b) for a, b in zip(sums, exact, strict=True))
        assert np.linalg.norm(exact[0] - exact[1]) <= bound


def test_metrics_of_a_job_get_noise_by_their_bounds():
    """Each by what one record may add to it; none leaves its bounds."""
    metrics = {"error": Metric(low=-4.0, high=2.0), "share": Metric(low=0.0, high=0.5)}
    loss = Metric(low=0.0, high=3.0)
    noisy = HeldOutMechanism(
        noise_multiplier=2.0,
        predictions=1,
        num_records=1000,
        loss=loss,
        metrics=metrics,
    )
    true = MetricSums(
        count=1000, loss_sum=1200.0, metrics={"error": -900.0, "share": 250.0}
    )
    source = keys(2)
    found = np.array(
        [
            (sums.count, sums.loss_sum, *sums.metrics.values())
            for sums in (noisy.release(true, source) for _ in range(2000))
        ]
    )
    sigma = noisy.standard_deviation()
    assert sigma == pytest.approx(2.0 * np.sqrt(4), rel=0.01)
    scales = np.array([1.0, 3.0, 4.0, 0.5])
    assert found.std(0) == pytest.approx(scales * sigma, rel=0.06)
    error = np.abs(found.mean(0) - (1000, 1200.0, -900.0, 250.0))
    assert (error < 5 * scales * sigma / np.sqrt(len(found))).all()
    little = MetricSums(count=1, loss_sum=0.0, metrics={"error": 0.0, "share": 0.0})
    for seed in range(20):
        sums = noisy.release(little, keys(seed))
        for name, metric in metrics.items():
            low, high = metric.low * sums.count, metric.high * sums.count
            assert low <= sums.metrics[name] <= high

"""Cells of histograms with noise, and the metrics that follow from them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from federation.job.metrics import CORRECT, Metric, measured_of, metrics_of
from federation.job.spec import TrainingSpec
from federation.messages import MetricSums
from monitoring.views.derived_metrics import derived
from privacy.dp.held_out import HeldOutMechanism

TRAINING = TrainingSpec(task="binary", measures=("auc", "calibration"))
METRICS = {**metrics_of(TRAINING), **measured_of(TRAINING)}
CELLS = [name for name, metric in METRICS.items() if metric.histogram]
PARTS = 2 + 4 + 2  # count and loss; hits, tp, fp and fn; two histograms


def mechanism(noise_multiplier: float) -> HeldOutMechanism:
    return HeldOutMechanism(
        noise_multiplier=noise_multiplier,
        predictions=1,
        num_records=1000,
        metrics=METRICS,
    )


def sums_of(count: int, **metrics: float) -> MetricSums:
    return MetricSums(
        count=count, loss_sum=0.5 * count, metrics=dict.fromkeys(METRICS, 0) | metrics
    )


def test_noise_on_cells_has_the_size_that_is_charged_and_no_bias():
    """Of 79 cells in 60 releases, nearly all empty: within five standard errors."""
    noisy, keys = mechanism(2.0), np.random.default_rng(4).bytes
    true = sums_of(1000, auc_pos_31=400, auc_neg_0=600, calibration_14=-50.0)
    released = [noisy.release(true, keys).metrics for _ in range(60)]
    error = np.array([[r[n] - true.metrics[n] for n in CELLS] for r in released])
    sigma = 2.0 * math.sqrt(PARTS)
    assert noisy.standard_deviation() == pytest.approx(sigma, rel=0.01)
    assert error.std() == pytest.approx(sigma, rel=5 / math.sqrt(2 * error.size))
    assert abs(error.mean()) < 5 * sigma / math.sqrt(error.size)
    assert noisy.event().noise_multiplier == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_metrics_of_next_to_nothing_are_in_their_range_or_absent(count: int):
    """The noise is many times what there is; no result is NaN, and sums are bounded."""
    noisy, keys, absent = mechanism(9.0), np.random.default_rng(count).bytes, 0
    for _ in range(40):
        sums = noisy.release(sums_of(count, auc_pos_20=count), keys)
        assert all(abs(sums.metrics[name]) <= sums.count for name in CELLS)
        found = derived(sums)
        assert 0 <= found["calibration_error"] <= 1
        assert 0 <= found.get("auc", 0.5) <= 1
        absent += "auc" not in found
    assert 0 < absent < 40


def test_area_is_not_biased_by_noise_on_empty_cells():
    """Of two sites, with the area 8/9; raised to 0, the cells make it 0.86."""
    noisy, keys = mechanism(10.0), np.random.default_rng(8).bytes
    true = sums_of(1500, auc_pos_31=600, auc_neg_0=700, auc_neg_31=200)
    assert derived(true)["auc"] == pytest.approx(8 / 9)
    sites = [noisy.release(true, keys) + noisy.release(true, keys) for _ in range(100)]
    assert np.mean([derived(sums)["auc"] for sums in sites]) == pytest.approx(
        8 / 9, abs=0.02
    )
    raised = [
        replace(sums, metrics={n: max(0, v) for n, v in sums.metrics.items()})
        for sums in sites
    ]
    assert np.mean([derived(sums)["auc"] for sums in raised]) < 0.865


def test_only_cells_may_be_negative():
    """A number of hits cannot be."""
    assert CORRECT["correct"].with_noise == CORRECT["correct"]
    cell = Metric(low=0.0, high=1.0, is_whole=True, histogram="auc")
    assert (cell.with_noise.low, cell.with_noise.high) == (-1.0, 1.0)

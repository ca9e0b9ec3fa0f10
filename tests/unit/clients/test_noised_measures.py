"""Measures of held-out records that leave with noise."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import first_or_not, small_job
from support.without_report import simulate
from torch import nn

from clients.models.objectives import objective_of
from clients.privacy.site_plans import PrivateSites
from clients.ranks.peers import NO_PEERS, Sums
from deploy.wiring.parts import build_federation
from federation.clock import VirtualClock
from federation.ids import RunId, SiteId
from federation.job.metrics import AUC_BINS, evaluated_of, loss_of
from federation.job.spec import JobSpec
from privacy.dp.held_out import HeldOutMechanism

PRIVATE = {"unit": "record", "target_epsilon": 60.0, "delta": 1e-5, "clip_norm": 1.0}
SECURE = {"enabled": True, "clip_norm": 5.0, "two_sites_waiver": True}
CLASSES = {
    "measures": ["recall_at_1", "recall_at_2", "calibration"],
    "classes": ["ash", "birch", "cedar"],
}
TASKS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "classification": ("blobs", 3, CLASSES),
    "binary": ("first_or_not", 1, {"measures": ["auc", "calibration"]}),
}


def job_of(task: str, more: Mapping[str, Any], **privacy: Any) -> JobSpec:
    source, outputs, _ = TASKS[task]
    return small_job(
        num_sites=2,
        model={
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 4, "classes": outputs},
        },
        data={
            "source": f"support.small_jobs:{source}",
            "options": {"num_train": 240, "num_held_out": 4000},
        },
        training={
            "task": task,
            "local_steps": 2,
            "batch_size": 32,
            **more,
        },
        aggregation={"weights": "uniform"},
        privacy=privacy,
    )


@pytest.mark.parametrize(
    ("task", "parts"),
    [("classification", (3, 7)), ("binary", (6, 8))],
    ids=["two sums and two histograms", "two histograms"],
)
def test_noise_grows_with_each_part_that_is_released(task: str, parts: tuple[int, int]):
    """A record adds 1 to count, loss, each sum, and to one cell of each histogram."""

    def of(more: Mapping[str, Any]) -> Any:
        job = job_of(task, more, differential_privacy=PRIVATE)
        with PrivateSites(
            build_federation(job),
            run_id=RunId("r"),
            folder=None,
            clock=VirtualClock(1.8e9),
        ) as sites:
            return sites.plans[SiteId("site-0")].held_out

    plain, more = of({}), of(TASKS[task][2])
    # The same epsilon, by more noise.
    multiplier = plain.event().noise_multiplier
    assert more.event().noise_multiplier == pytest.approx(multiplier, rel=1e-9)
    ratio = more.standard_deviation() / plain.standard_deviation()
    assert ratio == pytest.approx((parts[1] / parts[0]) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("masks", [{}, {"secure_aggregation": SECURE}])
@pytest.mark.parametrize("task", TASKS)
def test_measures_leave_with_noise(task: str, masks: dict[str, Any]):
    """In the clear and in a secure sum; little noise leaves them nearly the same."""
    noised = simulate(
        job_of(task, TASKS[task][2], differential_privacy=PRIVATE, **masks)
    )
    found = noised.metrics
    assert 0 <= found["calibration_error"] < 0.5
    if task == "binary":
        _, held_out = first_or_not(240, 4000)
        weight, bias = sorted(noised.weights.values(), key=lambda a: -a.ndim)
        logits = (held_out.inputs @ weight.T + bias).flatten()
        bins, is_first = (
            (AUC_BINS / (1 + np.exp(-logits))).astype(int),
            held_out.targets,
        )
        ordered, chosen = np.sort(bins[is_first == 0]), bins[is_first == 1]
        ranks = [np.searchsorted(ordered, chosen, side) for side in ("left", "right")]
        area = np.mean(ranks) / len(ordered)  # Pairs in one bin count half.
        assert found["auc"] == pytest.approx(area, abs=0.02)
    else:
        assert found["recall_at_1"] == pytest.approx(noised.accuracy, abs=0.02)
        assert found["recall_at_1"] + 0.1 < found["recall_at_2"] < 1
        matrix = np.array(noised.summary()["final"]["confusion"])
        assert matrix.sum() == pytest.approx(4000, abs=100)
        assert matrix.trace() / matrix.sum() == pytest.approx(noised.accuracy, abs=0.02)


@pytest.mark.parametrize("scale", [1.0, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("task", TASKS)
def test_one_record_changes_one_cell_of_each_histogram(task: str, scale: float):
    """Also where the model makes infinity or NaN of it, beside any other records."""
    _, outputs, more = TASKS[task]
    training = job_of(task, more).training
    objective, metrics = objective_of(training), evaluated_of(training)
    logits = torch.randn(9, outputs, generator=torch.Generator().manual_seed(5))
    logits[4] *= scale
    targets = torch.arange(9) % max(2, outputs)

    def vector(rows: Any) -> np.ndarray:
        sums = Sums(torch.device("cpu"), NO_PEERS, metrics)
        with torch.no_grad():
            found = objective(nn.Identity(), logits[rows], targets[rows], max_loss=6.0)
        sums.add(found.loss, found.count, found.metrics)
        exact = sums.metrics()
        loss = exact.loss_sum / loss_of(training).reach
        return np.array([exact.count, loss, *exact.metrics.values()])

    without = [0, 1, 2, 3, 5, 6, 7, 8]
    change = vector(range(9)) - vector(without)
    cells = [bool(metric.histogram) for metric in metrics.values()]
    histograms = {m.histogram for m in metrics.values() if m.histogram}
    assert np.count_nonzero(change[2:][cells]) <= len(histograms)
    mechanism = HeldOutMechanism(
        noise_multiplier=1.0,
        predictions=1,
        num_records=9,
        loss=loss_of(training),
        metrics=metrics,
    )
    bound = mechanism._mechanism().clip_norm
    assert np.linalg.norm(change) <= bound
    # And none of the parts is charged that a record cannot change.
    assert bound == pytest.approx(
        (2 + cells.count(False) + len(histograms)) ** 0.5, rel=0.01
    )

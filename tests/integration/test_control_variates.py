"""``training.control_variates``: SCAFFOLD, whose variates never travel."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from support.without_report import simulate
from torch.nn import functional

from deploy.wiring import parts
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

LR, STEPS, ROUNDS = 0.5, 6, 5
FULL = 10_000  # A batch size that is always all of a site's examples.


def tables(**more: Any) -> dict[str, Any]:
    training: dict[str, Any] = {
        "local_steps": STEPS,
        "batch_size": FULL,
        "control_variates": True,
        "optimizer": {"lr": LR},
    }
    unequal = {"partition": {"kind": "dirichlet", "alpha": 0.3}}
    data = {"source": "support.small_jobs:blobs", **unequal}
    return {
        "num_sites": 3,
        "rounds": ROUNDS,
        "data": data,
        "training": training,
        **more,
    }


def values(done: RunResult) -> np.ndarray:
    return np.concatenate([array.ravel() for array in done.weights.values()])


def scaffold(
    job: Mapping[str, Any],
    rounds: int = ROUNDS,
    *,
    corrects: bool = True,
    clip: float = math.inf,
):
    """SCAFFOLD as the paper has it: each site tells its change of ``c_i``.

    A site whose update is clipped learns ``c_i`` from the clipped one.
    """
    data = parts.build_federation(small_job(**job)).site_data
    sites = [train.batch(np.arange(len(train))) for train, _ in data.values()]
    total = sum(len(labels) for _, labels in sites)
    x, c = torch.zeros(15), torch.zeros(15)
    variates = [torch.zeros(15) for _ in sites]
    for _ in range(rounds):
        step, change = torch.zeros(15), torch.zeros(15)
        for index, (inputs, labels) in enumerate(sites):
            y = x.clone()
            for _ in range(STEPS):
                y.requires_grad_()
                logits = inputs @ y[:12].reshape(3, 4).t() + y[12:]
                (gradient,) = torch.autograd.grad(
                    functional.cross_entropy(logits, labels), y
                )
                y = y.detach() - LR * (gradient - variates[index] + c)
            share = len(labels) / total
            update = (y - x) * min(1.0, clip / float(torch.norm(y - x)))
            new = variates[index] - c - update / (STEPS * LR)
            step += share * update
            if corrects:
                change += share * (new - variates[index])
                variates[index] = new
        x, c = x + step, c + change
    return x.numpy()


@pytest.mark.parametrize("is_secure", [False, True])
def test_scaffold_is_that_of_the_paper(*, is_secure: bool):
    secure = {"privacy": {"secure_aggregation": {"enabled": True}}} if is_secure else {}
    job = tables(**secure)
    found = values(simulate(small_job(**job)))
    np.testing.assert_allclose(scaffold(job), found, atol=2e-5)
    assert np.abs(found - scaffold(job, corrects=False)).max() > 0.01


def test_clipped_updates_lead_to_variates_that_cancel():
    secure = {"secure_aggregation": {"enabled": True, "clip_norm": 0.4}}
    job = tables(privacy=secure)
    found = values(simulate(small_job(**job)))
    np.testing.assert_allclose(scaffold(job, clip=0.4), found, atol=2e-5)
    assert np.abs(found - scaffold(job)).max() > 0.01


def test_variates_travel_nowhere():
    """A run without them sends as many bytes, but for what a task says it counted.

    The largest round is compared: messages are padded, and a few digits less of a
    measured time may make a round smaller.
    """
    job = tables()
    found = simulate(small_job(**job)).history
    without = tables(training={**job["training"], "control_variates": False})
    plain = simulate(small_job(**without)).history
    up, down = (
        max(row[way] for row in found) - max(row[way] for row in plain)
        for way in ("bytes_up", "bytes_down")
    )
    assert up == 0
    assert 0 <= down < 60


def test_round_that_is_lost_changes_no_variate():
    """Two sites have trained in it; the model holds nothing of that."""
    fault = {"site": "site-1", "kind": "crash", "rounds": [3]}
    job = tables(simulation={"faults": [fault]})
    found = simulate(small_job(**job))
    assert found.rounds_completed == ROUNDS - 1
    expected = scaffold(job, ROUNDS - 1)
    np.testing.assert_allclose(expected, values(found), atol=2e-5)


def test_older_checkpoint_leaves_variates_that_cancel(tmp_path: Path):
    """Of the rounds that it undoes, one was lost, and only two sites trained in it."""
    fault = {"site": "site-1", "kind": "crash", "rounds": [5]}
    simulate(small_job(**tables(simulation={"faults": [fault]})), folder=tmp_path)
    for index in (4, 5):
        (tmp_path / "checkpoints" / f"round-{index:06}.json").unlink()
    job = tables(rounds=8)
    found = simulate(small_job(**job), folder=tmp_path, extend=True)
    expected = scaffold(job, 3 + 3)
    np.testing.assert_allclose(expected, values(found), atol=2e-5)


def test_variates_lead_to_the_best_model_of_all_records():
    """Where local steps alone lead to a mean of the sites' own."""
    train, _ = blobs()
    inputs = torch.from_numpy(train.inputs)
    labels = torch.from_numpy(train.targets)
    job = tables(rounds=15)

    def loss(x: np.ndarray) -> float:
        weights = torch.from_numpy(x)
        logits = inputs @ weights[:12].reshape(3, 4).t() + weights[12:]
        return float(functional.cross_entropy(logits, labels))

    without = {**job["training"], "control_variates": False}
    plain = tables(rounds=15, training=without)
    found, other = (values(simulate(small_job(**each))) for each in (job, plain))
    assert loss(found) < loss(other)

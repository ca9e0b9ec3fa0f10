"""Whole federations against computations that share no code with them.

Every test runs ``simulate``: job, partition, grid, sites, aggregation, checkpoints.
"""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from support.small_jobs import blobs, small_job
from torch import nn
from torch.nn import functional

from clients.batches import epoch_order
from clients.data import Examples
from deploy.simulation import RunResult, simulate
from federation.ids import SiteId
from federation.job import JobSpec

TESTS = Path(__file__).parents[1]
FULL = 10_000  # A batch size that is always all of a site's examples.
USERS = "support.users_module"
LR = 0.5


def own_data(first: int, last: int) -> tuple[Examples, Examples]:
    """A data source of one site: some of the blobs to train on."""
    train, held_out = blobs()
    part = slice(first, last)
    return (
        Examples(inputs=train.inputs[part], targets=train.targets[part]),
        held_out,
    )


def job_of(cuts: Sequence[int], training: dict[str, Any], **tables: Any) -> JobSpec:
    """A job whose sites hold the blobs between each two cuts."""
    sites = [
        {
            "name": f"site-{i}",
            "data": {
                "source": f"{__name__}:own_data",
                "options": {"first": first, "last": last},
            },
        }
        for i, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False))
    ]
    tables.setdefault("optimizer", {"lr": LR})
    training = {"optimizer": tables.pop("optimizer"), **training}
    return small_job(training=training, sites=sites, **tables)


def flat(result: RunResult):
    return np.concatenate([np.ravel(a) for a in result.weights.values()])


def digest(result: RunResult) -> str:
    return hashlib.sha256(
        b"".join(name.encode() + a.tobytes() for name, a in result.weights.items())
    ).hexdigest()


def centralised(steps: Sequence[np.ndarray], *, mu: float = 0.0, clip: float = 0.0):
    """Plain SGD on all blobs at once, one list of examples per step, from zero."""
    train, _ = blobs()
    x = torch.zeros(15, requires_grad=True)
    for step in steps:
        inputs = torch.from_numpy(train.inputs[step])
        labels = torch.from_numpy(train.targets[step])
        logits = inputs @ x[:12].reshape(3, 4).t() + x[12:]
        loss = functional.cross_entropy(logits, labels) + mu / 2 * x.square().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        if clip:
            gradient *= min(1.0, clip / float(gradient.norm()))
        x = (x - LR * gradient).detach().requires_grad_()
    return x.detach().numpy()


@pytest.mark.parametrize("cuts", [(0, 60), (0, 30, 60), (0, 12, 24, 36, 48, 60)])
@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_fedavg_of_one_full_step_is_centralised_sgd(cuts: Sequence[int], weights: str):
    """Equal sites: the mean of their gradients is the gradient of all."""
    job = job_of(
        cuts,
        {"local_steps": 1, "batch_size": FULL},
        rounds=6,
        aggregation={"weights": weights},
    )
    expected = centralised([np.arange(60)] * 6)
    np.testing.assert_allclose(expected, flat(simulate(job)), atol=1e-6)


@pytest.mark.parametrize("cuts", [(0, 7, 60), (0, 1, 3, 20, 59, 60)])
def test_weights_by_examples_make_up_for_unequal_sites(cuts: Sequence[int]):
    """A site that holds twice as much counts twice; uniform weights would not do."""
    steps = {"local_steps": 1, "batch_size": FULL}
    weighted, uniform = (
        flat(simulate(job_of(cuts, steps, rounds=6, aggregation={"weights": w})))
        for w in ("examples", "uniform")
    )
    expected = centralised([np.arange(60)] * 6)
    np.testing.assert_allclose(expected, weighted, atol=1e-6)
    assert np.abs(expected - uniform).max() > 1e-3


def walk(num_batches: int, size: int):
    """The batches of a site that holds all blobs, cut from whole epochs."""
    orders = [epoch_order(60, seed=0, site=SiteId("site-0"), epoch=e) for e in range(9)]
    visited = np.concatenate(orders)
    return [visited[i * size : (i + 1) * size] for i in range(num_batches)]


@pytest.mark.parametrize(("rounds", "local_steps"), [(1, 12), (4, 3), (12, 1)])
def test_one_site_is_local_training(rounds: int, local_steps: int):
    """However the steps are cut into rounds, also across the ends of epochs."""
    job = job_of(
        (0, 60), {"local_steps": local_steps, "batch_size": 25}, rounds=rounds
    )
    expected = centralised(walk(12, 25))
    np.testing.assert_allclose(expected, flat(simulate(job)), atol=1e-5)


def test_local_epochs_are_passes_over_the_data():
    """Two rounds of two epochs, in batches of which the last is smaller."""
    job = job_of((0, 60), {"local_epochs": 2, "batch_size": 25}, rounds=2)
    epochs = [epoch_order(60, seed=0, site=SiteId("site-0"), epoch=e) for e in range(4)]
    steps = [epoch[i : i + 25] for epoch in epochs for i in (0, 25, 50)]
    np.testing.assert_allclose(centralised(steps), flat(simulate(job)), atol=1e-5)


def test_fedprox_is_the_gradient_of_its_penalty():
    """The pull is towards the weights that the round began with, here zero."""
    training = {"local_steps": 5, "batch_size": FULL, "proximal_mu": 0.3}
    result = simulate(job_of((0, 60), training))
    expected = centralised([np.arange(60)] * 5, mu=0.3)
    np.testing.assert_allclose(expected, flat(result), atol=1e-6)
    assert np.abs(expected - centralised([np.arange(60)] * 5)).max() > 0.01


def test_clipping_bounds_every_step():
    """Steps of a bounded gradient, each scaled down as a whole."""
    training = {"local_steps": 4, "batch_size": FULL, "clip_grad_norm": 0.2}
    expected = centralised([np.arange(60)] * 4, clip=0.2)
    result = simulate(job_of((0, 60), training))
    np.testing.assert_allclose(expected, flat(result), atol=1e-5)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_accumulating_k_batches_is_one_batch_k_times_larger(k: int):
    """Several rounds, steps counted alike."""
    small, large = (
        simulate(job_of((0, 60), {"local_steps": 4, **sizes}, rounds=3))
        for sizes in (
            {"batch_size": 60 // k // 2, "accumulate": k},
            {"batch_size": 60 // k // 2 * k},
        )
    )
    np.testing.assert_allclose(flat(large), flat(small), atol=1e-5)
    np.testing.assert_allclose(
        centralised(walk(12, 60 // k // 2 * k)), flat(small), atol=1e-5
    )


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 1, 0.82, 0.64, 0.46, 0.28]),
        ("cosine", [1 / 3, 2 / 3, *(0.55 + 0.45 * np.cos(np.pi * np.arange(-1, 5) / 5))]),
    ],
)
def test_learning_rate_moves_over_the_whole_run(name: str, factors: list[float]):
    """A model whose gradient is constant moves by the sum of the rates."""
    if name == "cosine":
        factors[2] = 1.0
    plan = {"name": name, "warmup_steps": 3, "final_fraction": 0.1}
    training = {"local_steps": 4, "batch_size": FULL, "learning_rate": plan}
    model = {"factory": f"{__name__}:constant_gradient"}
    job = job_of((0, 60), training, rounds=2, model=model)
    moved = [
        float(simulate(job_with_rounds(job, r)).weights["slope"]) for r in (1, 2)
    ]
    if name == "constant":
        assert moved[0] == pytest.approx(moved_by(factors[:4]), rel=1e-5)
    assert moved[1] == pytest.approx(moved_by(factors), rel=1e-5)

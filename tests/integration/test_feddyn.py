"""``training.dynamic_alpha``: FedDyn, against a loop in NumPy that shares no code."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.killed_runs import kill_at
from support.small_jobs import blobs, small_job
from support.without_report import simulate

from deploy.wiring import parts
from federation.errors import FederationError
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

LR, STEPS, ROUNDS, ALPHA = 0.5, 6, 5, 0.3
FULL = 10_000  # A batch size that is always all of a site's examples.


def tables(*, training: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    usual = {
        "local_steps": STEPS,
        "batch_size": FULL,
        "dynamic_alpha": ALPHA,
        "optimizer": {"lr": LR},
    }
    unequal = {"partition": {"kind": "dirichlet", "alpha": 0.3}}
    return {
        "num_sites": 3,
        "rounds": ROUNDS,
        "data": {"source": "support.small_jobs:blobs", **unequal},
        "aggregation": {"server_optimizer": {"name": "running_sum"}},
        "training": {**usual, **(training or {})},
        **more,
    }


def values(done: RunResult) -> np.ndarray:
    return np.concatenate([array.ravel() for array in done.weights.values()])


def gradient(theta: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of logistic regression with 4 inputs, 3 classes."""
    logits = inputs @ theta[:12].reshape(3, 4).T + theta[12:]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = odds / odds.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    return np.concatenate([(error.T @ inputs).ravel(), error.sum(axis=0)])


def sites_of(job: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    data = parts.build_federation(small_job(**job)).site_data
    batches = [train.batch(np.arange(len(train))) for train, _ in data.values()]
    return [(x.numpy().astype(float), y.numpy()) for x, y in batches]


def feddyn(
    job: Mapping[str, Any],
    rounds: int = ROUNDS,
    *,
    corrects: bool = True,
    clip: float = math.inf,
) -> np.ndarray:
    """Algorithm 1 of arXiv:2111.04263, with gradient steps and all devices active."""
    sites = sites_of(job)
    shares = np.array([len(labels) for _, labels in sites], float)
    shares /= shares.sum()
    theta, h = np.zeros(15), np.zeros(15)
    lambdas = np.zeros((3, 15))
    for _ in range(rounds):
        ends = []
        for k, (inputs, labels) in enumerate(sites):
            y = theta.copy()
            for _ in range(STEPS):
                step = gradient(y, inputs, labels) - lambdas[k] + ALPHA * (y - theta)
                y -= LR * step
            update = y - theta
            update *= min(1.0, clip / float(np.linalg.norm(update)))
            ends.append(theta + update)
            if corrects:
                lambdas[k] -= ALPHA * update
        mean = shares @ np.array(ends)
        h -= ALPHA * (mean - theta)
        theta = mean - h / ALPHA if corrects else mean
    return theta


@pytest.mark.parametrize("is_secure", [False, True])
def test_feddyn_is_that_of_the_paper(*, is_secure: bool):
    secure = {"privacy": {"secure_aggregation": {"enabled": True}}} if is_secure else {}
    job = tables(**secure)
    found = values(simulate(small_job(**job)))
    np.testing.assert_allclose(feddyn(job), found, atol=2e-5)
    assert np.abs(found - feddyn(job, corrects=False)).max() > 0.01


def test_clipped_updates_are_what_sites_follow():
    """With their own updates, the corrections of all sites would no longer cancel."""
    secure = {"secure_aggregation": {"enabled": True, "clip_norm": 0.4}}
    job = tables(privacy=secure)
    found = values(simulate(small_job(**job)))
    np.testing.assert_allclose(feddyn(job, clip=0.4), found, atol=2e-5)
    assert np.abs(found - feddyn(job)).max() > 0.01


def test_round_that_is_lost_changes_no_correction():
    """Two sites have trained in it; the model holds nothing of that."""
    fault = {"site": "site-1", "kind": "crash", "rounds": [3]}
    job = tables(simulation={"faults": [fault]})
    found = simulate(small_job(**job))
    assert found.rounds_completed == ROUNDS - 1
    np.testing.assert_allclose(feddyn(job, ROUNDS - 1), values(found), atol=2e-5)


def test_older_checkpoint_takes_corrections_back(tmp_path: Path):
    """Of the rounds that it undoes, one was lost, and only two sites trained in it."""
    fault = {"site": "site-1", "kind": "crash", "rounds": [5]}
    simulate(small_job(**tables(simulation={"faults": [fault]})), folder=tmp_path)
    for index in (4, 5):
        (tmp_path / "checkpoints" / f"round-{index:06}.json").unlink()
    job = tables(rounds=8)
    found = simulate(small_job(**job), folder=tmp_path, extend=True)
    np.testing.assert_allclose(feddyn(job, 3 + 3), values(found), atol=2e-5)


def test_rounds_lead_to_the_best_model_of_all_records():
    """Where local steps alone lead to a mean of the sites' own."""
    train, _ = blobs()
    inputs, labels = train.inputs.astype(float), train.targets

    def slope(**job: Any) -> float:
        found = values(simulate(small_job(**job))).astype(float)
        return float(np.linalg.norm(gradient(found, inputs, labels)))

    plain = tables(rounds=30, training={"dynamic_alpha": 0.0}, aggregation={})
    assert slope(**tables(rounds=30)) < slope(**plain) / 3


def test_killed_secure_run_goes_on_from_rounds_that_counted(tmp_path: Path):
    """The round of the kill is lost; which bits a secure sum rounds to is random."""
    job = tables(privacy={"secure_aggregation": {"enabled": True}})
    kill_at(job, tmp_path / "run", "SiteAnswered", 3)
    found = simulate(small_job(**job), folder=tmp_path / "run", resume=True)
    assert found.rounds_completed == ROUNDS - 1
    np.testing.assert_allclose(feddyn(job, ROUNDS - 1), values(found), atol=2e-5)


@pytest.mark.parametrize("is_secure", [False, True])
def test_run_fails_if_a_site_lost_its_state(tmp_path: Path, *, is_secure: bool):
    """A model that nobody asked for would look like any other."""
    secure = {"privacy": {"secure_aggregation": {"enabled": True}}} if is_secure else {}
    simulate(small_job(**tables(rounds=2, **secure)), folder=tmp_path)
    for path in (tmp_path / "sites" / "site-1").glob("state-*"):
        path.unlink()
    with pytest.raises(FederationError, match=r"kept for FedDyn"):
        simulate(small_job(**tables(rounds=9, **secure)), folder=tmp_path, extend=True)

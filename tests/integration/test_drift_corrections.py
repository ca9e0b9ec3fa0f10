"""SCAFFOLD and FedDyn against loops in NumPy that share no code."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
SUMMED = {"aggregation": {"server_optimizer": {"name": "running_sum"}}}
SECURE = {"privacy": {"secure_aggregation": {"enabled": True}}}


def tables(method: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    usual = {"local_steps": STEPS, "batch_size": FULL, "optimizer": {"lr": LR}}
    unequal = {"partition": {"kind": "dirichlet", "alpha": 0.3}}
    return {
        "num_sites": 3,
        "rounds": ROUNDS,
        "data": {"source": "support.small_jobs:blobs", **unequal},
        "training": usual | method,
        **(SUMMED if "dynamic_alpha" in method else {}),
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


def scaffold(
    job: Mapping[str, Any],
    rounds: int = ROUNDS,
    *,
    corrects: bool = True,
    clip: float = math.inf,
) -> np.ndarray:
    """SCAFFOLD as the paper has it: each site tells its change of ``c_i``.

    A site whose update is clipped learns ``c_i`` from the clipped one.
    """
    sites = sites_of(job)
    total = sum(len(labels) for _, labels in sites)
    x, c, variates = np.zeros(15), np.zeros(15), np.zeros((len(sites), 15))
    for _ in range(rounds):
        step, change = np.zeros(15), np.zeros(15)
        for index, (inputs, labels) in enumerate(sites):
            y = x.copy()
            for _ in range(STEPS):
                y -= LR * (gradient(y, inputs, labels) - variates[index] + c)
            share = len(labels) / total
            update = (y - x) * min(1.0, clip / float(np.linalg.norm(y - x)))
            new = variates[index] - c - update / (STEPS * LR)
            step += share * update
            if corrects:
                change += share * (new - variates[index])
                variates[index] = new
        x, c = x + step, c + change
    return x


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


class Method(NamedTuple):
    """A way to correct for the drift of sites, and the loop that does it by hand."""

    on: Mapping[str, Any]
    by_hand: Callable[..., np.ndarray]


FEDDYN = Method({"dynamic_alpha": ALPHA}, feddyn)
SCAFFOLD = Method({"control_variates": True}, scaffold)
each = pytest.mark.parametrize("method", [SCAFFOLD, FEDDYN], ids=["scaffold", "feddyn"])


@each
@pytest.mark.parametrize("is_secure", [False, True])
def test_method_is_that_of_the_paper(method: Method, *, is_secure: bool):
    job = tables(method.on, **(SECURE if is_secure else {}))
    found = values(simulate(small_job(**job)))
    np.testing.assert_allclose(method.by_hand(job), found, atol=2e-5)
    assert np.abs(found - method.by_hand(job, corrects=False)).max() > 0.01


@each
def test_clipped_updates_are_what_sites_follow(method: Method):
    """With their own updates, the corrections of all sites would no longer cancel."""
    secure = {"secure_aggregation": {"enabled": True, "clip_norm": 0.4}}
    job = tables(method.on, privacy=secure)
    found = values(simulate(small_job(**job)))
    np.testing.assert_allclose(method.by_hand(job, clip=0.4), found, atol=2e-5)
    assert np.abs(found - method.by_hand(job)).max() > 0.01


@each
def test_round_that_is_lost_changes_no_correction(method: Method):
    """Two sites have trained in it; the model holds nothing of that."""
    fault = {"site": "site-1", "kind": "crash", "rounds": [3]}
    job = tables(method.on, simulation={"faults": [fault]})
    found = simulate(small_job(**job))
    assert found.rounds_completed == ROUNDS - 1
    expected = method.by_hand(job, ROUNDS - 1)
    np.testing.assert_allclose(expected, values(found), atol=2e-5)


@each
def test_older_checkpoint_takes_corrections_back(method: Method, tmp_path: Path):
    """Of the rounds that it undoes, one was lost, and only two sites trained in it."""
    fault = {"site": "site-1", "kind": "crash", "rounds": [5]}
    faulty = tables(method.on, simulation={"faults": [fault]})
    simulate(small_job(**faulty), folder=tmp_path)
    for index in (4, 5):
        (tmp_path / "checkpoints" / f"round-{index:06}.json").unlink()
    job = tables(method.on, rounds=8)
    found = simulate(small_job(**job), folder=tmp_path, extend=True)
    np.testing.assert_allclose(method.by_hand(job, 3 + 3), values(found), atol=2e-5)


@pytest.mark.parametrize(
    ("method", "rounds", "part"),
    [(SCAFFOLD, 15, 1.0), (FEDDYN, 30, 1 / 3)],
    ids=["scaffold", "feddyn"],
)
def test_rounds_lead_to_the_best_model_of_all_records(
    method: Method, rounds: int, part: float
):
    """Where local steps alone lead to a mean of the sites' own."""
    train, _ = blobs()
    inputs, labels = train.inputs.astype(float), train.targets

    def slope(on: Mapping[str, Any]) -> float:
        job = small_job(**tables(on, rounds=rounds))
        found = values(simulate(job)).astype(float)
        return float(np.linalg.norm(gradient(found, inputs, labels)))

    assert slope(method.on) < part * slope({})


def test_variates_travel_nowhere():
    """A run without them sends as many bytes, but for what a task says it counted.

    The largest round is compared: messages are padded, and a few digits less of a
    measured time may make a round smaller.
    """
    found, plain = (
        simulate(small_job(**tables(on))).history for on in (SCAFFOLD.on, {})
    )
    up, down = (
        max(row[way] for row in found) - max(row[way] for row in plain)
        for way in ("bytes_up", "bytes_down")
    )
    assert up == 0
    assert 0 <= down < 60


def test_killed_secure_run_goes_on_from_rounds_that_counted(tmp_path: Path):
    """The round of the kill is lost; which bits a secure sum rounds to is random."""
    job = tables(FEDDYN.on, **SECURE)
    kill_at(job, tmp_path / "run", "SiteAnswered", 3)
    found = simulate(small_job(**job), folder=tmp_path / "run", resume=True)
    assert found.rounds_completed == ROUNDS - 1
    np.testing.assert_allclose(feddyn(job, ROUNDS - 1), values(found), atol=2e-5)


@pytest.mark.parametrize("is_secure", [False, True])
def test_run_fails_if_a_site_lost_its_state(tmp_path: Path, *, is_secure: bool):
    """A model that nobody asked for would look like any other."""
    secure = SECURE if is_secure else {}
    simulate(small_job(**tables(FEDDYN.on, rounds=2, **secure)), folder=tmp_path)
    for path in (tmp_path / "sites" / "site-1").glob("state-*"):
        path.unlink()
    more = small_job(**tables(FEDDYN.on, rounds=9, **secure))
    with pytest.raises(FederationError, match=r"kept for FedDyn"):
        simulate(more, folder=tmp_path, extend=True)

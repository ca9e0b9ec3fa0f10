"""Whole federations against computations that share no code with them.

Every test runs ``simulate``: job, partition, grid, sites, aggregation, checkpoints.
"""

import hashlib
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from support.without_report import simulate
from torch import nn
from torch.nn import functional

from clients.data import Examples
from clients.data.batches import epoch_order
from clients.models.model_pool import ModelPool
from federation.ids import SiteId
from federation.job.spec import JobSpec
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

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
        for i, (first, last) in enumerate(pairwise(cuts))
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
    job = job_of((0, 60), {"local_steps": local_steps, "batch_size": 25}, rounds=rounds)
    expected = centralised(walk(12, 25))
    np.testing.assert_allclose(expected, flat(simulate(job)), atol=1e-5)


def test_local_epochs_are_passes_over_the_data():
    """Two rounds of two epochs, in batches of which the last is smaller."""
    job = job_of((0, 60), {"local_epochs": 2, "batch_size": 25}, rounds=2)
    epochs = [epoch_order(60, seed=0, site=SiteId("site-0"), epoch=e) for e in range(4)]
    steps = [epoch[i : i + 25] for epoch in epochs for i in (0, 25, 50)]
    np.testing.assert_allclose(centralised(steps), flat(simulate(job)), atol=1e-5)


@pytest.mark.parametrize("is_secure", [False, True])
def test_fednova_averages_updates_per_step(*, is_secure: bool):
    """Sites of 5, 3 and 1 steps an epoch; the product scales at the sites, so the sum
    may be secret. Here the mean over all is scaled afterwards, by any ``tau_eff``."""
    cuts, tau = (0, 34, 54, 60), 4
    training = {"local_epochs": 1, "batch_size": 7, "normalized_steps": tau}
    secure = {"secure_aggregation": {"enabled": True}} if is_secure else {}
    found = simulate(job_of(cuts, training, privacy=secure))
    expected, plain = np.zeros(15), np.zeros(15)
    for i, (first, last) in enumerate(pairwise(cuts)):
        size = last - first
        order = first + epoch_order(size, seed=0, site=SiteId(f"site-{i}"), epoch=0)
        steps = [order[k : k + 7] for k in range(0, size, 7)]
        assert len(steps) == (5, 3, 1)[i]
        expected += size / 60 * centralised(steps) / len(steps)
        plain += size / 60 * centralised(steps)
    # 32 bits of a ring hold an update of norm 10.
    np.testing.assert_allclose(tau * expected, flat(found), atol=1e-6)
    assert np.abs(tau * expected - plain).max() > 0.01


def under_a_wide_base() -> nn.Module:
    """Ten thousand values to train on a million that stay as they are."""
    base = nn.Sequential(nn.Linear(4, 1000), nn.ReLU(), nn.Linear(1000, 1000))
    return nn.Sequential(base.requires_grad_(requires_grad=False), nn.Linear(1000, 10))


@pytest.mark.parametrize("secure", [False, True])
def test_frozen_parameters_are_never_sent(tmp_path: Path, *, secure: bool):
    """Bytes are those of what trains; the exported model is whole."""
    trained = 10 * 1000 + 10
    job = job_of(
        (0, 20, 40, 60),
        {"local_steps": 1},
        rounds=2,
        model={"factory": f"{__name__}:under_a_wide_base"},
        privacy={"secure_aggregation": {"enabled": secure}},
    )
    begun = ModelPool(job)
    assert begun.layout.num_frozen == 5 * 1000 + 1001 * 1000
    result = simulate(job, folder=tmp_path / "whole")
    head = 12_000 if secure else 1000.0
    for row in result.view.rounds:
        assert 3 * 4 * trained <= row.bytes_down < 3 * (4 * trained + head)
        assert row.bytes_up < 3 * (4 * trained + head)
    for name, values in begun.frozen_arrays().items():
        np.testing.assert_array_equal(result.weights[name], values)
    under_a_wide_base().load_state_dict(result.state_dict())
    once = iter([False, True])
    simulate(job, folder=tmp_path / "cut", stop_requested=lambda: next(once))
    resumed = simulate(job, folder=tmp_path / "cut", resume=True)
    assert resumed.rounds_now == 1
    # Rounding to the ring's grid is random.
    np.testing.assert_allclose(
        flat(resumed), flat(result), rtol=0, atol=1e-4 if secure else 0
    )


MODELS = {
    "plain": {"factory": f"{USERS}:frozen_network"},
    "dropout": {"factory": f"{USERS}:dropout_network"},
    "late_dropout": {"factory": f"{USERS}:late_dropout"},
    "norm": {"factory": f"{USERS}:norm_network"},
    "forgetful": {"factory": f"{USERS}:forgetful"},
}


def run_of(model: str, *, workers: int = 1, seed: int = 1) -> RunResult:
    """Five sites, two rounds."""
    return simulate(
        small_job(
            num_sites=5,
            rounds=2,
            seed=seed,
            model=MODELS[model],
            training={"local_steps": 3, "batch_size": 4, "optimizer": {"lr": 0.1}},
            simulation={"workers": workers},
        )
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_run_is_a_function_of_its_seed(model: str):
    """Twice the same, bit by bit, whatever the number of workers."""
    first = run_of(model)
    for workers in (1, 2, 4):
        again = run_of(model, workers=workers)
        assert digest(first) == digest(again)
        assert (first.loss, first.accuracy) == (again.loss, again.accuracy)
    assert digest(first) != digest(run_of(model, seed=2))


@pytest.mark.parametrize("model", ["dropout", "late_dropout"])
def test_random_models_draw_differently_at_each_site(model: str):
    """The only site's name is all that differs, and all examples are in the batch."""
    data = {"source": f"{__name__}:own_data", "options": {"first": 0, "last": 60}}
    results = [
        simulate(
            small_job(
                model=MODELS[model],
                training={"local_steps": 3, "batch_size": FULL},
                sites=[{"name": name, "data": data}],
            )
        )
        for name in ("a", "b")
    ]
    assert np.abs(flat(results[0]) - flat(results[1])).max() > 1e-4


def digests(model: str, *threads: int) -> Iterator[str]:
    """Of the weights that a run comes to with each number of threads."""
    for number in threads:
        job = small_job(
            num_sites=2,
            rounds=1,
            model={"factory": model},
            data={"source": "clients.data:digits"},
            training={"local_steps": 3, "threads": number},
            simulation={"workers": 2},
        )
        weights = simulate(job).weights.values()
        yield hashlib.sha256(b"".join(a.tobytes() for a in weights)).hexdigest()


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from integration.test_correctness import digests

print(*digests(sys.argv[2], *map(int, sys.argv[3:])), sep="\\n")
"""


def digests_elsewhere(model: str, *threads: int, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS), model, *map(str, threads)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.long
def test_a_run_does_not_depend_on_the_environments_threads():
    """The job says how many threads compute; the environment has no say."""
    model = "clients.models:digits_cnn"
    others = {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    assert digests_elsewhere(model, 1, 2, **others) == list(digests(model, 1, 2))


def test_a_users_own_model_and_data():
    """A module of the user's, named in the job with its options."""
    job = small_job(
        num_sites=2,
        rounds=3,
        model={"factory": f"{USERS}:network", "options": {"width": 16}},
        data={"source": f"{USERS}:two_moons", "options": {"noise": 0.05}},
        training={"local_epochs": 8, "optimizer": {"name": "adam", "lr": 0.05}},
    )
    result = simulate(job)
    assert result.weights["inner.weight"].shape == (16, 2)
    assert result.accuracy >= 0.9


@pytest.mark.parametrize("workers", [1, 4])
def test_a_run_leaves_the_process_as_it_was(workers: int):
    """Random state, thread count, threads, gradients on: nothing has changed."""
    importlib.import_module(USERS)  # It draws random numbers, which is its own affair.
    torch.rand(7)

    def state() -> tuple[object, ...]:
        return (
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002 -- the global one
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
        )

    before, threads = state(), set(threading.enumerate())
    run_of("dropout", workers=workers)
    assert before == state()
    assert set(threading.enumerate()) <= threads  # Those of other tests may end.


def test_an_example_finishes_well_under_a_second(capfd: pytest.CaptureFixture[str]):
    """Three clouds learn to tell tumours apart, nearly as well as one would."""
    job = small_job(
        num_sites=3,
        rounds=5,
        model={
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 30, "classes": 2},
        },
        data={"source": "clients.data:breast_cancer"},
        training={"local_epochs": 2, "optimizer": {"lr": 0.1}},
    )
    result = simulate(job)
    assert result.accuracy > 0.95
    assert capfd.readouterr() == ("", "")

"""``training.optimizer.state = "keep"``: optimisers that outlive rounds and kills."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.killed_runs import kill_at
from support.small_jobs import small_job
from support.without_report import simulate
from torch.nn import functional

from clients.data.batches import stepwise
from clients.models.model_pool import ModelPool
from deploy.wiring import parts
from federation.errors import JobError
from federation.ids import SiteId
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

ROUNDS, STEPS, BATCH = 4, 3, 8
ADAM = {"name": "adam", "lr": 0.05}
MOMENTUM = {"lr": 0.2, "momentum": 0.9}
MUON = {"name": "muon", "lr": 0.02, "momentum": 0.95}
MLP = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [16, 8]},
}


def tables(optimizer: Mapping[str, Any], state: str = "keep", **more: Any):
    return {
        "num_sites": 3,
        "rounds": ROUNDS,
        "training": {
            "local_steps": STEPS,
            "batch_size": BATCH,
            "optimizer": {**optimizer, "state": state},
        },
        **more,
    }


def values(done: RunResult) -> np.ndarray:
    return np.concatenate([array.ravel() for array in done.weights.values()])


def plain_loop(optimizer: Mapping[str, Any], *, keeps: bool) -> np.ndarray:
    """FedAvg in plain PyTorch: every site has one optimiser for the whole run."""
    job = small_job(**tables(optimizer))
    data = parts.build_federation(job).site_data
    (start_d, _), model = ModelPool(job).initial_weights(), torch.nn.Linear(4, 3)
    parameters = list(model.parameters())

    def make() -> torch.optim.Optimizer:
        options = {key: v for key, v in optimizer.items() if key != "name"}
        kind = torch.optim.Adam if "name" in optimizer else torch.optim.SGD
        return kind(parameters, **options)

    optimizers = {name: make() for name in data}
    global_d = torch.from_numpy(start_d)
    for round_index in range(ROUNDS):
        updates = []
        for name, (train, _) in data.items():
            torch.nn.utils.vector_to_parameters(global_d.clone(), parameters)
            chosen = optimizers[name] if keeps else make()
            walk = stepwise(
                len(train),
                batch_size=BATCH,
                first_batch=round_index * STEPS,
                num_batches=STEPS,
                seed=job.seed,
                site=name,
            )
            for batch in walk:
                inputs, labels = train.batch(batch)
                chosen.zero_grad()
                functional.cross_entropy(model(inputs), labels).backward()
                chosen.step()
            local_d = torch.nn.utils.parameters_to_vector(parameters).detach()
            updates.append(len(train) * (local_d - global_d))
        global_d = global_d + sum(updates) / sum(len(t) for t, _ in data.values())
    return global_d.numpy()


@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_keep_and_fresh_are_what_a_plain_loop_does(optimizer: dict[str, Any]):
    """And they are not the same; a job that says nothing is a fresh one."""
    kept = values(simulate(small_job(**tables(optimizer))))
    fresh = values(simulate(small_job(**tables(optimizer, "fresh"))))
    np.testing.assert_allclose(plain_loop(optimizer, keeps=True), kept, atol=2e-6)
    np.testing.assert_allclose(plain_loop(optimizer, keeps=False), fresh, atol=2e-6)
    assert np.abs(kept - fresh).max() > 0.01
    said_nothing = tables(optimizer)
    del said_nothing["training"]["optimizer"]["state"]
    assert values(simulate(small_job(**said_nothing))).tobytes() == fresh.tobytes()


def test_momenta_of_matrices_are_kept():
    kept, fresh = (
        values(simulate(small_job(**tables(MUON, state, model=MLP))))
        for state in ("keep", "fresh")
    )
    assert np.abs(kept - fresh).max() > 1e-3


def test_a_run_that_goes_back_to_an_older_checkpoint_ends_alike(tmp_path: Path):
    """As far back as checkpoints are kept, states are, too."""
    job = tables(ADAM, storage={"keep_checkpoints": 3})
    expected = simulate(small_job(**job))
    kill_at(job, tmp_path / "run", "SiteAnswered", 4)
    checkpoints = sorted((tmp_path / "run/checkpoints").glob("round-*.json"))
    assert len(checkpoints) == 3
    for damaged in checkpoints[1:]:
        damaged.write_bytes(b"")
    found = simulate(small_job(**job), folder=tmp_path / "run", resume=True)
    assert found.rounds_now == 3
    assert values(found).tobytes() == values(expected).tobytes()


def test_lost_state_is_logged_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """By name of the site, once; nothing is made up."""
    job = tables(ADAM)
    expected = simulate(small_job(**job))
    kill_at(job, tmp_path / "run", "CheckpointSaved", 2)
    for path in (tmp_path / "run/sites/site-1").glob("state-*"):
        path.unlink()
    with caplog.at_level(logging.WARNING):
        found = simulate(small_job(**job), folder=tmp_path / "run", resume=True)
    assert caplog.text.count("has no state of a round before round 3") == 1
    assert "site site-1 has no state" in caplog.text
    assert found.rounds_completed == ROUNDS
    assert np.abs(values(found) - values(expected)).max() > 1e-4


def test_state_of_another_optimiser_is_logged_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Somebody has mixed up two folders: the site begins afresh."""
    job = tables(ADAM)
    kill_at(job, tmp_path / "run", "CheckpointSaved", 2)
    kill_at(tables(MOMENTUM), tmp_path / "other", "CheckpointSaved", 2)
    state = "sites/site-1/state-0000000002"
    (tmp_path / "other" / state).replace(tmp_path / "run" / state)
    with caplog.at_level(logging.WARNING):
        found = simulate(small_job(**job), folder=tmp_path / "run", resume=True)
    assert caplog.text.count(f"site-1 does not use {state}") == 1
    assert found.rounds_completed == ROUNDS


def test_a_site_that_loses_its_memory_goes_on_with_its_state(tmp_path: Path):
    """It is started anew before each round; what it kept is in its store."""
    job = tables(ADAM)
    restarts = {"faults": [{"site": "site-0", "kind": "restart"}]}
    expected = simulate(small_job(**job))
    found = simulate(small_job(**job, simulation=restarts), folder=tmp_path / "run")
    assert values(found).tobytes() == values(expected).tobytes()


def test_state_stays_at_the_site_and_old_ones_go(tmp_path: Path):
    """One object a round, as many as a coordinator may go back, and one more."""
    job = tables(ADAM, storage={"keep_checkpoints": 1})
    simulate(small_job(**job), folder=tmp_path / "run")
    for name in ("site-0", "site-1", "site-2"):
        left = sorted(p.name for p in (tmp_path / f"run/sites/{name}").iterdir())
        assert left == ["state-0000000003", "state-0000000004"]
    simulate(small_job(**tables(ADAM, "fresh")), folder=tmp_path / "fresh")
    assert not (tmp_path / "fresh/sites").exists()


def test_virtual_time_changes_nothing():
    """The same sites, one after another."""
    job = tables({"lr": 0.2, "momentum": 0.9})
    machines = [
        {"site": f"site-{i}", "examples_per_second": 100.0 - i} for i in range(3)
    ]
    found = simulate(
        small_job(**job, simulation={"machines": machines}), engine="virtual"
    )
    expected = simulate(small_job(**job))
    np.testing.assert_allclose(values(expected), values(found), atol=1e-6)


@pytest.mark.flower
def test_flowers_engine_needs_a_folder_for_the_state():
    """Any of its processes takes a site's round; ``test_few_bits`` runs it with one."""
    with pytest.raises(JobError, match="folder for their state"):
        simulate(small_job(**tables(ADAM)), engine="flower")


@pytest.mark.parametrize(
    ("unit", "optimizer"), [("record", MOMENTUM), ("site", MOMENTUM), ("record", MUON)]
)
def test_private_and_secure_runs_keep_optimisers(
    unit: str, optimizer: dict[str, Any], tmp_path: Path
):
    """What noise or a clip norm bounds stays bounded whatever a site remembers."""
    private: dict[str, Any] = {"unit": unit, "target_epsilon": 8.0, "clip_norm": 0.5}
    more: dict[str, Any] = {"aggregation": {"weights": "uniform"}}
    if unit == "site":
        private |= {"delta": 1e-5, "held_out": "public", "accept_low_signal": True}
    job = tables(
        optimizer,
        model=MLP,
        **more,
        privacy={
            "differential_privacy": private,
            "secure_aggregation": {"enabled": True},
        },
    )
    found = simulate(small_job(**job), folder=tmp_path / "run")
    assert found.rounds_completed == ROUNDS
    names = [SiteId(f"site-{i}") for i in range(3)]
    assert all(any((tmp_path / "run/sites" / n).glob("state-*4")) for n in names)

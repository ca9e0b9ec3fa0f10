"""Runs of which each site keeps a part of the model for itself."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.small_jobs import small_job
from support.without_report import simulate

from clients.data.batches import stepwise
from clients.models import mlp
from clients.models.model_pool import ModelPool
from clients.models.trained import trained_model
from deploy.cli import main
from deploy.tools.site_model import write_site_model
from deploy.wiring import parts
from federation.errors import JobError, RunNotFound
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

ROUNDS, STEPS, BATCH, LR = 3, 2, 8, 0.3
MODEL = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [6]},
    "personal": ["3.*"],
}
SECURE = {"secure_aggregation": {"enabled": True, "clip_norm": 8.0}}


def job_of(rounds: int = ROUNDS, **tables: Any) -> JobSpec:
    return small_job(
        model=MODEL,
        num_sites=3,
        rounds=rounds,
        training={"local_steps": STEPS, "batch_size": BATCH, "optimizer": {"lr": LR}},
        **tables,
    )


def values(done: RunResult) -> np.ndarray:
    return np.concatenate([array.ravel() for array in done.weights.values()])


def by_hand(job: JobSpec) -> tuple[np.ndarray, float]:
    """FedAvg of the lower layer in plain torch; each site goes on with its own head."""
    federation = parts.build_federation(job)
    models = {}
    for name in federation.site_data:
        with ModelPool(job).borrow() as instance:
            models[name] = instance.module
    shared = {k: v.clone() for k, v in next(iter(models.values())).state_dict().items()}
    shared = {name: value for name, value in shared.items() if name.startswith("1.")}
    sizes = {name: len(train) for name, (train, _) in federation.site_data.items()}
    for round_index in range(job.rounds):
        found = []
        for name, (train, _) in federation.site_data.items():
            model = models[name]
            model.load_state_dict(shared, strict=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for batch in stepwise(
                len(train),
                batch_size=BATCH,
                first_batch=round_index * STEPS,
                num_batches=STEPS,
                seed=job.seed,
                site=name,
            ):
                inputs, labels = train.batch(batch)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            found.append({k: v.clone() for k, v in model.state_dict().items()})
        shares = [size / sum(sizes.values()) for size in sizes.values()]
        shared = {
            key: sum(s * each[key] for s, each in zip(shares, found, strict=True))
            for key in shared
        }
    hits = count = 0
    for name, (_, held_out) in federation.site_data.items():
        models[name].load_state_dict(shared, strict=False)
        inputs, labels = held_out.batch(np.arange(len(held_out)))
        hits += int((models[name](inputs).argmax(1) == labels).sum())
        count += len(labels)
    shared_d = np.concatenate([value.numpy().ravel() for value in shared.values()])
    return shared_d, hits / count


def test_sites_share_one_part_and_keep_the_other():
    """As in plain PyTorch, and so is the accuracy: of each site's own model."""
    done = simulate(job_of())
    shared_d, accuracy = by_hand(job_of())
    assert list(done.weights) == ["1.weight", "1.bias"]
    np.testing.assert_allclose(values(done), shared_d, atol=1e-6)
    assert done.accuracy == pytest.approx(accuracy)


def test_only_the_shared_part_is_in_the_secure_sum():
    """The same values, but for the ring's rounding, in as many words."""
    plain, secure = simulate(job_of()), simulate(job_of(privacy=SECURE))
    np.testing.assert_allclose(values(secure), values(plain), atol=1e-4)
    assert secure.accuracy == plain.accuracy


def test_personal_parts_outlive_what_holds_them(tmp_path: Path):
    """An extended run, and one whose site restarts, end as one that ran through."""
    whole = simulate(job_of(4))
    simulate(job_of(2), folder=tmp_path)
    extended = simulate(job_of(4), folder=tmp_path, extend=True)
    restarts = {"faults": [{"site": "site-1", "kind": "restart", "rounds": [3]}]}
    for done in (extended, simulate(job_of(4, simulation=restarts))):
        np.testing.assert_array_equal(values(done), values(whole))
        assert done.loss == whole.loss


def test_each_site_can_export_its_own_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Evaluated by hand, the sites' models are as accurate as the run says."""
    job, run = job_of(), RunFolder(tmp_path / "run")
    done = simulate(job, folder=run.path)
    hits = count = 0
    for name, (_, held_out) in parts.build_federation(job).site_data.items():
        given = tmp_path / name
        words = ["export", str(run.path), "--site", name, "--to", f"file://{given}"]
        assert main(words) == 0
        model = mlp(4, 3, [6])
        model.load_state_dict(load_file(given / "model.safetensors"))
        inputs, labels = held_out.batch(np.arange(len(held_out)))
        _, whole = trained_model(job, given / "model.safetensors")
        torch.testing.assert_close(whole(inputs), model(inputs))
        hits += int((model(inputs).argmax(1) == labels).sum())
        count += len(labels)
    assert done.accuracy == hits / count
    assert "model.safetensors" in capsys.readouterr().out
    with pytest.raises(JobError, match="no site 'site-9'; it has site-0") as caught:
        write_site_model(run, "site-9", tmp_path / "out")
    assert caught.value.key == "--site"
    with pytest.raises(JobError, match="export RUN --site NAME"):
        trained_model(job, run.model)
    shutil.rmtree(run.path / "sites/site-1")
    with pytest.raises(RunNotFound, match="personal parts of site 'site-1'"):
        write_site_model(run, "site-1", tmp_path / "out")


def test_a_job_without_personal_parts_has_no_models_of_sites(tmp_path: Path):
    """The message says what to do."""
    simulate(small_job(), folder=tmp_path)
    with pytest.raises(JobError, match="remove --site"):
        write_site_model(RunFolder(tmp_path), "site-0", tmp_path / "out")

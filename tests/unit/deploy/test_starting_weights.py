"""Runs that start from a file of weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.small_jobs import small_job

from clients.models.model_pool import ModelPool
from deploy.wiring.starting_weights import initial_weights, notice
from federation.errors import JobError
from federation.job import job_digest, job_file, weights_file
from federation.job.spec import JobSpec
from federation.vectors import Vector

FACTORY = {
    "factory": "clients.models:logistic_regression",
    "options": {"inputs": 4, "classes": 3},
}
NAMES = [spec.name for spec in ModelPool(small_job()).layout.tensors]


def tensors() -> dict[str, torch.Tensor]:
    """Other weights of the model than those of any seed."""
    layout = ModelPool(small_job()).layout
    return {
        spec.name: torch.full(spec.shape, float(number + 1))
        for number, spec in enumerate(layout.tensors)
    }


def document(weights: str, **tables: Any) -> dict[str, Any]:
    job = job_file.document(small_job(**tables))
    job["model"]["weights"] = weights
    return job


def job_of(folder: Path, weights: str = "start.safetensors", **tables: Any) -> JobSpec:
    found = document(weights, **tables)
    job_file.pin(found, folder)
    return job_file.parse(found)


def started(job: JobSpec) -> Vector:
    return initial_weights(job, ModelPool(job))[0]


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    """A file or the folder of a run; half precision is widened."""
    run = tmp_path / "run"
    run.mkdir()
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors().items()}
    save_file(halves, run / "model.safetensors")
    by_folder, by_file = (
        job_of(tmp_path, "run"),
        job_of(tmp_path, "run/model.safetensors"),
    )
    expected = np.concatenate([t.numpy().ravel() for t in tensors().values()])
    for job in (by_folder, by_file):
        np.testing.assert_array_equal(started(job), expected)
    assert not np.array_equal(started(small_job()), expected)


def test_the_job_is_bound_to_the_weights(tmp_path: Path) -> None:
    """Other weights are another job; a file that changes later is refused."""
    file = tmp_path / "start.safetensors"
    save_file(tensors(), file)
    first = job_of(tmp_path)
    assert first.model.weights is not None
    assert job_file.parse(job_file.document(first)) == first
    save_file({name: tensor + 1 for name, tensor in tensors().items()}, file)
    second = job_of(tmp_path)
    digests = {job_digest.digest(job) for job in (first, second, small_job())}
    assert len(digests) == 3
    with pytest.raises(JobError, match="not the file that the job names"):
        started(first)
    # A name that has its digest needs no file until the run begins.
    file.unlink()
    assert job_of(tmp_path, first.model.weights) == first
    with pytest.raises(JobError, match="there is no file"):
        started(first)


def test_no_weights_leave_the_digest_as_it_was() -> None:
    """Of runs that were begun before there was such a key."""
    assert "weights" not in job_digest.deciding(small_job())["model"]


def _without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors().items() if key != name}


FIRST, LAST = NAMES[0], NAMES[-1]
UNFIT = {
    "missing": (_without(LAST), f"'{LAST}' is float32.* in the model and nothing in"),
    "shape": (
        {**tensors(), FIRST: torch.zeros(5, 5)},
        rf"'{FIRST}' is float32\[.*\] in the model and float32\[5, 5\] in the file",
    ),
    "kind": (
        {**tensors(), LAST: tensors()[LAST].long()},
        f"'{LAST}' is float32.* in the model and int64",
    ),
    "extra": ({**tensors(), "more": torch.zeros(2)}, "'more' is nothing in the model"),
    "not finite": ({**tensors(), LAST: tensors()[LAST] * torch.nan}, "NaN"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_the_first_difference_is_named(kind: str, tmp_path: Path) -> None:
    found, said = UNFIT[kind]
    save_file(found, tmp_path / "start.safetensors")
    with pytest.raises(JobError, match=said) as caught:
        started(job_of(tmp_path))
    assert caught.value.key == "model.weights"


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("s3://bucket/model.safetensors", "copy the file to this machine"),
        ("none.safetensors", "there is no file .*none"),
        (".", r"there is no file .*model\.safetensors"),
    ],
)
def test_what_is_not_here_is_refused_when_the_job_is_loaded(
    weights: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=said):
        job_of(tmp_path, weights)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "start.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(JobError, match="is no safetensors file"):
        started(job_of(tmp_path))


def test_a_name_without_a_digest_starts_nothing(tmp_path: Path) -> None:
    """A document that nobody has pinned."""
    save_file(tensors(), tmp_path / "start.safetensors")
    job = job_file.parse(document(str(tmp_path / "start.safetensors")))
    with pytest.raises(JobError, match="none in the job"):
        started(job)


def test_an_aggregator_looks_in_its_own_folder(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "start.safetensors")
    job = job_of(tmp_path)
    assert job.model.weights is not None
    assert weights_file.find(job.model.weights, tmp_path).parent == tmp_path
    with pytest.raises(JobError, match="there is no file"):
        weights_file.find(job.model.weights, tmp_path / "elsewhere")


def test_frozen_values_must_be_those_of_the_factory(tmp_path: Path) -> None:
    """They are never sent, so sites could not know of others."""
    model = {"factory": "support.users_module:frozen_network"}
    pool = ModelPool(small_job(model=model))
    layout, state = pool.layout, {}
    weights_d, integers_m = pool.initial_weights()
    frozen = pool.frozen_arrays()
    assert frozen
    for spec, view in layout.float_views(weights_d):
        state[spec.name] = torch.from_numpy(view.copy())
    for name, values in frozen.items():
        state[name] = torch.from_numpy(values)
    assert integers_m.size == 0
    save_file(state, tmp_path / "start.safetensors")
    started(job_of(tmp_path, model=model))
    name = next(iter(frozen))
    save_file({**state, name: state[name] + 1}, tmp_path / "start.safetensors")
    with pytest.raises(JobError, match=f"other values of '{name}'"):
        started(job_of(tmp_path, model=model))


def test_a_private_run_says_what_epsilon_leaves_out(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "start.safetensors")
    private = {
        "aggregation": {"weights": "uniform"},
        "privacy": {"differential_privacy": {"unit": "record", "target_epsilon": 8.0}},
    }
    assert "count the runs" in notice(job_of(tmp_path, **private))
    assert notice(job_of(tmp_path)) == ""
    assert notice(small_job(**private)) == ""

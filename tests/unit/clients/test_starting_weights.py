"""Runs that start from a file of weights."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import save_file
from support.small_jobs import small_job

from aggregator import model_export
from clients.models import starting_weights
from clients.models.model_pool import ModelPool
from clients.models.starting_weights import (
    check_first,
    initial_weights,
    notice,
    pinned,
)
from clients.models.trained import trained_model
from cloud_adapters.storage.disk.transfer import upload
from deploy.cli import main
from federation.compression.codec import decoded
from federation.errors import CorruptObject, JobError, ProtocolError
from federation.job import job_digest, job_file
from federation.job.spec import JobSpec
from federation.protocols import ObjectStore
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
    return pinned(job_file.parse(document(weights, **tables)), folder)


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
    with pytest.raises(JobError, match="different weights than"):
        started(first)
    # A name that has its digest needs no file until the run begins.
    file.unlink()
    assert job_of(tmp_path, first.model.weights) == first
    with pytest.raises(JobError, match="there is no file"):
        started(first)


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
    "prefix": (
        {f"module.{key}": value for key, value in tensors().items()},
        f"nothing in the file; the file has 'module.{FIRST}': rename",
    ),
    "extra": ({**tensors(), "more": torch.zeros(2)}, "'more' is not in the model"),
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
        ("memory://", "path or a bucket"),
        ("ftp://host/model.safetensors", "the scheme 'ftp' is unknown"),
        ("file://none.safetensors", "there is no file .*none"),
        ("none.safetensors", "there is no file .*none"),
        (".", r"there is no file .*model\.safetensors"),
    ],
)
def test_what_is_not_here_is_refused_when_the_job_is_loaded(
    weights: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=said):
        job_of(tmp_path, weights)


def test_a_file_of_torch_save_is_named_and_not_read(tmp_path: Path) -> None:
    """Another copy of it would not help, and reading it could run its code."""
    torch.save(tensors(), tmp_path / "start.safetensors")
    with pytest.raises(JobError, match=r"torch\.save .* write .*save_file") as caught:
        job_of(tmp_path)
    assert caught.value.key == "model.weights"
    assert "copy it again" not in str(caught.value)


def test_a_name_without_a_digest_starts_nothing(tmp_path: Path) -> None:
    """A document that nobody has pinned."""
    save_file(tensors(), tmp_path / "start.safetensors")
    job = job_file.parse(document(str(tmp_path / "start.safetensors")))
    with pytest.raises(JobError, match="none in the job"):
        started(job)


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
    with pytest.raises(JobError, match=f"different values of '{name}'"):
        started(job_of(tmp_path, model=model))


def test_a_private_run_says_what_epsilon_leaves_out(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "start.safetensors")
    private = {
        "aggregation": {"weights": "uniform"},
        "privacy": {"differential_privacy": {"unit": "record", "target_epsilon": 8.0}},
    }
    assert "add those runs" in notice(job_of(tmp_path, **private))
    assert notice(job_of(tmp_path)) == ""
    assert notice(small_job(**private)) == ""


def test_a_site_knows_the_model_that_its_job_names(tmp_path: Path) -> None:
    """By its digest alone; one value that differs is another model."""
    save_file(tensors(), tmp_path / "start.safetensors")
    job = job_of(tmp_path)
    pool = ModelPool(job)
    weights_d, integers_m = initial_weights(job, pool)
    (tmp_path / "start.safetensors").unlink()
    check_first(job, pool, weights_d, integers_m)
    weights_d[-1] = np.nextafter(weights_d[-1], np.float32(9))
    with pytest.raises(ProtocolError, match=r"model\.weights = 'start\.safetensors'"):
        check_first(job, pool, weights_d, integers_m)
    bare = job_file.parse(document("start.safetensors"))
    with pytest.raises(ProtocolError, match="none in the job"):
        check_first(bare, pool, weights_d, integers_m)
    check_first(small_job(), pool, weights_d, integers_m)


def test_integers_are_part_of_the_first_model(tmp_path: Path) -> None:
    model = {"factory": "support.users_module:norm_network"}
    pool = ModelPool(small_job(model=model))
    weights_d, integers_m = pool.initial_weights()
    assert integers_m.size
    state = {
        spec.name: torch.from_numpy(view.copy())
        for views in (
            pool.layout.float_views(weights_d),
            pool.layout.integer_views(integers_m),
        )
        for spec, view in views
    }
    save_file(state, tmp_path / "start.safetensors")
    job = job_of(tmp_path, model=model)
    check_first(job, pool, weights_d, integers_m)
    with pytest.raises(ProtocolError, match="different weights"):
        check_first(job, pool, weights_d, integers_m + 1)


@pytest.mark.parametrize("held", ["with", "without"])
def test_frozen_tensors_are_the_sites_own(held: str, tmp_path: Path) -> None:
    """A file may hold them or not; the site has them in any case."""
    model = {"factory": "support.users_module:frozen_network"}
    pool = ModelPool(small_job(model=model))
    weights_d, integers_m = pool.initial_weights()
    views = pool.layout.float_views(weights_d)
    state = {spec.name: torch.from_numpy(view.copy()) for spec, view in views}
    frozen = {name: torch.from_numpy(v) for name, v in pool.frozen_arrays().items()}
    assert frozen
    file = tmp_path / "start.safetensors"
    save_file({**state, **(frozen if held == "with" else {})}, file)
    job = job_of(tmp_path, model=model)
    weights_d, integers_m = initial_weights(job, pool)
    check_first(job, pool, weights_d, integers_m)
    weights_d[0] += 1
    with pytest.raises(ProtocolError, match="different weights"):
        check_first(job, pool, weights_d, integers_m)


def test_a_codec_rounds_the_start_of_both(tmp_path: Path) -> None:
    """The run starts from what sites receive, and the digest is of that."""
    odd = {name: tensor / 3 for name, tensor in tensors().items()}
    save_file(odd, tmp_path / "start.safetensors")
    tables = {"communication": {"down_codec": {"name": "bf16"}}}
    job = job_of(tmp_path, **tables)
    pool = ModelPool(job)
    weights_d, integers_m = initial_weights(job, pool)
    assert not np.array_equal(weights_d, started(job_of(tmp_path)))
    codec = job.communication.links.whole
    received_d = decoded(codec, codec.encode(weights_d))
    np.testing.assert_array_equal(received_d, weights_d)
    check_first(job, pool, received_d, integers_m)


def test_weights_beyond_the_codec_are_refused(tmp_path: Path) -> None:
    save_file(
        {**tensors(), LAST: tensors()[LAST] * 1e6}, tmp_path / "start.safetensors"
    )
    with pytest.raises(JobError, match=f"'{LAST}' in .*does not fit into fp16"):
        job_of(tmp_path, communication={"down_codec": {"name": "fp16"}})


def test_a_damaged_file_ends_a_command_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "start.safetensors").write_bytes(b"\xff" * 100)
    job = tmp_path / "job.toml"
    job.write_text(tomli_w.dumps(document("start.safetensors")))
    assert main(["check-job", str(job)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "start.safetensors is not a safetensors" in line


@pytest.fixture(params=["s3", "gcs"])
def bucket(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> ObjectStore:
    """One that the environment leads to."""
    server = request.getfixturevalue(f"{request.param}_server")
    if request.param == "gcs":
        from support import gcs_stores  # noqa: PLC0415 (slow to import)

        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        return gcs_stores.store(server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    store: ObjectStore = server.store()
    return store


def test_weights_come_from_a_bucket(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the object's URL, or that of the export which it is in; nothing is left."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    file = tmp_path / "start.safetensors"
    save_file(tensors(), file)
    upload(bucket, "exports/moons/model.safetensors", file)
    local = job_of(tmp_path)
    for name in ("exports/moons", "exports/moons/model.safetensors"):
        job = job_of(tmp_path, f"{bucket.url}/{name}")
        assert job.model.weights is not None
        assert local.model.weights is not None
        # The same weights have one digest, wherever they are.
        assert job.model.weights[-65:] == local.model.weights[-65:]
        np.testing.assert_array_equal(started(job), started(local))
    save_file({**tensors(), LAST: tensors()[LAST] + 1}, file)
    upload(bucket, "exports/moons/model.safetensors", file)
    with pytest.raises(JobError, match=r"(s3|gs)://.*holds different weights than"):
        started(job)
    bucket.delete("exports/moons/model.safetensors")
    with pytest.raises(JobError, match=r"no object (s3|gs)://.*/model\.safetensors or"):
        started(job)
    assert not [*scratch.iterdir()]


def test_a_file_in_a_bucket_has_a_largest_size(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is downloaded of a larger one."""
    save_file(tensors(), tmp_path / "start.safetensors")
    upload(bucket, "model.safetensors", tmp_path / "start.safetensors")
    job_of(tmp_path, bucket.url)
    monkeypatch.setattr(starting_weights, "MAX_DOWNLOAD_BYTES", 100)
    with pytest.raises(JobError, match="at most 100 are downloaded"):
        job_of(tmp_path, bucket.url)


def test_a_path_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="is no path") as caught:
        job_of(tmp_path, "a\0b")
    assert caught.value.key == "model.weights"


def test_a_damaged_model_with_personal_parts_is_named(tmp_path: Path) -> None:
    """Before its names are compared with the parts that sites keep."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x10" + 7 * b"\0" + b"damaged")
    personal = small_job(model={**FACTORY, "personal": ["*bias"]})
    with pytest.raises(JobError, match=r"model\.safetensors is not a safetensors"):
        trained_model(personal, file)


def test_values_of_a_type_that_cannot_be_read_are_named(tmp_path: Path):
    """The library's own error names neither file nor tensor.

    Its oldest releases know no such type, and so no such file.
    """
    head = {"1.weight": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}
    model = {"factory": "clients.models:mlp", "options": {"inputs": 4, "classes": 3}}
    job = small_job(model={**model, "weights": "model.safetensors"})
    text = json.dumps(head).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(
        JobError,
        match=r"'1.weight' as torch.float4.*quantised|model\.safetensors is not a",
    ):
        pinned(job, tmp_path)
    with pytest.raises(CorruptObject, match="cannot be read"):
        model_export.read(path)
    path.write_bytes(b"")
    with pytest.raises(JobError, match=r"is not a safetensors file: .*; copy it again"):
        pinned(job, tmp_path)

"""Flower's engine with data and runs in a bucket."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from clients.data import load
from clients.shards.write import write_dataset
from cloud_adapters.urls import StoreOptions, open_store
from deploy.wiring import run_store
from federation.errors import JobError
from federation.job.spec import JobSpec

pytestmark = [pytest.mark.flower, pytest.mark.slow]

BLOBS = "support.small_jobs:blobs"


@pytest.fixture
def service(
    s3_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, Any]:
    """A new bucket; credentials and cache are in the environment, as for a user."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("CROSSFED_CACHE_DIR", str(tmp_path / "cache"))
    return {
        "url": f"s3://{s3_server.bucket()}",
        "endpoint": s3_server.url,
        "region": "us-east-1",
    }


def job_in(service: dict[str, Any], **tables: Any) -> JobSpec:
    """Both sites read shards from the bucket, and the run is kept there."""
    url = f"{service['url']}/data"
    options = {"endpoint": service["endpoint"], "region": service["region"]}
    store = open_store(url, options=StoreOptions(**options))
    train, held_out = load(BLOBS, {})
    write_dataset(store, train, held_out, name="blobs", shard_bytes=20_000)
    store.close()
    data = {"source": url, "options": options}
    training = {"local_steps": 3, "batch_size": 7, "optimizer": {"lr": 0.5}}
    storage = service | {"url": f"{service['url']}/runs"}
    tables = {"training": training, "storage": storage} | tables
    return small_job(num_sites=2, rounds=3, data=data, **tables)


@pytest.mark.long
def test_engines_agree_about_a_bucket(service: dict[str, Any], tmp_path: Path):
    """Sites in other processes read their shards; a run continues from the bucket.

    On another engine than the one that it was stopped on.
    """
    job = job_in(service)
    expected = simulate(job, folder=None)
    rounds: list[object] = []
    stopped = simulate(
        job,
        folder=tmp_path / "run",
        listeners=[rounds.append],
        stop_requested=lambda: len(rounds) > 0,
    )
    assert stopped.rounds_now < 3
    store = run_store.open_bucket(job, stopped.run_id)
    assert any(info.key.startswith("checkpoints/") for info in store.list())
    store.close()
    assert len(list((tmp_path / "cache").glob("?" * 64))) > 3
    found = simulate(job, folder=tmp_path / "run", engine="flower", resume=True)
    assert found.rounds_completed == 3
    for name, array in expected.weights.items():
        np.testing.assert_array_equal(found.weights[name], array)


def test_kept_integers_and_a_bucket_are_refused(
    service: dict[str, Any], tmp_path: Path
):
    """They would stay on this machine, and another could not continue with the run."""
    model = {
        "factory": "support.users_module:norm_network",
        "integer_buffers": {"*num_batches_tracked": "keep"},
    }
    with pytest.raises(JobError, match=r"storage\.url: .*--engine inproc"):
        simulate(job_in(service, model=model), folder=tmp_path / "run", engine="flower")

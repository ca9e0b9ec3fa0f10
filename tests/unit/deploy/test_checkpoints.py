"""A run's checkpoints are found in its folder or in its bucket."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import event_samples, secure_runs
from support.small_jobs import small_job

from aggregator.checkpoint import RunCheckpoints
from cloud_adapters.keys.key_file import add_key
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from deploy.tools.checkpoints import CheckpointFindings, examine
from deploy.wiring import run_store
from deploy.wiring.encryption import encrypted
from federation.clock import VirtualClock
from federation.errors import JobError, RunConflict, RunNotFound
from federation.event_log import EventWriter
from federation.events import CheckpointSkipped
from federation.job.spec import JobSpec
from federation.protocols import ObjectStore, RunState
from federation.vectors import Layout, Role
from monitoring.runs.run_folder import RunFolder

NOW = 1_790_000_000.0
LAYOUT = Layout.build([("x", (1_000,), "float32", Role.PARAMETER)])


def begun(folder: Path, job: JobSpec) -> RunFolder:
    """A folder of a run that has begun."""
    folder.mkdir()
    run = RunFolder(folder)
    with EventWriter(run.events) as log:
        for event in event_samples.two_sites(1):
            log(event)
    run.write_job(job)
    return run


@pytest.mark.slow
def test_a_run_says_which_damaged_checkpoint_it_passes_over():
    """It continues from the one before."""
    store, job = MemoryStore(), small_job(rounds=3)
    stop = iter([False, False, True])
    secure_runs.run(job, store=store, stop_requested=lambda: next(stop, True))
    newest = max(o.key for o in store.list("checkpoints/round-"))
    store.put(newest, [b"damaged"])
    found = secure_runs.run(job, store=store)
    (skipped,) = (e for e in found.seen if isinstance(e, CheckpointSkipped))
    assert skipped.key == newest
    assert found.state.round_index == 3


def fill(store: ObjectStore, num_rounds: int = 3) -> None:
    checkpoints = RunCheckpoints(
        store=store,
        prefix="checkpoints/",
        run_id="run",
        job={},
        layout=LAYOUT,
        keep=9,
        emit=lambda _: None,
        clock=VirtualClock(0.0),
        chunk_bytes=1_000,
    )
    for index in range(1, num_rounds + 1):
        weights_d = np.arange(1_000, dtype=np.float32)
        weights_d[0] = -index
        checkpoints.save(
            RunState(
                round_index=index,
                weights_d=weights_d,
                integers_m=np.zeros(0, np.int64),
                optimizer={},
                rounds_completed=index,
                lost_in_a_row=0,
            )
        )


def look(
    place: str, *, verify: bool = False, keep: int | None = None
) -> CheckpointFindings:
    root, clock = Path("no-runs-here"), VirtualClock(NOW)
    return examine(place, root, verify=verify, keep=keep, clock=clock)


def rounds(found: CheckpointFindings) -> list[int | None]:
    return [one.round_index for one in found.survey.checkpoints]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = begun(tmp_path / "run", small_job(num_sites=2))
    fill(LocalStore(run.path))
    return run


@pytest.mark.slow
def test_bucket_of_a_run(
    tmp_path: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch
):
    """A run whose job names a bucket has its checkpoints there."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    url = f"s3://{s3_server.bucket()}/our/runs"
    job = small_job(
        num_sites=2,
        storage={"url": url, "endpoint": s3_server.url, "region": "us-east-1"},
    )
    run = begun(tmp_path / "run", job)
    run_id = run.run_id()
    assert run_id is not None
    fill(run_store.open_bucket(job, run_id))
    found = look(str(run.path), verify=True)
    assert found.url == f"{url}/{job.name}/{run_id}"
    assert rounds(found) == [1, 2, 3]
    # Of the file only the chunk with the first value is another.
    assert found.survey.checkpoints[1].shared == 3_104
    assert rounds(look(str(run.path), keep=1)) == [3]
    assert look(str(run.path), verify=True).num_damaged == 0


def test_encrypted_checkpoints(tmp_path: Path):
    """They are read with the key of the run's job; a URL alone has none."""
    add_key(tmp_path / "keys.toml")
    storage = {"encryption": {"key": f"file:{tmp_path / 'keys.toml'}"}}
    job = small_job(num_sites=2, storage=storage)
    run = begun(tmp_path / "run", job)
    fill(encrypted(job, LocalStore(run.path), run_id=run.run_id() or ""))
    found = look(str(run.path), verify=True)
    assert (rounds(found), found.num_damaged) == ([1, 2, 3], 0)
    assert found.survey.checkpoints[1].shared == 3_104
    assert look(f"file://{run.path}").num_damaged == 3
    assert look(f"file://{run.path}", keep=1).num_damaged == 3
    assert look(str(run.path), verify=True).num_damaged == 0


def test_prune_waits_for_a_run_that_goes_on(run: RunFolder):
    """While a process holds the run's folder nothing of it is removed."""
    with run.locked(), pytest.raises(RunConflict, match="another process"):
        look(str(run.path), keep=1)
    assert rounds(look(str(run.path))) == [1, 2, 3]


def test_nothing_there(tmp_path: Path, run: RunFolder):
    """The message says where it looked."""
    with pytest.raises(RunNotFound, match="no checkpoints in file://"):
        look(f"file://{tmp_path}/nothing")
    with pytest.raises(RunNotFound, match="there is no run"):
        look("nothing")
    with pytest.raises(JobError, match="scheme"):
        look("ftp://x")
    empty = begun(tmp_path / "empty", small_job(num_sites=2))
    with pytest.raises(RunNotFound, match="no checkpoints in file://"):
        look(str(empty.path))

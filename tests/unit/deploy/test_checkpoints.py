"""A run's checkpoints are found in its folder or in its bucket."""

from pathlib import Path

import numpy as np
import pytest
from support import event_samples, secure_runs
from support.small_jobs import small_job

from aggregator.checkpoint import RunCheckpoints
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from deploy.tools.checkpoints import CheckpointFindings, examine
from federation.clock import VirtualClock
from federation.errors import RunConflict
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


def test_prune_waits_for_a_run_that_goes_on(run: RunFolder):
    """While a process holds the run's folder nothing of it is removed."""
    with run.locked(), pytest.raises(RunConflict, match="another process"):
        look(str(run.path), keep=1)
    assert rounds(look(str(run.path))) == [1, 2, 3]

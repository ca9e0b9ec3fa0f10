"""Which run of a job ``--resume`` takes if no folder is given."""

from pathlib import Path

import pytest
from support import event_samples
from support.small_jobs import small_job

from deploy.aggregator_host import run_queue
from deploy.wiring.run_store import newest_folder
from federation.errors import RunNotFound
from federation.event_log import EventWriter
from federation.events import Event, RunExtended, RunFinished
from monitoring.runs.run_folder import RunFolder

JOB = small_job()


def kept(root: Path, day: int, *events: Event) -> RunFolder:
    """A run of a day."""
    run = RunFolder(root / "small" / f"202601{day:02}-000000-aaaaaa")
    run.path.mkdir(parents=True)
    with EventWriter(run.events) as note:
        for event in events:
            note(event)
    return run


def test_resume_prefers_a_run_with_rounds_left(tmp_path: Path):
    """A finished one is newest; an extension takes that."""
    finished = event_samples.two_sites(2)
    with pytest.raises(RunNotFound, match="of the job 'small'"):
        newest_folder(JOB, tmp_path)
    kept(tmp_path, 1, *finished[:-1])
    killed = kept(tmp_path, 2, *finished[:-1])
    newest = kept(tmp_path, 3, *finished)
    assert newest_folder(JOB, tmp_path) == killed.path
    assert newest_folder(JOB, tmp_path, unfinished=False) == newest.path


def test_resume_takes_the_newest_run_if_all_are_finished(tmp_path: Path):
    """It says that the run is complete; an extended run is not."""
    finished = event_samples.two_sites(2)
    old, newest = kept(tmp_path, 1, *finished), kept(tmp_path, 2, *finished)
    assert newest_folder(JOB, tmp_path) == newest.path
    longer = RunExtended(
        at=1.0,
        last_round=2,
        first_round=3,
        rounds_before=2,
        rounds=4,
        job_before="00" * 32,
        job="11" * 32,
    )
    with EventWriter(old.events) as note:
        note(longer)
    assert newest_folder(JOB, tmp_path) == old.path


def test_resume_leaves_runs_of_an_aggregator_alone(tmp_path: Path):
    """Their service resumes them."""
    ours = kept(tmp_path, 1, *event_samples.two_sites(2))
    run_queue.submit(
        JOB, RunFolder(tmp_path / "small" / "20260202-000000-bbbbbb"), at=0
    )
    (tmp_path / "small" / "20260202-000000-bbbbbb" / "events.jsonl").touch()
    assert newest_folder(JOB, tmp_path) == ours.path


@pytest.mark.parametrize("status", ["stopped", "failed", "interrupted"])
def test_run_that_ended_early_has_rounds_left(tmp_path: Path, status: str):
    """Whatever ended it."""
    *events, end = event_samples.two_sites(2)
    assert isinstance(end, RunFinished)
    early = RunFinished(
        at=end.at,
        status=status,
        rounds_completed=1,
        last_round=1,
        message="",
        seconds=1.0,
    )
    run = kept(tmp_path, 1, *events, early)
    assert not run.is_ended()

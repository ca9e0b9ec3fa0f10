"""A changed job of a deployment, and runs of it that have not ended."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from support.enrolments import Federation
from support.small_jobs import small_job

from deploy.aggregator_host import run_queue
from deploy.aggregator_host.run_queue import Outcome
from deploy.fleet import spec
from deploy.fleet.provision import check_older, hand_over
from deploy.fleet.state import Deployment
from federation.clock import VirtualClock
from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder

FILE = """
name = "fed"
job = "job.toml"
folder = "."
[[sites]]
name = "site-0"
"""
JOB = small_job()
CHANGED = replace(JOB, rounds=2)


class Fleet:
    """A deployment whose aggregator serves, with one enrolled site."""

    def __init__(self, folder: Path) -> None:
        self.federation = Federation(folder=folder)
        self.federation.site("site-0")
        (folder / "job.toml").write_text(tomli_w.dumps(job_file.document(JOB)))
        path = folder / "fed.toml"
        path.write_text(FILE)
        no_container: Any = object()
        self.told: list[str] = []
        self.deployment = Deployment(
            plan=spec.load(path),
            pools={"local": no_container},
            clock=VirtualClock(1.8e9),
            owner="",
        )
        assert self.deployment.plan.aggregator == self.federation.aggregator

    def submit(self, job: JobSpec, older: str = "") -> RunFolder:
        self.deployment.clock.sleep(2.0)
        run = hand_over(
            self.deployment,
            self.federation.config,
            job,
            self.told.append,
            older=older,
        )
        assert run is not None
        return run


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_older_runs_are_named_before_anything_is_started(fleet: Fleet):
    """A person decides; no run is submitted behind one that may never end."""
    first = fleet.submit(JOB)
    check_older(fleet.deployment, JOB, "")  # It is the same run.
    expected = rf"run {first.path.name} \(small, waiting, 0 rounds .*--older stop"
    with pytest.raises(JobError, match=expected):
        check_older(fleet.deployment, CHANGED, "")
    for choice in ("stop", "keep"):
        check_older(fleet.deployment, CHANGED, choice)


@pytest.mark.parametrize(("choice", "stops"), [("stop", True), ("keep", False)])
def test_older_runs_are_stopped_or_kept(fleet: Fleet, choice: str, *, stops: bool):
    """Each of them, and with a word; a run that is to stop is not named again."""
    first = fleet.submit(JOB)
    other = RunFolder(first.path.parents[1] / "other" / "20270101-000000-aaaaaa")
    run_queue.submit(replace(JOB, name="other"), other, at=0.0)
    newest = fleet.submit(CHANGED, choice)
    assert newest.path != first.path
    for run in (first, other):
        assert (run.path / run_queue.STOP).exists() is stops
        assert any(run.path.name in text for text in fleet.told[1:])
    again = replace(CHANGED, rounds=3)
    with pytest.raises(JobError) as caught:
        check_older(fleet.deployment, again, "")
    assert (first.path.name in str(caught.value)) is not stops
    assert newest.path.name in str(caught.value)


def test_pause_is_no_stop(fleet: Fleet):
    """The command that asked for it resumes the run."""
    run_queue.ask_to_pause(fleet.submit(JOB))
    with pytest.raises(JobError, match="--older"):
        check_older(fleet.deployment, CHANGED, "")


def test_ended_runs_wait_for_nobody(fleet: Fleet):
    """Nor does a completed run of the same job, which is not submitted again."""
    run = fleet.submit(JOB)
    run_queue.leave_outcome(run, Outcome(code=0, message="completed"))
    check_older(fleet.deployment, CHANGED, "")
    newest = fleet.submit(CHANGED)
    check_older(fleet.deployment, CHANGED, "")
    run_queue.leave_outcome(newest, Outcome(code=1, message="failed"))
    other = RunFolder(run.path.parents[1] / "other" / "20270101-000000-aaaaaa")
    run_queue.submit(replace(JOB, name="other"), other, at=0.0)
    with pytest.raises(JobError, match=other.path.name):  # It would be resumed.
        check_older(fleet.deployment, CHANGED, "")

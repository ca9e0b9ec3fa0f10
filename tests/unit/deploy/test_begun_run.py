"""A run that was killed before its first event goes on under its own name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.agents import consortium
from support.small_jobs import small_job

from clients.privacy.site_plans import PrivateSites
from deploy.aggregator_host import run_queue
from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.wiring.begun_run import begun_id, check_engine
from deploy.wiring.parts import build_federation
from deploy.wiring.simulation import simulate
from federation.clock import SystemClock, VirtualClock
from federation.errors import (
    CheckpointMismatch,
    CorruptObject,
    RunNotFound,
)
from federation.event_log import EventWriter
from federation.events import RunStarted
from federation.ids import RunId, SiteId
from monitoring.runs.run_folder import RunFolder
from privacy.dp.errors import LedgerDamaged
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file
from privacy.dp.ledger.ledger_format import Terms

RUN, OTHER = RunId("20260101-000000-aaaaaa"), RunId("20260102-000000-bbbbbb")


def begin(folder: Path, site: str, **changes: Any) -> Path:
    """Write the first line of a ledger, and nothing else."""
    terms = Terms(
        run_id=RUN, site=site, job_digest="ab" * 32, delta=1e-5, epsilon_cap=2.0
    )
    place = folder / "sites" / site
    place.mkdir(parents=True)
    FileLedger(place, replace(terms, **changes), clock=VirtualClock(1.8e9)).close()
    return place / LEDGER_NAME


def started_by(folder: Path, *engines: str) -> RunFolder:
    """A run of ``small_job`` whose coordinators have used these engines."""
    run = RunFolder(folder)
    folder.mkdir()
    (first,) = [e for e in event_samples.two_sites(1) if isinstance(e, RunStarted)]
    with EventWriter(run.events) as note:
        for engine in engines:
            note(replace(first, engine=engine))
    run.write_job(small_job())
    return run


@pytest.mark.parametrize("more", [{}, {"extend": True}])
def test_simulation_does_not_take_over_a_deployed_run(
    tmp_path: Path, more: dict[str, bool]
):
    """Its sites would be simulated, and its name that of a run on real data."""
    run = started_by(tmp_path / "run", "deployed")
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    with pytest.raises(CheckpointMismatch, match="crossfed run JOB --aggregator"):
        simulate(small_job(rounds=2), folder=run.path, resume=True, **more)
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_simulation_does_not_begin_in_the_folder_of_a_submitted_run(tmp_path: Path):
    """It waits for its coordinator, and has no event yet."""
    run = RunFolder(tmp_path / "run")
    run_queue.submit(small_job(), run, at=0.0)
    with pytest.raises(CheckpointMismatch, match="holds a deployed run"):
        simulate(small_job(), folder=run.path)
    assert not run.exists()


def test_service_does_not_continue_a_run_with_simulated_rounds(tmp_path: Path):
    """Somebody has copied them there: its rounds stay."""
    run = started_by(tmp_path / "run", "deployed", "inproc")
    with pytest.raises(CheckpointMismatch, match=r"simulated sites .engine inproc"):
        DeployedRun(run, consortium("site-0").parties, clock=SystemClock())


def test_engines_with_the_same_weights_continue_each_other(tmp_path: Path):
    """And no others; the message names the engine to resume with."""
    real = started_by(tmp_path / "real", "inproc", "flower")
    virtual = started_by(tmp_path / "virtual", "virtual")
    for run, engine in ((real, "inproc"), (real, "flower"), (virtual, "virtual")):
        check_engine(run, engine)
    with pytest.raises(CheckpointMismatch, match="resume it with --engine flower"):
        check_engine(real, "virtual")
    with pytest.raises(CheckpointMismatch, match="resume it with --engine virtual"):
        check_engine(virtual, "inproc")


def test_ledgers_name_the_run_of_a_folder_without_events(tmp_path: Path):
    """All of one run; without an event log it is no run to go on with."""
    run = RunFolder(tmp_path)
    begin(tmp_path, "a")
    begin(tmp_path, "b")
    (tmp_path / "sites" / "c").mkdir()
    (tmp_path / "sites" / "c" / LEDGER_NAME).write_bytes(b'{"torn')
    assert begun_id(run) is None
    run.events.touch()
    assert begun_id(run) == RUN
    path = begin(tmp_path, "d", run_id=OTHER)
    assert begun_id(run) is None
    path.write_bytes(path.read_bytes().replace(b"2026", b"2027", 1))
    with pytest.raises(LedgerDamaged):
        begun_id(run)


@pytest.mark.slow
def test_a_run_is_resumed_that_has_ledgers_and_no_event(tmp_path: Path):
    """As after a kill between the first line of a ledger and the run's first event."""
    private = {"unit": "record", "target_epsilon": 60.0, "noise_multiplier": 2.0}
    job = small_job(
        rounds=1,
        num_sites=1,
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
        data={
            "source": "support.small_jobs:blobs",
            "options": {"num_train": 400},
            "partition": {"kind": "iid"},
        },
        training={"local_steps": 1, "batch_size": 8},
        privacy={"differential_privacy": private},
    )
    folder, site = tmp_path / "mine", SiteId(job.sites[0].name)
    with pytest.raises(RunNotFound, match="omit --resume or --extend to start one"):
        simulate(job, folder=folder, resume=True)
    with PrivateSites(
        build_federation(job), run_id=RUN, folder=folder, clock=SystemClock()
    ) as sites:
        sites.trainer(site)
    (folder / "events.jsonl").touch()
    result = simulate(job, folder=folder, resume=True, report=False)
    assert result.rounds_completed == 1
    contents = read_file(folder / "sites" / site / LEDGER_NAME)
    assert (contents.terms.run_id, RunFolder(folder).run_id()) == (RUN, RUN)
    assert contents.charges


@pytest.mark.slow
def test_a_run_goes_on_whose_events_were_lost(tmp_path: Path):
    """Its checkpoints name it."""
    folder = tmp_path / "mine"
    job = small_job(rounds=2)
    answers = iter([False, True, True])
    first = simulate(
        job, folder=folder, report=False, stop_requested=lambda: next(answers)
    )
    assert first.rounds_completed == 1
    run = RunFolder(folder)
    before = run.run_id()
    run.events.write_bytes(b"")
    (folder / "checkpoints" / "round-000009.json").write_bytes(b"{")
    assert simulate(job, folder=folder, resume=True, report=False).status == "completed"
    assert run.run_id() == before


@pytest.mark.slow
def test_a_run_whose_checkpoints_were_lost_does_not_begin_again(tmp_path: Path):
    """Its events tell that there were some."""
    folder, job = tmp_path / "mine", small_job(rounds=2)
    answers = iter([False, True, True])
    stop: dict[str, Any] = {"stop_requested": lambda: next(answers)}
    simulate(job, folder=folder, report=False, **stop)
    for path in folder.glob("checkpoints/round-*"):
        path.unlink()
    with pytest.raises(CorruptObject, match="run saved round 1:"):
        simulate(job, folder=folder, resume=True, report=False)

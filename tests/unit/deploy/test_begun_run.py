"""A run that was killed before its first event goes on under its own name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_jobs import small_job

from clients.privacy.site_plans import PrivateSites
from deploy.wiring.begun_run import begun_id
from deploy.wiring.parts import build_federation
from deploy.wiring.simulation import simulate
from federation.clock import SystemClock, VirtualClock
from federation.errors import CorruptObject, RunNotFound
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

"""The fleets in ``jobs`` run in virtual time."""

from pathlib import Path

import pytest
from support.without_report import simulate

from federation.job import job_file
from federation.job.spec import JobSpec

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"
FLEETS = sorted(path.stem for path in JOBS.glob("fleet-*.toml"))


def load(name: str, *overrides: str) -> JobSpec:
    return job_file.load(JOBS / f"{name}.toml", overrides)


@pytest.mark.parametrize("name", FLEETS)
def test_fleet_runs_in_virtual_time(name: str) -> None:
    """For two rounds; of many sites, the first thirty."""
    few = ["rounds=2", "training.local_steps=4"]
    if len(load(name).sites) > 4:
        few += ["simulation.fleet.sites=30", "schedule.minimum_sites=1"]
    if "edge" in name:
        few += ["schedule.sites_per_round=20"]
    job = load(name, *few)
    outcome = simulate(job, engine="virtual")
    assert outcome.status == "completed"
    assert len(job.sites) in {2, 4, 30}

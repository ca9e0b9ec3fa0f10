"""``crossfed plan --probe``: speeds that nobody stated, measured by a rehearsal."""

import json
from functools import partial
from pathlib import Path

import pytest
import tomli_w
from support.deployment import crossfed
from support.small_jobs import small_job

from deploy.cli import job_check
from deploy.exit_codes import BAD_JOB
from deploy.fleet import forecast, measured, spec
from deploy.fleet.spec import DeploymentPlan
from federation.clock import VirtualClock
from federation.job import job_file
from federation.job.spec import JobSpec

pytestmark = pytest.mark.slow
SIZES = partial(job_check.sizes_of, clock=VirtualClock(0.0))
SIMULATED = {"simulation": {"live_metrics": ["tensorboard"]}}
SECURE = {"privacy": {"secure_aggregation": {"enabled": True, "max_examples": 1000}}}
AUTO = {"schedule": {"local_work": "auto", "max_local_steps": 8}}
LARGER = {"training": {"local_steps": 1, "accumulate_from": [[5, 2]]}}


def plan_of(job: JobSpec, folder: Path) -> DeploymentPlan:
    (folder / "job.toml").write_text(tomli_w.dumps(job_file.document(job)))
    sites = [{"name": site.name, "dollars_per_hour": 36.0} for site in job.sites]
    table = {"name": "fed", "job": "job.toml", "sites": sites}
    (folder / "fed.toml").write_text(tomli_w.dumps(table))
    return spec.load(folder / "fed.toml")


@pytest.mark.parametrize(
    "tables",
    [SIMULATED, SECURE, AUTO, LARGER],
    ids=["with metrics", "secure", "chosen steps", "larger steps"],
)
def test_a_rehearsal_shows_training_and_evaluation(tmp_path: Path, tables: dict):  # type: ignore[type-arg]
    """Apart, also of a job whose sites would not report them."""
    job = small_job(num_sites=3, rounds=9, **tables)
    found = measured.probe(plan_of(job, tmp_path), job, SIZES)
    assert found.run is None
    assert (found.speeds.setup_seconds, found.speeds.first_round_seconds) == (0, 0)
    assert [speed.name for speed in found.speeds.sites] == [s.name for s in job.sites]
    for speed in found.speeds.sites:
        for rate in (
            speed.train_examples_per_second,
            speed.evaluate_examples_per_second,
        ):
            assert 1 < rate < 1e8  # One that took no time would be larger.


def test_plan_writes_what_it_has_measured(tmp_path: Path):
    """And takes it the next time, as a stated file; prices come from the deployment."""
    plan_of(small_job(num_sites=2, rounds=4), tmp_path)
    file = str(tmp_path / "fed.toml")
    first = crossfed("plan", file, "--probe", "--json")
    own, *_ = json.loads(first.stdout)["alternatives"]
    assert own["seconds"] > 0
    assert "prediction does not include" in first.stderr
    path = tmp_path / "deployments" / "fed" / forecast.SPEEDS
    assert forecast.load_speeds(path).sites
    again = json.loads(crossfed("plan", file, "--json").stdout)
    assert again["alternatives"][0] == own
    machines = own["dollars"]["machines"]
    assert machines == pytest.approx(2 * 36.0 * own["seconds"] / 3600)
    told = crossfed("plan", file, "--probe", "--speeds", str(path), code=BAD_JOB).stderr
    assert "give one of --speeds, --like and --probe" in told
    small = f"{own['seconds'] / 3600 / 1e6:.12f}"
    nothing = crossfed("plan", file, "--deadline", small, code=1)
    assert "nothing fits: the shortest time is" in nothing.stderr

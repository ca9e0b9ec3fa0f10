"""What a deployment's run will send, take and cost, and what else one could do."""

from datetime import date
from functools import partial
from pathlib import Path

import pytest
from support.small_jobs import small_job

from deploy.cli import job_check
from deploy.fleet import plan, prices
from deploy.fleet.deployment_file import CloudMachine, DeploymentFile, SiteMachine
from deploy.wiring import parts
from deploy.wiring.simulation import simulate
from federation.clock import VirtualClock
from federation.errors import JobError
from federation.events import Event
from federation.job.spec import JobSpec
from federation.rounds import cost
from monitoring.views.run_fold import fold

SIZES = partial(job_check.sizes_of, clock=VirtualClock(0.0))


def virtual_job(**changes: object) -> JobSpec:
    """Two sites of known speeds, and lines that take no time."""
    machines = [
        {"site": site.name, "examples_per_second": 100.0 * (1 + index)}
        for index, site in enumerate(small_job(num_sites=2).sites)
    ]
    tables = {"simulation": {"machines": machines}, "rounds": 4}
    return small_job(num_sites=2, **{**tables, **changes})


def view_of(job: JobSpec):
    seen: list[Event] = []
    simulate(job, engine="virtual", listeners=[seen.append])
    return fold(seen)


def test_speeds_of_a_run_are_those_that_its_machines_had():
    """Virtual time has no noise: the job's own speeds come back."""
    job = virtual_job()
    federation = parts.build_federation(job)
    traffic = SIZES(federation)
    assert traffic is not None
    view = view_of(job)
    speeds = plan.measured_speeds(view, traffic)
    for speed, machine in zip(speeds.sites, job.simulation.machines, strict=True):
        stated = pytest.approx(machine.examples_per_second, rel=0.01)
        assert speed.name == machine.site
        assert speed.train_examples_per_second == stated
        assert speed.evaluate_examples_per_second == stated
    assert view.finished is not None
    predicted = cost.of_run(traffic, speeds).seconds
    assert predicted == pytest.approx(view.finished.seconds, rel=0.02)


def test_a_run_of_one_round_tells_no_speeds():
    """Its only round has work that no other has."""
    job = virtual_job(rounds=1)
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    with pytest.raises(JobError, match="two rounds or more") as caught:
        plan.measured_speeds(view_of(job), traffic)
    assert caught.value.key == "--like"


def test_alternatives_are_predicted_as_jobs_of_their_own():
    """Each with its keys set; the job itself comes first."""
    job = virtual_job()
    federation = parts.build_federation(job)
    speeds = cost.machine_speeds(job.simulation.machines)
    first, *others = plan.alternatives(federation, speeds, SIZES)
    assert (first.name, dict(first.changes)) == ("as it is", {})
    found = {one.name: one for one in others}
    assert set(found) == {
        "updates in bf16",
        "both directions in 16 bits",
        "twice the local steps, half the rounds",
        "no evaluation until the end",
    }
    for one in others:
        changed = plan._changed(job, one.changes)
        alone = SIZES(parts.build_federation(changed))
        assert alone is not None
        assert one.traffic.of_run() == alone.of_run()
        assert one.cost == cost.of_run(alone, speeds)
        assert one.num_bytes < first.num_bytes
    assert found["twice the local steps, half the rounds"].changes == {
        "rounds": 2,
        "training.local_steps": 2 * (job.training.local_steps or 0),
    }


def test_alternatives_that_a_job_forbids_are_not_offered():
    """An odd number of rounds has no half, and no codec works on secure sums."""
    job = small_job(num_sites=3, rounds=3, **SECURE)
    found = plan.alternatives(parts.build_federation(job), None, SIZES)
    assert [one.name for one in found] == [
        "as it is",
        "secure sums in 16 bits",
        "no evaluation until the end",
    ]
    assert all(one.cost is None for one in found)


TABLE = prices.load(None, today=date(2026, 6, 20), warn=pytest.fail)
SECURE = {"privacy": {"secure_aggregation": {"enabled": True, "max_examples": 1000}}}


def test_prices_are_those_of_the_deployment():
    """Machines for the time, traffic at its source."""
    job = virtual_job()
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    name = job.sites[0].name
    site = SiteMachine(name=name, dollars_per_hour=3600.0, dollars_per_gigabyte=1e9)
    file = DeploymentFile(name="x", job="j", sites=(site,))
    speeds = cost.machine_speeds(job.simulation.machines)
    speeds = plan.with_prices(speeds, file, TABLE)
    found = cost.of_run(traffic, speeds)
    _, up = traffic.of_run()
    assert found.dollars["machines"] == pytest.approx(found.seconds)
    assert 0 < found.dollars["traffic up"] < up.high  # That of one of two sites.
    assert found.dollars["traffic down"] == 0


def cloud(provider: str, region: str, kind: str, **changes: object) -> SiteMachine:
    machine = CloudMachine(region=region, type=kind, **changes)  # type: ignore[arg-type]
    return SiteMachine(name="site-0", provider=provider, machine=machine)


def test_machines_of_clouds_cost_what_the_table_says():
    """By the hour and market, and by the gigabyte that leaves the cloud."""
    job = virtual_job()
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    known = cost.machine_speeds(job.simulation.machines)
    site = cloud("gcp", "us-central1", "a2-highgpu-1g", market="spot")
    file = DeploymentFile(name="x", job="j", sites=(site,))
    priced = plan.with_prices(known, file, TABLE)
    assert priced.sites[0].dollars_per_hour == 1.804
    assert priced.sites[0].dollars_per_gigabyte == 0.12
    assert priced.sites[1].dollars_per_hour == 0
    own = plan._predict("as it is", {}, traffic, priced)
    (other,) = plan.markets(own, known, file, TABLE)
    assert (other.name, other.cost) == (
        "all on demand",
        cost.of_run(traffic, plan.with_prices(known, file, TABLE, spot=False)),
    )
    assert own.cost is not None
    assert other.cost is not None
    ratio = other.cost.dollars["machines"] / own.cost.dollars["machines"]
    assert ratio == pytest.approx(3.673 / 1.804)
    site = cloud("aws", "mars-1", "g5.xlarge")
    file = DeploymentFile(name="x", job="j", sites=(site,))
    with pytest.raises(
        JobError, match=r"g5.xlarge of aws in 'mars-1' \(it has us-east"
    ):
        plan.with_prices(known, file, TABLE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("spot = 1.804", "spot = 18.04", r"machines\[4\].spot: 18.04 is more than"),
        ("on_demand = 55.04", "on_demand = 5504", r"machines\[0\].on_demand"),
        ("dollars = 0.09", "dollars = 9", r"egress\[0\].tiers\[1\].dollars"),
        ("up_to = 10_240.0, dollars = 0.09", "up_to = 1, dollars = 0.09", "must rise"),
        ("{ dollars = 0.05 }", "{ up_to = 9e9, dollars = 0.05 }", "must rise"),
        ('as_of = "2026-06-17"', 'as_of = "June"', "as_of: 'June' is not a day"),
    ],
)
def test_slips_in_a_price_table_are_named(
    tmp_path: Path, old: str, new: str, message: str
):
    """A decimal point in the wrong place would make a plan worthless."""
    text = prices.PACKAGED.read_text()
    assert old in text
    path = tmp_path / "prices.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(JobError, match=message):
        prices.load(path, today=date(2026, 6, 20), warn=print)


def test_old_prices_are_told():
    told: list[str] = []
    prices.load(None, today=date(2026, 9, 15), warn=told.append)
    assert told == []
    prices.load(None, today=date(2026, 9, 16), warn=told.append)
    assert len(told) == 1
    assert "are 91 days old" in told[0]

"""What a deployment's run will send, take and cost, and what else one could do."""

from functools import partial

import pytest
from support.small_jobs import small_job

from deploy.cli import job_check
from deploy.fleet import plan
from deploy.fleet.deployment_file import DeploymentFile, SiteMachine
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


SECURE = {"privacy": {"secure_aggregation": {"enabled": True, "max_examples": 1000}}}


def test_prices_are_those_of_the_deployment():
    """Machines for the time, traffic at its source."""
    job = virtual_job()
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    name = job.sites[0].name
    site = SiteMachine(name=name, dollars_per_hour=3600.0, dollars_per_gigabyte=1e9)
    file = DeploymentFile(name="x", job="j", sites=(site,))
    speeds = plan.with_prices(cost.machine_speeds(job.simulation.machines), file)
    found = cost.of_run(traffic, speeds)
    _, up = traffic.of_run()
    assert found.dollars["machines"] == pytest.approx(found.seconds)
    assert 0 < found.dollars["traffic up"] < up.high  # That of one of two sites.
    assert found.dollars["traffic down"] == 0

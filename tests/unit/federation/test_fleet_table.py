"""``simulation.fleet``: many sites from a few numbers."""

from statistics import median
from typing import Any

import pytest
from support import toy

from federation.errors import JobError
from federation.job import job_digest, job_file


def job_of(fleet: dict[str, Any], **tables: Any):
    document = toy.document() | {"simulation": {"fleet": fleet}} | tables
    if "sites" not in tables:
        del document["sites"]
    return job_file.parse(document)


FLEET = {"sites": 400, "examples_per_second": 50.0, "spread": 4.0, "away_share": 0.2}


def test_sites_are_drawn_about_their_medians_and_always_the_same():
    job = job_of(FLEET)
    machines = job.simulation.machines
    assert [site.name for site in job.sites] == [machine.site for machine in machines]
    assert {len(site.name) for site in job.sites} == {len("site-001")}
    speeds = sorted(machine.examples_per_second for machine in machines)
    assert median(speeds) == pytest.approx(50.0, rel=0.15)
    within = sum(50 / 4 <= speed <= 50 * 4 for speed in speeds) / len(speeds)
    assert within == pytest.approx(0.95, abs=0.03)
    assert {machine.away_share for machine in machines} == {0.2}
    assert job_of(FLEET) == job
    assert job_of(FLEET, seed=8).simulation != job.simulation


def test_fleet_is_only_a_short_form():
    job = job_of(FLEET | {"sites": 3})
    again = job_file.parse(job_file.document(job))
    assert again == job
    assert job_digest.digest(again) == job_digest.digest(job)


@pytest.mark.parametrize(
    ("fleet", "tables", "key"),
    [
        (FLEET, {"sites": [{"name": "a"}]}, "simulation.fleet"),
        ({"sites": 3}, {}, "simulation.fleet.examples_per_second"),
        (FLEET | {"spread": 0.5}, {}, "simulation.fleet.spread"),
        (FLEET | {"sites": 0}, {}, "simulation.fleet.sites"),
        (FLEET | {"examples_per_second": -1.0}, {}, "fleet.examples_per_second"),
        (FLEET | {"away_share": 1.0}, {}, "simulation.fleet.away_share"),
        (FLEET, {"seed": "today"}, "seed"),
    ],
)
def test_bad_fleets_are_refused_by_name(
    fleet: dict[str, Any], tables: dict[str, Any], key: str
):
    with pytest.raises(JobError) as caught:
        job_of(fleet, **tables)
    assert key in str(caught.value)

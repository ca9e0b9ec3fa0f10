"""What was predicted of a run, beside what it took."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from deploy.cli import job_check
from deploy.fleet import forecast
from deploy.fleet.forecast import RunForecast
from deploy.wiring import parts
from federation.clock import VirtualClock
from federation.events import Event
from federation.rounds import cost
from federation.rounds.cost import Speeds
from monitoring.pages import report
from monitoring.views import run_plan
from monitoring.views.run_fold import fold
from monitoring.views.run_plan import RunPlan
from monitoring.views.run_view import RunView

SIZES = partial(job_check.sizes_of, clock=VirtualClock(0.0))
SETUP = 10.0


@pytest.fixture(scope="module")
def ran() -> tuple[RunPlan, RunView, Speeds]:
    """A run in virtual time, submitted some time before it started."""
    sites = [site.name for site in small_job(num_sites=2).sites]
    machines = [{"site": site, "examples_per_second": 100.0} for site in sites]
    job = small_job(num_sites=2, rounds=4, simulation={"machines": machines})
    seen: list[Event] = []
    simulate(job, engine="virtual", listeners=[seen.append])
    view = fold(seen)
    speeds = cost.machine_speeds(job.simulation.machines)
    speeds = replace(
        speeds,
        setup_seconds=SETUP,
        dollars_per_hour=3.6,
        dollars_per_gigabyte=2e6,
        sites=tuple(
            replace(s, dollars_per_hour=36.0, dollars_per_gigabyte=1e6)
            for s in speeds.sites
        ),
    )
    federation = parts.build_federation(job)
    found = RunForecast(
        federation=federation, traffic=SIZES(federation), speeds=speeds, prices=None
    )
    plan = forecast.run_plan(found, submitted=view.first_started_at - SETUP)
    assert plan is not None
    return plan, view, speeds


def test_time_bytes_and_dollars_are_compared(ran: tuple[RunPlan, RunView, Speeds]):
    """Both sides by one model; the actual dollars are prices times measured units."""
    plan, view, _ = ran
    rows = {(row.unit, row.what): row for row in run_plan.rows(plan, view)}
    assert rows["seconds", "set-up"].actual == pytest.approx(SETUP)
    whole = rows["seconds", "all"]
    assert whole.actual == pytest.approx(SETUP + view.seconds)
    assert whole.predicted[0] == pytest.approx(whole.actual, rel=0.02)
    for way in ("down", "up"):
        parted = [r for r in rows.values() if r.what.startswith(f"{way}, ")]
        assert len(parted) == 3
        assert all(row.error == 0 for row in parted)
        assert parted[-1].is_total
        assert parted[-1].actual == sum(row.actual for row in parted[:-1])
    dollars = {row.what: row for row in rows.values() if row.unit == "dollars"}
    assert dollars["machines"].actual == pytest.approx(2 * 0.01 * whole.actual)
    assert dollars["aggregator"].actual == pytest.approx(0.001 * whole.actual)
    assert dollars["traffic up"].actual == pytest.approx(view.bytes_up / 1e3)
    assert dollars["traffic down"].actual == pytest.approx(view.bytes_down / 500)
    assert dollars["all"].actual == pytest.approx(
        sum(row.actual for what, row in dollars.items() if what != "all")
    )


def test_a_longer_first_round_is_not_spread_over_the_others(
    ran: tuple[RunPlan, RunView, Speeds],
):
    """Nor forgotten: it is predicted once, and so is the set-up."""
    _, view, _ = ran
    first, *later = view.rounds
    longer = replace(first, started_at=first.started_at - 24.0)
    slow = replace(view, rounds=(longer, *later), seconds=view.seconds + 24.0)
    job = small_job(num_sites=2, rounds=4)
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    submitted = slow.first_started_at - 7.0
    speeds = forecast.measured_speeds(slow, traffic, submitted=submitted)
    assert speeds.first_round_seconds == pytest.approx(24.0, abs=0.2)
    assert speeds.setup_seconds == pytest.approx(7.0)
    found = cost.of_run(traffic, speeds)
    assert found.seconds == pytest.approx(slow.seconds + 7.0, rel=0.02)
    assert sum(found.phases.values()) == found.seconds


@pytest.mark.slow
def test_a_plan_is_kept_and_shown(ran: tuple[RunPlan, RunView, Speeds], tmp_path: Path):
    """In the run's folder; its page has every row."""
    plan, view, _ = ran
    run_plan.write(plan, tmp_path)
    assert run_plan.read(tmp_path) == plan
    page = report.render(view, "", {}, plan=plan)
    for row in run_plan.rows(plan, view):
        assert f"{row.what}</td>" in page
    assert "Predicted and actual" in page


def test_a_run_without_a_plan_shows_what_it_predicted_itself(
    ran: tuple[RunPlan, RunView, Speeds],
):
    """As simulations do."""
    _, view, _ = ran
    assert [row.what for row in run_plan.rows(None, view)] == [
        *("all", "down, all", "up, all")
    ]
    assert run_plan.rows(None, replace(view, predicted=None)) == []

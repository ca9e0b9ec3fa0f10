"""Sites move to machines on demand while the deadline can still be kept."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cloud_adapters.compute.pool import Market, Node, NodeState
from deploy.fleet import deployment_file, spending
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.moves import Mover, WorkLeft, check_prices
from deploy.fleet.prices import MachinePrice, Prices
from federation.errors import JobError

HOUR = 3600.0
BOOT_HOURS = 0.25  # As in the file: `start.machine_minutes` is 15 by default.
PRICES = Prices(
    as_of="2026-11-01",
    machines=(
        MachinePrice(
            provider="aws",
            region="us-east-1",
            machine="g5.xlarge",
            on_demand=1.0,
            spot=0.3,
        ),
    ),
    egress=(),
)


@pytest.fixture
def plan(tmp_path: Path) -> DeploymentPlan:
    path = tmp_path / "fed.toml"
    path.write_text("""
name = "fed"
job = "job.toml"
folder = "."
deadline_hours = 12.0
[[sites]]
name = "cloud"
provider = "aws"
[sites.machine]
region = "us-east-1"
type = "g5.xlarge"
market = "spot"
[sites.home]
url = "file:///mnt/home"
[[sites]]
name = "here"
""")
    return deployment_file.load(path)


def progress(rounds_left: int) -> Callable[[], WorkLeft]:
    """Of a run that has begun at 0, with rounds of an hour."""
    return lambda: WorkLeft(started=0.0, rounds_left=rounds_left, round_seconds=HOUR)


def node(market: Market = Market.SPOT, **changes: object) -> Node:
    values = {
        "id": "i-1",
        "name": "site-cloud",
        "state": NodeState.RUNNING,
        "labels": {"crossfed-role": "site-cloud"},
        "market": market,
        "launched": 0.0,
    }
    return Node(**(values | changes))


def markets(plan: DeploymentPlan) -> list[str]:
    return [site.machine.market for site in plan.file.sites]


def test_a_spot_machine_stays_while_its_loss_could_be_made_up_for(
    plan: DeploymentPlan,
):
    told: list[str] = []
    mover = Mover(plan, PRICES, progress(8), told.append)
    assert mover.moved(plan, [node()], 2 * HOUR) == plan
    assert not told


def test_a_lost_machine_is_replaced_on_demand_when_time_is_short(
    plan: DeploymentPlan,
):
    """With its reason, in words and on disk."""
    told: list[str] = []
    mover = Mover(plan, PRICES, progress(8), told.append)
    now = (12 - 8 - BOOT_HOURS - 0.1) * HOUR
    found = mover.moved(plan, [node(state=NodeState.GONE)], now)
    assert markets(found) == ["on-demand", "on-demand"]
    (line,) = told
    assert "site-cloud: on-demand: aws us-east-1 g5.xlarge on-demand at $1.000" in line
    assert "leave no slack before the deadline" in line
    row = json.loads((plan.folder / "decisions.jsonl").read_text())
    assert (row["role"], row["action"]) == ("site-cloud", "on-demand")
    assert row["reason"] in line


def test_it_stays_on_demand_to_the_end(plan: DeploymentPlan):
    """There is no time left to change."""
    mover = Mover(plan, PRICES, progress(8), lambda _: None)
    now = (12 - 8 - BOOT_HOURS - 0.1) * HOUR
    moved = mover.moved(plan, [], now)
    again = mover.moved(moved, [node(Market.ON_DEMAND, launched=now)], now + 60.0)
    assert markets(again) == ["on-demand", "on-demand"]


def test_nothing_is_decided_before_the_first_round_or_after_the_last(
    plan: DeploymentPlan,
):
    for known in (lambda: None, progress(0)):
        mover = Mover(plan, PRICES, known, lambda _: None)
        assert mover.moved(plan, [], 11.9 * HOUR) == plan


def test_a_site_without_a_home_is_never_moved(plan: DeploymentPlan):
    """Its keys and its ledger would be lost; `up` refuses such a file, too."""
    text = plan.path.read_text().replace('url = "file:///mnt/home"', "")
    plan.path.write_text(text)
    bare = deployment_file.load(plan.path)
    mover = Mover(bare, PRICES, progress(8), lambda _: None)
    assert mover.moved(bare, [], 11.9 * HOUR) == bare


def without(plan: DeploymentPlan, old: str, new: str) -> DeploymentPlan:
    plan.path.write_text(plan.path.read_text().replace(old, new))
    return deployment_file.load(plan.path)


NO_SPOT = replace(PRICES, machines=(replace(PRICES.machines[0], spot=None),))


def test_a_deadline_without_a_price_is_refused_before_the_start(plan: DeploymentPlan):
    """In the middle of a run, it would end the watch, and machines went on unkept."""
    with pytest.raises(JobError, match=r"no price of a spot g5\.xlarge") as caught:
        check_prices(plan, NO_SPOT)
    assert caught.value.key == "sites[0].dollars_per_hour"
    check_prices(plan, PRICES)
    stated = without(
        plan, 'provider = "aws"', 'provider = "aws"\ndollars_per_hour = 0.2'
    )
    check_prices(stated, NO_SPOT)
    with pytest.raises(JobError, match="no price of an on-demand") as caught:
        check_prices(stated, replace(PRICES, machines=()))
    assert caught.value.key == "sites[0].on_demand_dollars_per_hour"


def test_a_stated_price_is_that_of_the_stated_market(plan: DeploymentPlan):
    """And a machine that was moved is counted at the other one."""
    stated = without(
        plan,
        'provider = "aws"',
        'provider = "aws"\ndollars_per_hour = 0.2\non_demand_dollars_per_hour = 1.5',
    )
    told: list[str] = []
    mover = Mover(stated, replace(PRICES, machines=()), progress(8), told.append)
    now = (12 - 8 - BOOT_HOURS - 0.1) * HOUR
    moved = mover.moved(stated, [node(state=NodeState.GONE)], now)
    assert "at $1.500 an hour" in told[0]
    assert moved.file.sites[0].dollars_per_hour == 1.5
    assert stated.file.sites[0].in_market("spot").dollars_per_hour == 0.2


def test_attached_gpus_are_not_forgotten_in_a_price(plan: DeploymentPlan):
    """The type alone costs a fraction."""
    site = plan.file.sites[0]
    machine = replace(site.machine, accelerator="nvidia-tesla-t4", accelerators=2)
    with pytest.raises(JobError, match=r"a spot g5\.xlarge \+ 2 x nvidia-tesla-t4"):
        spending._hourly(
            replace(plan.file, sites=(replace(site, machine=machine),)), PRICES
        )

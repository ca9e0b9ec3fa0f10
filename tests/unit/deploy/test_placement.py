"""Sites move to machines on demand while the deadline can still be kept."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cloud_adapters.compute.pool import Market, Node, NodeState
from deploy.fleet import spec, spending
from deploy.fleet.placement import Placement, WorkLeft, check_deadline, market_now
from deploy.fleet.prices import MachinePrice, Prices
from deploy.fleet.spec import DeploymentPlan
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
    return spec.load(path)


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


def test_a_site_is_on_spot_until_a_loss_could_not_be_made_up_for():
    """A loss costs the whole round, and the start of a machine on demand."""
    rest = {"work_hours": 8.0, "round_hours": 1.25, "boot_hours": 0.5}
    for left, boot_left, market in (
        (9.75, 0.0, Market.SPOT),
        (9.74, 0.0, Market.ON_DEMAND),
        (10.25, 0.5, Market.SPOT),
        (10.24, 0.5, Market.ON_DEMAND),
        (-1.0, 0.0, Market.ON_DEMAND),
    ):
        found = market_now(left_hours=left, boot_left_hours=boot_left, **rest)
        assert found is market, (left, boot_left)


def test_a_spot_machine_stays_while_its_loss_could_be_made_up_for(
    plan: DeploymentPlan,
):
    told: list[str] = []
    ours = Placement(plan, progress(8), told.append)
    assert ours.placed(plan, [node()], 2 * HOUR) == plan
    assert not told


def test_a_lost_machine_is_replaced_on_demand_when_time_is_short(
    plan: DeploymentPlan,
):
    """With its reason, once."""
    told: list[str] = []
    ours = Placement(plan, progress(8), told.append)
    now = (12 - 8 - BOOT_HOURS - 0.1) * HOUR
    for later in (0.0, 60.0):
        gone = [node(state=NodeState.GONE)]
        found = ours.placed(plan, gone, now + later)
        assert markets(found) == ["on-demand", "on-demand"]
    (line,) = told
    assert line.startswith("site-cloud: on demand from now on: 8.0 h of work")


def test_it_stays_on_demand_to_the_end(plan: DeploymentPlan):
    """There is no time left to change."""
    ours = Placement(plan, progress(8), lambda _: None)
    now = (12 - 8 - BOOT_HOURS - 0.1) * HOUR
    moved = ours.placed(plan, [], now)
    again = ours.placed(moved, [node(Market.ON_DEMAND, launched=now)], now + 60.0)
    assert markets(again) == ["on-demand", "on-demand"]


def test_nothing_is_decided_before_the_first_round_or_after_the_last(
    plan: DeploymentPlan,
):
    for known in (lambda: None, progress(0)):
        ours = Placement(plan, known, lambda _: None)
        assert ours.placed(plan, [], 11.9 * HOUR) == plan


def test_a_missed_deadline_is_reported_once_before_and_once_after(
    plan: DeploymentPlan,
):
    """It has twelve hours for rounds of an hour; the run continues."""
    told: list[str] = []
    ours = Placement(plan, progress(8), told.append)
    machines = [node(Market.ON_DEMAND)]
    found: list[list[str]] = []
    for hours in (3.9, 4.1, 5.0, 12.0, 13.0):
        ours.placed(plan, machines, hours * HOUR)
        found.append([line for line in told if "deadline_hours" in line])
        told.clear()
    none, (early,), still, (late,), last = found
    assert none == still == last == []
    assert early == (
        "deadline_hours = 12 will probably be missed: 8 rounds left, 8.0 h at the pace "
        "so far, in 7.9 h"
    )
    assert "deadline_hours = 12 are over, with 8 rounds left" in late
    done: list[str] = []
    Placement(plan, progress(0), done.append).placed(plan, machines, 13 * HOUR)
    assert not done


def without(plan: DeploymentPlan, old: str, new: str) -> DeploymentPlan:
    plan.path.write_text(plan.path.read_text().replace(old, new))
    return spec.load(plan.path)


def test_a_budget_needs_the_price_of_the_machine_on_demand(plan: DeploymentPlan):
    """In the middle of a run, its absence would end the watch of paid machines."""
    check_deadline(plan, now=1.7e9, tell=print)
    unknown = without(
        plan, 'folder = "."', 'folder = "."\nmax_dollars = 9.0\nprices = "prices.toml"'
    )
    (plan.folder / "prices.toml").write_text(
        'as_of = "2026-11-01"\n[[machines]]\nprovider = "aws"\nregion = "eu-west-1"\n'
        'machine = "g5.xlarge"\non_demand = 1.0\n'
        '[[egress]]\nprovider = "aws"\ntiers = [{ dollars = 0.09 }]\n'
    )
    with pytest.raises(JobError, match=r"price of an on-demand g5\.xlarge"):
        check_deadline(unknown, now=1.7959e9, tell=print)
    check_deadline(without(plan, "deadline_hours", "# "), now=1.7959e9, tell=print)


def test_a_stated_price_is_that_of_the_stated_market(plan: DeploymentPlan):
    """And a machine that was moved is counted at the other one."""
    stated = without(
        plan,
        'provider = "aws"',
        'provider = "aws"\ndollars_per_hour = 0.2\non_demand_dollars_per_hour = 1.5',
    )
    ours = Placement(stated, progress(8), lambda _: None)
    now = (12 - 8 - BOOT_HOURS - 0.1) * HOUR
    moved = ours.placed(stated, [node(state=NodeState.GONE)], now)
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


def test_a_move_waits_for_the_end_of_the_round_while_the_deadline_allows(
    plan: DeploymentPlan,
):
    """It may if a loss just before that end could still be made up for."""
    began = 3 * HOUR
    for spare, waits in ((1.1, True), (0.9, False)):
        now = began + 0.1 * HOUR
        left = 8.0 - 0.1 + BOOT_HOURS + spare
        known = WorkLeft(
            started=now - (12.0 - left) * HOUR,
            rounds_left=8,
            round_seconds=HOUR,
            round_began=began,
        )
        ours = Placement(plan, lambda known=known: known, lambda _: None)
        alive = [node(launched=0.0)]
        moved = ours.placed(plan, alive, now)
        assert markets(moved) == ["on-demand", "on-demand"]
        assert ours.may_wait(plan, moved, alive, now) is waits
        # A machine that is gone waits for nothing.
        assert not ours.may_wait(plan, moved, [], now)


def test_a_machine_stays_while_a_lost_round_could_be_made_up_for(plan: DeploymentPlan):
    """A loss costs the round that it happens in, besides the start of the next one."""
    ours = Placement(plan, progress(8), lambda _: None)
    at = (12 - 8 - BOOT_HOURS) * HOUR
    assert ours.placed(plan, [node()], at - 1.3 * HOUR) == plan
    late = ours.placed(plan, [node()], at - 1.2 * HOUR)
    assert markets(late) == ["on-demand", "on-demand"]

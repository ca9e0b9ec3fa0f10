"""A budget counts what a spot machine costs in its own zone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cloud_adapters.compute.machine_types import SpotPrice
from cloud_adapters.compute.pool import Market, Node, NodeState
from deploy.fleet import deployment_file, spending
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.keeping.spot_record import SpotRecord
from deploy.fleet.keeping.zone_prices import mean_price, paid_prices
from deploy.fleet.spending import MachineCost, Spending

HOUR = 3600.0
ROLE = "site-cloud"
NEAR, FAR = "us-east-1a", "us-east-1b"
# The far zone is dear until the second hour.
PRICES = [
    SpotPrice(zone=NEAR, at=0.0, dollars_per_hour=0.3),
    SpotPrice(zone=FAR, at=0.0, dollars_per_hour=0.9),
    SpotPrice(zone=FAR, at=2 * HOUR, dollars_per_hour=0.1),
]


class Published:
    """A cloud that publishes prices."""

    def spot_prices(
        self, machine: str, zones: Sequence[str], since: float
    ) -> Sequence[SpotPrice]:
        assert (machine, zones) == ("g5.xlarge", ())
        return [each for each in PRICES if each.at >= max(0.0, since)]


@pytest.fixture
def plan(tmp_path: Path) -> DeploymentPlan:
    path = tmp_path / "fed.toml"
    path.write_text("""
name = "fed"
job = "job.toml"
folder = "."
max_dollars = 10.0
[[sites]]
name = "cloud"
provider = "aws"
[sites.machine]
region = "us-east-1"
type = "g5.xlarge"
market = "spot"
""")
    return deployment_file.load(path)


def node(zone: str, **changes: object) -> Node:
    values = {
        "id": zone,
        "name": ROLE,
        "state": NodeState.RUNNING,
        "labels": {"crossfed-role": ROLE},
        "machine": "g5.xlarge",
        "zone": zone,
        "market": Market.SPOT,
        "launched": HOUR,
    }
    return Node(**(values | changes))


def test_a_mean_price_weighs_each_price_by_the_time_that_it_held():
    for begin, end, expected in (
        (0.0, 2 * HOUR, 0.9),
        (HOUR, 3 * HOUR, 0.5),
        (HOUR, 5 * HOUR, (0.9 + 3 * 0.1) / 4),
        (3 * HOUR, 4 * HOUR, 0.1),
        (HOUR, HOUR, 0.9),
        # What was published first counts also before.
        (-2 * HOUR, -HOUR, 0.9),
        # A clock that was set back.
        (3 * HOUR, HOUR, 0.1),
    ):
        found = mean_price(PRICES, FAR, begin, end)
        assert found == pytest.approx(expected), (begin, end)
    assert mean_price(PRICES, "us-east-1c", 0.0, HOUR) is None


def test_a_budget_counts_the_zone_that_a_site_has_moved_to(plan: DeploymentPlan):
    """And not the table's price, which is that of a region."""
    record = SpotRecord(plan.folder, {"aws us-east-1": Published()}, print)
    nodes = [
        node(NEAR, state=NodeState.GONE, ended=2 * HOUR),
        node(FAR, launched=2 * HOUR),
        node("us-east-1c"),
        node(FAR, id="on-demand", market=Market.ON_DEMAND),
        node(FAR, id="larger", machine="g5.2xlarge"),
        node(FAR, id="other", labels={"crossfed-role": "aggregator"}),
    ]
    paid = paid_prices(plan, record, nodes, 4 * HOUR)
    assert paid == pytest.approx({NEAR: 0.3, FAR: 0.1})
    spent = spending.observed(Spending(), nodes[:2], {ROLE: 7.0}, 4 * HOUR, paid=paid)
    assert spent.dollars == pytest.approx(0.3 + 0.2)
    # Prices change while a machine runs.
    later = spending.observed(spent, nodes[1:2], {ROLE: 7.0}, 4 * HOUR, paid={FAR: 1.0})
    assert later.dollars == pytest.approx(0.3 + 2.0)


def test_a_stated_price_counts_in_every_zone(plan: DeploymentPlan):
    (site,) = plan.file.sites
    sites = (replace(site, dollars_per_hour=0.5),)
    stated = replace(plan, file=replace(plan.file, sites=sites))
    record = SpotRecord(plan.folder, {"aws us-east-1": Published()}, print)
    assert paid_prices(stated, record, [node(FAR)], 4 * HOUR) == {}


def test_what_is_left_of_a_budget_lasts_at_the_price_of_the_machine_that_runs(
    plan: DeploymentPlan,
):
    """A machine that costs more than the table says ends all the earlier."""
    (site,) = plan.file.sites
    sites = (replace(site, dollars_per_hour=1.0),)
    stated = replace(plan, file=replace(plan.file, sites=sites))
    cost = MachineCost(id=FAR, role=ROLE, dollars_per_hour=4.0, seconds=HOUR)
    for state, hours in ((NodeState.RUNNING, 1.5), (NodeState.GONE, 6.0)):
        spending.write(plan.folder, Spending(machines=(cost,)))
        nodes = [node(FAR, state=state, ended=2 * HOUR)]
        left = spending.seconds_left(stated, nodes, now=2 * HOUR)
        assert left == pytest.approx(hours * HOUR), state

"""What a deployment's machines have cost, as far as one who watches them knows.

``spending.json`` in the deployment's folder adds up all machines that it ever had, also
those that their service no longer lists. Disks are in their prices; traffic and NAT
gateways are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cloud_adapters.compute.pool import Node
from deploy.fleet import prices
from deploy.fleet.machine_spec import LOCAL, SiteMachine
from deploy.fleet.prices import Prices
from deploy.fleet.reconcile import AGGREGATOR, ROLE
from deploy.fleet.spec import DeploymentFile, DeploymentPlan
from federation import durable_files
from federation.errors import JobError

LEAST_SECONDS = 60.0
"""No machine is launched if the rest of a budget pays for less."""

_RECORD = "spending.json"
_HOUR = 3600.0
_DAMAGED = "restore it; if you delete it, max_dollars counts from now on"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCost:
    """One machine.

    Attributes:
        id: How its service knows it.
        role: What it did.
        dollars_per_hour: Its price.
        seconds: How long it has been paid for, when it was last seen.
    """

    id: str
    role: str
    dollars_per_hour: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """All machines of a deployment, those that have ended among them."""

    machines: tuple[MachineCost, ...] = ()

    @property
    def dollars(self) -> float:
        """What they have cost together."""
        return sum(
            each.dollars_per_hour * each.seconds / _HOUR for each in self.machines
        )


def observed(
    spending: Spending,
    nodes: Sequence[Node],
    hourly: Mapping[str, float],
    now: float,
) -> Spending:
    """Add what is seen now; a machine that is no longer listed keeps its last cost.

    Args:
        spending: So far.
        nodes: All nodes of the deployment that their services list.
        hourly: Dollars per hour, by role.
        now: Seconds since 1970.
    """
    known = {each.id: each for each in spending.machines}
    for node in nodes:
        role = node.labels.get(ROLE, "")
        seconds, before = node.seconds(now), known.get(node.id)
        if before is None:
            known[node.id] = MachineCost(
                id=node.id,
                role=role,
                dollars_per_hour=hourly.get(role, 0.0),
                seconds=seconds,
            )
        # The end of a machine that is gone may not be known.
        elif node.ended is not None or not _is_gone(node):
            # One that was first seen without a budget has no price yet.
            price = before.dollars_per_hour or hourly.get(role, 0.0)
            known[node.id] = replace(before, seconds=seconds, dollars_per_hour=price)
    return Spending(machines=tuple(known.values()))


def _is_gone(node: Node) -> bool:
    return node.state.value == "gone"


def _hourly(file: DeploymentFile, table: Prices | None) -> Mapping[str, float]:
    """Dollars of an hour of each role's machine: stated, or of the table."""
    found = {AGGREGATOR: file.aggregator.dollars_per_hour}
    for site in file.sites:
        found[site.role] = machine_hour(site, table)
    return found


def machine_hour(
    site: SiteMachine, table: Prices | None, *, spot: bool | None = None
) -> float:
    """Find the price of a site's machine with its disk: stated, or of the table.

    Args:
        site: The site; what it states is the whole price.
        table: The price table; None if every machine has a stated price.
        spot: Whether its price as a spot machine is asked for, or that on demand; None
            for its own market.

    Returns:
        Dollars of an hour.

    Raises:
        JobError: The table lacks the price.
    """
    machine = site.machine
    is_stated = site.dollars_per_hour is not None and spot is None
    if is_stated or not site.is_of_cloud:
        return site.dollars_per_hour or 0.0
    if table is None:
        raise JobError(f"no price of {machine.type} is stated", key="prices")
    is_spot = site.is_spot if spot is None else spot
    hourly = table.hourly(
        site.provider, machine.region, machine.priced_as, spot=is_spot
    )
    return hourly + table.disk_hour(site.provider, machine.disk_gb)


def budget_prices(plan: DeploymentPlan, *, now: float) -> Mapping[str, float]:
    """Find the prices of a deployment, which a budget makes necessary.

    Args:
        plan: The deployment.
        now: Seconds since 1970.

    Returns:
        Dollars of an hour, by role; empty if there is no budget.

    Raises:
        JobError: There is a budget, and the table is older than 90 days or lacks a
            price.
    """
    file = plan.file
    if file.max_dollars is None:
        return {}
    if all(s.provider == LOCAL or s.dollars_per_hour is not None for s in file.sites):
        return _hourly(file, None)
    clouds = {site.provider for site in file.sites}
    table = prices.load(
        plan.prices, today=prices.day_of(now), warn=_refuse, clouds=clouds
    )
    return _hourly(file, table)


def seconds_left(
    plan: DeploymentPlan, nodes: Sequence[Node], *, now: float
) -> float | None:
    """How long all machines can run together until the budget is spent.

    What machines have cost so far is written down, since not every service still lists
    them later.

    Args:
        plan: The deployment.
        nodes: All nodes of it that their services list.
        now: Seconds since 1970.

    Returns:
        None if there is no budget, or no machine has a price.

    Raises:
        JobError: Prices are missing or too old.
        StoreUnavailable: The folder cannot be written.
    """
    hourly, limit = budget_prices(plan, now=now), plan.file.max_dollars
    if limit is None or not sum(hourly.values()):
        return None
    spent = observed(read(plan.folder), nodes, hourly, now)
    write(plan.folder, spent)
    return rest_seconds(limit, spent, nodes, hourly)


def rest_seconds(
    limit: float, spending: Spending, nodes: Sequence[Node], hourly: Mapping[str, float]
) -> float | None:
    """How long the rest of a budget pays for all machines together.

    Args:
        limit: Dollars that all of them may cost.
        spending: What they have cost so far.
        nodes: All nodes of the deployment that their services list.
        hourly: Dollars per hour, by role.

    Returns:
        None if no machine has a price.
    """
    rate = sum(_rates(spending, nodes, hourly).values())
    return max(0.0, limit - spending.dollars) / rate * _HOUR if rate else None


def _rates(
    spending: Spending, nodes: Sequence[Node], hourly: Mapping[str, float]
) -> Mapping[str, float]:
    """Dollars of an hour of each role from now on.

    That of its price, or of the machine that it has if this one costs more: the next
    one may cost either.
    """
    alive = {node.id for node in nodes if not _is_gone(node)}
    found = dict(hourly)
    for each in spending.machines:
        if each.id in alive:
            known = found.get(each.role, 0.0)
            found[each.role] = max(known, each.dollars_per_hour)
    return found


def _refuse(message: str) -> None:
    raise JobError(
        f"a budget needs new prices, but {message}; name a newer table as prices in "
        "the deployment file (tools/refresh_prices.py of the repository writes one), "
        "or state dollars_per_hour of every site",
        key="max_dollars",
    )


def read(folder: Path) -> Spending:
    """Read what a deployment has cost so far.

    Raises:
        CorruptObject: The record is damaged.
    """
    found = durable_files.read_json(folder / _RECORD, Spending, advice=_DAMAGED)
    return Spending() if found is None else found


def write(folder: Path, spending: Spending) -> None:
    """Write it down.

    Raises:
        StoreUnavailable: The folder cannot be written.
    """
    durable_files.write_json(folder / _RECORD, spending)

"""The cheapest machine that meets what a site requires, where its data may be.

A site states its region and its zones, and no other is looked at: its data does not
leave them. Only types with a price in the table are candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cloud_adapters.compute.machine_types import (
    MachineCatalogue,
    MachineType,
    RequiresSpec,
)
from cloud_adapters.compute.pool import ComputePool, Market, Node, NodeState
from deploy.fleet import prices as price_table
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.pools import pools_of
from deploy.fleet.prices import MachinePrice, Prices
from deploy.fleet.reconcile import DEPLOYMENT, ROLE, SITE_PREFIX
from deploy.fleet.tables.site_machine import SiteMachine
from federation.errors import JobError
from federation.protocols import Clock

Tell = Callable[[str], None]


def with_types(
    plan: DeploymentPlan, *, clock: Clock, tell: Tell, prices: Path | None = None
) -> DeploymentPlan:
    """Name the type of every machine that the file leaves open; see ``resolved``.

    Clouds are asked, and prices read, only if there is one.
    """
    if not any(_is_kept(plan, site) for site in plan.file.sites):
        return plan
    today = price_table.day_of(clock.now())
    table = price_table.load(prices or plan.prices, today=today, warn=tell)
    return resolved(plan, pools_of(plan, clock), table, tell)


def resolved(
    plan: DeploymentPlan, pools: Mapping[str, ComputePool], prices: Prices, tell: Tell
) -> DeploymentPlan:
    """Name the type of every machine that the file leaves open.

    A machine that runs keeps its type, whatever costs less now: it has the site's keys.
    One that a deadline has moved keeps its market, and one with sizes its size.

    Args:
        plan: The deployment.
        pools: Compute services by their names.
        prices: The table.
        tell: Called with a word about every choice.

    Raises:
        JobError: No machine meets what a site requires; the message names what does.
        ComputeError: A service failed.
    """
    sites = []
    for index, site in enumerate(plan.file.sites):
        own, market = site.machine, site.machine.market
        if _is_kept(plan, site):
            node = _running(plan, site, pools[site.pool])
            if node is not None and node.machine in {each.type for each in site.sizes}:
                # A change of size before has chosen it.
                own = replace(own, type=node.machine)
            elif node is not None:
                kind = node.machine if _is_open(site) else own.type
                market = node.market.value if _may_move(plan, site) else own.market
                own = replace(own, type=kind)
            elif _is_open(site):
                hourly, kind = _chosen(plan, index, pools[site.pool], prices)
                own = replace(own, type=kind)
                tell(
                    f"{SITE_PREFIX}{site.name}: {site.provider} {own.region} {kind} "
                    f"{market} at ${hourly:.3f} an hour is the cheapest that meets "
                    "machine.requires"
                )
        found = replace(site, machine=own).in_market(market)
        sites.append(found.sized(own.type) if site.sizes else found)
    return replace(plan, file=replace(plan.file, sites=tuple(sites)))


def offers(
    site: SiteMachine, types: Sequence[MachineType], prices: Prices
) -> Sequence[tuple[float, str]]:
    """Machines that meet what a site requires: dollars per hour and type, sorted.

    Args:
        site: The site: its region, zones, market and requirements.
        types: Types that its zones have.
        prices: The table.
    """
    machine = site.machine
    found = []
    for each in types:
        hourly = _hourly(site, each.name, prices)
        if hourly is not None and not machine.requires.lacking(each):
            found.append((hourly, each.name))
    return sorted(found)


def _chosen(
    plan: DeploymentPlan, index: int, pool: ComputePool, prices: Prices
) -> tuple[float, str]:
    site = plan.file.sites[index]
    if not isinstance(pool, MachineCatalogue):
        raise TypeError(f"{site.pool} describes no types of machines")
    names = {each.machine for each in _priced(site, prices)}
    types = pool.machine_types(names, site.machine.zones) if names else ()
    found = offers(site, types, prices)
    if found:
        return found[0]
    others = [
        f"{each.name} has {_why_not(site, each, prices)}"
        for each in sorted(types, key=lambda each: each.name)
    ]
    where = ", ".join(site.machine.zones) or site.machine.region
    raise JobError(
        f"{plan.path}: no {site.machine.market} machine of {site.provider} in {where} "
        f"with a price in the table meets this: {'; '.join(others) or 'there is none'}"
        ". Require less, name another region that the data may be in, or add prices",
        key=f"sites[{index}].machine.requires",
    )


def _why_not(site: SiteMachine, machine: MachineType, prices: Prices) -> str:
    lacking = list(site.machine.requires.lacking(machine))
    if _hourly(site, machine.name, prices) is None:
        lacking.append(f"no {site.machine.market} price")
    return " and ".join(lacking)


def _priced(site: SiteMachine, prices: Prices) -> Sequence[MachinePrice]:
    where = (site.provider, site.machine.region)
    return [each for each in prices.machines if (each.provider, each.region) == where]


def _hourly(site: SiteMachine, machine: str, prices: Prices) -> float | None:
    is_spot = site.machine.market == Market.SPOT.value
    found = [each for each in _priced(site, prices) if each.machine == machine]
    if not found:
        return None
    return found[0].spot if is_spot else found[0].on_demand


def _running(plan: DeploymentPlan, site: SiteMachine, pool: ComputePool) -> Node | None:
    """The machine that a site has now."""
    role = f"{SITE_PREFIX}{site.name}"
    nodes = pool.nodes({DEPLOYMENT: plan.file.name, ROLE: role})
    alive = [node for node in nodes if node.state is not NodeState.GONE]
    return alive[-1] if alive else None


def _may_move(plan: DeploymentPlan, site: SiteMachine) -> bool:
    return plan.file.deadline_hours is not None and site.is_movable


def _is_kept(plan: DeploymentPlan, site: SiteMachine) -> bool:
    """Whether a running machine may differ from what the file says."""
    return _is_open(site) or _may_move(plan, site) or bool(site.sizes)


def _is_open(site: SiteMachine) -> bool:
    return site.machine.requires != RequiresSpec()

"""Prices of machines that a deadline may move: stated in the file, or of the table."""

from cloud_adapters.compute.pool import Market
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.prices import Prices
from deploy.fleet.tables.site_machine import SiteMachine
from federation.errors import JobError


def check_prices(plan: DeploymentPlan, prices: Prices) -> None:
    """Refuse a deadline for machines of unknown price, before anything is started.

    Args:
        plan: The deployment.
        prices: The table.

    Raises:
        JobError: The price of a machine that a deadline may move is neither stated nor
            in the table, in one market or the other.
    """
    if plan.file.deadline_hours is None:
        return
    for index, site in enumerate(plan.file.sites):
        if not site.is_movable:
            continue
        for market, name in (
            (Market.SPOT, "dollars_per_hour"),
            (Market.ON_DEMAND, "on_demand_dollars_per_hour"),
        ):
            try:
                hourly(site, market.value, prices)
            except JobError as error:
                raise JobError(
                    f"{plan.path}: is missing: deadline_hours weighs machines by their "
                    f"prices, and {error.reason}",
                    key=f"sites[{index}].{name}",
                ) from None


def hourly(site: SiteMachine, market: str, prices: Prices) -> float:
    """Dollars of an hour of a site's machine in a market: stated, or of the table.

    Raises:
        JobError: Neither.
    """
    wanted = site.in_market(market)
    if wanted.dollars_per_hour is not None:
        return wanted.dollars_per_hour
    place = (site.provider, site.machine.region, site.machine.priced_as)
    return prices.hourly(*place, spot=market == Market.SPOT.value)

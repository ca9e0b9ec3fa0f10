"""What ``crossfed up --keep`` checks of a deadline before it starts machines."""

from collections.abc import Callable
from dataclasses import replace

from deploy.fleet import prices, spending
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.keeping import site_prices, spot_record
from deploy.fleet.tables.providers import MARKETS
from federation.protocols import Clock


def check_moves(
    plan: DeploymentPlan, clock: Clock, tell: Callable[[str], None]
) -> None:
    """Refuse what would end the watch of a run: no price, or a damaged record.

    Args:
        plan: The deployment.
        clock: To tell how old prices are.
        tell: Called with a word about prices that are old, or a deadline without an
            effect.

    Raises:
        CorruptObject: The record of spot prices is damaged.
        JobError: A price is missing that a deadline or a budget depends on.
    """
    spot_record.SpotRecord(plan.folder, {}, tell)  # A damaged one is refused.
    if plan.file.deadline_hours is None:
        return
    movable = [site for site in plan.file.sites if site.is_movable]
    if not movable:
        tell(
            "deadline_hours changes nothing: no site is on a spot machine of a cloud, "
            "from which it could move"
        )
        return
    clouds = {
        site.provider
        for site in movable
        for market in MARKETS
        if site.in_market(market).dollars_per_hour is None
    }
    table = prices.load(
        plan.prices,
        today=prices.day_of(clock.now()),
        # Prices that all sites state are not those of the table.
        warn=tell if clouds else lambda _: None,
        clouds=clouds,
    )
    site_prices.check_prices(plan, table)
    for market in MARKETS:  # A budget counts either.
        sites = tuple(
            site.in_market(market) if site.is_movable else site
            for site in plan.file.sites
        )
        moved = replace(plan, file=replace(plan.file, sites=sites))
        spending.budget_prices(moved, now=clock.now())

"""What spot machines are paid, by the zones that they run in.

The price table has one spot price of a region. Where a cloud publishes prices of
zones, a budget counts these, also after a site has moved to another zone.
"""

from collections.abc import Mapping, Sequence

from cloud_adapters.compute.machine_types import SpotPrice
from cloud_adapters.compute.pool import Market, Node
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.keeping.site_machines import role_of
from deploy.fleet.keeping.spot_record import SpotRecord
from deploy.fleet.reconcile import ROLE


def mean_price(
    prices: Sequence[SpotPrice], zone: str, begin: float, end: float
) -> float | None:
    """Mean of a zone's published price over a time, in dollars per hour.

    Each price holds until the next one. The first one also counts before it was
    published, since histories are limited.

    Args:
        prices: Prices of any zones, the oldest first.
        zone: Prices of other zones are ignored.
        begin: Seconds since 1970.
        end: The same; the price at ``begin`` counts alone if it is not later.

    Returns:
        None if the zone has no price.
    """
    own = [each for each in prices if each.zone == zone]
    if not own:
        return None
    started = [each for each in own if each.at <= begin]
    held = (started or own)[-1 if started else 0].dollars_per_hour
    if end <= begin:
        return held
    total, since = 0.0, begin
    for each in own:
        if begin < each.at < end:
            total += held * (each.at - since)
            held, since = each.dollars_per_hour, each.at
    return (total + held * (end - since)) / (end - begin)


def paid_prices(
    plan: DeploymentPlan, record: SpotRecord, nodes: Sequence[Node], now: float
) -> Mapping[str, float]:
    """Dollars per hour of spot machines whose zones have published prices, by ID.

    Args:
        plan: The deployment as its file has it. A price that the file states for a
            site counts instead of what is published.
        record: Record of the prices.
        nodes: All nodes of the deployment.
        now: Seconds since 1970.
    """
    spots = {
        role_of(site): site
        for site in plan.file.sites
        if site.machine.market == Market.SPOT.value and site.dollars_per_hour is None
    }
    found = {}
    for node in nodes:
        site = spots.get(node.labels.get(ROLE, ""))
        if site is None or node.market is not Market.SPOT:
            continue
        if node.machine != site.machine.type:  # Of another size.
            continue
        end = now if node.ended is None else node.ended
        prices = record.prices(site, now)
        price = mean_price(prices, node.zone, node.launched, end)
        if price is not None:
            found[node.id] = price
    return found

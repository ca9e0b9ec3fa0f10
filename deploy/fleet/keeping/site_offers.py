"""The machines that a site could have now, with their prices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cloud_adapters.compute.pool import Market
from deploy.fleet.choosing.choice import MachineOffer
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.keeping.site_prices import hourly
from deploy.fleet.keeping.spot_record import SpotRecord
from deploy.fleet.prices import Prices
from deploy.fleet.tables.site_machine import SiteMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOffers:
    """Offers for the sites of a deployment that a deadline may move.

    Attributes:
        movable: These sites as the deployment file has them, by name.
        prices: The table.
        record: What is known of spot machines.
    """

    movable: Mapping[str, SiteMachine]
    prices: Prices
    record: SpotRecord

    def spots(self, site: SiteMachine, now: float) -> Sequence[MachineOffer]:
        """A spot machine in each zone of a site, at the price that is published there.

        Args:
            site: With the zones to offer; without any, those with a published price.
            now: Seconds since 1970.
        """
        newest = {
            each.zone: each.dollars_per_hour for each in self.record.prices(site, now)
        }
        zones = site.machine.zones or sorted(newest) or ("",)
        offer = self._offer(site, Market.SPOT)
        return [
            replace(
                offer,
                zone=zone,
                dollars_per_hour=newest.get(zone, offer.dollars_per_hour),
            )
            for zone in zones
        ]

    def reserve(self, site: SiteMachine) -> MachineOffer:
        """The machine on demand of a site."""
        return self._offer(site, Market.ON_DEMAND)

    def others_hourly(self, plan: DeploymentPlan, site: SiteMachine) -> float:
        """Dollars of an hour of all machines that wait while one site has none."""
        return plan.file.aggregator.dollars_per_hour + sum(
            hourly(each, each.machine.market, self.prices)
            if each.name in self.movable
            else each.dollars_per_hour or 0.0
            for each in plan.file.sites
            if each.name != site.name
        )

    def _offer(self, site: SiteMachine, market: Market) -> MachineOffer:
        machine = site.machine
        return MachineOffer(
            provider=site.provider,
            region=machine.region,
            machine=machine.type,
            market=market,
            dollars_per_hour=hourly(self.movable[site.name], market.value, self.prices),
        )

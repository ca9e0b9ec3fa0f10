"""Spot machines of a deployment: what their clouds publish, and what became of them.

``sightings.json`` in the deployment's folder says when a site's spot machine was seen,
lost or refused, and where. No cloud publishes that, and the next command needs it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.compute.machine_types import SpotMarket, SpotPrice
from cloud_adapters.compute.pool import Market, Node
from deploy.fleet.choosing.spot_history import HISTORY_HOURS, Sighting, ended_unseen
from deploy.fleet.tables.site_machine import SiteMachine
from federation import durable_json
from federation.errors import ComputeError

_NAME = "sightings.json"
_DAMAGED = "restore it, or delete it: the policy then begins without losses seen before"
_HOUR = 3600.0
# Clouds publish a new price every few minutes at most.
_READ_SECONDS = 900.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSighting:
    """What was seen of one site's machines.

    Attributes:
        machine: Its type of machine.
        seen: What was seen.
    """

    site: str
    machine: str
    seen: Sighting


@dataclass(frozen=True, slots=True, kw_only=True)
class SightingFile:
    """All of a deployment, the newest last."""

    sightings: tuple[SiteSighting, ...] = ()


class SpotRecord:
    """Prices and sightings of the spot machines of one deployment."""

    def __init__(
        self, folder: Path, markets: Mapping[str, SpotMarket], tell: Tell
    ) -> None:
        """Read what earlier commands have seen.

        Args:
            folder: The deployment's.
            markets: Services that publish prices, by the names of their pools.
            tell: Called with a word about a service that does not answer.

        Raises:
            CorruptObject: The record is damaged.
        """
        self._path, self._markets, self._tell = folder / _NAME, markets, tell
        found = durable_json.read(self._path, SightingFile, advice=_DAMAGED)
        self._sightings = () if found is None else found.sightings
        self._prices: dict[str, tuple[float, Sequence[SpotPrice]]] = {}
        self._refused: set[str] = set()

    def note(self, site: SiteMachine, *seen: Sighting) -> None:
        """Write down what was seen of a site's machine.

        Raises:
            StoreUnavailable: The folder cannot be written.
        """
        if not seen:
            return
        since = seen[-1].at - HISTORY_HOURS * _HOUR
        kept = [each for each in self._sightings if each.seen.at >= since]
        kind = site.machine.type
        new = [SiteSighting(site=site.name, machine=kind, seen=each) for each in seen]
        self._sightings = (*kept, *new)
        durable_json.write(self._path, SightingFile(sightings=self._sightings))

    def note_ended_unseen(
        self, site: SiteMachine, alive: Iterable[Node], now: float
    ) -> None:
        """Give up what an earlier command has seen, and that is no longer there.

        Args:
            site: Of the type of machine.
            alive: All machines that there are.
            now: Seconds since 1970.

        Raises:
            StoreUnavailable: The folder cannot be written.
        """
        running = [
            (node.zone or site.machine.region, node.launched)
            for node in alive
            if node.market is Market.SPOT
        ]
        self.note(site, *ended_unseen(self.sightings(site), running, now))

    def sightings(self, site: SiteMachine) -> Sequence[Sighting]:
        """What was seen of a site's type of machine in its region, by any site."""
        return [
            each.seen
            for each in self._sightings
            if each.machine == site.machine.type
            and each.seen.zone.startswith(site.machine.region)
        ]

    def prices(self, site: SiteMachine, now: float) -> Sequence[SpotPrice]:
        """Published prices of a site's type of machine in its zones; maybe none.

        If a service does not answer, that is reported once, and what it has said before
        counts.
        """
        market = self._markets.get(site.pool)
        at, known = self._prices.get(site.name, (-_READ_SECONDS, ()))
        # What was read later than now was read before the clock was set back.
        if market is None or 0.0 <= now - at < _READ_SECONDS:
            return known
        machine = site.machine
        try:
            known = market.spot_prices(
                machine.type, machine.zones, now - HISTORY_HOURS * _HOUR
            )
        except ComputeError as error:
            if site.name not in self._refused:
                self._tell(f"{error}; the price table counts until it answers")
            self._refused.add(site.name)
        self._prices[site.name] = (now, known)
        return known

"""A site's machine, and the work that is left for it. Pure: no service is asked."""

import math
from collections.abc import Sequence
from dataclasses import replace

from cloud_adapters.compute.pool import Market, Node
from deploy.fleet.choosing.choice import MachineOffer
from deploy.fleet.choosing.spot_history import RestOfWork
from deploy.fleet.keeping.run_progress import WorkLeft
from deploy.fleet.reconcile import ROLE, SITE_PREFIX
from deploy.fleet.tables.site_machine import SiteMachine

_HOUR = 3600.0
_MOST_SLOTS = 200
# A round may take longer than the median one, of which this is a share.
_MARGIN = 0.25


def role_of(site: SiteMachine) -> str:
    """Role of a site's machine."""
    return f"{SITE_PREFIX}{site.name}"


def own_machine(site: SiteMachine, nodes: Sequence[Node]) -> Node | None:
    """The newest machine of a site that works; None if it has none."""
    own = [n for n in nodes if n.labels.get(ROLE) == role_of(site) and n.state.works]
    return own[-1] if own else None


def tried_first(site: SiteMachine, zone: str) -> SiteMachine:
    """The site with a zone before its others, as a launch tries them."""
    zones = site.machine.zones
    if zone not in zones:
        return site
    others = (each for each in zones if each != zone)
    return replace(site, machine=replace(site.machine, zones=(zone, *others)))


def rest_of_work(
    progress: WorkLeft,
    own: Node | None,
    offers: Sequence[MachineOffer],
    *,
    left_hours: float,
    boot_hours: float,
    now: float,
) -> RestOfWork:
    """What is left of a run for the machine of a site.

    Args:
        progress: How far the run is.
        own: The machine; None if the site has none.
        offers: Machines that it could have.
        left_hours: Until the deadline.
        boot_hours: From the request for a machine until the site works.
        now: Seconds since 1970.
    """
    round_hours = lost_hours = progress.round_seconds / _HOUR
    work_hours = progress.rounds_left * round_hours
    slots = max(left_hours, work_hours) / _MOST_SLOTS
    current = [] if own is None else [o for o in offers if _is_of(o, own)]
    age = math.inf if own is None else (now - own.launched) / _HOUR
    if own is not None and own.market is Market.SPOT:
        work_hours -= progress.done_hours(now)
        # So that it is known a round before it has to leave.
        lost_hours += _MARGIN * round_hours
    return RestOfWork(
        work_hours=work_hours,
        left_hours=left_hours,
        boot_hours=boot_hours,
        lost_hours=lost_hours,
        slot_hours=max(boot_hours, slots),
        current=current[0].name if current else "",
        boot_left_hours=max(0.0, boot_hours - age),
    )


def _is_of(offer: MachineOffer, own: Node) -> bool:
    """Whether a machine is of this offer, as far as its zone is known."""
    return offer.market is own.market and offer.zone in {own.zone, ""}

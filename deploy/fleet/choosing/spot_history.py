"""What is known of a market of spot machines, as the policy reads it.

Clouds publish prices, but not where they have capacity. That is known only of the time
in which one had a machine, and of launches that were refused. A zone is taken to be as
it was last seen; before that, to have had capacity, in few slots: ``_HOPED_SLOTS``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloud_adapters.compute.machine_types import SpotPrice
from cloud_adapters.compute.pool import Market
from deploy.fleet.choosing.choice import MachineOffer, Situation
from deploy.fleet.choosing.outlook import Left, MarketHistory, foresee

_HOUR = 3600.0
# How far back prices and sightings count.
HISTORY_HOURS = 7 * 24.0
_HOPED_SLOTS, _MOST_SLOTS = 10, 840
# A zone that had no capacity is taken to have none for so many slots.
_BELIEVED_SLOTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Whether a zone had capacity, as a machine or a launch has shown.

    Attributes:
        zone: The zone.
        at: When, in seconds since 1970.
        has_capacity: Whether a machine ran; else it was lost, or a launch refused.
    """

    zone: str
    at: float
    has_capacity: bool


def history(
    offers: Sequence[MachineOffer],
    prices: Sequence[SpotPrice],
    sightings: Sequence[Sighting],
    *,
    now: float,
    slot_hours: float,
) -> MarketHistory:
    """Put what is known into slots, the last of which ends now.

    Args:
        offers: Spot machines, one in each zone; a zone without published prices is
            taken to have cost what its offer does.
        prices: As published.
        sightings: As seen.
        now: Seconds since 1970.
        slot_hours: Length of a slot.
    """
    slot = slot_hours * _HOUR
    recent = [each for each in sightings if now - each.at < HISTORY_HOURS * _HOUR]
    # A clock that was set back has sightings of later on.
    oldest = min([now, *(each.at for each in recent)])
    seen = math.ceil((now - oldest) / slot)
    num = min(_MOST_SLOTS, _HOPED_SLOTS + seen)
    ends_t = now - slot * np.arange(num)[::-1]
    prices_zt = np.empty((len(offers), num))
    available_zt = np.ones((len(offers), num), dtype=bool)
    for row, offer in enumerate(offers):
        rows = sorted(
            (each.at, each.dollars_per_hour)
            for each in prices
            if each.zone == place_of(offer)
        )
        times = np.array([at for at, _ in rows])
        dollars = np.array([d for _, d in rows] or [offer.dollars_per_hour])
        places = np.searchsorted(times, ends_t, side="right") - 1
        prices_zt[row] = dollars[np.clip(places, 0, None)] * slot_hours
        for each in sorted(recent, key=lambda each: each.at):
            if each.zone == place_of(offer):
                # Until it is seen again: a refusal is no second loss.
                first = num - 1 - math.floor((now - each.at) / slot)
                available_zt[row, max(0, first) :] = each.has_capacity
    names = [offer.name for offer in offers]
    return MarketHistory(names=names, prices_zt=prices_zt, available_zt=available_zt)


def place_of(offer: MachineOffer) -> str:
    """Where a machine is: its zone; its region if no zone is known."""
    return offer.zone or offer.region


def is_believed(
    offer: MachineOffer, sightings: Sequence[Sighting], *, now: float, slot_hours: float
) -> bool:
    """Whether a spot machine may be had now: nothing has shown otherwise of late."""
    zone = place_of(offer)
    since = now - _BELIEVED_SLOTS * slot_hours * _HOUR
    last = max(
        (each for each in sightings if each.zone == zone and since < each.at <= now),
        key=lambda each: each.at,
        default=None,
    )
    return last is None or last.has_capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOfWork:
    """How much is to be done, and how long it takes to start.

    Attributes:
        work_hours: Hours of work left.
        left_hours: Hours until the deadline.
        boot_hours: What a new machine takes before it works.
        lost_hours: Work that a loss of the machine undoes at most.
        slot_hours: Time until the next decision.
        current: Name of the offer that it runs on; empty if it runs on none.
        boot_left_hours: What the present machine still takes before it works.
    """

    work_hours: float
    left_hours: float
    boot_hours: float
    lost_hours: float = 0.0
    slot_hours: float
    current: str = ""
    boot_left_hours: float = 0.0


def situation(
    rest: RestOfWork,
    known: MarketHistory,
    offers: Sequence[MachineOffer],
    *,
    now: float,
) -> Situation:
    """Foresee the rest of the work on a market.

    Args:
        rest: Of the work.
        known: Of the market.
        offers: What can be had now; one of them on demand.
        now: Seconds since 1970.
    """
    on_demand = min(
        each.dollars_per_hour for each in offers if each.market is Market.ON_DEMAND
    )
    left = Left(
        slots=int(rest.left_hours / rest.slot_hours),
        work=math.ceil(rest.work_hours / rest.slot_hours),
    )
    outlook = foresee(
        known,
        left,
        boot=max(1, math.ceil(rest.boot_hours / rest.slot_hours - 1e-9)),
        on_demand=on_demand * rest.slot_hours,
    )
    return Situation(
        work_hours=rest.work_hours,
        deadline=now + rest.left_hours * _HOUR,
        # What a loss costs, which must not miss the deadline.
        boot_hours=rest.boot_hours + rest.lost_hours,
        slot_hours=rest.slot_hours,
        current=rest.current,
        boot_left_hours=rest.boot_left_hours,
        outlook=outlook,
    )

"""What is known of a market of spot machines, as the policy reads it.

Clouds publish prices, but not where they have capacity. That is known only of the time
in which one had a machine, and of launches that were refused; the rest is drawn, see
``capacity``.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cloud_adapters.compute.machine_types import SpotPrice
from cloud_adapters.compute.pool import Market
from deploy.fleet.choosing import capacity
from deploy.fleet.choosing.capacity import UNKNOWN
from deploy.fleet.choosing.choice import MachineOffer, Situation
from deploy.fleet.choosing.outlook import Floats, Left, MarketHistory, foresee

_HOUR = 3600.0
# How far back prices and sightings count.
HISTORY_HOURS = 7 * 24.0
_MOST_SLOTS = 840
# Draws of what was not seen; four cost 1 % less than one, on traces of the tuning.
_DRAWS = 4
# A zone that had no capacity is taken to have none for so many slots.
_BELIEVED_SLOTS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Whether a zone had capacity, as a machine or a launch has shown.

    Attributes:
        at: When, in seconds since 1970.
        has_capacity: Whether a machine ran; else it was lost, or a launch refused.
        is_given_up: Whether that machine was ended by its user: nothing is known of the
            zone afterwards. One that was not has run until the next sighting there.
    """

    zone: str
    at: float
    has_capacity: bool
    is_given_up: bool = False


def history(
    offers: Sequence[MachineOffer],
    prices: Sequence[SpotPrice],
    sightings: Sequence[Sighting],
    *,
    now: float,
    slot_hours: float,
) -> MarketHistory:
    """Put what is known into slots, the last of which ends now.

    The week is in it several times, with different draws of what was not seen.

    Args:
        offers: Spot machines, one in each zone; a zone without published prices is
            taken to have cost what its offer does.
        prices: As published.
        sightings: As seen; those of other zones and of later on do not count.
        now: Seconds since 1970.
        slot_hours: Length of a slot.
    """
    slot = slot_hours * _HOUR
    num = max(2, min(_MOST_SLOTS, math.ceil(HISTORY_HOURS / slot_hours)))
    ends_t = np.asarray(now - slot * np.arange(num)[::-1], dtype=np.float64)
    of_zone: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for price in prices:
        of_zone[price.zone].append((price.at, price.dollars_per_hour))
    prices_zt = np.empty((len(offers), num))
    seen_zt = np.full((len(offers), num), UNKNOWN)
    for row, offer in enumerate(offers):
        zone = place_of(offer)
        rows = sorted(of_zone[zone])
        prices_zt[row] = _held(rows, ends_t, offer.dollars_per_hour) * slot_hours
        seen_zt[row] = _seen([s for s in sightings if s.zone == zone], ends_t, slot)
    return MarketHistory(
        names=[offer.name for offer in offers],
        prices_zt=np.tile(prices_zt, (1, _DRAWS)),
        available_zt=capacity.drawn(seen_zt, slot_hours=slot_hours, times=_DRAWS),
    )


def _held(
    rows: Sequence[tuple[float, float]], ends_t: Floats, default: float
) -> Floats:
    """Prices at the ends of slots: each holds until the next, the first before it."""
    if not rows:
        return np.full(ends_t.size, default)
    times, dollars = np.array(rows).T
    places = np.searchsorted(times, ends_t, side="right") - 1
    return np.asarray(dollars[np.clip(places, 0, None)])


def _seen(
    sightings: Sequence[Sighting], ends_t: Floats, slot: float
) -> NDArray[np.int64]:
    """Capacity of a zone in each slot as it was seen, or ``UNKNOWN``."""
    seen_t = np.full(ends_t.size, UNKNOWN)
    now, oldest = float(ends_t[-1]), float(ends_t[0]) - slot
    recent = sorted(
        (each for each in sightings if oldest < each.at <= now),
        key=lambda each: each.at,
    )
    last = ends_t.size - 1
    for each, later in pairwise([*recent, None]):
        assert each is not None  # noqa: S101 -- None is the last of all
        first = last - math.floor((now - each.at) / slot)
        runs = each.has_capacity and not each.is_given_up
        until = now if later is None else later.at
        end = last - math.floor((now - until) / slot) if runs else first
        seen_t[first : end + 1] = each.has_capacity
    return seen_t


def ended_unseen(
    sightings: Sequence[Sighting], running: Iterable[tuple[str, float]], now: float
) -> Sequence[Sighting]:
    """What to note of machines that ended while no command looked, for any reason.

    Nothing is known of their zones from the last sighting on, where otherwise they
    would seem to have run until now.

    Args:
        sightings: So far; those of later on do not count.
        running: Zone and time of launch of each machine that there is, in seconds since
            1970.
        now: Seconds since 1970.
    """
    launched: dict[str, float] = {}
    for zone, at in running:
        launched[zone] = min(at, launched.get(zone, math.inf))
    past = (each for each in sightings if each.at <= now)
    newest = {each.zone: each for each in sorted(past, key=lambda each: each.at)}
    return [
        replace(last, is_given_up=True)
        for zone, last in newest.items()
        if last.has_capacity
        and not last.is_given_up
        and launched.get(zone, math.inf) > last.at
    ]


def place_of(offer: MachineOffer) -> str:
    """Where a machine is: its zone; its region if no zone is known."""
    return offer.zone or offer.region


def is_believed(
    offer: MachineOffer, sightings: Sequence[Sighting], *, now: float, slot_hours: float
) -> bool:
    """Whether a spot machine may be available: nothing recent shows otherwise."""
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
        stall_dollars_per_hour: What an hour without a machine that works costs, because
            those of other sites wait.
    """

    work_hours: float
    left_hours: float
    boot_hours: float
    lost_hours: float = 0.0
    slot_hours: float
    current: str = ""
    boot_left_hours: float = 0.0
    stall_dollars_per_hour: float = 0.0


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
        known: What is known of the market.
        offers: What is available now; one of them on demand.
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
        stall=rest.stall_dollars_per_hour * rest.slot_hours,
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

"""Generated traces of spot machines, and the cheapest way through each in hindsight.

Time is in slots. In each slot a job runs on one machine or on none. A machine that is
new takes `boot` slots, which are paid for, before it works; a slot of work is one unit
of progress, kept when the machine is lost. A spot machine is lost when its zone has no
capacity; on demand there always is capacity, in the home region. Moving to a zone costs
what the site's bytes cost on their way from the home region, each time.

`optimum` is exact for this problem, by dynamic programming backwards in time over
(work left, place, slots of boot left); `tests/unit/test_spot_policy.py`
compares it with every possible sequence of actions.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLOT_HOURS = 0.2
HISTORY_SLOTS = 7 * 24 * 5  # What is known of the market before a job starts.
WAIT = -1  # On demand is the place after the last zone.

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A job and the market that it meets.

    Attributes:
        kind: Name of the generator.
        prices_zt: Dollars per spot hour, by zone and slot, history first.
        available_zt: Whether a zone has capacity.
        region_z: Region of each zone; 0 is the home region.
        moving_z: Dollars to move the site to a zone.
        on_demand: Dollars of an hour on demand, in the home region.
        start: Slot in which the job starts; those before are history.
        work: Slots of work.
        deadline: Slots from the start until the work must be done.
        boot: Slots that a new machine takes.
    """

    kind: str
    prices_zt: Floats
    available_zt: Bools
    region_z: Sequence[int]
    moving_z: Floats
    on_demand: float
    start: int
    work: int
    deadline: int
    boot: int

    @property
    def zones(self) -> int:
        """Number of zones; also the place that means on demand."""
        return len(self.region_z)


def _spells(
    rng: np.random.Generator, slots: int, share: Floats, mean_up: float
) -> Bools:
    """Alternate between up and down, up for `mean_up` slots in the mean.

    Args:
        share: Share of the time that it is up, by slot, in (0, 1).
    """
    found = np.empty(slots, dtype=bool)
    draws = rng.random(slots)
    up = bool(rng.random() < share[0])
    for slot in range(slots):
        leave = 1 / mean_up if up else share[slot] / (1 - share[slot]) / mean_up
        if draws[slot] < min(1.0, leave):
            up = not up
        found[slot] = up
    return found


def _reverting(
    rng: np.random.Generator, slots: int, deviation: float, half_life: float
) -> Floats:
    """Mean-reverting noise with a standard deviation; its half-life is in slots."""
    keep = 0.5 ** (1 / half_life)
    steps = rng.normal(0.0, deviation * np.sqrt(1 - keep**2), slots)
    found = np.empty(slots)
    last = rng.normal(0.0, deviation)
    for slot in range(slots):
        last = keep * last + steps[slot]
        found[slot] = last
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """How a generator draws: ranges, of which each zone draws its own.

    Attributes:
        share: Share of the time in which a zone has capacity.
        up_hours: Mean length of such a spell.
        outage: Mean hours between the outages of a whole region; 0 for none.
        outage_hours: Mean length of one.
        deviation: Standard deviation of the logarithm of a price.
        half_life: Hours in which half of a deviation is gone.
        together: Share of the variance that the zones of a region have in common.
        daily: How much the share of capacity falls and rises within a day.
    """

    share: tuple[float, float]
    up_hours: tuple[float, float]
    outage: float = 0.0
    outage_hours: float = 4.0
    deviation: float = 0.1
    half_life: float = 24.0
    together: float = 0.5
    daily: float = 0.0


MARKETS: Mapping[str, Market] = {
    "calm": Market(share=(0.8, 0.98), up_hours=(10.0, 40.0)),
    "scarce": Market(share=(0.05, 0.4), up_hours=(0.8, 4.0)),
    "outages": Market(
        share=(0.6, 0.95), up_hours=(5.0, 20.0), outage=24.0, outage_hours=6.0
    ),
    "volatile": Market(
        share=(0.6, 0.95), up_hours=(4.0, 16.0), deviation=0.35, half_life=8.0
    ),
    "daily": Market(share=(0.35, 0.7), up_hours=(2.0, 8.0), daily=0.25, deviation=0.2),
}


def generate(kind: str, seed: int) -> Trace:
    """Draw a trace."""
    market = MARKETS[kind]
    rng = np.random.default_rng([seed, sorted(MARKETS).index(kind)])
    region_z = [z // 2 for z in range(2 * int(rng.integers(1, 4)))]
    work = int(24 / SLOT_HOURS)
    deadline = int(work * rng.choice([1.15, 1.3, 1.6, 2.0]))
    slots = HISTORY_SLOTS + deadline
    on_demand = 1.006  # g5.xlarge in the price table.
    hours = np.arange(slots) * SLOT_HOURS
    shared = {
        region: _reverting(rng, slots, 1.0, market.half_life / SLOT_HOURS)
        for region in set(region_z)
    }
    outages = {
        region: _spells(
            rng,
            slots,
            np.full(slots, market.outage / (market.outage + market.outage_hours)),
            market.outage / SLOT_HOURS,
        )
        if market.outage
        else np.ones(slots, dtype=bool)
        for region in set(region_z)
    }
    prices, available = [], []
    for region in region_z:
        own = _reverting(rng, slots, 1.0, market.half_life / SLOT_HOURS)
        both = np.sqrt(market.together) * shared[region]
        both += np.sqrt(1 - market.together) * own
        price = on_demand * rng.uniform(0.3, 0.5) * np.exp(market.deviation * both)
        prices.append(np.clip(price, 0.1 * on_demand, on_demand))
        share = rng.uniform(*market.share)
        wave = market.daily * np.cos(2 * np.pi * (hours / 24 + region / 3))
        share_t = np.clip(share + wave, 0.02, 0.98)
        up = _spells(rng, slots, share_t, rng.uniform(*market.up_hours) / SLOT_HOURS)
        available.append(up & outages[region])
    gigabytes = rng.uniform(0.5, 5.0)
    return Trace(
        kind=kind,
        prices_zt=np.array(prices),
        available_zt=np.array(available),
        region_z=region_z,
        # Between regions of one cloud, 0.02 dollars a GB; to another cloud, 0.09.
        moving_z=np.array([(0.0, 0.02, 0.09)[r] * gigabytes for r in region_z]),
        on_demand=on_demand,
        start=HISTORY_SLOTS,
        work=work,
        deadline=deadline,
        boot=int(rng.integers(1, 3)),
    )


def recorded(folder: Path, seed: int, *, is_inverted: bool) -> Trace:
    """Draw a job that meets recorded availability, and generated calm prices.

    Args:
        folder: Files of github.com/skypilot-org/spot-traces, one for each zone, all of
            the same time.
        seed: Draws the zones, the begin and the job.
        is_inverted: Whether a 1 means that there is no capacity. The README says that
            it is a number of instances; studies that used the data read it both ways.
    """
    rng = np.random.default_rng([seed, len(MARKETS)])
    files = sorted(folder.glob("*.json"))
    files = [files[at] for at in rng.permutation(len(files))[: rng.integers(2, 7)]]
    made = generate("calm", seed)
    slots = made.start + made.deadline
    found = [_slots(json.loads(each.read_text()), is_inverted) for each in files]
    length = min(each.size for each in found)
    begin = int(rng.integers(0, length - slots))
    names = [each.name.split("_")[0][:-1] for each in files]
    region_z = [sorted(set(names), key=names.index).index(name) for name in names]
    prices = [
        made.on_demand
        * rng.uniform(0.3, 0.5)
        * np.exp(_reverting(rng, slots, 0.1, 24.0 / SLOT_HOURS))
        for _ in files
    ]
    gigabytes = rng.uniform(0.5, 5.0)
    return replace(
        made,
        kind="recorded",
        prices_zt=np.clip(prices, 0.1 * made.on_demand, made.on_demand),
        available_zt=np.array([each[begin : begin + slots] for each in found]),
        region_z=region_z,
        moving_z=np.array([(0.0, 0.02, 0.02)[r] * gigabytes for r in region_z]),
    )


def _slots(document: Any, is_inverted: bool) -> Bools:  # noqa: FBT001
    """Whether there was capacity all through each slot."""
    there = (np.array(document["data"]) > 0) != is_inverted
    each = SLOT_HOURS * 3600 / document["metadata"]["gap_seconds"]
    edges = np.arange(0, there.size, each).astype(int)
    return np.logical_and.reduceat(there, edges)[:-1]


def optimum(trace: Trace) -> float:
    """Dollars of the cheapest way through a trace that is known in advance.

    Infinite if even a machine on demand from the start is too late.
    """
    places, boots = trace.zones + 1, trace.boot + 1
    # Cost to finish, by work left, place and boot left; and by work left, on none.
    on_wpb = np.full((trace.work + 1, places, boots), np.inf)
    off_w = np.full(trace.work + 1, np.inf)
    on_wpb[0], off_w[0] = 0.0, 0.0
    moving_p = np.append(trace.moving_z, 0.0)
    for slot in range(trace.start + trace.deadline - 1, trace.start - 1, -1):
        cost_p = np.append(trace.prices_zt[:, slot], trace.on_demand) * SLOT_HOURS
        cost_p[:-1][~trace.available_zt[:, slot]] = np.inf
        # To keep running: a slot of boot, or of work.
        kept_wpb = np.full_like(on_wpb, np.inf)
        kept_wpb[:, :, 1:] = on_wpb[:, :, :-1]
        kept_wpb[1:, :, 0] = on_wpb[:-1, :, 0]
        kept_wpb += cost_p[:, None]
        new_w = (kept_wpb[:, :, -1] + moving_p).min(axis=1)
        best_w = np.minimum(new_w, off_w)
        on_wpb = np.minimum(kept_wpb, best_w[:, None, None])
        off_w = best_w
        on_wpb[0], off_w[0] = 0.0, 0.0
    return float(off_w[-1])


# Which place next, by the slot, the place, whether it is still there, and work left.
Policy = Callable[[Trace, "Position"], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a job is in a trace.

    Attributes:
        slot: Of the trace.
        place: A zone, on demand, or WAIT; WAIT also if the machine was just lost.
        boot: Slots of boot left.
        work: Slots of work left.
        left: Slots until the deadline.
    """

    slot: int
    place: int
    boot: int
    work: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a policy made of a trace.

    Attributes:
        dollars: Paid.
        is_late: Whether work was left at the deadline; it is then finished on demand.
        launches: Number of machines.
        on_demand_slots: Time slots of on-demand machines.
    """

    dollars: float
    is_late: bool
    launches: int
    on_demand_slots: int


def replay(trace: Trace, policy: Policy) -> Outcome:
    """Let a policy work through a trace; it sees nothing after the present slot."""
    dollars, launches, on_demand_slots = 0.0, 0, 0
    place, boot, work, slot = WAIT, 0, trace.work, trace.start
    end = trace.start + trace.deadline
    while work and slot < end:
        if 0 <= place < trace.zones and not trace.available_zt[place, slot]:
            place = WAIT
        at = Position(slot=slot, place=place, boot=boot, work=work, left=end - slot)
        chosen = policy(trace, at)
        if 0 <= chosen < trace.zones and not trace.available_zt[chosen, slot]:
            raise AssertionError(f"slot {slot}: zone {chosen} has no capacity")
        if chosen not in {place, WAIT}:
            boot, launches = trace.boot, launches + 1
            dollars += 0.0 if chosen == trace.zones else trace.moving_z[chosen]
        place = chosen
        if place != WAIT:
            is_spot = place < trace.zones
            price = trace.prices_zt[place, slot] if is_spot else trace.on_demand
            dollars += price * SLOT_HOURS
            on_demand_slots += not is_spot
            boot, work = (boot - 1, work) if boot else (0, work - 1)
        slot += 1
    late = work > 0
    if late:
        dollars += (work + trace.boot) * trace.on_demand * SLOT_HOURS
    return Outcome(
        dollars=float(dollars),
        is_late=late,
        launches=launches,
        on_demand_slots=on_demand_slots,
    )

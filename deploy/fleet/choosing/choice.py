"""Where one site's machine should run now: stay, move, wait, or run on demand.

Pure: a situation, offers and the time in, a decision with its reason out. After
SkyNomad (arXiv:2601.06520): several regions, spot machines, a deadline that is always
kept by changing to a machine on demand while there still is time to. ``outlook`` says
what the future is worth.

The rule changes machines only. What a site computes (records, batch, steps, noise) is
the job's, and is the same on every machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cloud_adapters.compute.pool import Market
from deploy.fleet.choosing.outlook import Left, Outlook
from federation.errors import ComputeError

_SECONDS = 3600.0
# How far prices are forecast.
_HORIZON = 40
# Tuned on traces of benchmarks/spot_policy.py, see ADR 73. The chain takes the best
# zone to be reached for nothing: how much of what an offer is forecast to cost above
# the lowest counts.
_FORECAST_SHARE = 0.5
# Hours are sums of slots; their rounding must not decide.
_TINY = 1e-9


class Action(StrEnum):
    """What to do with a site's machine."""

    STAY = "stay"
    MOVE = "move"
    WAIT = "wait"
    ON_DEMAND = "on-demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOffer:
    """A machine that one could have.

    Attributes:
        provider: The cloud.
        zone: Its zone; empty for any of the region.
        machine: Type of machine.
        market: How it is paid.
        dollars_per_hour: Its price now.
        moving_dollars: What the site's bytes cost on their way to it.
        is_available: Whether there was capacity when it was last looked for.
    """

    provider: str
    region: str
    zone: str = ""
    machine: str
    market: Market
    dollars_per_hour: float
    moving_dollars: float = 0.0
    is_available: bool = True

    @property
    def name(self) -> str:
        """Names the offer, whatever it costs now."""
        place = self.zone or self.region
        return f"{self.provider} {place} {self.machine} {self.market.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where a site is with its work.

    Attributes:
        work_hours: Hours of work left.
        deadline: When it must be done, in seconds since 1970.
        boot_hours: What a loss of the machine costs at most: a new one's start, and
            work that is done again.
        slot_hours: Time until the next decision at the latest; that of the outlook.
        current: Name of the offer that it runs on; empty if it runs on none.
        boot_left_hours: What the present machine still takes before it works.
        outlook: What the future costs.
    """

    work_hours: float
    deadline: float
    boot_hours: float
    slot_hours: float
    current: str = ""
    boot_left_hours: float = 0.0
    outlook: Outlook


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to do, and why.

    Attributes:
        action: What to do.
        offer: The machine to have then; None for none.
        reason: Why, in words.
    """

    action: Action
    offer: MachineOffer | None
    reason: str


def decide(situation: Situation, offers: Sequence[MachineOffer], now: float) -> Choice:
    """Decide where a site's machine should be.

    1. The best spot machine, for what is left of the job: its price until it is lost,
       as forecast, what its start and the way to it cost.
    2. If a slot without work could miss the deadline: the spot machine that works now,
       as long as its loss could be made up for; otherwise one on demand.
    3. That spot machine, none, or one on demand: whichever has the lowest expected cost
       of the whole rest.

    Args:
        situation: Where the site is.
        offers: Machines available now; at least one of them on demand.
        now: Seconds since 1970.

    Raises:
        ComputeError: No offer is on demand.
    """
    reserve = _reserve(situation, offers)
    spots = [o for o in offers if o.market is Market.SPOT and o.is_available]
    left_hours = max(0.0, (situation.deadline - now) / _SECONDS)
    slots = math.floor(left_hours / situation.slot_hours + _TINY)
    work = math.ceil(situation.work_hours / situation.slot_hours - _TINY)
    forecast = _Prospect(situation, Left(slots=slots, work=work), spots)
    # 1.
    best = min(spots, key=forecast.dollars, default=None)
    # 2.
    spare = left_hours - situation.work_hours - situation.boot_hours
    if spare + _TINY < situation.slot_hours:
        if spare + _TINY >= 0.0 and situation.boot_left_hours <= 0.0:
            for offer in spots:
                if offer.name == situation.current:
                    return _to(situation, offer, "its loss could still be made up for")
        why = (
            f"{situation.work_hours:.1f} h of work and {situation.boot_hours:.1f} h "
            f"for a loss leave no slack before the deadline in {left_hours:.1f} h"
        )
        return _to(situation, reserve, why)
    # 3.
    spot, idle, on_demand = forecast.market_dollars(best, reserve)
    if best is not None and spot <= min(idle, on_demand):
        return _to(situation, best, _why_spot(situation, best, spots))
    if on_demand < idle:
        why = (
            f"waiting for a spot machine is expected to cost more, with "
            f"{situation.work_hours:.1f} h of work in the {left_hours:.1f} h until the "
            "deadline"
        )
        return _to(situation, reserve, why)
    what = "no spot machine is available" if best is None else "a lower price is likely"
    reason = f"{what}, and {spare:.1f} h can be spared"
    return Choice(action=Action.WAIT, offer=None, reason=reason)


class _Prospect:
    """Expected dollars of the rest, by what is done now."""

    def __init__(
        self, situation: Situation, left: Left, spots: Sequence[MachineOffer]
    ) -> None:
        self._situation, self._left = situation, left
        self._outlook = outlook = situation.outlook
        rates = {
            offer.name: self._price(offer) * (1 + outlook.boot * _loss(outlook, offer))
            for offer in spots
        }
        leader = min(spots, key=lambda offer: rates[offer.name], default=None)
        self._lowest = None if leader is None else self._price(leader)
        self._level = outlook.level(self._lowest)
        steps = np.arange(1, _HORIZON + 1)
        prices = {}
        for offer in spots:
            mean = _mean(outlook, offer, self._price(offer))
            away = outlook.persistence**steps * (self._price(offer) - mean)
            prices[offer.name] = (mean + away) * (
                1 + outlook.boot * _loss(outlook, offer)
            )
        lowest = np.min(list(prices.values()), axis=0) if prices else 0.0
        horizon = max(1, min(_HORIZON, left.work))
        self._excess = {
            offer.name: float(
                ((prices[offer.name] - lowest) * (1 - _loss(outlook, offer)) ** steps)[
                    :horizon
                ].sum()
            )
            for offer in spots
        }

    def dollars(self, offer: MachineOffer) -> float:
        """Of a spot machine: what distinguishes it from the others."""
        above = self._price(offer) - (self._lowest or 0.0)
        found = self._spot(offer, above, _loss(self._outlook, offer))
        if offer.name != self._situation.current:
            found += offer.moving_dollars
        return found + _FORECAST_SHARE * self._excess[offer.name]

    def market_dollars(
        self, best: MachineOffer | None, reserve: MachineOffer
    ) -> tuple[float, float, float]:
        """Of a spot machine, none and one on demand, all by the market's chain.

        A mean market is compared with itself: compared with the present machine's
        dollars, waiting for a market with the best of every offer would always pay.
        """
        outlook, left = self._outlook, self._left
        idle = outlook.later(outlook.idle_nws, self._level, after=1, at=left)
        idle += outlook.stall
        slots = self._boot_slots(reserve)
        after = max(1, slots)
        at = Left(slots=left.slots, work=left.work - (slots == 0))
        then = outlook.later(outlook.reserve_nws, self._level, after=after, at=at)
        on_demand = after * self._price(reserve) + slots * outlook.stall + then
        if best is None:
            return math.inf, idle, on_demand
        return self._spot(best, 0.0), idle, on_demand

    def _spot(
        self, offer: MachineOffer, above: float, loss: float | None = None
    ) -> float:
        outlook = self._outlook
        slots = self._boot_slots(offer)
        after = max(1, slots)
        at = Left(slots=self._left.slots, work=self._left.work - (slots == 0))
        price = float(outlook.price_s[self._level]) + above
        then = outlook.on_spot(self._level, after=after, at=at, loss=loss)
        return after * price + slots * outlook.stall + then

    def _boot_slots(self, offer: MachineOffer) -> int:
        if offer.name != self._situation.current:
            return self._outlook.boot
        return math.ceil(
            self._situation.boot_left_hours / self._situation.slot_hours - _TINY
        )

    def _price(self, offer: MachineOffer) -> float:
        return offer.dollars_per_hour * self._situation.slot_hours


def _to(situation: Situation, offer: MachineOffer, why: str) -> Choice:
    action = Action.ON_DEMAND if offer.market is Market.ON_DEMAND else Action.MOVE
    if offer.name == situation.current:
        action = Action.STAY
    price = f"{offer.name} at ${offer.dollars_per_hour:.3f} an hour"
    return Choice(action=action, offer=offer, reason=f"{price}: {why}")


def _why_spot(
    situation: Situation, best: MachineOffer, spots: Sequence[MachineOffer]
) -> str:
    hours = situation.slot_hours / _loss(situation.outlook, best)
    lasts = f"it is expected to last {hours:.1f} h"
    if best.name != situation.current:
        return f"the lowest cost with start-up and traffic; {lasts}"
    if any(each.dollars_per_hour < best.dollars_per_hour for each in spots):
        return f"a move would cost more than it saves; {lasts}"
    return f"no spot machine costs less; {lasts}"


def _reserve(situation: Situation, offers: Sequence[MachineOffer]) -> MachineOffer:
    """The machine on demand that finishes for least."""
    found = [o for o in offers if o.market is Market.ON_DEMAND and o.is_available]
    if not found:
        raise ComputeError(
            "no machine on demand is on offer, so no deadline can be kept: allow a "
            "region that has one, or remove deadline_hours"
        )
    hours = situation.work_hours + situation.boot_hours

    def dollars(offer: MachineOffer) -> float:
        moving = 0.0 if offer.name == situation.current else offer.moving_dollars
        return offer.dollars_per_hour * hours + moving

    return min(found, key=dollars)


def _loss(outlook: Outlook, offer: MachineOffer) -> float:
    if offer.name in outlook.names:
        return float(outlook.loss_z[outlook.names.index(offer.name)])
    return outlook.loss


def _mean(outlook: Outlook, offer: MachineOffer, price: float) -> float:
    if offer.name in outlook.names:
        return float(outlook.mean_z[outlook.names.index(offer.name)])
    return price

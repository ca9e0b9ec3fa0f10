"""The best way of running a job in a budget, before a deadline, or in both."""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.fleet.planning.plan import Alternative, in_dollars
from federation.rounds.cost import Cost
from monitoring import units

_HOUR = 3600.0
_Costed = tuple[Alternative, Cost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The best way to run a job, or what would be enough for one.

    Attributes:
        best: None if no way fits.
        smallest_budget: Dollars of the cheapest way before the deadline, or of all ways
            if none is; None if nobody knows the dollars of any of them.
        shortest_seconds: Of the fastest way, whatever it costs.
        message: The same in words.
    """

    best: str | None
    smallest_budget: float | None
    shortest_seconds: float
    message: str


def recommend(
    found: Sequence[Alternative], *, budget: float | None, deadline: float | None
) -> Recommendation:
    """Choose the fastest way in a budget, or the cheapest before a deadline.

    Args:
        found: Ways to run a job, with their cost.
        budget: Dollars; None for any.
        deadline: Seconds; None for any. With both, the cheapest in both.
    """
    ways = [(way, way.cost) for way in found if way.cost is not None]
    timely = [each for each in ways if deadline is None or each[1].seconds <= deadline]
    priced = [each for each in timely or ways if each[1].is_known]
    cheapest = min(priced, key=lambda each: each[1].total, default=None)
    fastest = min(ways, key=lambda each: each[1].seconds)
    best = _best(timely, budget=budget, is_fastest=deadline is None)
    if best is not None:
        message = _praise(best, timely)
    elif timely:
        message = _too_little(cheapest)
    else:
        message = _too_late(fastest, cheapest, budget)
    return Recommendation(
        best=None if best is None else best[0].name,
        smallest_budget=None if cheapest is None else cheapest[1].total,
        shortest_seconds=fastest[1].seconds,
        message=message,
    )


def _best(
    timely: Sequence[_Costed], *, budget: float | None, is_fastest: bool
) -> _Costed | None:
    priced = [
        each
        for each in timely
        if each[1].is_known and (budget is None or each[1].total <= budget)
    ]
    if priced and not is_fastest:
        return min(priced, key=lambda each: (each[1].total, each[1].seconds))
    # Without dollars, nothing can be said to be the cheapest but what takes least time.
    fits = priced or (timely if budget is None else ())
    return min(fits, key=lambda each: each[1].seconds, default=None)


def _praise(best: _Costed, timely: Sequence[_Costed]) -> str:
    way, cost = best
    took, dollars = units.format_duration(cost.seconds), in_dollars(cost.total)
    text = f"best: {way.name}: {took}, {dollars} dollars"
    if not cost.is_known:
        return f"{text}: the fastest way; without dollars, nobody knows the cheapest"
    unknown = sum(not each.is_known for _, each in timely)
    if not unknown:
        return text
    return (
        f"{text}; not compared: {units.format_count(unknown, 'way')} of unknown dollars"
    )


def _too_little(cheapest: _Costed | None) -> str:
    if cheapest is None:
        return "nothing is known to fit the budget: dollars are unknown"
    return f"nothing fits: {_smallest_budget(cheapest)}"


def _too_late(fastest: _Costed, cheapest: _Costed | None, budget: float | None) -> str:
    seconds = fastest[1].seconds
    text = (
        f"nothing fits: the shortest time is {units.format_duration(seconds)} "
        f"({_rounded_up(seconds / _HOUR)} hours), whatever it costs"
    )
    if budget is None or cheapest is None or cheapest[1].total <= budget:
        return text
    return f"{text}; {_smallest_budget(cheapest)}, however long it takes"


def _smallest_budget(cheapest: _Costed) -> str:
    way, cost = cheapest
    return (
        "the smallest budget that can be met is "
        f"{_rounded_up(cost.total)} dollars ({way.name})"
    )


def _rounded_up(value: float) -> str:
    """Four decimals, rounded up: what is shown is enough."""
    near = round(value, 4)
    return f"{near if near >= value else near + 1e-4:,.4f}"

"""Compare the prediction for a run with what the run took.

Seconds by phase, bytes by link and dollars, all by the one model of
``federation.rounds.cost``. Dollars of both sides are the same prices times units: those
that were predicted, and those that the run's events have measured.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from federation import durable_files
from federation.rounds import cost
from federation.rounds.cost import PHASES, Speeds
from monitoring.views.run_view import RunView

NAME = "plan.json"
_ADVICE = "remove it: the report then shows no prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Bytes of the link to a site, in the whole run.

    Attributes:
        down: Fewest and most bytes to it, if it is asked as often as others.
        up: The same from it.
    """

    site: str
    down: tuple[int, int]
    up: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A prediction.

    Attributes:
        submitted_at: When the job was submitted, in seconds since 1970.
        links: Bytes by link.
        speeds: Speeds and prices that seconds and dollars follow from; None if none
            were stated or measured.
        seconds: By ``PHASES``; empty without speeds.
        dollars: Of the whole run by what costs it; empty without speeds.
        prices_of: Day of the price table; empty if none was used.
    """

    submitted_at: float
    links: tuple[LinkBytes, ...]
    speeds: Speeds | None
    seconds: tuple[tuple[str, float], ...] = ()
    dollars: tuple[tuple[str, float], ...] = ()
    prices_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One quantity.

    Attributes:
        unit: ``seconds``, ``bytes`` or ``dollars``.
        what: A phase, a link, or what costs.
        predicted: Smallest and largest value; they are equal for most.
        actual: What the run took; so far, if it has not ended.
        is_total: Whether it is the sum of those before it.
    """

    unit: str
    what: str
    predicted: tuple[float, float]
    actual: float
    is_total: bool = False

    @property
    def error(self) -> float | None:
        """How far off the prediction was, as a fraction of what the run took.

        None if it took nothing of this; zero inside the range.
        """
        low, high = self.predicted
        if not self.actual:
            return None
        nearest = min(max(self.actual, low), high)
        return (nearest - self.actual) / self.actual


def read(folder: Path) -> RunPlan | None:
    """Read the prediction in a run's folder; None if there is none.

    Raises:
        CorruptObject: It is damaged.
    """
    return durable_files.read_json(folder / NAME, RunPlan, advice=_ADVICE)


def write(plan: RunPlan, folder: Path) -> None:
    """Write it durably.

    Raises:
        StoreUnavailable: The folder is full or cannot be written.
    """
    durable_files.write_json(folder / NAME, plan)


def rows(
    plan: RunPlan | None, view: RunView, *, listed: Collection[str] | None = None
) -> Sequence[PlanRow]:
    """Compare a prediction with a run, part by part, each unit with its total.

    Args:
        plan: The prediction; None for what the run itself has predicted, if it has.
        view: The run.
        listed: Sites whose links have rows of their own; all by default.
    """
    if plan is None:
        return [*_simulated(view)]
    took = seconds_of(view, submitted_at=plan.submitted_at)
    sites = {site.site: (site.bytes_down, site.bytes_up) for site in view.sites}
    found = [*_priced("seconds", plan.seconds, took)]
    for index, way in enumerate(("down", "up")):
        spans = {link.site: getattr(link, way) for link in plan.links}
        for site, span in spans.items():
            if listed is not None and site not in listed:
                continue
            actual = sites.get(site, (0, 0))[index]
            what = f"{way}, {site}"
            found.append(
                PlanRow(unit="bytes", what=what, predicted=span, actual=actual)
            )
        low, high = (sum(ends) for ends in zip(*spans.values(), strict=True))
        actual = sum(each[index] for each in sites.values())
        found.append(_sum_row("bytes", f"{way}, all", (low, high), actual))
    if plan.speeds is not None:
        priced = {speed.name for speed in plan.speeds.sites}
        links = {name: each for name, each in sites.items() if name in priced}
        actual_dollars = cost.dollars(sum(took.values()), links, plan.speeds)
        found += _priced("dollars", plan.dollars, actual_dollars)
    return found


def _simulated(view: RunView) -> Iterator[PlanRow]:
    """What a simulation has predicted of itself when it started."""
    if view.predicted is None:
        return
    if view.predicted.seconds is not None:
        predicted = view.predicted.seconds
        yield _sum_row("seconds", "all", (predicted, predicted), view.seconds)
    yield _sum_row("bytes", "down, all", view.predicted.bytes_down, view.bytes_down)
    yield _sum_row("bytes", "up, all", view.predicted.bytes_up, view.bytes_up)
    if view.predicted.dollars is not None and view.virtual_dollars:
        predicted, actual = view.predicted.dollars, sum(view.virtual_dollars.values())
        yield _sum_row("dollars", "all, virtual", (predicted, predicted), actual)


def _sum_row(
    unit: str, what: str, predicted: tuple[float, float], actual: float
) -> PlanRow:
    return PlanRow(
        unit=unit, what=what, predicted=predicted, actual=actual, is_total=True
    )


def _priced(
    unit: str, predicted: Sequence[tuple[str, float]], actual: Mapping[str, float]
) -> Iterator[PlanRow]:
    if not predicted:
        return
    for what, value in predicted:
        found = actual.get(what, 0.0)
        yield PlanRow(unit=unit, what=what, predicted=(value, value), actual=found)
    total = sum(value for _, value in predicted)
    yield _sum_row(unit, "all", (total, total), sum(actual.values()))


def seconds_of(view: RunView, *, submitted_at: float) -> Mapping[str, float]:
    """Seconds that a run took, by ``PHASES``.

    What coordinators that were killed took besides counts as ``final evaluation``.
    """
    first, *later = [row.length for row in view.totals.rows] or [0.0]
    rest = max(0.0, view.seconds - first - sum(later))
    setup = max(0.0, view.first_started_at - submitted_at)
    return dict(zip(PHASES, (setup, first, sum(later), rest), strict=True))

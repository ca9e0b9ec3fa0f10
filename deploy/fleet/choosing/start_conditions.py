"""What must hold before machines are started: hours, spot prices, carbon intensity.

Pure. A value that is not known holds a start back, and is named: no machine is started
on a guess.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.fleet.choosing.start_window import StartWindow

WINDOW = "start.window"
SPOT_CEILING = "start.max_spot_dollars_per_hour"
CARBON_CEILING = "start.max_grams_per_kwh"
AT_LATEST = "start.at_latest_hours"
_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A value of now.

    Attributes:
        what: What it is of, in words.
        value: The value; None if it is not known.
        why: Why it is not known.
    """

    what: str
    value: float | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConditions:
    """Conditions, each of which may be none.

    Attributes:
        window: Hours of the day.
        max_spot_dollars: The most that an hour of each spot machine may cost.
        max_grams: The most CO2-equivalent per kWh in each region, in g/kWh.
        at_latest_seconds: After so long, prices and carbon no longer count.
    """

    window: StartWindow | None = None
    max_spot_dollars: float | None = None
    max_grams: float | None = None
    at_latest_seconds: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether machines may be started at any time."""
        return (self.window, self.max_spot_dollars, self.max_grams) == (None,) * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """A condition that does not hold.

    Attributes:
        key: Its key in the deployment file.
        reason: Why it does not hold, in words.
    """

    key: str
    reason: str


def held_back(
    conditions: StartConditions,
    *,
    now: float,
    since: float,
    prices: Sequence[Reading] = (),
    intensities: Sequence[Reading] = (),
) -> Sequence[HeldBack]:
    """Return the conditions that hold a start back; none means that it may begin.

    Args:
        conditions: What must hold.
        now: Seconds since 1970.
        since: When a command first began to wait.
        prices: Dollars of an hour of each spot machine.
        intensities: Grams per kWh of each region.
    """
    found = [*_window(conditions.window, now)]
    latest = conditions.at_latest_seconds
    if latest is None or now - since < latest:
        found += _above(SPOT_CEILING, prices, conditions.max_spot_dollars, "$", "/h")
        found += _above(CARBON_CEILING, intensities, conditions.max_grams, "", " g/kWh")
    return found


def why_started(conditions: StartConditions, *, now: float, since: float) -> str:
    """Say why machines are started now, for the log of decisions."""
    latest = conditions.at_latest_seconds
    if latest is not None and now - since >= latest:
        return (
            f"{AT_LATEST} = {latest / _HOUR:g} are over: prices and carbon intensity "
            "no longer count"
        )
    return "every condition of [start] holds"


def _window(window: StartWindow | None, now: float) -> Iterator[HeldBack]:
    if window is not None and (opens := window.opens(now)) > now:
        yield HeldBack(key=WINDOW, reason=f"it opens at {window.text(opens)}")


def _above(
    key: str, readings: Sequence[Reading], ceiling: float | None, sign: str, unit: str
) -> Iterator[HeldBack]:
    if ceiling is None:
        return
    for each in readings:
        if each.value is None:
            yield HeldBack(key=key, reason=f"{each.what}: unknown: {each.why}")
        elif each.value > ceiling:
            reason = (
                f"{each.what}: {sign}{each.value:.4g}{unit} is more than "
                f"{sign}{ceiling:.4g}{unit}"
            )
            yield HeldBack(key=key, reason=reason)

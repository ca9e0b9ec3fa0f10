"""The timeline figure: each site and the aggregator, side by side."""

import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from federation.events import SiteFailed
from federation.messages import FailureKind, Phase
from monitoring.pages.figures import (
    DOWN_COLOUR,
    FAINT,
    LOST,
    WIDTH,
    add_legend,
    cut_names,
    new_figure,
)
from monitoring.units import format_duration
from monitoring.views.round_view import RoundView
from monitoring.views.run_view import RunView

MAX_ROUNDS_IN_TIMELINE = 5

_FAILED, _WAITING, _OTHER = "failed", "on the way or waiting", "other"
PHASES = {
    "ready": "#5f7fb0",
    "advertise": "#c9b8dd",
    "confirm": "#a48cc4",
    "exchange": "#93a4b5",
    "evaluate": "#7fb8d6",
    "train": "#33528f",
    "prepare": "#d9b44a",
    "survivors": "#e8b48c",
    "reveal": "#cf8148",
    "combine": "#bf5b6b",
    "apply": "#7a2a57",
    "checkpoint": "#2f7d57",
    _OTHER: "#8f8f3a",
    _WAITING: "#eceff3",
    "awaited": DOWN_COLOUR,
    _FAILED: LOST,
}
_LABEL_SHARE = 0.07  # of the width, for the label of a round


def timeline(view: RunView, sites: Sequence[str]) -> Figure | None:
    """Draw the last rounds: the phases of each site and the aggregator."""
    rounds = [row for row in view.rounds if row.finished is not None]
    rounds = rounds[-MAX_ROUNDS_IN_TIMELINE:]
    if not rounds:
        return None
    figure, axes = new_figure(rows=(len(sites) + 1) * 1.25, width=2 * WIDTH)
    shown: set[str] = set()
    offsets, labelled = starts(rounds), -math.inf
    lengths = (row.seconds or 0.0 for row in rounds)
    room = _LABEL_SHARE * max(map(sum, zip(offsets, lengths, strict=True)))
    for row, offset in zip(rounds, offsets, strict=True):
        axes.axvline(offset, color=FAINT, lw=0.8, ls=(0, (2, 3)))
        _draw_round(axes, row, offset, sites, shown)
        if offset < labelled + room:
            continue  # Two labels would cover each other.
        labelled = offset
        axes.annotate(
            f"round {row.index}",
            (offset, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, 2),
            textcoords="offset points",
            color=FAINT,
        )
    axes.set_yticks(range(len(sites) + 1), ["aggregator", *cut_names(sites)])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    # Steps that one decimal can tell apart.
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_duration(x)))
    add_legend(axes, {n: colour for n, colour in PHASES.items() if n in shown})
    return figure


def starts(rows: Sequence[RoundView]) -> list[float]:
    """When each round begins, in seconds after the first one.

    Where the clock was set back, a round begins when the one before has ended; also
    after a pause in which nobody worked on the run, beside which rounds would vanish.
    """
    found, moved = list[float](), 0.0
    longest = max((row.seconds or 0.0 for row in rows), default=0.0)
    for before, row in zip([None, *rows], rows, strict=False):
        start = row.started_at - rows[0].started_at + moved
        if before is not None:
            end = found[-1] + (before.seconds or 0.0)
            if not found[-1] <= start <= end + longest:
                start, moved = end, moved + end - start
        found.append(start)
    return found


def _draw_round(
    axes: Axes, row: RoundView, offset: float, sites: Sequence[str], shown: set[str]
) -> None:
    for place, start, seconds, phase in bars(row, sites):
        shown.add(phase)
        span = (offset + start, seconds)
        axes.broken_barh([span], (place - 0.3, 0.6), fc=PHASES[phase])


def bars(
    row: RoundView, sites: Sequence[str]
) -> Iterator[tuple[int, float, float, str]]:
    """Yield the bars of a round: row, start and length in seconds, key of ``PHASES``.

    Args:
        row: The round; its start is 0.
        sites: Who has row 1 and the next; the aggregator has row 0.
    """
    for phase in row.phases:
        yield 0, phase.start_seconds, phase.seconds, _named(phase)
    for report in row.reports:
        if report.site not in sites:
            continue
        place = sites.index(report.site) + 1
        asked, answered = report.asked_seconds, report.answered_seconds
        # A task that nobody needed any more is no failure.
        failed = (
            isinstance(report, SiteFailed) and report.kind is not FailureKind.SURPLUS
        )
        yield place, asked, answered - asked, _FAILED if failed else _WAITING
        for phase in () if isinstance(report, SiteFailed) else report.phases:
            # What a site says that it did, as far as it can have been then.
            start = asked + phase.start_seconds
            seconds = min(phase.seconds, answered - start)
            if seconds >= 0:
                yield place, start, seconds, _named(phase)


def _named(phase: Phase) -> str:
    return phase.name if phase.name in PHASES else _OTHER

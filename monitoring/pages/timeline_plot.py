"""The figure of where the time went: each site and the aggregator, side by side."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from federation.events import SiteAnswered, SiteFailed
from monitoring.pages.figures import FAINT, WIDTH, add_legend, cut_names, new_figure
from monitoring.units import format_duration
from monitoring.views.round_view import RoundView
from monitoring.views.run_view import RunView

MAX_ROUNDS_IN_TIMELINE = 5

_PHASE_COLOURS = {
    "advertise": "#c9b8dd",
    "confirm": "#a48cc4",
    "exchange": "#dfe4ea",
    "evaluate": "#7fb8d6",
    "train": "#33528f",
    "prepare": "#d9b44a",
    "survivors": "#e8b48c",
    "reveal": "#cf8148",
    "combine": "#bf5b6b",
    "apply": "#7a2a57",
    "checkpoint": "#2f7d57",
}
_SPARE_PHASE_COLOURS = ("#8f8f3a", "#a4579a", "#5c6b7a")
_WAITING = "#eef1f4"


def timeline(view: RunView, sites: Sequence[str]) -> Figure | None:
    """Draw the last rounds: what each site and the aggregator did, and when."""
    rounds = [row for row in view.rounds if row.finished is not None]
    rounds = rounds[-MAX_ROUNDS_IN_TIMELINE:]
    if not rounds:
        return None
    figure, axes = new_figure(rows=(len(sites) + 1) * 1.25, width=2 * WIDTH)
    colours: dict[str, str] = {}
    start = rounds[0].started_at
    for row in rounds:
        offset = row.started_at - start
        axes.axvline(offset, color=FAINT, lw=0.8, ls=(0, (2, 3)))
        axes.annotate(
            f"round {row.index}",
            (offset, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, 2),
            textcoords="offset points",
            color=FAINT,
        )
        _draw_round(axes, row, offset, sites, colours)
    axes.set_yticks(range(len(sites) + 1), ["aggregator", *cut_names(sites)])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    # Steps that one decimal can tell apart.
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_duration(x)))
    order = [*_PHASE_COLOURS, *colours]
    add_legend(axes, {n: colours[n] for n in sorted(colours, key=order.index)})
    return figure


def _draw_round(
    axes: Axes,
    row: RoundView,
    offset: float,
    sites: Sequence[str],
    colours: dict[str, str],
) -> None:
    def bar(place: int, start: float, seconds: float, colour: str) -> None:
        axes.broken_barh([(offset + start, seconds)], (place - 0.3, 0.6), fc=colour)

    for phase in row.phases:
        bar(0, phase.start_seconds, phase.seconds, _phase_colour(phase.name, colours))
    for report in row.reports:
        if report.site not in sites:
            continue
        place = sites.index(report.site) + 1
        seconds = report.answered_seconds - report.asked_seconds
        if isinstance(report, SiteFailed):
            bar(place, report.asked_seconds, seconds, "#f3c9c5")
            colours["failed"] = "#f3c9c5"
            continue
        bar(place, report.asked_seconds, seconds, _WAITING)
        colours["on the way or waiting"] = _WAITING
        _draw_phases(report, lambda *args, at=place: bar(at, *args), colours)


def _draw_phases(
    report: SiteAnswered,
    bar: Callable[[float, float, str], None],
    colours: dict[str, str],
) -> None:
    """Draw what a site says that it did, as far as it can have been then."""
    for phase in report.phases:
        start = report.asked_seconds + phase.start_seconds
        seconds = min(phase.seconds, report.answered_seconds - start)
        if seconds >= 0:
            name = phase.name if phase.name in _PHASE_COLOURS else "other"
            bar(start, seconds, _phase_colour(name, colours))


def _phase_colour(name: str, colours: dict[str, str]) -> str:
    if name not in colours:
        spare = _SPARE_PHASE_COLOURS[len(colours) % len(_SPARE_PHASE_COLOURS)]
        colours[name] = _PHASE_COLOURS.get(name, spare)
    return colours[name]

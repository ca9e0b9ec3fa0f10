"""The figures of the report as SVG text that stands inside a page.

The same view gives the same bytes: identifiers come from a fixed salt, and no date
is written. Text stays text, so that the page's own font draws it. Nothing here
changes matplotlib's global settings or uses its global figures.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from federation.events import SiteAnswered, SiteFailed
from monitoring.run_view import RoundView, RunView, Series, SiteView, perplexity
from monitoring.units import format_bytes, format_duration

MAX_SITES_SHOWN = 8
MAX_LABELS_SHOWN = 16
MAX_ROUNDS_IN_TIMELINE = 5
OTHER_LABELS = "other"

# Okabe and Ito's palette for colour-blind readers without its yellow, one darker.
SITE_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f5aa8",
    "#8c6d46",
)
POOLED_COLOUR = "#1b2430"
UP_COLOUR, DOWN_COLOUR = "#2b6f8f", "#b9d3df"

_INK, _FAINT, _GRID, _FAILED = "#4a5563", "#8a94a3", "#e6e9ee", "#c2372e"
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
_MAX_CELLS_WITH_NUMBERS = 12
_MAX_LABEL_CHARS = 44  # that fit side by side under a figure
_WIDTH, _HEIGHT = 6.2, 3.0  # inches, at 72 points; the page scales them
_ROW = 0.3
_SETTINGS: Mapping[Any, object] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a label is a "$"
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
}


def draw_all(view: RunView) -> Mapping[str, str]:
    """Draw every figure that the run has data for: name to SVG text."""
    drawings: Mapping[str, Callable[[RunView], Figure | None]] = {
        "loss": _loss,
        "perplexity" if view.is_language else "accuracy": _quality,
        "data": _data,
        "bytes": _bytes,
        "timeline": _timeline,
        "answers": _answers,
        "update-norm": _update_norm,
    }
    found = {}
    for name, draw in drawings.items():
        with mpl.rc_context({**_SETTINGS, "svg.hashsalt": f"crossfed-{name}"}):
            figure = draw(view)
            if figure is not None:
                found[name] = _to_svg(figure, name)
    return found


def shown_sites(view: RunView) -> tuple[SiteView, ...]:
    """The sites that figures show, in the order of the job.

    All of them if they are few; otherwise those with failures, then those whose
    loss differs most from the middle one.
    """
    sites = view.sites
    if len(sites) <= MAX_SITES_SHOWN:
        return sites
    losses = sorted(site.loss[-1][1] for site in sites if site.loss)
    middle = losses[len(losses) // 2] if losses else 0.0

    def interest(site: SiteView) -> tuple[int, float]:
        distance = abs(site.loss[-1][1] - middle) if site.loss else 0.0
        return len(site.failures), distance if math.isfinite(distance) else math.inf

    chosen = {s.site for s in sorted(sites, key=interest)[-MAX_SITES_SHOWN:]}
    return tuple(site for site in sites if site.site in chosen)


def site_colours(view: RunView) -> Mapping[str, str]:
    """One colour for each site that figures show, the same in all of them."""
    sites = shown_sites(view)
    return {s.site: c for s, c in zip(sites, SITE_COLOURS, strict=False)}


def _loss(view: RunView) -> Figure | None:
    pooled = _pooled(view, lambda loss, _: loss)
    lines = [(site.site, site.loss) for site in shown_sites(view)]
    return _lines(view, pooled, lines, "loss in nats")


def _quality(view: RunView) -> Figure | None:
    if view.is_language:
        pooled = _pooled(view, lambda loss, _: perplexity(loss))
        lines = [
            (site.site, tuple((index, perplexity(loss)) for index, loss in site.loss))
            for site in shown_sites(view)
        ]
        figure = _lines(view, pooled, lines, "perplexity")
        if figure is not None:
            figure.axes[0].set_yscale("log")
            axis = figure.axes[0].yaxis
            axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        return figure
    pooled = _pooled(view, lambda _, accuracy: 100 * accuracy)
    lines = [
        (site.site, tuple((index, 100 * value) for index, value in site.accuracy))
        for site in shown_sites(view)
    ]
    return _lines(view, pooled, lines, "accuracy in %")


def _pooled(view: RunView, value: Callable[[float, float], float]) -> Series:
    events = (view.initial, *(row.evaluated for row in view.rounds))
    return tuple(
        (event.round_index, value(event.pooled.loss, event.pooled.accuracy))
        for event in events
        if event is not None and event.pooled.count
    )


def _lines(
    view: RunView,
    pooled: Series,
    by_site: Sequence[tuple[str, Series]],
    label: str,
) -> Figure | None:
    """Draw the pooled metric thick over the sites' thin lines."""
    if not _finite(pooled):
        return None
    figure, axes = _new()
    colours = site_colours(view)
    for site, series in by_site:
        points = _finite(series)
        marker = "." if len(points) == 1 else ""
        axes.plot(
            *_columns(points), color=colours[site], lw=1.2, marker=marker, zorder=3
        )
    points = _finite(pooled)
    axes.plot(*_columns(points), color=POOLED_COLOUR, lw=2.4)
    axes.plot(*_columns(points[-1:]), "o", color=POOLED_COLOUR, ms=5)
    _mark_lost_rounds(axes, view)
    _label(axes, "after round", label)
    return figure


def _mark_lost_rounds(axes: Axes, view: RunView) -> None:
    for row in view.rounds:
        if row.status != "completed":
            axes.axvspan(row.index - 0.5, row.index + 0.5, color=_FAILED, alpha=0.08)


def _data(view: RunView) -> Figure | None:
    """Draw who holds what: a heat map of counts, or bars without labels."""
    if view.data is None:
        return None
    names = [site.site for site in shown_sites(view)]
    shares = {share.site: share for share in view.data.shares}
    rows = [shares[name] for name in names if name in shares]
    if not rows:
        return None
    if not view.data.labels or not all(share.counts for share in rows):
        totals = [(share.site, share.train_examples) for share in rows]
        return _example_bars(totals, site_colours(view))
    labels, counts = _largest_labels(view.data.labels, [share.counts for share in rows])
    return _heat_map([share.site for share in rows], labels, counts)


def _example_bars(
    totals: Sequence[tuple[str, int]], colours: Mapping[str, str]
) -> Figure:
    figure, axes = _new(rows=len(totals))
    sites, sizes = zip(*totals, strict=True)
    axes.barh(_cut(sites), sizes, color=[colours[site] for site in sites], height=0.6)
    axes.invert_yaxis()
    _label(axes, "training examples", "")
    return figure


def _largest_labels(
    labels: Sequence[str], rows: Sequence[Sequence[int]]
) -> tuple[list[str], list[list[int]]]:
    """Keep the labels with most examples and add up the rest."""
    if len(labels) <= MAX_LABELS_SHOWN:
        return list(labels), [list(row) for row in rows]
    totals = [sum(column) for column in zip(*rows, strict=True)]
    by_size = sorted(range(len(labels)), key=lambda index: -totals[index])
    kept = sorted(by_size[: MAX_LABELS_SHOWN - 1])
    rest = set(range(len(labels))) - set(kept)
    return [*(labels[index] for index in kept), OTHER_LABELS], [
        [*(row[index] for index in kept), sum(row[index] for index in rest)]
        for row in rows
    ]


def _heat_map(
    sites: Sequence[str], labels: Sequence[str], counts: Sequence[Sequence[int]]
) -> Figure:
    figure, axes = _new(rows=len(sites) + 1, row=0.42)
    colours = LinearSegmentedColormap.from_list("counts", ["#f4f8fa", UP_COLOUR])
    largest = max(1, *(max(row) for row in counts))
    axes.pcolormesh(
        counts, cmap=colours, vmin=0, vmax=largest, edgecolors="white", linewidth=2
    )
    if len(labels) <= _MAX_CELLS_WITH_NUMBERS:
        for y, row in enumerate(counts):
            for x, count in enumerate(row):
                ink = "white" if count > 0.55 * largest else _INK
                place = (x + 0.5, y + 0.52)
                axes.text(*place, f"{count}", color=ink, ha="center", va="center")
    axes.set_yticks([index + 0.5 for index in range(len(sites))], _cut(sites))
    slanted = sum(len(label) + 1 for label in labels) > _MAX_LABEL_CHARS
    axes.set_xticks(
        [index + 0.5 for index in range(len(labels))],
        _cut(labels, 14),
        rotation=40 if slanted else 0,
        ha="right" if slanted else "center",
    )
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


def _bytes(view: RunView) -> Figure | None:
    sites = shown_sites(view)
    if not any(site.bytes_up or site.bytes_down for site in sites):
        return None
    figure, axes = _new(rows=len(sites) * 1.4)
    places = range(len(sites))
    up, down = [s.bytes_up for s in sites], [s.bytes_down for s in sites]
    axes.barh([p - 0.19 for p in places], up, 0.34, color=UP_COLOUR, label="up")
    axes.barh([p + 0.19 for p in places], down, 0.34, color=DOWN_COLOUR, label="down")
    axes.set_yticks(list(places), _cut([site.site for site in sites]))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    _legend(axes, {"from the site": UP_COLOUR, "to the site": DOWN_COLOUR})
    return figure


def _answers(view: RunView) -> Figure | None:
    """Draw how many sites of each round answered, and how many tasks failed."""
    if not view.rounds:
        return None
    figure, axes = _new()
    indices = [row.index for row in view.rounds]
    answered = [row.answered for row in view.rounds]
    failed = [sum(row.failures.values()) for row in view.rounds]
    axes.bar(indices, answered, 0.7, color=UP_COLOUR)
    axes.bar(indices, failed, 0.7, bottom=answered, color=_FAILED)
    _label(axes, "round", "sites")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    _legend(axes, {"answered": UP_COLOUR, "failed": _FAILED})
    return figure


def _timeline(view: RunView) -> Figure | None:
    """Draw the last rounds: what each site and the aggregator did, and when."""
    rounds = [row for row in view.rounds if row.finished is not None]
    rounds = rounds[-MAX_ROUNDS_IN_TIMELINE:]
    if not rounds:
        return None
    sites = [site.site for site in shown_sites(view)]
    figure, axes = _new(rows=(len(sites) + 1) * 1.25, width=2 * _WIDTH)
    colours: dict[str, str] = {}
    start = rounds[0].started_at
    for row in rounds:
        offset = row.started_at - start
        axes.axvline(offset, color=_FAINT, lw=0.8, ls=(0, (2, 3)))
        axes.annotate(
            f"round {row.index}",
            (offset, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, 2),
            textcoords="offset points",
            color=_FAINT,
        )
        _draw_round(axes, row, offset, sites, colours)
    axes.set_yticks(range(len(sites) + 1), ["aggregator", *_cut(sites)])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    # Steps that one decimal can tell apart.
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_duration(x)))
    order = [*_PHASE_COLOURS, *colours]
    _legend(axes, {n: colours[n] for n in sorted(colours, key=order.index)})
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
    for phase in report.phases:
        start = report.asked_seconds + phase.start_seconds
        bar(start, phase.seconds, _phase_colour(phase.name, colours))


def _phase_colour(name: str, colours: dict[str, str]) -> str:
    if name not in colours:
        spare = _SPARE_PHASE_COLOURS[len(colours) % len(_SPARE_PHASE_COLOURS)]
        colours[name] = _PHASE_COLOURS.get(name, spare)
    return colours[name]


def _update_norm(view: RunView) -> Figure | None:
    points = _finite(
        (row.index, row.finished.update_norm)
        for row in view.rounds
        if row.finished is not None and row.finished.update_norm is not None
    )
    if not points:
        return None
    figure, axes = _new()
    axes.plot(*_columns(points), color=POOLED_COLOUR, lw=2, marker="o", ms=3)
    axes.set_ylim(bottom=0)
    _mark_lost_rounds(axes, view)
    _label(axes, "round", "Euclidean norm")
    return figure


def _new(
    *, rows: float | None = None, row: float = _ROW, width: float = _WIDTH
) -> tuple[Figure, Axes]:
    """Begin a figure: of the usual height, or tall enough for so many rows."""
    height = _HEIGHT if rows is None else max(1.6, 0.8 + row * rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=False, axis="x")
    if "round" in x_label:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _legend(axes: Axes, colours: Mapping[str, str]) -> None:
    axes.figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="outside upper left",
        ncols=len(colours),
        handlelength=1,
        handleheight=1,
        columnspacing=1.4,
    )


def _finite(series: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(index, value) for index, value in series if math.isfinite(value)]


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _cut(names: Iterable[str], limit: int = 24) -> list[str]:
    """Shorten names to what has room, and to signs that a plot can measure."""
    plain = ("".join(c if " " <= c <= "~" else "?" for c in name) for name in names)
    return [n if len(n) <= limit else f"{n[: limit - 3]}..." for n in plain]


def _to_svg(figure: Figure, name: str) -> str:
    """Make a stand-alone SVG file a part of a page.

    The prolog and the metadata go, they point to addresses on the network; the
    identifiers get the figure's name, because a page holds several figures; and
    the size gives way to that of the page.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style .*?</style>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "matplotlib writes a viewBox"  # noqa: S101
    return (
        f'<svg class="plot" role="img" aria-label="{escape(name)}" {box[0]} '
        'xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">{rest}'
    )

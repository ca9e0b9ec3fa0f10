"""Figures of a run of statistics: a histogram for each column, and correlations."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from monitoring.pages.figures import (
    INK,
    SITE_COLOURS,
    cut_names,
    draw,
    new_figure,
)
from monitoring.pages.panels import Panel
from monitoring.views.statistics_view import ColumnStatistics, RunStatistics

MAX_HISTOGRAMS, MAX_CORRELATED, MAX_BARS = 24, 30, 20
MAX_WITH_NUMBERS = 12


def panels_of(found: RunStatistics) -> Sequence[Panel]:
    """Figures of the columns that have histograms or categories, in their order."""
    shown = [c for c in found.columns if c.histogram or c.categories][:MAX_HISTOGRAMS]
    drawings = {f"column-{at}": partial(_bars, c) for at, c in enumerate(shown)}
    captions: Mapping[str, tuple[str, str]] = {
        f"column-{at}": (c.name, _caption(c)) for at, c in enumerate(shown)
    }
    if 1 < len(found.numbers) <= MAX_CORRELATED:
        drawings["correlations"] = partial(_correlations, found)
        said = ("Correlations", "Of each pair of columns, over records without a gap.")
        captions = {**captions, "correlations": said}
    return [
        Panel(name=name, title=captions[name][0], caption=captions[name][1], svg=svg)
        for name, svg in draw(drawings).items()
    ]


def _caption(column: ColumnStatistics) -> str:
    cell = "bin" if column.histogram else "category"
    unit = f", in {column.unit}" if column.unit else ""
    return f"Records of all sites in each {cell}{unit}."


def _bars(column: ColumnStatistics) -> Figure:
    if column.histogram:
        figure, axes = new_figure()
        widths = [b - a for a, b in zip(column.edges, column.edges[1:], strict=False)]
        axes.bar(
            column.edges[:-1],
            column.histogram,
            width=widths,
            align="edge",
            color=SITE_COLOURS[0],
            edgecolor="white",
            linewidth=0.5,
        )
        axes.set_ylabel("records")
        return figure
    names = sorted(column.categories, key=lambda n: -column.categories[n])[:MAX_BARS]
    names += [name for name in column.sizes if name not in column.categories]
    figure, axes = new_figure(rows=len(names))
    sizes = [column.sizes[name] for name in names]
    axes.barh(range(len(names)), sizes, color=SITE_COLOURS[0], height=0.6)
    axes.set_yticks(range(len(names)), cut_names(names))
    axes.invert_yaxis()
    axes.set_xlabel("records")
    return figure


def _correlations(found: RunStatistics) -> Figure:
    names = found.numbers
    figure, axes = new_figure(rows=len(names) + 1)
    values = [[math.nan if v is None else v for v in row] for row in found.correlations]
    axes.pcolormesh(values, cmap="RdBu_r", vmin=-1, vmax=1)
    if len(names) <= MAX_WITH_NUMBERS:
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                ink = "white" if abs(value) > 0.6 else INK  # noqa: PLR2004 -- deep
                place = (x + 0.5, y + 0.52)
                said = "-" if math.isnan(value) else f"{value:.2f}"
                noise = found.correlation_noise and found.correlation_noise[y][x]
                said += f"\n±{noise:.2g}" if noise else ""
                axes.text(*place, said, color=ink, ha="center", va="center")
    middles = [at + 0.5 for at in range(len(names))]
    axes.set_yticks(middles, cut_names(names))
    axes.set_xticks(middles, cut_names(names, 14), rotation=40, ha="right")
    axes.invert_yaxis()
    axes.grid(visible=False)
    return figure

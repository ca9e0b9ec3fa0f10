"""Pictures of the study: loss by bytes and minutes, share of training by bandwidth.

The same rows give the same bytes: identifiers have a fixed salt, and no date is
written.
"""

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

Series = Mapping[str, Sequence[tuple[float, float]]]

# Okabe and Ito's palette for colour-blind readers.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4a5563")
_MARKS = "os^vDP"
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "thin-lines",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e9ee",
    "legend.frameon": False,
    "figure.facecolor": "white",
}
_WIDTH, _HEIGHT = 7.5, 4.2


def loss_by_bytes(points: Series) -> str:
    """Draw each row's loss against the bytes that it sends, both ways, in megabytes."""

    def draw(axes: Axes) -> None:
        for (name, row), colour, mark in _styles(points):
            x, y = zip(*sorted(row), strict=True)
            axes.plot(x, y, mark, color=colour, label=name, ms=6)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_xlabel("megabytes that all sites send and receive")
        axes.set_ylabel("held-out loss, nats per byte")

    return _one(draw)


def loss_by_minutes(panels: Mapping[str, Series]) -> str:
    """Draw each row's training loss against minutes, one panel for each width."""

    def draw(figure: Figure) -> None:
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
            for (name, row), colour, mark in _styles(lines):
                x, y = zip(*row, strict=True)
                dashes = "-" if mark == _MARKS[0] else "--"
                axes.plot(x, y, dashes, color=colour, label=name, lw=1.2)
            axes.set_xscale("log")
            # Three panels have no room for more, nor for powers of ten.
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("minutes")
        all_axes[0].set_ylabel("training loss, nats per byte")
        handles, labels = all_axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", fontsize=7.5)

    return _svg(draw)


def share_by_bandwidth(lines: Series, measured: Series) -> str:
    """Draw the share of training: computed ones as lines, measured ones as points."""

    def draw(axes: Axes) -> None:
        colours: dict[str, str] = {}
        for (name, row), colour, mark in _styles(lines):
            colours[name], dashes = colour, "-" if mark == _MARKS[0] else "--"
            x, y = zip(*sorted(row), strict=True)
            axes.plot(x, [100 * each for each in y], dashes, color=colour, label=name)
        for name, row in measured.items():
            x, y = zip(*sorted(row), strict=True)
            colour, percent = colours.get(name, "black"), [100 * each for each in y]
            axes.plot(x, percent, "o", color=colour, ms=5)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_ylim(0, 103)
        axes.set_xlabel("Mbit/s of each site's line, in each direction")
        axes.set_ylabel("share of time that sites train, %")

    return _one(draw)


def curves(lines: Series, labels: tuple[str, str], *, log: bool = False) -> str:
    """Draw lines; ``labels`` are of the axes."""

    def draw(axes: Axes) -> None:
        for (name, row), colour, mark in _styles(lines):
            x, y = zip(*sorted(row), strict=True)
            axes.plot(x, y, mark, ls="-", lw=1.2, ms=4, color=colour, label=name)
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_ylim(bottom=0)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])

    return _one(draw)


def bars(groups: Mapping[str, Mapping[str, float]], label: str) -> str:
    """Draw a horizontal bar for each name, one colour for each group."""

    def draw(axes: Axes) -> None:
        names = list(next(iter(groups.values())))
        height = 0.8 / len(groups)
        for number, (group, values) in enumerate(groups.items()):
            places = [i + (number + 0.5) * height - 0.4 for i in range(len(names))]
            lengths = [values[name] for name in names]
            axes.barh(places, lengths, height, color=_COLOURS[number], label=group)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_axisbelow(True)
        axes.set_xlabel(label)

    return _one(draw)


def _styles(
    series: Series,
) -> Sequence[tuple[tuple[str, Sequence[tuple[float, float]]], str, str]]:
    looks = itertools.product(_MARKS, _COLOURS)
    return [
        (item, colour, mark)
        for item, (mark, colour) in zip(series.items(), looks, strict=False)
    ]


def _one(draw: Callable[[Axes], None]) -> str:
    """Draw a picture of one panel, with its legend beside it."""

    def draw_all(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7.5)

    return _svg(draw_all)


def _svg(draw: Callable[[Figure], None]) -> str:
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    # Lines end without blanks, as elsewhere in the repository.
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"

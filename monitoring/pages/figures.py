"""How every figure looks, and how it becomes SVG text that stands inside a page.

The same figure gives the same bytes: identifiers come from a fixed salt, and no date
is written. Text stays text, so that the page's own font draws it. Nothing here
changes matplotlib's global settings or uses its global figures.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

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
INK, FAINT = "#4a5563", "#8a94a3"

WIDTH = 6.2  # inches, at 72 points; the page scales them

# Sites say what they like. Axes whose ends are as far apart as floats can be have no
# ticks, and drawing them fails.
LARGEST_DRAWN = 1e100

_GRID = "#e6e9ee"
_HEIGHT = 3.0
_ROW = 0.3
_SETTINGS: Mapping[Any, object] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a label is a "$"
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
}


def draw(name: str, make: Callable[[], Figure | None]) -> str | None:
    """Make a figure in the house's style, as SVG text; None if there is none."""
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": f"crossfed-{name}"}):
        figure = make()
        return None if figure is None else _to_svg(figure, name)


def new_figure(
    *, rows: float | None = None, row: float = _ROW, width: float = WIDTH
) -> tuple[Figure, Axes]:
    """Begin a figure: of the usual height, or tall enough for so many rows."""
    height = _HEIGHT if rows is None else max(1.6, 0.8 + row * rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def label_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Name the axes; one of rounds has whole numbers."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=False, axis="x")
    if "round" in x_label:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def add_legend(axes: Axes, colours: Mapping[str, str]) -> None:
    """Say above a figure what its colours are."""
    axes.figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="outside upper left",
        ncols=len(colours),
        handlelength=1,
        handleheight=1,
        columnspacing=1.4,
    )


def is_drawable(value: float) -> bool:
    """Whether a value has a place in a figure; NaN has none."""
    return abs(value) <= LARGEST_DRAWN


def finite_points(series: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Points that can be drawn."""
    return [(index, value) for index, value in series if is_drawable(value)]


def columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Points as places along both axes."""
    return [x for x, _ in points], [y for _, y in points]


def cut_names(names: Iterable[str], limit: int = 24) -> list[str]:
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

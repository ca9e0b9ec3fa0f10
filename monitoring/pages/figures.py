"""The style of every figure, and its form as SVG text inside a page.

The same figure gives the same bytes: identifiers come from a fixed salt, and no date
is written. Text stays text, so that the page's own font draws it. Nothing here
changes matplotlib's global settings or uses its global figures.
"""

import io
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

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

QUIET = "#dfe4ea"
DOWN_COLOUR = "#b9d3df"
LOST = "#f3c9c5"
CARD = "#fefefe"  # where the page shows through

MAX_READOUTS = 150  # places along an axis that show values under the pointer
MAX_READOUT_ROWS = 16

_GRID = "#e6e9ee"
# Colours that follow the page's, which are others in the dark.
_THEME = {
    QUIET: "quiet",
    "#eceff3": "row",
    POOLED_COLOUR: "ink",
    INK: "soft",
    FAINT: "faint",
    _GRID: "line",
    CARD: "card",
    DOWN_COLOUR: "down",
    LOST: "lost",
}
_CHAR, _LINE = 5.8, 12.0  # width and height of text under the pointer, in points
_NARROW = 8.0  # ends of an axis whose ratio is below have no powers of ten to mark
_LEGEND_COLUMNS = 9
_BEYOND = "\u0530"  # Greek and Cyrillic end before.
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


def draw(drawings: Mapping[str, Callable[[], Figure | None]]) -> Mapping[str, str]:
    """Draw figures in the common style: name to SVG text, of those that have data."""
    found = {}
    for name, make in drawings.items():
        with mpl.rc_context({**_SETTINGS, "svg.hashsalt": f"crossfed-{name}"}):
            figure = make()
            if figure is not None:
                found[name] = _to_svg(figure, name)
    return found


def stand_alone(name: str, make: Callable[[], Figure], form: str = "svg") -> bytes:
    """Draw a figure as a file of its own, SVG or PNG, on white."""
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": f"crossfed-{name}"}):
        buffer = io.BytesIO()
        undated = {"Date": None} if form == "svg" else {}
        make().savefig(
            buffer, format=form, facecolor="white", dpi=150, metadata=undated
        )
    return buffer.getvalue()


def new_figure(
    *, rows: float | None = None, row: float = _ROW, width: float = WIDTH
) -> tuple[Figure, Axes]:
    """Start a figure of the usual height, or tall enough for some rows."""
    height = _HEIGHT if rows is None else max(1.6, 0.8 + row * rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def label_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Name the axes; one of rounds has whole numbers."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=False, axis="x")
    unit = " %" if y_label.endswith("%") else ""
    axes.fmt_ydata = lambda y: f"{y:.4g}{unit}"
    if "round" in x_label:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def log_scale(axis: Axis, subs: Sequence[int] = (1, 2, 5)) -> None:
    """Make an axis logarithmic, marked at multiples of powers of ten."""
    which = "x" if axis is axis.axes.xaxis else "y"
    axis.axes.set(**{f"{which}scale": "log"})
    low, high = getattr(axis.axes, f"get_{which}lim")()
    axis.set_major_locator(
        LogLocator(subs=subs, numticks=12) if high > _NARROW * low else MaxNLocator(5)
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_locator(NullLocator())


def _points(line: Line2D) -> list[list[float]]:
    found: list[list[float]] = np.asarray(line.get_xydata()).tolist()
    return found


def draw_line(
    axes: Axes,
    name: str,
    points: Sequence[tuple[float, float]],
    colour: str,
    **style: Any,
) -> None:
    """Draw points as a line whose values the page shows under the pointer by name."""
    marker = "." if len(points) == 1 else ""
    axes.plot(*columns(points), label=name, color=colour, marker=marker, **style)


def add_legend(axes: Axes, colours: Mapping[str, str]) -> None:
    """Add a legend above a figure."""
    axes.figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="outside upper left",
        ncols=min(len(colours), _LEGEND_COLUMNS),
        handlelength=1,
        handleheight=1,
        columnspacing=1.4,
    )


def is_drawable(value: float) -> bool:
    """Whether a value can be drawn; NaN cannot."""
    return abs(value) <= LARGEST_DRAWN


def drawable(
    series: Iterable[tuple[float, float]], *, log: bool = False
) -> list[tuple[float, float]]:
    """Points that can be drawn, on a logarithmic axis positive ones."""
    return [(x, y) for x, y in series if is_drawable(y) and (y > 0 or not log)]


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Points as places along both axes."""
    return [x for x, _ in points], [y for _, y in points]


def cut_names(names: Iterable[str], limit: int = 24) -> list[str]:
    """Shorten names to fit, with only characters that the font of plots has.

    It has those of European languages, up to Cyrillic.
    """
    composed = (unicodedata.normalize("NFC", name) for name in names)
    plain = (
        "".join(c if c.isprintable() and c < _BEYOND else "?" for c in name)
        for name in composed
    )
    return [n if len(n) <= limit else f"{n[: limit - 3]}..." for n in plain]


def _lay_out(figure: Figure) -> None:
    """Lay out the figure now: otherwise ``savefig`` draws everything twice."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)


def _to_svg(figure: Figure, name: str) -> str:
    """Turn a stand-alone SVG file into a part of a page.

    The prolog and the metadata go, they point to addresses on the network; the
    identifiers get the figure's name, because a page holds several figures; and
    the size gives way to that of the page.
    """
    _lay_out(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style .*?</style>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r"(fill|stroke): (#\w{6})", _theme, text)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "matplotlib writes a viewBox"  # noqa: S101
    return (
        f'<svg class="plot" role="img" aria-label="{escape(name)}" {box[0]} '
        'xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">'
        f"{rest[: rest.rindex('</svg>')]}{_readouts(figure)}</svg>"
    )


def _theme(match: re.Match[str]) -> str:
    colour = match[2]
    themed = f"var(--{_THEME[colour]}, {colour})" if colour in _THEME else colour
    return f"{match[1]}: {themed}"


def _readouts(figure: Figure) -> str:
    """The values under the pointer, for each place along the axis.

    No script: a style of the page shows the text that follows an area under the
    pointer.
    """
    axes, scale = figure.axes[0], 72 / figure.dpi
    found: dict[float, list[tuple[float, str, str]]] = {}
    for line in axes.lines:
        name = str(line.get_label())
        if name.startswith(("_child", "_nolegend_")):  # matplotlib's own
            continue
        ((name,), colour) = cut_names([name]), str(line.get_color())
        for x, y in _points(line):
            text = f"{name} {axes.format_ydata(y)}"
            found.setdefault(x, []).append((-y, text, colour))
    places = sorted(found)[:: -(1 + len(found) // MAX_READOUTS)][::-1]
    box, height = axes.bbox, figure.bbox.height
    top, bottom = ((height - y) * scale for y in (box.y1, box.y0))
    at = [axes.transData.transform((x, 1.0))[0] * scale for x in places]
    between = [(left + right) / 2 for left, right in pairwise(at)]
    ends = [box.x0 * scale, *between, box.x1 * scale]
    parts = []
    for x, centre, left, right in zip(places, at, ends, ends[1:], strict=False):
        rows = [(f"{axes.get_xlabel()} {x:g}", INK)]
        rows += [(text, colour) for _, text, colour in sorted(found[x])]
        rows = rows[: MAX_READOUT_ROWS + 1]
        width = _CHAR * max(len(text) for text, _ in rows) + 12
        start = min(centre + 6, box.x1 * scale - width)
        text = "".join(
            f'<tspan x="{start + 6:.0f}" dy="{_LINE:.0f}" style="fill: {colour}">'
            f"{escape(text)}</tspan>"
            for text, colour in rows
        )
        parts.append(
            f'<g class="at"><rect fill-opacity="0" x="{left:.1f}" y="{top:.1f}" '
            f'width="{max(0.0, right - left):.1f}" height="{bottom - top:.1f}"/>'
            f'<g visibility="hidden"><path d="M{centre:.1f} {top:.1f}V{bottom:.1f}"/>'
            f'<rect x="{start:.0f}" y="{top:.0f}" width="{width:.0f}" '
            f'height="{_LINE * len(rows) + 6:.0f}" rx="4"/>'
            f'<text y="{top:.0f}">{text}</text></g></g>'
        )
    return re.sub(r"(fill): (#\w{6})", _theme, "".join(parts))


def themed(colour: str) -> str:
    """A colour of a figure as CSS, which follows the page's where it has one."""
    return f"var(--{_THEME[colour]})" if colour in _THEME else colour

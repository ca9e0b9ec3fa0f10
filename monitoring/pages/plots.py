"""Draw the figures of a run's report from its view."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from federation.epsilon_text import format_cap
from federation.errors import JobError, StoreUnavailable, os_errors
from monitoring.pages.figures import (
    CARD,
    DOWN_COLOUR,
    INK,
    POOLED_COLOUR,
    SITE_COLOURS,
    add_legend,
    columns,
    cut_names,
    draw,
    draw_line,
    drawable,
    is_drawable,
    label_axes,
    log_scale,
    new_figure,
    stand_alone,
)
from monitoring.pages.timeline_plot import timeline
from monitoring.privacy_words import accuracy_noise, is_of_sites, loss_noise
from monitoring.units import format_bytes
from monitoring.views.round_view import (
    FAILED,
    NO_UPDATE,
    NOT_ASKED,
    TOOK_PART,
    perplexity,
)
from monitoring.views.run_totals import MAX_ROWS
from monitoring.views.run_view import RunView
from monitoring.views.site_view import Series

MAX_LABELS_SHOWN = 16
OTHER_LABELS = "other"
ALL_SITES, TRAINING = "all sites", "training"

MAX_ROWS_IN_STRIP = 40
_ROUNDS_WITH_GAPS = 60
_STRIP_ROW = 0.22  # inches

UP_COLOUR = "#2b6f8f"

_FAILED = "#c2372e"
_STATES = {
    TOOK_PART: ("took part", UP_COLOUR),
    FAILED: ("failed", _FAILED),
    NO_UPDATE: ("no update", "#e0b34c"),
    NOT_ASKED: ("not asked", "#b9c2cc"),
}
_CLIP_COLOUR = UP_COLOUR
_MAX_CELLS_WITH_NUMBERS = 12
_MAX_LABEL_CHARS = 44  # that fit side by side under a figure


def draw_all(view: RunView, names: Collection[str] = ()) -> Mapping[str, str]:
    """Draw the figures that the run has data for: name to SVG text.

    Args:
        view: The run.
        names: Draw only these; by default all.
    """
    losses = partial(_curves, view, f"loss{view.loss_unit}", lambda loss: loss)
    losses = partial(losses, training=training_losses(view))
    rights = partial(_curves, view, by_loss=False)
    drawings: dict[str, Callable[[], Figure | None]] = {
        "loss": losses,
        "loss-log": partial(losses, log=True),
        "accuracy": partial(rights, "accuracy in %", lambda right: 100 * right),
        "accuracy-log": partial(
            rights, "wrong in %", lambda right: 100 - 100 * right, log=True
        ),
        "perplexity": partial(_curves, view, "perplexity", perplexity, log=True),
        "epsilon": partial(_epsilon, view),
        "data": partial(_data, view),
        "bytes": partial(_bytes, view),
        "timeline": partial(timeline, view, [s.site for s in view.shown_sites]),
        "participation": partial(_participation, view),
        "update-norm": partial(_update_norm, view),
    }
    hidden = "accuracy" if view.is_language else "perplexity"
    return draw(
        {
            name: make
            for name, make in drawings.items()
            if not name.startswith(hidden)
            and (not names or name in names)
            and (view.trains or name != "update-norm")
        }
    )


def site_colours(view: RunView) -> Mapping[str, str]:
    """One colour for each site that figures show, the same in all of them."""
    sites = view.shown_sites
    return {s.site: c for s, c in zip(sites, SITE_COLOURS, strict=False)}


def training_losses(view: RunView) -> Series:
    """Mean loss while the sites trained, by round; empty if it is never sent."""
    return dict(view.totals.curves)["training"]


def _curves(
    view: RunView,
    label: str,
    change: Callable[[float], float],
    *,
    by_loss: bool = True,
    training: Series = (),
    log: bool = False,
) -> Figure | None:
    """Draw a metric of all sites thick over each site's own, training dashed."""

    def points_of(series: Series) -> list[tuple[float, float]]:
        return drawable(((at, change(value)) for at, value in series), log=log)

    points = points_of(dict(view.totals.curves)["loss" if by_loss else "accuracy"])
    if not points:
        return None
    figure, axes = new_figure()
    colours = site_colours(view)
    for site in view.shown_sites:
        own = points_of(site.loss if by_loss else site.accuracy)
        draw_line(axes, site.site, own, colours[site.site], lw=1.2, zorder=3)
    dashes = {"lw": 1.6, "ls": (0, (3, 2))}
    draw_line(axes, TRAINING, points_of(training), INK, **dashes)
    draw_line(axes, ALL_SITES, points, POOLED_COLOUR, lw=2.4)
    axes.plot(*columns(points[-1:]), "o", color=POOLED_COLOUR, ms=5)
    _shade_noise(axes, view, change, by_loss=by_loss)
    if log:
        log_scale(axes.yaxis)
    _mark_lost_rounds(axes, view)
    label_axes(axes, "after round", label)
    return figure


def _shade_noise(
    axes: Axes, view: RunView, change: Callable[[float], float], *, by_loss: bool
) -> None:
    """Shade two standard deviations of the noise on the results."""
    bands = []
    for event in () if view.past else view.evaluations():
        noise = (loss_noise if by_loss else accuracy_noise)(view.privacy, event)
        if noise is None or not event.pooled.count:
            continue
        value = event.pooled.loss if by_loss else event.pooled.accuracy
        ends = (max(0.0, value - 2 * noise), value + 2 * noise)
        band = [change(end if by_loss else min(1.0, end)) for end in ends]
        if all(map(is_drawable, band)):
            bands.append((event.round_index, *band))
    if bands:
        at, low, high = zip(*bands, strict=True)
        axes.fill_between(at, low, high, color=POOLED_COLOUR, alpha=0.1, lw=0)


def _epsilon(view: RunView) -> Figure | None:
    """Draw each site's epsilon by round, below its cap."""
    if view.privacy is None or not view.spent:
        return None
    figure, axes = new_figure()
    colours = site_colours(view)
    if is_of_sites(view.privacy):  # One line hides all others.
        colours = dict.fromkeys(colours, POOLED_COLOUR)
    for site in view.shown_sites:
        points = drawable(site.epsilon)
        draw_line(axes, site.site, points, colours[site.site], lw=1.6)
    for cap in sorted({site.epsilon_cap for site in view.privacy.sites}):
        axes.axhline(cap, color=_FAILED, lw=1.2, ls=(0, (4, 3)))
        axes.annotate(
            f"cap {format_cap(cap)}",
            (0.0, cap),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            color=_FAILED,
        )
    _, top = axes.get_ylim()
    axes.set_ylim(0, 1.08 * top)
    _mark_lost_rounds(axes, view)
    label_axes(axes, "after round", "epsilon")
    return figure


def _mark_lost_rounds(axes: Axes, view: RunView) -> None:
    for row in view.totals.rows:
        if row.status != "completed":
            axes.axvspan(row.index - 0.5, row.index + 0.5, color=_FAILED, alpha=0.08)


def _data(view: RunView) -> Figure | None:
    """Draw the sites' data: a heat map of counts, or bars without labels."""
    if view.data is None:
        return None
    names = [site.site for site in view.shown_sites]
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
    figure, axes = new_figure(rows=len(totals))
    sites, sizes = zip(*totals, strict=True)
    axes.barh(
        cut_names(sites), sizes, color=[colours[site] for site in sites], height=0.6
    )
    axes.invert_yaxis()
    label_axes(axes, "training examples", "")
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
    figure, axes = new_figure(rows=len(sites) + 1, row=0.42)
    shades = [to_rgba(UP_COLOUR, alpha) for alpha in (0.04, 1.0)]
    colours = LinearSegmentedColormap.from_list("counts", shades)
    largest = max(1, *(max(row) for row in counts))
    axes.pcolormesh(
        counts, cmap=colours, vmin=0, vmax=largest, edgecolors=CARD, linewidth=2
    )
    if len(labels) <= _MAX_CELLS_WITH_NUMBERS:
        for y, row in enumerate(counts):
            for x, count in enumerate(row):
                ink = "white" if count > 0.55 * largest else INK
                place = (x + 0.5, y + 0.52)
                axes.text(*place, f"{count}", color=ink, ha="center", va="center")
    axes.set_yticks([index + 0.5 for index in range(len(sites))], cut_names(sites))
    slanted = sum(len(label) + 1 for label in labels) > _MAX_LABEL_CHARS
    axes.set_xticks(
        [index + 0.5 for index in range(len(labels))],
        cut_names(labels, 14),
        rotation=40 if slanted else 0,
        ha="right" if slanted else "center",
    )
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


def _bytes(view: RunView) -> Figure | None:
    sites = view.shown_sites
    if not any(site.bytes_up or site.bytes_down for site in sites):
        return None
    figure, axes = new_figure(rows=len(sites) * 1.4)
    places = range(len(sites))
    up, down = [s.bytes_up for s in sites], [s.bytes_down for s in sites]
    axes.barh([p - 0.19 for p in places], up, 0.34, color=UP_COLOUR, label="up")
    axes.barh([p + 0.19 for p in places], down, 0.34, color=DOWN_COLOUR, label="down")
    axes.set_yticks(list(places), cut_names([site.site for site in sites]))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    add_legend(axes, {"from the site": UP_COLOUR, "to the site": DOWN_COLOUR})
    return figure


def _participation(view: RunView) -> Figure | None:
    """Draw a cell for each site and round: which took part, which failed."""
    rounds = view.totals.rows[-MAX_ROWS:]
    if not rounds:
        return None
    sites = [site.site for site in view.sites]
    if len(sites) > MAX_ROWS_IN_STRIP:
        sites = [site.site for site in view.shown_sites]
    has_gaps = len(rounds) <= _ROUNDS_WITH_GAPS
    figure, axes = new_figure(rows=len(sites), row=_STRIP_ROW)
    found: set[str] = set()
    places = {site: at for at, site in enumerate(view.started.sites)}
    for place, site in enumerate(sites):
        states = [
            (row.sites[places[site]] if site in places else NOT_ASKED, row.index)
            for row in rounds
        ]
        for state, cells in groupby(states, lambda cell: cell[0]):
            found.add(state)
            at = [index for _, index in cells]
            # Cells too narrow for a gap are drawn as one.
            merged = [(at[0] - 0.5, float(len(at)))]
            bars = [(index - 0.45, 0.9) for index in at] if has_gaps else merged
            axes.broken_barh(bars, (place - 0.42, 0.84), fc=_STATES[state][1])
    axes.set_yticks(range(len(sites)), cut_names(sites))
    axes.invert_yaxis()
    label_axes(axes, "round", "")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    add_legend(axes, dict(_STATES[state] for state in _STATES if state in found))
    return figure


def _update_norm(view: RunView) -> Figure | None:
    rows = view.totals.rows
    points = drawable(
        (row.index, row.update_norm) for row in rows if row.update_norm is not None
    )
    if not points:
        return None
    figure, axes = new_figure()
    draw_line(axes, "combined update", points, POOLED_COLOUR, lw=2)
    if view.clip_adapts:
        clips = ((row.index, row.update_clip) for row in rows)
        found = drawable((at, clip) for at, clip in clips if clip is not None)
        draw_line(axes, "clip norm", found, _CLIP_COLOUR, lw=2)
        add_legend(axes, {"combined update": POOLED_COLOUR, "clip norm": _CLIP_COLOUR})
    axes.set_ylim(bottom=0)
    _mark_lost_rounds(axes, view)
    label_axes(axes, "round", "Euclidean norm")
    return figure


_FORMATS = (".svg", ".png")


def write_plan(points: Mapping[str, tuple[float, float]], path: Path) -> None:
    """Draw a point for each way.

    Args:
        points: Seconds and dollars by name.
        path: Where to write; its ending names the format.

    Raises:
        JobError: The ending is neither ``.svg`` nor ``.png``.
        StoreUnavailable: The file cannot be written.
    """
    if path.suffix not in _FORMATS:
        raise JobError(f"{path.name} must end in .svg or .png", key="--plot")
    drawn = stand_alone("plan", partial(_ways, points), form=path.suffix[1:])
    # Not by the library: its frames would be shown below the error as the user's.
    with os_errors(StoreUnavailable, f"write {path}", "name another file"):
        path.write_bytes(drawn)


def _ways(points: Mapping[str, tuple[float, float]]) -> Figure:
    figure, axes = new_figure(width=8.0)
    for index, (name, (seconds, dollars)) in enumerate(points.items()):
        colour = SITE_COLOURS[index % len(SITE_COLOURS)]
        marker = "o" if index < len(SITE_COLOURS) else "s"
        axes.plot(seconds, dollars, marker, color=colour, label=name)
    most = [max(values) for values in zip(*points.values(), strict=True)]
    axes.set_xlim(0.0, 1.08 * most[0] or 1.0)
    axes.set_ylim(0.0, 1.08 * most[1] or 1.0)
    label_axes(axes, "seconds", "dollars")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure

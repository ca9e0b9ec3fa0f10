"""The figures of the report of one run: what each shows, drawn from a view."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from monitoring.pages.figures import (
    INK,
    POOLED_COLOUR,
    SITE_COLOURS,
    add_legend,
    columns,
    cut_names,
    draw,
    finite_points,
    is_drawable,
    label_axes,
    new_figure,
)
from monitoring.pages.timeline_plot import timeline
from monitoring.privacy_words import accuracy_noise, is_of_sites, loss_noise
from monitoring.units import format_bytes, format_cap
from monitoring.views.round_view import perplexity
from monitoring.views.run_view import RunView
from monitoring.views.site_view import Series, SiteView

MAX_SITES_SHOWN = 8
MAX_LABELS_SHOWN = 16
OTHER_LABELS = "other"

UP_COLOUR, DOWN_COLOUR = "#2b6f8f", "#b9d3df"

_FAILED = "#c2372e"
_CLIP_COLOUR = UP_COLOUR
_MAX_CELLS_WITH_NUMBERS = 12
_MAX_LABEL_CHARS = 44  # that fit side by side under a figure


def draw_all(view: RunView) -> Mapping[str, str]:
    """Draw every figure that the run has data for: name to SVG text."""
    drawings: Mapping[str, Callable[[RunView], Figure | None]] = {
        "loss": _loss,
        "perplexity" if view.is_language else "accuracy": _quality,
        "epsilon": _epsilon,
        "data": _data,
        "bytes": _bytes,
        "timeline": _timeline,
        "answers": _answers,
        "update-norm": _update_norm,
    }
    found = {}
    for name, make in drawings.items():
        svg = draw(name, partial(make, view))
        if svg is not None:
            found[name] = svg
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
    figure = _lines(view, pooled, lines, f"loss{view.loss_unit}")
    if figure is not None:
        _shade_noise(figure.axes[0], view, by_loss=True)
    return figure


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
    figure = _lines(view, pooled, lines, "accuracy in %")
    if figure is not None:
        _shade_noise(figure.axes[0], view, by_loss=False)
    return figure


def _shade_noise(axes: Axes, view: RunView, *, by_loss: bool) -> None:
    """Shade what two standard deviations of the noise on the results cover."""
    rounds, low, high = [], [], []
    for event in (view.initial, *(row.evaluated for row in view.rounds)):
        noise = (loss_noise if by_loss else accuracy_noise)(view.privacy, event)
        if event is None or noise is None:
            continue
        sums, unit = event.pooled, 1 if by_loss else 100
        value = sums.loss if by_loss else sums.accuracy
        if not (is_drawable(noise) and is_drawable(value)):
            continue
        rounds.append(event.round_index)
        low.append(unit * max(0.0, value - 2 * noise))
        high.append(
            unit * (value + 2 * noise if by_loss else min(1, value + 2 * noise))
        )
    if rounds:
        axes.fill_between(rounds, low, high, color=POOLED_COLOUR, alpha=0.1, lw=0)


def _epsilon(view: RunView) -> Figure | None:
    """Draw what each site has spent by round, below its cap."""
    if view.privacy is None or not view.spent:
        return None
    figure, axes = new_figure()
    colours = site_colours(view)
    if is_of_sites(view.privacy):  # One line hides all others.
        colours = dict.fromkeys(colours, POOLED_COLOUR)
    for site in shown_sites(view):
        points = finite_points(site.epsilon)
        marker = "." if len(points) == 1 else ""
        axes.plot(*columns(points), color=colours[site.site], lw=1.6, marker=marker)
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
    if not finite_points(pooled):
        return None
    figure, axes = new_figure()
    colours = site_colours(view)
    for site, series in by_site:
        points = finite_points(series)
        marker = "." if len(points) == 1 else ""
        axes.plot(
            *columns(points), color=colours[site], lw=1.2, marker=marker, zorder=3
        )
    points = finite_points(pooled)
    axes.plot(*columns(points), color=POOLED_COLOUR, lw=2.4)
    axes.plot(*columns(points[-1:]), "o", color=POOLED_COLOUR, ms=5)
    _mark_lost_rounds(axes, view)
    label_axes(axes, "after round", label)
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
    colours = LinearSegmentedColormap.from_list("counts", ["#f4f8fa", UP_COLOUR])
    largest = max(1, *(max(row) for row in counts))
    axes.pcolormesh(
        counts, cmap=colours, vmin=0, vmax=largest, edgecolors="white", linewidth=2
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
    sites = shown_sites(view)
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


def _answers(view: RunView) -> Figure | None:
    """Draw how many sites of each round answered, and how many tasks failed."""
    if not view.rounds:
        return None
    figure, axes = new_figure()
    indices = [row.index for row in view.rounds]
    answered = [row.answered for row in view.rounds]
    failed = [sum(row.failures.values()) for row in view.rounds]
    axes.bar(indices, answered, 0.7, color=UP_COLOUR)
    axes.bar(indices, failed, 0.7, bottom=answered, color=_FAILED)
    label_axes(axes, "round", "sites")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    add_legend(axes, {"answered": UP_COLOUR, "failed": _FAILED})
    return figure


def _timeline(view: RunView) -> Figure | None:
    return timeline(view, [site.site for site in shown_sites(view)])


def _update_norm(view: RunView) -> Figure | None:
    points = finite_points(
        (row.index, row.finished.update_norm)
        for row in view.rounds
        if row.finished is not None and row.finished.update_norm is not None
    )
    if not points:
        return None
    figure, axes = new_figure()
    axes.plot(*columns(points), color=POOLED_COLOUR, lw=2, marker="o", ms=3)
    if view.clip_adapts:
        clips = ((row.index, row.update_clip) for row in view.rounds)
        found = finite_points((at, clip) for at, clip in clips if clip is not None)
        axes.plot(*columns(found), color=_CLIP_COLOUR, lw=2, marker="o", ms=3)
        add_legend(axes, {"combined update": POOLED_COLOUR, "clip norm": _CLIP_COLOUR})
    axes.set_ylim(bottom=0)
    _mark_lost_rounds(axes, view)
    label_axes(axes, "round", "Euclidean norm")
    return figure

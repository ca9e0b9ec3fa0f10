"""The figures of a comparison of runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from monitoring.pages.figures import (
    SITE_COLOURS,
    WIDTH,
    columns,
    draw,
    finite_points,
    label_axes,
    new_figure,
)
from monitoring.privacy_words import accuracy_noise, loss_noise
from monitoring.views.round_view import accuracy_of, loss_of
from monitoring.views.run_view import RunView
from monitoring.views.site_view import Series

Runs = Mapping[str, RunView]  # by the name that the page has for them

# More runs than colours are told apart by their dashes.
_DASHES: Sequence[Any] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARGIN = 1.6  # room beside the outermost points of the logarithmic axis, as a factor


def draw_comparison(runs: Runs) -> Mapping[str, str]:
    """Draw every figure that the runs have data for: name to SVG text."""
    drawings: Mapping[str, Callable[[Runs], Figure | None]] = {
        "privacy-utility": _privacy_utility,
        "loss": _loss,
        "accuracy": _accuracy,
    }
    found = {}
    for name, make in drawings.items():
        svg = draw(name, partial(make, runs))
        if svg is not None:
            found[name] = svg
    return found


def run_colours(runs: Runs) -> Mapping[str, str]:
    """The colour of each run, the same in every figure."""
    return {
        name: SITE_COLOURS[index % len(SITE_COLOURS)] for index, name in enumerate(runs)
    }


def has_accuracy(runs: Runs) -> bool:
    """Whether the runs can be held against each other by their accuracy."""
    return not any(view.is_language or not view.loss_unit for view in runs.values())


def _privacy_utility(runs: Runs) -> Figure | None:
    """Draw what each run is worth against what it has spent.

    A run without differential privacy has no epsilon: it is a line across.
    """
    if not any(_epsilon(view) for view in runs.values()):
        return None
    figure, axes = new_figure(width=2 * WIDTH)
    colours = run_colours(runs)
    in_percent = has_accuracy(runs)
    spent = []
    for name, view in runs.items():
        value = _utility(view, in_percent=in_percent)
        epsilon = _epsilon(view)
        if value is None:
            continue
        if epsilon is not None:
            _draw_point(
                axes, view, (epsilon, value), colours[name], in_percent=in_percent
            )
            spent.append(epsilon)
        elif view.privacy is None:
            dashes = _dashes(runs, name) if _dashes(runs, name) != "-" else (0, (5, 3))
            axes.axhline(value, color=colours[name], lw=1.4, ls=dashes)
    if not spent:
        return None
    axes.set_xscale("log")
    axes.set_xlim(min(spent) / _MARGIN, max(spent) * _MARGIN)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    label_axes(axes, "epsilon", "accuracy in %" if in_percent else "loss in nats")
    return figure


def _draw_point(
    axes: Axes,
    view: RunView,
    place: tuple[float, float],
    colour: str,
    *,
    in_percent: bool,
) -> None:
    last = view.last_evaluated
    noise = accuracy_noise(view.privacy, last)
    span = None if noise is None else 200 * noise
    if not in_percent:
        noise = loss_noise(view.privacy, last)
        span = None if noise is None else 2 * noise
    if span is not None:
        # No accuracy is above 100 %, and neither is below 0.
        up = min(span, 100 - place[1]) if in_percent else span
        down = min(span, place[1])
        axes.errorbar(*place, yerr=[[down], [up]], color=colour, capsize=3, lw=1.2)
    axes.plot(*place, "o", color=colour, ms=7)


def _loss(runs: Runs) -> Figure | None:
    return _curves(runs, _losses, "loss in nats")


def _accuracy(runs: Runs) -> Figure | None:
    return _curves(runs, _accuracies, "accuracy in %")


def _curves(
    runs: Runs, series: Callable[[RunView], Series], label: str
) -> Figure | None:
    colours = run_colours(runs)
    lines = {name: finite_points(series(view)) for name, view in runs.items()}
    if not any(lines.values()):
        return None
    figure, axes = new_figure()
    for name, points in lines.items():
        marker = "." if len(points) == 1 else ""
        dashes = _dashes(runs, name)
        axes.plot(
            *columns(points), color=colours[name], lw=1.8, ls=dashes, marker=marker
        )
    label_axes(axes, "after round", label)
    return figure


def _dashes(runs: Runs, name: str) -> Any:
    return _DASHES[list(runs).index(name) // len(SITE_COLOURS) % len(_DASHES)]


def _losses(view: RunView) -> Series:
    return _pooled(view, accuracy=False)


def _accuracies(view: RunView) -> Series:
    # How many tokens are right is not what a language model is judged by.
    return () if view.is_language else _pooled(view, accuracy=True)


def _pooled(view: RunView, *, accuracy: bool) -> Series:
    found = []
    for event in (view.initial, *(row.evaluated for row in view.rounds)):
        if event is not None and event.pooled.count:
            value = 100 * event.pooled.accuracy if accuracy else event.pooled.loss
            found.append((event.round_index, value))
    return tuple(found)


def _utility(view: RunView, *, in_percent: bool) -> float | None:
    last = view.last_evaluated
    sums = last.pooled if last else None
    if not in_percent:
        loss = loss_of(sums)
        return loss if loss is not None and math.isfinite(loss) else None
    accuracy = accuracy_of(sums)
    return None if accuracy is None else 100 * accuracy


def _epsilon(view: RunView) -> float | None:
    """What the run has spent; None if nothing, which no logarithm can show."""
    total = view.total_spent
    return total.epsilon if total and 0 < total.epsilon < math.inf else None

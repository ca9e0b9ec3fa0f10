"""The figures of a comparison of runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from federation.messages import MetricSums
from monitoring.pages.figures import (
    SITE_COLOURS,
    WIDTH,
    draw,
    draw_line,
    drawable,
    label_axes,
    log_scale,
    new_figure,
)
from monitoring.privacy_words import accuracy_noise, loss_noise
from monitoring.views.round_view import accuracy_of, loss_of
from monitoring.views.run_view import RunView

Runs = Mapping[str, RunView]  # by the name that the page has for them

MAX_SIDE_BY_SIDE = 8  # runs whose curves fit half of the page's width

# More runs than colours differ by their dashes.
_DASHES: Sequence[Any] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARGIN = 1.6  # room beside the outermost points of the logarithmic axis, as a factor


def draw_comparison(runs: Runs) -> Mapping[str, str]:
    """Draw every figure that the runs have data for: name to SVG text."""
    losses = partial(_curves, runs, "loss in nats", lambda sums: sums.loss)
    drawings: dict[str, Callable[[], Figure | None]] = {
        "privacy-utility": partial(_privacy_utility, runs),
        "loss": losses,
        "loss-log": partial(losses, log=True),
        "accuracy": partial(_curves, runs, "accuracy in %", _percent_right),
        "accuracy-log": partial(
            _curves, runs, "wrong in %", lambda s: 100 - _percent_right(s), log=True
        ),
    }
    return draw(drawings)


def run_colours(runs: Runs) -> Mapping[str, str]:
    """The colour of each run, the same in every figure."""
    return {
        name: SITE_COLOURS[index % len(SITE_COLOURS)] for index, name in enumerate(runs)
    }


def has_accuracy(runs: Runs) -> bool:
    """Whether the runs can be compared by their accuracy."""
    return not any(view.is_language or not view.loss_unit for view in runs.values())


def _privacy_utility(runs: Runs) -> Figure | None:
    """Draw each run's quality against its epsilon.

    A run without differential privacy has no epsilon: it is a line across.
    """
    if not any(epsilon_of(view) for view in runs.values()):
        return None
    figure, axes = new_figure(width=2 * WIDTH)
    colours = run_colours(runs)
    in_percent = has_accuracy(runs)
    spent = []
    for name, view in runs.items():
        value = utility(view, in_percent=in_percent)
        epsilon = epsilon_of(view)
        if value is None:
            continue
        if epsilon is not None:
            number, place = f"{list(runs).index(name) + 1}", (epsilon, value)
            _draw_noise(axes, view, place, colours[name], in_percent=in_percent)
            draw_line(axes, f"{number} {name}", [place], colours[name], ms=13)
            axes.annotate(number, place, xytext=(6, 4), textcoords="offset points")
            spent.append(epsilon)
        elif view.privacy is None:
            # A line across is never taken for a curve.
            style = _DASHES[dashes(list(runs).index(name)) or 1]
            axes.axhline(value, color=colours[name], lw=1.4, ls=style)
    if not spent:
        return None
    axes.set_xlim(min(spent) / _MARGIN, max(spent) * _MARGIN)
    log_scale(axes.xaxis)
    label_axes(axes, "epsilon", "accuracy in %" if in_percent else "loss in nats")
    return figure


def _draw_noise(
    axes: Axes,
    view: RunView,
    place: tuple[float, float],
    colour: str,
    *,
    in_percent: bool,
) -> None:
    size = accuracy_noise if in_percent else loss_noise
    noise = size(view.privacy, view.last_evaluated)
    if noise is not None:
        span = 2 * noise * (100 if in_percent else 1)
        # No accuracy is above 100 %, and neither is below 0.
        up = min(span, 100 - place[1]) if in_percent else span
        down = min(span, place[1])
        axes.errorbar(*place, yerr=[[down], [up]], color=colour, capsize=3, lw=1.2)


def _curves(
    runs: Runs, label: str, value: Callable[[MetricSums], float], *, log: bool = False
) -> Figure | None:
    lines = {
        # How many tokens are right is not what a language model is judged by.
        name: drawable(view.pooled(value), log=log)
        for name, view in runs.items()
        if "%" not in label or not view.is_language
    }
    if not any(lines.values()):
        return None
    figure, axes = new_figure(
        width=WIDTH if len(runs) <= MAX_SIDE_BY_SIDE else 2 * WIDTH
    )
    colours = run_colours(runs)
    for index, name in enumerate(runs):
        style = {"lw": 1.8, "ls": _DASHES[dashes(index)]}
        points = lines.get(name, [])
        draw_line(axes, f"{index + 1} {name}", points, colours[name], **style)
    label_axes(axes, "after round", label)
    if log:
        log_scale(axes.yaxis)
    return figure


def dashes(index: int) -> int:
    """The dash pattern of a run's line: 0 for the first runs, which have none."""
    return index // len(SITE_COLOURS) % len(_DASHES)


def _percent_right(sums: MetricSums) -> float:
    return 100 * sums.accuracy


def utility(view: RunView, *, in_percent: bool) -> float | None:
    """The last accuracy in per cent, or the last loss; None without one."""
    last = view.last_evaluated
    sums = last.pooled if last else None
    if not in_percent:
        loss = loss_of(sums)
        return loss if loss is not None and math.isfinite(loss) else None
    accuracy = accuracy_of(sums)
    return None if accuracy is None else 100 * accuracy


def epsilon_of(view: RunView) -> float | None:
    """The run's epsilon; None for zero, which a logarithmic axis cannot show."""
    total = view.guaranteed
    return total.epsilon if total and 0 < total.epsilon < math.inf else None

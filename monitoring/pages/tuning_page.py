"""The page of a search: one HTML file that opens anywhere, like a report."""

import math
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from monitoring import units
from monitoring.pages.figures import (
    FAINT,
    INK,
    POOLED_COLOUR,
    SITE_COLOURS,
    WIDTH,
    cut_names,
    draw,
    draw_line,
    is_drawable,
    label_axes,
    new_figure,
)
from monitoring.pages.panels import from_drawn
from monitoring.pages.report import environment, write_page

# Number, metric of a completed trial, metric reported last, values by key.
Result = tuple[int, float | None, float | None, Mapping[str, Any]]

_BEST, _MOST_LINES = 5, 200  # lines in colour; lines in all
_ROOM = 0.04  # above and below an axis of parallel coordinates, of its height


def draw_tuning(
    *,
    metric: str,
    is_larger_better: bool,
    results: Sequence[Result],
    ranges: Mapping[str, Sequence[Any]],
    logarithmic: AbstractSet[str],
    importance: Mapping[str, float],
) -> Mapping[str, str]:
    """Draw every figure that there is data for: name to SVG text.

    Args:
        metric: What is searched for.
        is_larger_better: Whether a larger metric is better.
        results: Results of all trials, in the order of their numbers.
        ranges: For each key, its ends as a tuple, or its choices as a list.
        logarithmic: Keys on a logarithmic axis.
        importance: Share of each key.
    """
    sound = [one for one in results if one[1] is not None and is_drawable(one[1])]
    drawings: dict[str, Callable[[], Figure | None]] = {
        "history": partial(_history, metric, sound, is_larger_better=is_larger_better),
        "importance": partial(_importance, importance),
        "coordinates": partial(
            _coordinates,
            metric,
            sound,
            ranges,
            logarithmic,
            is_larger_better=is_larger_better,
        ),
    }
    return draw(drawings)


def _history(
    metric: str, results: Sequence[Result], *, is_larger_better: bool
) -> Figure | None:
    """Draw each trial, and the best so far."""
    if not results:
        return None
    figure, axes = new_figure()
    numbers = [number + 1 for number, *_ in results]
    values = [value or 0.0 for _, value, *_ in results]
    axes.plot(numbers, values, ".", color=FAINT, ms=5, label="trial")
    best = list(accumulate(values, max if is_larger_better else min))
    points = list(zip(numbers, best, strict=True))
    draw_line(axes, "best so far", points, POOLED_COLOUR, ds="steps-post", lw=1.8)
    label_axes(axes, "trial", metric)
    return figure


def _importance(importance: Mapping[str, float]) -> Figure | None:
    if not importance:
        return None
    names = sorted(importance, key=lambda name: importance[name])
    figure, axes = new_figure(rows=len(names))
    shares = [100 * importance[name] for name in names]
    axes.barh(range(len(names)), shares, color=SITE_COLOURS[0], height=0.6)
    axes.set_yticks(range(len(names)), cut_names(names, limit=32))
    label_axes(axes, "share in %", "")
    return figure


def _coordinates(
    metric: str,
    results: Sequence[Result],
    ranges: Mapping[str, Sequence[Any]],
    logarithmic: AbstractSet[str],
    *,
    is_larger_better: bool,
) -> Figure | None:
    """Draw a line for each trial through an axis for each key, and the metric's."""
    if len(results) < 2 or not ranges:  # noqa: PLR2004
        return None
    sign = -1 if is_larger_better else 1
    order = sorted(results, key=lambda one: sign * (one[1] or 0.0))[:_MOST_LINES]
    shown = [value or 0.0 for _, value, *_ in order]
    figure, axes = new_figure(width=2 * WIDTH)
    places = range(len(ranges) + 1)
    for rank, (number, value, _, values) in reversed(list(enumerate(order))):
        heights = [
            _height(values[key], ends, is_log=key in logarithmic)
            for key, ends in ranges.items()
        ]
        heights.append(_height(value, (min(shown), max(shown)), is_log=False))
        is_best = rank < _BEST
        colour = SITE_COLOURS[rank % len(SITE_COLOURS)] if is_best else FAINT
        axes.plot(
            places,
            heights,
            color=colour,
            lw=1.8 if is_best else 0.7,
            alpha=1.0 if is_best else 0.5,
            label=f"trial {number + 1}" if is_best else "_",
        )
    ends_of = [*ranges.items(), (metric, (min(shown), max(shown)))]
    for place, (_, ends) in zip(places, ends_of, strict=True):
        axes.axvline(place, color=FAINT, lw=0.8)
        for label, height in _labels(ends):
            axes.annotate(
                label,
                (place, height),
                xytext=(4, 3),
                textcoords="offset points",
                size=8,
                color=INK,
            )
    axes.set_xticks(places, cut_names([name for name, _ in ends_of], limit=22))
    axes.set_yticks([])
    axes.set_ylim(-_ROOM, 1 + 2 * _ROOM)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.margins(x=0.08)
    return figure


def _height(value: Any, ends: Sequence[Any], *, is_log: bool) -> float:
    """Place of a value on its axis, from 0 to 1."""
    if not _is_scale(ends):
        return ends.index(value) / max(len(ends) - 1, 1)
    low, high = (math.log(end) if is_log else float(end) for end in ends)
    at = math.log(value) if is_log else float(value)
    return (at - low) / (high - low) if high > low else 0.5


def _is_scale(ends: Sequence[Any]) -> bool:
    """Whether an axis has two ends, and not choices."""
    return isinstance(ends, tuple)


def _labels(ends: Sequence[Any]) -> Sequence[tuple[str, float]]:
    top = max(len(ends) - 1, 1)
    texts = [f"{end:.4g}" if isinstance(end, float) else str(end) for end in ends]
    return [(text, at / top) for at, text in enumerate(texts)]


COMPLETED, UNFINISHED = "completed", "not finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One run of a search.

    Attributes:
        number: From 0.
        state: ``completed``, ``ended early``, ``failed`` or ``not finished``.
        values: Values of the keys that are searched, by their dotted names.
        value: The metric of its last model; None unless it was completed.
        last: The metric that was reported last.
        rounds: Round of that report.
        reason: Why it failed; empty if it did not.
        folder: Folder of its run.
    """

    number: int
    state: str
    values: Mapping[str, Any]
    value: float | None
    last: float | None
    rounds: int
    reason: str
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A search, finished or not.

    Attributes:
        name: Name of the search.
        metric: What is searched for.
        goal: ``min`` or ``max``: which values of the metric are better.
        sampler: How values are chosen.
        wanted: Trials that there will be.
        trials: Those so far, in the order of their numbers.
        ranges: For each key, its ends as a tuple, or its choices as a list.
        logarithmic: Keys that were drawn on a logarithmic axis.
        importance: Share of each key in how much results differ; they add up to 1.
        epsilon: What all trials have spent together: the largest of any site; None
            without differential privacy.
        delta: The delta that goes with it.
        page: Where the page is.
        is_selected: Whether the best trial is selected privately, so that all others,
            and their number, are not for others to see.
    """

    name: str
    metric: str
    goal: str
    sampler: str
    wanted: int
    trials: Sequence[TrialRow]
    ranges: Mapping[str, Sequence[Any]]
    logarithmic: AbstractSet[str]
    importance: Mapping[str, float]
    epsilon: float | None
    delta: float | None
    page: Path
    is_selected: bool = False

    def ranked(self) -> Sequence[TrialRow]:
        """Completed trials, the best first."""
        sign = -1.0 if self.goal == "max" else 1.0
        done = [trial for trial in self.trials if trial.value is not None]
        return sorted(done, key=lambda trial: (sign * (trial.value or 0), trial.number))

    @property
    def best(self) -> TrialRow | None:
        """The best completed trial."""
        ranked = self.ranked()
        return ranked[0] if ranked else None


def write_tuning(tuning: Tuning) -> None:
    """Write the page of a search atomically.

    Raises:
        StoreUnavailable: The file cannot be written.
    """
    write_page(render(tuning), tuning.page)


def render(tuning: Tuning) -> str:
    """Return the page as text."""
    ranked = tuning.ranked()
    others = [trial for trial in tuning.trials if trial.value is None]
    drawn = draw_tuning(
        metric=tuning.metric,
        is_larger_better=tuning.goal == "max",
        results=[(t.number, t.value, t.last, t.values) for t in tuning.trials],
        ranges=tuning.ranges,
        logarithmic=tuning.logarithmic,
        importance=tuning.importance,
    )
    words = {
        "metric": tuning.metric,
        "better": "Higher" if tuning.goal == "max" else "Lower",
    }
    return (
        environment()
        .get_template("tuning.html.j2")
        .render(
            tuning=tuning,
            rows=[*ranked, *others],
            keys=list(tuning.ranges),
            format_value=format_value,
            panels=[
                replace(panel, is_wide=panel.name == "coordinates")
                for panel in from_drawn("tuning", drawn, words)
            ],
            counts={
                state: sum(trial.state == state for trial in tuning.trials)
                for state in (COMPLETED, "ended early", "failed", UNFINISHED)
            },
        )
    )


def format_value(value: Any) -> str:
    """Return a value as a table shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    return units.format_number(value) if isinstance(value, float) else str(value)

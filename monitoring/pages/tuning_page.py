"""The page of a search: one HTML file that opens anywhere, like a report."""

from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monitoring import units
from monitoring.pages import tuning_plots
from monitoring.pages.panels import from_drawn
from monitoring.pages.report import environment, write_page

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
    drawn = tuning_plots.draw_tuning(
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

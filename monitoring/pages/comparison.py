"""Compare runs: one HTML file that opens anywhere, like a report.

The page comes from ``comparison.html.j2``, every number from a ``RunView``.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from federation.events import PrivacyPlanned
from federation.messages import MetricSums
from monitoring import privacy_words, units
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
from monitoring.pages.panels import Panel, from_drawn
from monitoring.pages.report import environment
from monitoring.privacy_words import accuracy_noise, loss_noise
from monitoring.views import run_plan
from monitoring.views.round_view import accuracy_of, loss_of, perplexity
from monitoring.views.run_plan import PlanRow, RunPlan
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


def run_colours(runs: Iterable[str]) -> Mapping[str, str]:
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


MAX_CHANGED_KEYS = 60

# Where a run is kept does not make it another run.
_BESIDE_THE_POINT = ("storage.", "simulation.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        folder: Where it is kept, as the reader may look for it.
        view: What happened.
        job_toml: Its resolved job file, as text.
        plan: What was predicted of it; None if nothing was.
    """

    folder: str
    view: RunView
    job_toml: str
    plan: RunPlan | None = None

    @property
    def totals(self) -> Sequence[PlanRow]:
        """Time, bytes and dollars, predicted and actual."""
        return [row for row in run_plan.rows(self.plan, self.view) if row.is_total]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunRow:
    """A row of the table, as texts."""

    number: int  # in figures and tables, from 1
    name: str
    colour: str
    run: ComparedRun
    loss: str
    quality: str
    epsilon: str
    delta: str
    terms: str


def render(runs: Sequence[ComparedRun]) -> str:
    """Return the page as text."""
    names = names_of(runs)
    views = {name: run.view for name, run in zip(names, runs, strict=True)}
    colours = run_colours(views)
    changed = changed_keys([run.job_toml for run in runs])
    return (
        environment()
        .get_template("comparison.html.j2")
        .render(
            rows=[
                _row(number, name, colours[name], run)
                for number, (name, run) in enumerate(zip(names, runs, strict=True), 1)
            ],
            orders=_orders(list(views.values())),
            max_named=MAX_SIDE_BY_SIDE,
            panels=_panels(views, colours),
            has_accuracy=has_accuracy(views),
            is_private=any(run.view.privacy for run in runs),
            has_noise=any(privacy_words.has_noise(run.view.privacy) for run in runs),
            cautions=_cautions(runs),
            changed=dict(list(changed.items())[:MAX_CHANGED_KEYS]),
            num_changed=len(changed),
        )
    )


def changed_keys(jobs: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Keys in which job files differ, each with its value in every one of them.

    Args:
        jobs: Resolved job files; one that is no TOML counts as empty.
    """
    documents = [_flat(_document(job)) for job in jobs]
    keys = {key for document in documents for key in document}
    found = {}
    for key in sorted(keys, key=_in_order):
        values = [document.get(key, "-") for document in documents]
        if len(set(values)) > 1 and not key.startswith(_BESIDE_THE_POINT):
            found[key] = values
    return found


def _in_order(key: str) -> tuple[bool, list[tuple[int, str]]]:
    """Sites come last, the tenth of them after the second."""
    parts = [(int(p) if p.isdecimal() else -1, p) for p in key.split(".")]
    return key.startswith("sites."), parts


def _document(job: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(job)
    except tomllib.TOMLDecodeError:
        return {}


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Every value of a document as text, by its whole key."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        items = {str(index): part for index, part in enumerate(value)}.items()
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return {prefix.removesuffix("."): text}
    found: dict[str, str] = {}
    for key, part in items:
        found |= _flat(part, f"{prefix}{key}.")
    return found


def names_of(runs: Sequence[ComparedRun]) -> Sequence[str]:
    """A name for each run: its job's, with its folder's where jobs are the same."""
    jobs = Counter(run.view.started.job_name for run in runs)
    names: list[str] = []
    for run in runs:
        job = run.view.started.job_name
        name = job if jobs[job] == 1 else f"{job} {Path(run.folder).name}"
        # Folders of one name, in different places.
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names


def _orders(views: Sequence[RunView]) -> Mapping[str, Sequence[int]]:
    """Places of the runs in each order of the table, by its name on the page."""
    rights = [utility(view, in_percent=True) for view in views]
    values: dict[str, Sequence[float | None]] = {
        "number": range(len(views)),
        "loss": [utility(view, in_percent=False) for view in views],
        "accuracy": [None if right is None else -right for right in rights],
        "epsilon": [epsilon_of(view) for view in views],
        "traffic": [view.bytes_up + view.bytes_down for view in views],
        "time": [view.seconds for view in views],
    }

    def places(own: Sequence[float | None]) -> Sequence[int]:
        order = sorted(range(len(own)), key=lambda at: (own[at] is None, own[at] or 0))
        return [order.index(at) for at in range(len(own))]

    return {name: places(own) for name, own in values.items() if len(set(own)) > 1}


def _row(number: int, name: str, colour: str, run: ComparedRun) -> _RunRow:
    view, last = run.view, run.view.last_evaluated
    loss = loss_of(last.pooled if last else None)
    noisy = ""
    if loss is not None and privacy_words.has_noise(view.privacy):
        noisy = privacy_words.NOISY
    if view.is_language:
        value = None if loss is None else perplexity(loss)
        quality = f"perplexity {noisy}{units.format_number(value)}"
    else:
        accuracy = accuracy_of(last.pooled if last else None)
        quality = f"{noisy}{units.format_fraction(accuracy)}"
        noise = privacy_words.accuracy_noise(view.privacy, last)
        quality += f" \u00b1 {privacy_words.format_points(noise)}" if noise else ""
    planned, total = view.privacy, view.total_spent
    epsilon = "none"
    if planned is not None:
        spent = total.epsilon if total else None
        epsilon = privacy_words.epsilon_of_cap(
            spent, planned, by_results=view.by_results
        )
    noise = privacy_words.loss_noise(planned, last)
    return _RunRow(
        number=number,
        name=name,
        colour=colour,
        run=run,
        loss=f"{noisy}{units.format_number(loss)}"
        + (f" \u00b1 {noise:.2g}" if noise else ""),
        quality=quality,
        epsilon=epsilon,
        delta=units.format_delta(total.delta) if total else "-",
        terms=_terms(planned) if planned else "-",
    )


def _terms(planned: PrivacyPlanned) -> str:
    terms = f"{planned.unit}; {privacy_words.terms(planned)}"
    if not planned.holds_against:
        return terms
    return f"{terms}; against {planned.holds_against}"


def _panels(
    views: Mapping[str, RunView], colours: Mapping[str, str]
) -> Sequence[Panel]:
    drawn = draw_comparison(views)
    better = "Higher" if has_accuracy(views) else "Lower"
    noisy = ""
    if any(privacy_words.has_noise(view.privacy) for view in views.values()):
        noisy = " Noise on results makes the curves uneven."
    return tuple(
        replace(
            panel,
            key={
                f"{number} {run}": c
                for number, (run, c) in enumerate(colours.items(), 1)
            },
            dashes=[dashes(index) for index in range(len(colours))],
            is_wide=panel.name == "privacy-utility" or len(views) > MAX_SIDE_BY_SIDE,
            has_pooled=False,
        )
        for panel in from_drawn("comparison", drawn, {"better": better, "noisy": noisy})
    )


def _cautions(runs: Sequence[ComparedRun]) -> Mapping[str, str]:
    """Reasons why these runs are hard to compare."""
    found = {}
    views = [run.view for run in runs]
    if len({view.started.sites for view in views}) > 1 or len(_held_out(views)) > 1:
        found["records"] = (
            "The runs have different sites or held-out data: their losses and "
            "accuracies are measured on different records."
        )
    if len({view.started.task for view in views}) > 1:
        found["tasks"] = "The runs have different tasks."
    apart = _apart([view.privacy for view in views if view.privacy])
    if apart:
        found["meaning"] = (
            f"The epsilons have different meanings. They differ in: {apart}."
        )
    if len({view.total_spent.delta for view in views if view.total_spent}) > 1:
        found["deltas"] = "The epsilons are at different deltas."
    if any(view.finished is None for view in views):
        found["running"] = "Some runs have not ended."
    return found


def _apart(planned: Sequence[PrivacyPlanned]) -> str:
    """Return how the guarantees of runs differ; empty if they do not."""
    parts = {
        "unit": {one.unit for one in planned},
        "neighbours": {one.relation for one in planned},
        "accountant": {one.accountant for one in planned},
        "sampling": {one.sampling for one in planned},
        "adversary": {one.holds_against for one in planned},
    }
    return ", ".join(name for name, values in parts.items() if len(values) > 1)


def _held_out(views: Sequence[RunView]) -> set[tuple[int, ...]]:
    return {
        tuple(share.held_out_examples for share in view.data.shares)
        for view in views
        if view.data
    }

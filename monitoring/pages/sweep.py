"""Figures over the runs of a sweep, each an SVG file with its data as CSV beside it.

A sweep is any set of runs: trials of a search, or runs that a script started. Whatever
a figure shows is in its table, which is made first; a figure without data is left out.
"""

import csv
import io
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from federation.durable_files import replace_file
from federation.errors import RunNotFound, StoreUnavailable, os_errors
from monitoring.pages.comparison import (
    ComparedRun,
    changed_keys,
    epsilon_of,
    names_of,
    run_colours,
    utility,
)
from monitoring.pages.figures import (
    QUIET,
    SITE_COLOURS,
    add_legend,
    columns,
    cut_names,
    label_axes,
    log_scale,
    new_figure,
    stand_alone,
)
from monitoring.privacy_words import loss_noise

MAX_LEGEND, MAX_KEYS, MAX_ROWS = 8, 12, 40
_MANY = 20.0  # From this ratio of the ends of an axis on, it is logarithmic.
_SITES = "number of sites"
_NAMES = re.compile(r"name|sites\.\d+\.name")  # What they are changes no loss.
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_WORK, _TASK = SITE_COLOURS[0], SITE_COLOURS[5]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a figure shows.

    Attributes:
        columns: Names, with units.
        rows: Values; None where one is not known or may not be.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def text(self) -> str:
        """As CSV; a cell that a spreadsheet would take for a formula is text."""
        made = io.StringIO()
        writer = csv.writer(made)
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow(["" if cell is None else _cell(cell) for cell in row])
        return made.getvalue()


def _cell(value: Any) -> Any:
    is_text = isinstance(value, str) and len(value) > 1 and _number(value) is None
    return f"'{value}" if is_text and value[0] in "=+-@\t" else value


_Sweep = Mapping[str, ComparedRun]  # The runs that have begun, by name.


def _loss(run: ComparedRun) -> float | None:
    """The last held-out loss; None without one."""
    return utility(run.view, in_percent=False)


def write_sweep(runs: Sequence[ComparedRun], folder: Path) -> Sequence[Path]:
    """Draw every figure that the runs have data for.

    Returns:
        The figures; the table of ``x.svg`` is ``x.csv``.

    Raises:
        RunNotFound: There are fewer than two runs.
        StoreUnavailable: The folder cannot be written.
    """
    if len(runs) < 2:  # noqa: PLR2004
        raise RunNotFound(
            f"a sweep has at least two runs, and here is {len(runs)}: name the folder "
            "of a search, or one with a folder for each run"
        )
    sweep = dict(zip(names_of(runs), runs, strict=True))
    with os_errors(StoreUnavailable, f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (of, draw) in _FIGURES.items():
        table = of(sweep)
        if not table.rows:
            continue
        picture = stand_alone(name, partial(draw, table))
        replace_file(folder / f"{name}.csv", [table.text().encode()])
        replace_file(folder / f"{name}.svg", [picture])
        written.append(folder / f"{name}.svg")
    return written


def _traffic(sweep: _Sweep) -> Table:
    rows = list[Sequence[Any]]()
    for name, run in sweep.items():
        seconds, sent = 0.0, 0
        for row in run.view.totals.rows:
            seconds += row.seconds or 0.0
            sent += row.bytes_up + row.bytes_down
            rows.append((name, row.index, seconds, sent))
        whole = run.view.bytes_up + run.view.bytes_down
        if whole > sent:  # Evaluations of their own, and what was sent before a resume.
            rows.append((name, "rest", seconds, whole))
    return Table(columns=("run", "round", "seconds", "bytes"), rows=rows)


def _unit(sizes: Sequence[float]) -> tuple[float, str]:
    """The unit for bytes of this size: how many, and its name."""
    return next((u for u in _UNITS if max(sizes) >= u[0]), (1.0, "B"))


def _draw_traffic(table: Table) -> Figure:
    figure, axes = new_figure()
    lines = dict.fromkeys(row[0] for row in table.rows)
    colours = run_colours(lines)
    one, unit = _unit([row[3] for row in table.rows])
    for name in lines:
        points = [(row[2], row[3] / one) for row in table.rows if row[0] == name]
        axes.plot(*columns([(0.0, 0.0), *points]), color=colours[name], lw=1.6)
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(left=0.0)
    label_axes(axes, "seconds of all rounds so far", f"sent and received, in {unit}")
    if len(colours) <= MAX_LEGEND:
        names = (f"{at} {_tail(name, 18)}" for at, name in enumerate(colours, start=1))
        add_legend(axes, dict(zip(names, colours.values(), strict=True)))
    return figure


def _use(sweep: _Sweep) -> Table:
    """How long each site worked; only of runs that may show a site's own times."""
    rows = list[Sequence[Any]]()
    for name, run in sweep.items():
        view = run.view
        if view.privacy is not None or view.started.secure_aggregation:
            continue
        whole = sum(row.seconds or 0.0 for row in view.totals.rows)
        for site in view.sites if whole else ():
            busy = None if site.used is None else site.used.busy_seconds
            rows.append((name, site.site, whole, site.seconds, busy))
    heads = ("run", "site", "round seconds", "seconds with a task", "seconds at work")
    return Table(columns=heads, rows=rows)


def _draw_use(table: Table) -> Figure:
    """Means over runs: of the time of all rounds, how much a site had what to do."""
    sites = sorted({row[1] for row in table.rows})[:MAX_ROWS]
    figure, axes = new_figure(rows=len(sites))
    for place, site in enumerate(sites):
        rows = [row for row in table.rows if row[1] == site]
        task = 100 * statistics.fmean(min(1.0, row[3] / row[2]) for row in rows)
        work = [row[4] / row[2] for row in rows if row[4] is not None]
        axes.barh(place, 100, color=QUIET, height=0.6)
        axes.barh(place, task, color=_TASK, height=0.6)
        if work:
            axes.barh(
                place, 100 * min(1.0, statistics.fmean(work)), color=_WORK, height=0.6
            )
    axes.set_yticks(range(len(sites)), cut_names(sites))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    label_axes(axes, "mean share of the time of all rounds, in %", "")
    at_work = {"at work": _WORK} if any(r[4] is not None for r in table.rows) else {}
    add_legend(axes, {**at_work, "sending or waiting": _TASK, "without a task": QUIET})
    return figure


def _sites(sweep: _Sweep) -> Table:
    rows = []
    for name, run in sweep.items():
        took = [row.seconds for row in run.view.totals.rows if row.seconds is not None]
        if took:
            middle, sites = statistics.median(took), len(run.view.started.sites)
            rows.append((name, sites, len(took), middle, sum(took)))
    several = len({row[1] for row in rows}) > 1
    heads = ("run", "sites", "rounds", "median seconds a round", "seconds of all")
    return Table(columns=heads, rows=rows if several else ())


def _cost(sweep: _Sweep) -> Table:
    rows = list[Sequence[Any]]()
    for name, run in sweep.items():
        loss = _loss(run)
        dollars = [row.actual for row in run.totals if row.unit == "dollars"]
        sent = run.view.bytes_up + run.view.bytes_down
        if loss is not None:
            rows.append((name, dollars[0] if dollars else None, sent, loss))
    return Table(columns=("run", "dollars", "bytes", "held-out loss"), rows=rows)


def _draw_cost(table: Table) -> Figure:
    """In dollars, if all runs have prices."""
    if all(row[1] is not None for row in table.rows):
        points = [(row[1], row[3]) for row in table.rows]
        return _scatter(points, "dollars", "held-out loss")
    one, unit = _unit([row[2] for row in table.rows])
    points = [(row[2] / one, row[3]) for row in table.rows]
    label = f"sent and received, in {unit}: not every run has prices"
    return _scatter(points, label, "held-out loss")


def _privacy(sweep: _Sweep) -> Table:
    rows = [
        (
            name,
            epsilon_of(run.view),
            _loss(run),
            loss_noise(run.view.privacy, run.view.last_evaluated),
        )
        for name, run in sweep.items()
    ]
    known = [row for row in rows if None not in row[:3]]
    heads = ("run", "epsilon", "held-out loss", "standard deviation of its noise")
    return Table(columns=heads, rows=known)


def _draw_privacy(table: Table) -> Figure:
    """With two standard deviations of the noise on a loss, up and down."""
    figure = _pairs(1, 2, table)
    (axes,) = figure.axes
    for _, epsilon, loss, noise in table.rows:
        if noise:
            spans = [[min(2 * noise, loss)], [2 * noise]]  # No loss is below 0.
            axes.errorbar(epsilon, loss, yerr=spans, color=_WORK, capsize=3, lw=1.2)
    return figure


def _pairs(x: int, y: int, table: Table) -> Figure:
    """Draw one column against another."""
    points = [(row[x], row[y]) for row in table.rows]
    return _scatter(points, table.columns[x], table.columns[y])


def _scatter(points: Sequence[tuple[float, float]], x: str, y: str) -> Figure:
    figure, axes = new_figure()
    axes.plot(*columns(points), "o", color=SITE_COLOURS[0], ms=6, alpha=0.75)
    label_axes(axes, x, y)
    for axis, values in zip((axes.xaxis, axes.yaxis), columns(points), strict=True):
        if min(values) > 0 and max(values) >= _MANY * min(values):
            log_scale(axis)
        elif min(values) >= 0 and axis is axes.xaxis:
            axes.set_xlim(0.0, 1.05 * max(values) or 1.0)
    return figure


def _sensitivity(sweep: _Sweep) -> Table:
    """The loss by the value of each key: all else as in the baseline, if that exists.

    The baseline is the run whose values most other runs have, too; of several the
    first. A key that no run changes alone (in a random search) has means over
    all runs with each value.
    """
    names = [name for name, run in sweep.items() if _loss(run) is not None]
    changed = _changed(sweep, names)
    if not changed:
        return Table(columns=(), rows=())
    usual = {key: statistics.mode(values) for key, values in changed.items()}
    far = [
        sum(values[i] != usual[k] for k, values in changed.items())
        for i in range(len(names))
    ]
    base = far.index(min(far))
    changed = _untied(changed, base)
    rows = list[Sequence[Any]]()
    for key, values in changed.items():
        alone = [
            at
            for at in range(len(names))
            if all(each[at] == each[base] for k, each in changed.items() if k != key)
        ]
        one = len({values[at] for at in alone}) > 1
        for value in dict.fromkeys(values):
            having = [
                at
                for at in (alone if one else range(len(names)))
                if values[at] == value
            ]
            found = (_loss(sweep[names[at]]) for at in having)
            losses = [loss for loss in found if loss is not None]
            if losses:
                loss = statistics.fmean(losses)
                how = "one at a time" if one else "mean over all runs"
                is_base = value == values[base]
                rows.append((key, value, loss, len(losses), is_base, how, names[base]))
    heads = ("key", "value", "held-out loss", "runs", "in the baseline", "method")
    return Table(columns=(*heads, "baseline"), rows=rows)


def _changed(sweep: _Sweep, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Keys in which runs differ, with their values; how many sites there are is one."""
    keys = changed_keys([sweep[name].job_toml for name in names])
    found = {key: v for key, v in keys.items() if not _NAMES.fullmatch(key)}
    sizes = [str(len(sweep[name].view.started.sites)) for name in names]
    if len(set(sizes)) > 1:
        found = {key: v for key, v in found.items() if not key.startswith("sites.")}
        found[_SITES] = sizes
    return found


def _untied(
    changed: Mapping[str, Sequence[str]], base: int
) -> Mapping[str, Sequence[str]]:
    """Leave out keys that few runs change, and these always with another key.

    Such as ``unit`` with ``target_epsilon``: the one with more values stays.
    """
    by_runs = dict[tuple[int, ...], str]()
    for key, values in sorted(changed.items(), key=lambda item: len(set(item[1]))):
        runs = tuple(at for at, each in enumerate(values) if each != values[base])
        few = 2 * len(runs) < len(values)
        by_runs[runs if few else (-1 - len(by_runs),)] = key
    return {key: values for key, values in changed.items() if key in by_runs.values()}


def _by_width(table: Table) -> Sequence[tuple[str, Sequence[Sequence[Any]]]]:
    """The rows of each key, of those that change the loss most first."""
    rows = {
        key: [row for row in table.rows if row[0] == key]
        for key in dict.fromkeys(row[0] for row in table.rows)
    }
    wide = {
        key: max(r[2] for r in found) - min(r[2] for r in found)
        for key, found in rows.items()
    }
    ordered = sorted(rows, key=lambda key: -wide[key])[:MAX_KEYS]
    return [(key, rows[key]) for key in ordered]


def _draw_each(table: Table) -> Figure:
    """One axis for each key, on one scale of the loss."""
    keys = _by_width(table)
    across = min(3, len(keys))
    down = -(-len(keys) // across)
    figure = Figure(figsize=(3.1 * across, 2.5 * down), layout="constrained")
    found = [*figure.subplots(down, across, squeeze=False, sharey=True).flat]
    for axes, (key, rows) in zip(found, keys, strict=False):
        numbers = [_number(row[1]) for row in rows]
        losses = [row[2] for row in rows]
        if None in numbers:
            axes.plot(range(len(rows)), losses, "o", color=_WORK)
            axes.set_xticks(range(len(rows)), cut_names([r[1] for r in rows], 12))
            axes.set_xlim(-0.5, len(rows) - 0.5)
        else:
            known = [each for each in numbers if each is not None]
            places = sorted(zip(known, losses, strict=True))
            axes.plot(*columns(places), "o-", color=_WORK, lw=1.2, ms=4)
            if min(known) > 0 and max(known) >= _MANY * min(known):
                log_scale(axes.xaxis, subs=(1,))
        label_axes(axes, _tail(key), "")
    for axes in found[len(keys) :]:
        axes.set_axis_off()
    figure.supylabel("held-out loss", fontsize=9.5)
    return figure


def _draw_tornado(table: Table) -> Figure:
    keys = _by_width(table)
    figure, axes = new_figure(rows=len(keys), row=0.42)
    for place, (_, rows) in enumerate(keys):
        low, high = min(rows, key=lambda r: r[2]), max(rows, key=lambda r: r[2])
        axes.barh(place, high[2] - low[2], left=low[2], color=_TASK, height=0.55)
        for row, side, offset in ((low, "right", -4), (high, "left", 4)):
            axes.annotate(
                cut_names([row[1]], 14)[0],
                (row[2], place),
                xytext=(offset, 0),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=8,
            )
        for row in rows:
            if row[4]:
                axes.plot(row[2], place, "|", color=SITE_COLOURS[1], ms=14, mew=2)
    axes.set_yticks(range(len(keys)), [_tail(key) for key, _ in keys])
    axes.invert_yaxis()
    losses = [row[2] for _, rows in keys for row in rows]
    room = 0.2 * (max(losses) - min(losses)) or 1.0
    axes.set_xlim(min(losses) - room, max(losses) + room)
    (base,) = cut_names([table.rows[0][6]], 24)
    label_axes(axes, f"held-out loss; a mark is the baseline, {base}", "")
    return figure


def _tail(key: str, limit: int = 32) -> str:
    """The end of a long name, which says more than its beginning."""
    (name,) = cut_names([key], len(key) or 1)
    return name if len(name) <= limit else f"...{name[3 - limit :]}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_FIGURES: Mapping[str, tuple[Callable[[_Sweep], Table], Callable[[Table], Figure]]] = {
    "communication-time": (_traffic, _draw_traffic),
    "utilisation": (_use, _draw_use),
    "sites-time": (_sites, partial(_pairs, 1, 3)),
    "sensitivity": (_sensitivity, _draw_each),
    "tornado": (_sensitivity, _draw_tornado),
    "cost-loss": (_cost, _draw_cost),
    "epsilon-loss": (_privacy, _draw_privacy),
}

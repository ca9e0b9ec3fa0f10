"""The report of a run: one HTML file that opens anywhere, without a network.

Figures come from ``monitoring.pages.panels``, the page from ``report.html.j2``, every
number from a ``RunView``. Text of the run (names, messages, the job file) is
escaped by the template. Nothing here reads a log or decides what a number means.
"""

import contextlib
import functools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from federation.epsilon_text import format_cap, format_epsilon
from federation.errors import StoreUnavailable
from federation.messages import Energy, FailureKind
from monitoring import privacy_words, units
from monitoring.pages import panels, plots, report_privacy, statistics_figures
from monitoring.pages.panels import Panel
from monitoring.views import run_plan, storage_use
from monitoring.views.derived_metrics import reliability, subgroups
from monitoring.views.round_view import (
    RUNNING,
    accuracy_of,
    loss_of,
    metrics_of,
    perplexity,
)
from monitoring.views.run_plan import PlanRow, RunPlan
from monitoring.views.run_totals import MAX_ROWS
from monitoring.views.run_view import VIRTUAL, RunView
from monitoring.views.site_view import SiteView
from monitoring.views.statistics_view import RunStatistics

_PLACED = re.compile(r'cloud = "(?!local"|unknown")')
MAX_SITE_ROWS = 100
MAX_NOTICE_ROWS = 100

FAILURE_MEANINGS: Mapping[str, str] = {
    FailureKind.CRASHED: "the site raised an error",
    FailureKind.NOT_SET_UP: "the site had no keys or no model, as after a restart",
    FailureKind.DEADLINE: "no update by the deadline, or within the grace time",
    FailureKind.UNREACHABLE: "the site was not connected",
    FailureKind.DISCONNECTED: "the site's connection was closed",
    FailureKind.NO_STATE: "the site had lost what the round was to begin with",
    FailureKind.BUSY: "the site was still working on an earlier round",
    FailureKind.BUDGET: "the site's privacy budget did not allow the work",
    FailureKind.NOT_FINITE: "the update contained NaN or infinity",
    FailureKind.INVALID: "wrong length, wrong model or wrong round",
    FailureKind.AGGREGATOR: "the aggregator sent something wrong; no site is to blame",
    FailureKind.DUPLICATE: "the site has answered this round already",
    FailureKind.SURPLUS: "others had answered in its place",
    FailureKind.LATE: "an update that came after its round ended",
    FailureKind.UNKNOWN: "an update from a site that was not asked",
    FailureKind.LEAVING: "the site left the run",
}


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""


class ConfusionRow(NamedTuple):
    """Examples of one class, and the model's predictions for them.

    Attributes:
        name: The class.
        cells: By predicted class: how many, and their percentage of the row.
        total: Examples of the class.
        recall: Fraction of them that were predicted as it; None if there are none.
        precision: Fraction of what was predicted as it that is it; None likewise.
    """

    name: str
    cells: tuple[tuple[int, int], ...]
    total: int
    recall: float | None
    precision: float | None


def write_report(
    view: RunView,
    job_toml: str,
    versions: Mapping[str, str],
    path: Path,
    *,
    plan: RunPlan | None = None,
    statistics: RunStatistics | None = None,
) -> None:
    """Write the report of a run atomically.

    Args:
        view: The run; it may still be going on.
        job_toml: The resolved job file, as text.
        versions: What ran, for example ``{"torch": "2.8.0"}``.
        path: Where to write; a file that is there is replaced.
        plan: What was predicted before the run; None if nothing was.
        statistics: What a run of statistics found.

    Raises:
        StoreUnavailable: The file cannot be written.
    """
    write_page(render(view, job_toml, versions, plan=plan, statistics=statistics), path)


def write_page(page: str, path: Path) -> None:
    """Write a page atomically.

    Raises:
        StoreUnavailable: The file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, path)  # noqa: PTH105 - the name says that it is atomic
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise StoreUnavailable(
            f"cannot write the report {path}: {error.strerror}"
        ) from error


def render(
    view: RunView,
    job_toml: str,
    versions: Mapping[str, str],
    *,
    plan: RunPlan | None = None,
    figures: Sequence[Panel] | None = None,
    statistics: RunStatistics | None = None,
) -> str:
    """Return the page as text.

    Args:
        view: The run; it may still be going on.
        job_toml: The resolved job file, as text.
        versions: What ran, for example ``{"torch": "2.8.0"}``.
        plan: What was predicted before the run; None if nothing was.
        figures: Figures to show; by default all that the run has data for. Drawing
            them takes most of the time.
        statistics: What a run of statistics found.
    """
    found = statistics_figures.panels_of(statistics) if statistics else ()
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            **context(view, statistics=statistics, job_toml=job_toml, plan=plan),
            statistics_panels=found,
            panels=panels.of_run(view) if figures is None else figures,
            job_toml=job_toml,
            versions=versions,
        )
    )


def render_sections(
    view: RunView,
    names: Sequence[str],
    *,
    is_live: bool,
    is_waiting: bool = False,
    job_toml: str = "",
    plan: RunPlan | None = None,
) -> Mapping[str, str]:
    """Return some sections of the page as text, as the whole page has them.

    Args:
        view: The run; it may still be going on.
        names: Blocks of ``report.html.j2``.
        is_live: Whether a process works on the run.
        is_waiting: Whether it waits for its next turn, whatever its events say.
        job_toml: The resolved job file, as text.
        plan: What was predicted before the run; None if nothing was.
    """
    template = environment().get_template("report.html.j2")
    stated = context(
        replace(view, finished=None) if is_waiting else view,
        is_live=is_live,
        is_waiting=is_waiting,
        job_toml=job_toml,
        plan=plan,
    )
    found = {**stated, "panels": ()}
    within = template.new_context(found)
    return {name: "".join(template.blocks[name](within)) for name in names}


def _places(job_toml: str) -> Mapping[str, tuple[str, str]]:
    """Cloud and region of the sites that a job places in one."""
    if not _PLACED.search(job_toml):
        return {}  # Parsing 10,000 sites takes half a second.
    with contextlib.suppress(tomllib.TOMLDecodeError):
        sites = tomllib.loads(job_toml).get("sites", ())
        found = {s["name"]: (s.get("cloud", ""), s.get("region", "")) for s in sites}
        return {name: place for name, place in found.items() if place[0] != "local"}
    return {}


def context(
    view: RunView,
    *,
    is_live: bool = False,
    is_waiting: bool = False,
    statistics: RunStatistics | None = None,
    job_toml: str = "",
    plan: RunPlan | None = None,
) -> Mapping[str, Any]:
    """What the page's tables and tiles say, by its name in the template."""
    unfinished = "waiting" if is_waiting else RUNNING if is_live else "not finished"
    totals, last, sites = view.totals, view.last_evaluated, _listed_sites(view)
    plan_rows = run_plan.rows(plan, view, listed={site.site for site in sites})
    energies = [s.used.energy for s in view.sites if s.used and s.used.energy]
    sums = None if last is None else last.pooled
    return {
        "view": view,
        "totals": totals,
        "is_live": is_live,
        "is_waiting": is_waiting,
        "status_word": unfinished if view.status == RUNNING else view.status,
        "statistics": statistics,
        "tiles": (*_tiles(view, statistics), *_cost_tiles(view, energies, plan_rows)),
        "plan_rows": plan_rows,
        "prices_of": "" if plan is None else plan.prices_of,
        "confusion": _confusion(view),
        "subgroups": subgroups(sums, view.started.subgroups) if sums else (),
        "reliability": reliability(sums) if sums else (),
        "cell_noise": _cell_noise(view),
        "colours": plots.site_colours(view),
        "sites": sites,
        "places": _places(job_toml),
        "rounds": totals.rows[-MAX_ROWS:],
        "failures": totals.failures,
        "num_failures": totals.num_failures,
        "kinds": dict(totals.kinds),
        "meanings": FAILURE_MEANINGS,
        "warnings": view.warnings[-MAX_NOTICE_ROWS:],
        "skipped": view.skipped[-MAX_NOTICE_ROWS:],
        "best_round": _best_round(view),
        "max_rows_in_strip": plots.MAX_ROWS_IN_STRIP,
        "stores": storage_use.shown(view),
        "store_rows": storage_use.rows,
        "store_total": storage_use.total(view.storage),
        "methods": " or ".join(sorted({s.used.method for s in view.sites if s.used})),
        "energies": energies,
        "aggregator": totals.aggregator,
        **report_privacy.context(view),
    }


@functools.cache
def environment() -> Environment:
    """The environment of the templates; all text is escaped."""
    found = Environment(
        loader=PackageLoader("monitoring.pages", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        bytes=units.format_bytes,
        cap=format_cap,
        delta=units.format_delta,
        duration=units.format_duration,
        epsilon=format_epsilon,
        fraction=units.format_fraction,
        number=units.format_number,
        range=units.format_range,
        sentence=lambda text: f"{text[:1].upper()}{text[1:]}.",
        utc=_utc,
    )
    found.globals.update(
        span=units.format_span,
        count=units.format_count,
        perplexity_of=_perplexity,
        accuracy_of=accuracy_of,
        last_of=_last,
        planned=planned,
        took=took,
    )
    return found


def planned(row: PlanRow) -> str:
    """A prediction as text; a range if it is one."""
    if row.unit == "bytes":
        low, high = row.predicted
        return units.format_span((int(low), int(high)))
    return _amount(row.unit, row.predicted[1])


def took(row: PlanRow) -> str:
    """What a run took as text."""
    return _amount(row.unit, row.actual)


def _amount(unit: str, value: float) -> str:
    if unit == "seconds":
        return units.format_duration(value)
    return f"{value:,.4f}" if unit == "dollars" else f"{int(value):,}"


def _privacy_tiles(view: RunView) -> Sequence[Tile]:
    planned, total = view.privacy, view.total_spent
    if planned is None:
        return ()
    delta = f"at delta {units.format_delta(total.delta)}; " if total else ""
    held_out = Tile("Held-out epsilon", "none", "no noise on results")
    if planned.signal_to_noise is not None:
        note = "mean update to noise, at most"
        held_out = Tile("Signal to noise", f"{planned.signal_to_noise:.2g}", note)
    if privacy_words.has_noise(planned):
        spent = total.held_out_epsilon if total else None
        of_cap = privacy_words.epsilon_of_cap(
            spent, planned, by_results=view.by_results
        )
        note = "separate records with their own budget"
        held_out = Tile("Held-out epsilon", of_cap, note)
    of_cap = privacy_words.epsilon_of_cap(
        total.epsilon if total else None, planned, by_results=view.by_results
    )
    tile = Tile("Epsilon", of_cap, f"{delta}{privacy_words.terms(planned)}")
    return (tile, held_out) if view.trains else (tile,)


def _rounds_tile(view: RunView) -> Tile:
    done, planned = view.rounds_completed, view.started.rounds
    if not view.trains:
        return Tile("Rounds", f"{done}", "that added up the sums")
    if not planned:
        return Tile("Rounds", "none", "the model was only evaluated")
    ends = ", ".join(str(event.last_round) for event in view.extended)
    extended = f"; extended after round {ends}" if ends else ""
    return Tile("Rounds", f"{done} of {planned}", f"that changed the model{extended}")


def _tiles(view: RunView, found: RunStatistics | None) -> Sequence[Tile]:
    last = view.last_evaluated
    loss = loss_of(last.pooled if last else None)
    after = "never evaluated"
    if last:
        only = not view.started.rounds
        after = "of the given model" if only else f"after round {last.round_index}"
        part = view.started.share(last.sites, view.started.sites)
        after += f", {part}" if part else ""
    noisy = privacy_words.NOISY if loss is not None else ""
    noisy = noisy if privacy_words.has_noise(view.privacy) else ""
    noise = privacy_words.accuracy_noise(view.privacy, last)
    loss_noise = privacy_words.loss_noise(view.privacy, last)
    accuracy = units.format_fraction(accuracy_of(last.pooled if last else None))
    note = "of held-out predictions"
    if noise is not None:
        note = f"with noise of {privacy_words.format_points(noise)} points"
    quality = Tile("Accuracy", f"{noisy}{accuracy}", note)
    if view.is_language:
        value = f"{noisy}{_perplexity(loss)}"
        quality = Tile("Perplexity", value, "of a held-out token")
    own = tuple(
        Tile(name, f"{noisy}{units.format_number(mean)}", "of a record")
        for name, mean in metrics_of(last.pooled if last else None).items()
    )
    up, down = units.format_bytes(view.bytes_up), units.format_bytes(view.bytes_down)
    failures = units.format_count(view.totals.num_failures, "failure")
    resumes = units.format_count(view.coordinators - 1, "resume")
    traffic = units.format_bytes(view.bytes_up + view.bytes_down)
    time_note = "virtual, " if view.started.engine == VIRTUAL else ""
    time_note += resumes if view.coordinators > 1 else "without a restart"
    after += "" if loss_noise is None else f", with noise of {loss_noise:.2g}"
    results = Tile("Held-out loss", f"{noisy}{units.format_number(loss)}", after)
    if found is not None:
        noise = found.noise.get("counts")
        of_noise = "" if noise is None else f"with noise of {noise:.3g}"
        results = Tile("Records", f"{found.records:,}", of_noise)
        quality = Tile("Columns", f"{len(found.columns):,}", f"of {found.sites} sites")
    return (
        results,
        *(own or (quality,)),
        *_privacy_tiles(view),
        _rounds_tile(view),
        Tile("Sites", f"{len(view.started.sites):,}", failures),
        Tile("Traffic", traffic, f"{up} up, {down} down"),
        Tile("Time", units.format_duration(view.seconds), time_note),
    )


def _cost_tiles(
    view: RunView, energies: Sequence[Energy], plan_rows: Sequence[PlanRow]
) -> Iterator[Tile]:
    """What the run has taken of money, power and time, as far as that is known."""
    busy = [site.used.busy_seconds for site in view.sites if site.used]
    if busy and view.totals.site_seconds:
        share = min(1.0, sum(busy) / view.totals.site_seconds)
        note = "of the sites' time in rounds at work"
        yield Tile("Utilisation", units.format_fraction(share), note)
    if energies:
        of_sites = (
            f"of {len(energies)} of {units.format_count(len(view.sites), 'site')}"
        )
        joules, grams = (
            _sum([e.joules for e in energies]),
            _sum([e.grams for e in energies]),
        )
        value = (
            "unknown" if joules is None else f"{units.format_range(joules, 1000)} kJ"
        )
        made = "" if grams is None else f"{units.format_range(grams)} g CO2e, "
        yield Tile("Energy", value, f"{made}{of_sites}")
    for row in plan_rows:
        if row.unit == "dollars" and row.is_total:
            whose = "virtual, at the job's" if view.virtual_dollars else "at the plan's"
            note = f"{whose} prices; {planned(row)} predicted"
            yield Tile("Dollars", took(row), note)


def _sum(
    ranges: Sequence[tuple[float, float] | None],
) -> tuple[float, float] | None:
    """The sum of ranges; None if one is not known."""
    known = [ends for ends in ranges if ends is not None]
    if len(known) < len(ranges):
        return None
    low, high = (sum(ends) for ends in zip(*known, strict=True))
    return low, high


def _confusion(view: RunView) -> Sequence[ConfusionRow]:
    """The confusion matrix, shaded by the share of its label's examples."""
    names, rows = view.started.classes, view.confusion
    columns = [sum(column) for column in zip(*rows, strict=True)]
    return [
        ConfusionRow(
            name,
            tuple(
                (number, round(100 * (_share(number, sum(row)) or 0))) for number in row
            ),
            sum(row),
            _share(row[label], sum(row)),
            _share(row[label], columns[label]),
        )
        for label, (name, row) in enumerate(zip(names, rows, strict=False))
    ]


def _cell_noise(view: RunView) -> str:
    """Standard deviation of the noise on a pooled count; empty without noise."""
    last = view.last_evaluated
    noise = privacy_words.count_noise(view.privacy, last) if last else 0.0
    return f"{noise:.2g}" if noise else ""


def _share(part: int, whole: int) -> float | None:
    """From 0 to 1, also of counts that noise made negative; None of nothing."""
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else None


def _listed_sites(view: RunView) -> Sequence[SiteView]:
    """The sites of the table: those of the figures, then the first of the rest."""
    if len(view.sites) <= MAX_SITE_ROWS:
        return view.sites
    shown = plots.site_colours(view)
    rest = [site for site in view.sites if site.site not in shown]
    chosen = {site.site for site in rest[: MAX_SITE_ROWS - len(shown)]} | set(shown)
    return [site for site in view.sites if site.site in chosen]


def _best_round(view: RunView) -> int | None:
    if privacy_words.has_noise(view.privacy):
        return None  # The lowest of noisy losses is the luckiest one.
    return None if view.totals.best is None else view.totals.best[1]


def _perplexity(loss: float | None) -> str:
    return units.format_number(None if loss is None else perplexity(loss))


def _last(series: Sequence[tuple[int, float]]) -> float | None:
    return series[-1][1] if series else None


def _utc(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

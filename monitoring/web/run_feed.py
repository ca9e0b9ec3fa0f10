"""One run's live page, as far as its events go: sections, charts and a timeline.

The sections are those of the report and its numbers the same, because both are
rendered from one ``RunView``. What may not leave a site is not in the events, and so
not here; see ``federation.job.disclosure``.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from federation.errors import FederationError
from federation.event_log import no_collection
from federation.events import SiteFailed
from monitoring.pages import plots, report
from monitoring.pages.figures import SITE_COLOURS, themed
from monitoring.pages.timeline_plot import MAX_ROUNDS_IN_TIMELINE, PHASES, bars, starts
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_reader import RunReader
from monitoring.views import run_plan
from monitoring.views.round_view import RUNNING, RoundView, perplexity
from monitoring.views.run_view import COMPLETED, EXHAUSTED, INTERRUPTED, RunView
from monitoring.views.site_view import Series

SECTIONS = (
    "masthead",
    "summary",
    "sites",
    "privacy",
    "rounds",
    "plan",
    "failures",
    "warnings",
)
INK = ""  # The page's own colour of text, dark or light.
MAX_AWAITED = 20
WAITING, STOPPED = "waiting", "stopped"

Row = tuple[float | None, ...]  # x, and the value of each line there
Line = tuple[str, str, Series]  # Its name, colour and points.


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure of lines over the rounds.

    Attributes:
        title: What it shows, with the unit.
        lines: The name of each line, and its colour; empty for that of text.
        rows: The round, and the value of each line after it; None where there is none.
        log: Whether its axis is logarithmic.
    """

    title: str
    lines: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    log: bool = False


_Whole = tuple[Mapping[str, str], Mapping[str, Chart], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that a live page shows at one moment.

    Attributes:
        title: The job's name, and how far the run is.
        state: ``live``, ``interrupted``, ``waiting`` for its next turn, ``stopped``
            before its last round, ``ended``, or ``deleted``.
        sections: HTML by the id of its place.
        charts: Figures by name.
        timeline: The last rounds: sites, bars and colours; None before the first.
    """

    title: str
    state: str
    sections: Mapping[str, str]
    charts: Mapping[str, Chart]
    timeline: Mapping[str, Any] | None


class RunFeed:
    """Follows the events of a run."""

    def __init__(
        self,
        run: RunFolder,
        revoked: Callable[[], Collection[str]] = frozenset,
        missing: Callable[[RunFolder], Collection[str]] = lambda _run: (),
        queued: Callable[[RunFolder], str] = lambda _run: "",
    ) -> None:
        """Begin before its first event.

        Args:
            run: Its folder.
            revoked: Returns the names of sites that were revoked.
            missing: Returns the names of sites that the run's coordinator waits for
                because they are away; empty if it waits for no such site.
            queued: Returns what a queue says of the run; empty if it is in none, or no
                longer.
        """
        self._run, self._revoked, self._missing = run, revoked, missing
        self._queued, self._state = queued, ""
        self._reader = RunReader(run.events)
        self._whole: _Whole | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, by its newest events, or was deleted."""
        if self._state in {WAITING, STOPPED}:
            return False  # Its last coordinator has ended, and another one may come.
        return self._reader.fold.finished is not None or self._reader.tail.is_gone

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read now."""
        return self._reader.is_behind

    def look(self, seconds: float = math.inf) -> bool:
        """Read what was written since; see ``RunReader.look``."""
        return self._reader.look(seconds)

    def page(self, now: float, *, whole: bool = True) -> Page | None:
        """The page; None before the run's first event.

        Args:
            now: Seconds since 1970.
            whole: Whether tables and charts are made anew, which takes the longer the
                more rounds and sites there are; otherwise they are as they were last.
        """
        if not self._reader.fold.has_started:
            return None
        with no_collection():
            return self._made(now, whole=whole)

    def _made(self, now: float, *, whole: bool) -> Page:
        view = self._reader.fold.view()
        is_live = self._run.is_locked()
        before, self._state = self._state, self._found_state(is_live=is_live)
        if (
            whole
            or self._whole is None
            or (before != self._state and WAITING in {before, self._state})
        ):
            job, plan = "", None
            with contextlib.suppress(FederationError):  # The page stands without it.
                job = self._run.read_job()
            with contextlib.suppress(FederationError):
                plan = run_plan.read(self._run.path)
            sections = report.render_sections(
                view,
                SECTIONS,
                is_live=is_live,
                is_waiting=self._state == WAITING,
                job_toml=job,
                plan=plan,
            )
            shown = [site.site for site in view.shown_sites]
            self._whole = sections, charts(view), shown
        tables, drawn, sites = self._whole
        done = f"{view.num_rounds}/{view.started.rounds}"
        return Page(
            title=f"{view.started.job_name} {done}",
            state=self._state,
            sections={
                **tables,
                "now": self._now(view, now, state=self._state),
                "log": _log(self._reader),
            },
            charts=drawn,
            timeline=timeline(view, sites, now),
        )

    def _found_state(self, *, is_live: bool) -> str:
        if self._reader.tail.is_gone:
            return "deleted"
        finished = self._reader.fold.finished
        # A coordinator that starts holds the run before it writes its first event.
        asks = finished is not None or not is_live
        queued = self._queued(self._run) if asks else ""
        made_way = finished is not None and finished.status == INTERRUPTED
        if queued == WAITING or (queued and made_way):
            return WAITING
        if finished is not None:
            is_done = finished.status in {COMPLETED, EXHAUSTED}
            return "ended" if is_done else STOPPED
        return "live" if is_live else "interrupted"

    def _now(self, view: RunView, now: float, *, state: str) -> str:
        """The round in progress: who is awaited, and what failed."""
        row = view.current
        answered = {} if row is None else row.newest
        silent = [] if row is None else [s for s in row.cohort if s not in answered]
        away = self._missing(self._run) if silent else ()
        silent = [site for site in silent if site in away] or silent
        late = _late(view, now) if silent else ""
        # Nobody knows how long a round still waits that takes so much longer.
        left = None if view.finished or late else view.seconds_left(now)
        return (
            report.environment()
            .get_template("now.html.j2")
            .render(
                view=view,
                state=state,
                away=[] if view.left_out is None else list(view.left_out.named()),
                row=row,
                awaited=silent[:MAX_AWAITED],
                num_silent=len(silent),
                failed=[f for f in answered.values() if isinstance(f, SiteFailed)],
                waited=0.0 if row is None else max(0.0, now - row.started_at),
                left=left,
                revoked=self._revoked(),
                read=self._reader.tail.read,
                late=late,
            )
        )


def _late(view: RunView, now: float) -> str:
    """By how much the round in progress is longer than the last ones; empty if not."""
    usual = [row.seconds for row in view.rounds[-5:] if row.seconds is not None]
    if not usual or view.current is None:
        return ""
    took = now - view.current.started_at
    return f"{took / max(usual):.1f}" if took > 1.5 * max(usual) else ""


def _log(reader: RunReader) -> str:
    return (
        report.environment()
        .get_template("log.html.j2")
        .render(lines=reader.log, tail=reader.tail)
    )


def charts(view: RunView) -> Mapping[str, Chart]:
    """The figures of lines that a run has data for, by name."""
    if not view.started.rounds:
        return {}  # One point, of the given model, is no line.
    curves = dict(view.totals.curves)
    loss, training = curves["loss"], curves["training"]
    title = f"Held-out loss{view.loss_unit}"
    lines = _over_sites(view, loss, lambda site: site.loss)
    lines += [(plots.TRAINING, INK, training)] if training else []
    found = {"loss": _joined(title, lines)}
    if view.is_language:
        series = tuple((at, perplexity(value)) for at, value in loss)
        found["quality"] = _joined(
            "Perplexity", [(plots.ALL_SITES, INK, series)], log=True
        )
    elif curves["accuracy"]:
        right = _percent(curves["accuracy"])
        lines = _over_sites(view, right, lambda site: _percent(site.accuracy))
        found["quality"] = _joined("Accuracy in %", lines)
    if view.privacy is not None and view.spent:
        lines = _over_sites(view, (), lambda site: site.epsilon)
        found["epsilon"] = _joined("Epsilon", lines)
    found["bytes"] = _joined(
        "Traffic of a round in MB",
        [
            ("up", SITE_COLOURS[0], _megabytes(curves["up"])),
            ("down", SITE_COLOURS[1], _megabytes(curves["down"])),
        ],
    )
    seconds = ("seconds", INK, curves["seconds"])
    found["seconds"] = _joined("Seconds of a round", [seconds])
    return {name: chart for name, chart in found.items() if chart.rows}


def _percent(series: Series) -> Series:
    return tuple((at, 100 * value) for at, value in series)


def _megabytes(series: Series) -> Series:
    return tuple((at, value / 1e6) for at, value in series)


def _over_sites(
    view: RunView, pooled: Series, own: Callable[[Any], Series]
) -> list[Line]:
    """The line of all sites together, if there is one, and of each that is shown."""
    colours = plots.site_colours(view)
    lines = [(plots.ALL_SITES, INK, pooled)] if pooled else []
    lines += [(s.site, colours[s.site], own(s)) for s in view.shown_sites if own(s)]
    return lines


def _joined(title: str, lines: Sequence[Line], *, log: bool = False) -> Chart:
    values = [dict(series) for _, _, series in lines]
    rounds = sorted({at for each in values for at in each})
    return Chart(
        title=title,
        lines=tuple((name, colour) for name, colour, _ in lines),
        rows=tuple((at, *(_finite(each.get(at)) for each in values)) for at in rounds),
        log=log,
    )


def _finite(value: float | None) -> float | None:
    """JSON has no others, and no axis either."""
    return value if value is not None and math.isfinite(value) else None


def timeline(
    view: RunView, sites: Sequence[str], now: float
) -> Mapping[str, Any] | None:
    """The last rounds, and the one in progress, as bars of seconds."""
    rows: list[RoundView] = [r for r in view.rounds if r.finished is not None]
    rows = rows[-MAX_ROUNDS_IN_TIMELINE:]
    rows += [] if view.current is None or view.finished else [view.current]
    if not rows:
        return None
    offsets = starts(rows)
    drawn = [
        (place, offset + begin, seconds, phase)
        for row, offset in zip(rows, offsets, strict=True)
        for place, begin, seconds, phase in bars(row, sites)
    ]
    if rows[-1].status == RUNNING:
        took = max(0.0, now - rows[-1].started_at)
        heard = {found.site for found in rows[-1].reports}
        drawn += [
            (place, offsets[-1], took, "awaited")
            for place, site in enumerate(sites, start=1)
            if site in rows[-1].cohort and site not in heard
        ]
    # Without rounds that wait for each other, a task may have begun before all of them.
    drawn = [
        (place, max(0.0, begin), min(seconds, begin + seconds), phase)
        for place, begin, seconds, phase in drawn
        if begin + seconds > 0
    ]
    shown = {phase for *_, phase in drawn}
    return {
        "rows": ["aggregator", *sites],
        "rounds": [(r.index, offset) for r, offset in zip(rows, offsets, strict=True)],
        "seconds": max((begin + seconds for _, begin, seconds, _ in drawn), default=0),
        "bars": drawn,
        "colours": {n: themed(c) for n, c in PHASES.items() if n in shown},
    }

"""The pages of runs as an ASGI application for one machine's own browser.

``/`` lists the runs, ``/runs/RUN`` shows one while it goes on, and ``/compare`` is the
comparison of several. Everything is read from the files of runs: a run does not know
whether somebody looks.
"""

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import (
    CONTENT_TYPE_LATEST,
    generate_latest,
)
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from federation.errors import FederationError
from federation.protocols import Clock
from monitoring.pages.report import environment
from monitoring.runs.run_folder import RunFolder, render_comparison
from monitoring.web.guard import METRICS, Guard
from monitoring.web.run_feed import Chart, Page, Row, RunFeed

LOOK_SECONDS = 1.0
# Pages wait longer where making one takes long, so that they never take more of a core.
MOST_SHARE = 0.02
READ_SECONDS = 0.5  # Of a second, while a page reads a long log for the first time.
IDLE_SECONDS = 5.0  # Between two pages of a run in which nothing has happened.
HEARTBEAT_LOOKS = 15  # So that a browser notices a connection that is gone.
MAX_FEEDS = 8
MAX_OPEN = 64  # Pages that follow runs at the same time.
MIN_COMPARED, MAX_COMPARED = 2, 16

Action = Callable[[RunFolder], None]
# What a page can do: the words of its button, and for a run in which state.
ACTIONS = {
    "stop": ("Stop after this round", "live"),
    "resume": ("Resume", "stopped"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the pages show.

    Attributes:
        rows: Returns a summary of each run and its ``name``, oldest first; see
            ``deploy.aggregator_host.run_list``.
        find: Returns the folder of the run with a name; None without one.
        actions: What a person may do with a run: some of ``ACTIONS``.
        revoked: Returns the names of sites that were revoked.
        missing: Returns the names of sites that are away, and that a run waits for.
        queued: Returns what the queue says of a run; empty if it is in none.
        queue: Describes the runs that wait; see ``deploy.aggregator_host.admission``.
        sites: Describes the sites; see ``deploy.aggregator_host.enrolment_operator``.
        trouble: Returns what holds up all runs; empty if nothing does.
    """

    rows: Callable[[], Sequence[Mapping[str, Any]]]
    find: Callable[[str], RunFolder | None]
    actions: Mapping[str, Action]
    revoked: Callable[[], Collection[str]] = frozenset
    missing: Callable[[RunFolder], Collection[str]] = lambda _run: ()
    queued: Callable[[RunFolder], str] = lambda _run: ""
    queue: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    sites: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    trouble: Callable[[], str] = str


class _SharedFeed:
    """One feed for all browsers that look at a run."""

    def __init__(self, run: RunFolder, shown: Shown, clock: Clock) -> None:
        self._feed = RunFeed(run, shown.revoked, shown.missing, shown.queued)
        self._clock = clock
        # A browser that leaves gives up the first, while its thread still reads on.
        self._lock, self._reading = asyncio.Lock(), threading.Lock()
        self._next = self._next_whole = self._made = 0.0
        self._has_news = False  # That tables and charts do not show yet.
        self._page: Page | None = None

    async def page(self) -> Page | None:
        """The newest page; the same object if nothing has changed."""
        async with self._lock:
            if self._clock.monotonic() >= self._next:
                await asyncio.to_thread(self._refresh)
            return self._page

    def _refresh(self) -> None:
        """Make the page anew if there is cause."""
        with self._reading:
            self._make()

    def _make(self) -> None:
        now, began = self._clock.monotonic(), time.thread_time()
        has_news = self._feed.look(READ_SECONDS)
        self._has_news |= has_news
        is_due = now >= self._next_whole or self._feed.is_over
        whole = self._has_news and is_due
        if (
            has_news
            or whole
            or self._page is None  # All news may be in what the run has left.
            or (not self._feed.is_over and now >= self._made + IDLE_SECONDS)
        ):
            self._page, self._made = (
                self._feed.page(self._clock.now(), whole=whole),
                now,
            )
        took = (time.thread_time() - began) / MOST_SHARE
        if whole:
            self._has_news, self._next_whole = False, now + took
            took = 0.0
        self._next = now + (
            LOOK_SECONDS if self._feed.is_behind else max(LOOK_SECONDS, took)
        )


class Changes:
    """What one browser knows of a page, and so what it lacks."""

    def __init__(self) -> None:
        """Begin with an empty page."""
        self._sections: dict[str, str] = {}
        self._charts: dict[str, Chart] = {}

    def to(self, page: Page) -> Mapping[str, Any]:
        """The changes that make the browser's page this one, for JSON."""
        sections = {
            name: html
            for name, html in page.sections.items()
            if self._sections.get(name) != html
        }
        changed = {
            name: rows
            for name, chart in page.charts.items()
            if (rows := _changed(self._charts.get(name), chart))
        }
        self._sections.update(sections)
        self._charts = dict(page.charts)
        return {
            "title": page.title,
            "state": page.state,
            "sections": sections,
            "charts": changed,
            # A run that begins anew, or a backup, has fewer of them.
            "figures": [*page.charts],
            "timeline": page.timeline,
        }


def _changed(known: Chart | None, chart: Chart) -> Mapping[str, Any]:
    """A chart, of its rows only those that a browser lacks; empty if it has all."""
    before = () if known is None else known.rows
    is_other = known is None or known.lines != chart.lines
    same = 0 if is_other else _same(before, chart.rows)
    if same == max(len(chart.rows), len(before)):
        return {}
    return {
        "title": chart.title,
        "lines": chart.lines,
        "log": chart.log,
        "from": same,
        "rows": chart.rows[same:],
    }


def _same(old: Sequence[Row], new: Sequence[Row]) -> int:
    if old == new[: len(old)]:
        return len(old)
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))


class _Pages:
    """The handlers of the application."""

    def __init__(self, shown: Shown, clock: Clock) -> None:
        self._shown, self._clock = shown, clock
        self._feeds: dict[str, _SharedFeed] = {}
        self.open = 0  # Pages that follow a run.
        self._list = HTMLResponse()
        self._lock, self._next = asyncio.Lock(), -math.inf

    async def index(self, _: Request) -> HTMLResponse:
        """One list for all browsers, which ask for it every few seconds."""
        async with self._lock:
            if self._clock.monotonic() >= self._next:
                took = await asyncio.to_thread(self._make_list)
                self._next = self._clock.monotonic() + took / MOST_SHARE
            return self._list

    def _make_list(self) -> float:
        began, rows = time.thread_time(), self._shown.rows()[::-1]
        self._list = _html(
            "runs.html.j2",
            rows=rows,
            queue=self._shown.queue(),
            sites=self._shown.sites(),
            trouble=self._shown.trouble(),
            now=self._clock.now(),
        )
        return time.thread_time() - began

    async def run(self, request: Request) -> HTMLResponse:
        name = request.path_params["name"]
        self._find(name)
        self._check_open()
        actions = {each: ACTIONS[each] for each in self._shown.actions}
        return _html("live.html.j2", name=name, actions=actions)

    async def act(self, request: Request) -> RedirectResponse:
        name, action = request.path_params["name"], request.path_params["action"]
        run = self._find(name)
        if action not in self._shown.actions:
            raise HTTPException(404, f"there is nothing called {action}")
        try:
            await asyncio.to_thread(self._shown.actions[action], run)
        except FederationError as error:
            raise HTTPException(409, str(error)) from error
        # A run that is resumed waits for its turn, as the list shows.
        place = "/" if action == "resume" else f"/runs/{name}"
        return RedirectResponse(place, status_code=303)

    async def changes(self, request: Request) -> StreamingResponse:
        name = request.path_params["name"]
        run = self._find(name)
        self._check_open()
        feed = self._feeds.pop(name, None) or _SharedFeed(run, self._shown, self._clock)
        self._feeds[name] = feed  # The newest last.
        for oldest in list(self._feeds)[:-MAX_FEEDS]:
            del self._feeds[oldest]
        return _Following(self, _stream(feed))

    def _check_open(self) -> None:
        if self.open >= MAX_OPEN:
            raise HTTPException(
                503,
                f"{MAX_OPEN} pages of runs are open: close one, and load this again",
            )

    async def compare(self, request: Request) -> HTMLResponse:
        runs = [self._find(name) for name in request.query_params.getlist("run")]
        if not MIN_COMPARED <= len(runs) <= MAX_COMPARED:
            raise HTTPException(400, f"choose {MIN_COMPARED} to {MAX_COMPARED} runs")
        try:
            return HTMLResponse(await asyncio.to_thread(render_comparison, runs))
        except FederationError as error:
            raise HTTPException(409, str(error)) from error

    def _find(self, name: str) -> RunFolder:
        run = self._shown.find(name)
        if run is None:
            raise HTTPException(404, f"there is no run {name}")
        return run


def _exposed(metrics: Collector) -> Callable[[Request], Response]:
    registry = CollectorRegistry()
    registry.register(metrics)

    def collect(_: Request) -> Response:  # Starlette gives it a thread.
        found = generate_latest(registry)  # type: ignore[no-untyped-call]
        return Response(found, media_type=CONTENT_TYPE_LATEST)

    return collect


def _html(template: str, **values: object) -> HTMLResponse:
    return HTMLResponse(environment().get_template(template).render(**values))


async def _stream(feed: _SharedFeed) -> AsyncIterator[str]:
    """Server-sent events: the whole page, and then what changes on it."""
    changes, last, quiet = Changes(), None, 0
    while True:
        page = await feed.page()
        if page is not None and page is not last:
            text = json.dumps(changes.to(page), allow_nan=False)
            yield f"data: {text}\n\n"
            last, quiet = page, 0
        elif quiet >= HEARTBEAT_LOOKS:
            yield ": still here\n\n"
            quiet = 0
        quiet += 1
        await asyncio.sleep(LOOK_SECONDS)


class _Following(StreamingResponse):
    """The changes of one page, which is open from now until its browser has gone."""

    def __init__(self, pages: _Pages, changes: AsyncIterator[str]) -> None:
        super().__init__(changes, media_type="text/event-stream")
        self._pages = pages
        pages.open += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pages.open -= 1


async def _refused(_: Request, error: Exception) -> HTMLResponse:
    """Say an error on a page of its own."""
    found = error if isinstance(error, HTTPException) else HTTPException(500)
    page = environment().get_template("refused.html.j2").render(text=found.detail)
    return HTMLResponse(page, status_code=found.status_code)


def live_app(
    shown: Shown,
    *,
    token: str,
    port: int,
    clock: Clock,
    metrics: Collector | None = None,
    metrics_token: str = "",
) -> Guard:
    """Make the application.

    Args:
        shown: The runs, and what may be done with them.
        token: Who knows it may look; see ``Guard``.
        port: Where it is served on the loopback interface.
        clock: Tells time.
        metrics: What ``/metrics`` collects; None for no such place.
        metrics_token: Who knows it may collect them.
    """
    pages = _Pages(shown, clock)
    app = Starlette(
        routes=[
            Route("/", pages.index),
            Route("/compare", pages.compare),
            Route("/runs/{name}", pages.run),
            Route("/runs/{name}/changes", pages.changes),
            Route("/runs/{name}/{action}", pages.act, methods=["POST"]),
            _static(),
            *([] if metrics is None else [Route(METRICS, _exposed(metrics))]),
        ],
        exception_handlers={HTTPException: _refused},
    )
    return Guard(app, token=token, port=port, metrics_token=metrics_token)


def site_app(
    status: Callable[[], Mapping[str, Any]],
    *,
    token: str,
    port: int,
    metrics: Collector,
    metrics_token: str,
) -> Guard:
    """Make the page of a site and its metrics, for its own operator.

    Args:
        status: Returns what ``site.html.j2`` shows.
        token: Who knows it may look; see ``Guard``.
        port: Where it is served on the loopback interface.
        metrics: What ``/metrics`` collects.
        metrics_token: Who knows it may collect them.
    """

    def index(_: Request) -> HTMLResponse:  # Starlette gives it a thread.
        return _html("site.html.j2", **status())

    app = Starlette(
        routes=[Route("/", index), _static(), Route(METRICS, _exposed(metrics))],
        exception_handlers={HTTPException: _refused},
    )
    return Guard(app, token=token, port=port, metrics_token=metrics_token)


def _static() -> Mount:
    return Mount("/static", StaticFiles(directory=Path(__file__).with_name("static")))

"""Each round as an OpenTelemetry trace: the coordinator's phases, and each site's.

Made from events, which hold only what ``federation.job.disclosure`` allows, by a
process that only reads them: a run takes no notice. OpenTelemetry is an optional
package, and is imported when traces are sent. Headers, certificates and the time limit
of a collector are in its own environment variables, ``OTEL_EXPORTER_OTLP_...``.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cloud_adapters.extras import naming_extras
from federation.errors import StoreUnavailable, os_errors
from federation.events import (
    Event,
    RoundFinished,
    RoundStarted,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
)
from federation.messages import Phase
from federation.protocols import Clock
from monitoring.runs.event_tail import EventTail
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_view import INTERRUPTED

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

LOOK_SECONDS = 1.0
MAX_RUNS, MAX_BATCH, MAX_PENDING = 20, 512, 20_000
_NANO, _TRACE_BYTES, _SPAN_BYTES = 1e9, 16, 8


@dataclass(kw_only=True)
class RoundTraces:
    """Turns the events of a run into spans, once a round has ended.

    Attributes:
        since: Rounds that ended before, in seconds since 1970, are left out.
        is_over: Whether the run has ended.
    """

    since: float = 0.0
    is_over: bool = False
    _run: RunStarted | None = None
    _round: RoundStarted | None = None
    _reports: list[SiteAnswered | SiteFailed] = field(default_factory=list)

    def add(self, event: Event) -> "Sequence[ReadableSpan]":
        """Take the next event; return the spans of a round that it ends."""
        match event:
            case RunStarted():
                self._run, self._round, self.is_over = event, None, False
            case RoundStarted():
                self._round, self._reports = event, []
            case SiteAnswered() | SiteFailed():
                self._reports.append(event)
            case RunFinished():
                self.is_over = event.status != INTERRUPTED
            case RoundFinished():
                begun, self._round = self._round, None
                is_new = event.at >= self.since
                if self._run and begun and is_new:
                    return [*_spans(self._run, begun, self._reports, event)]
        return ()


def _spans(
    run: RunStarted,
    begun: RoundStarted,
    reports: Sequence[SiteAnswered | SiteFailed],
    ended: RoundFinished,
) -> "Iterator[ReadableSpan]":
    # Sent twice it is the same trace.
    trace = _Trace(run, f"{run.run_id}/{begun.round_index}/{begun.at!r}", begun.at)
    seconds = max(0.0, ended.at - begun.at)
    fault = "" if ended.status == "completed" else f"the round is {ended.status}"
    whole = trace.span(
        "",
        "round",
        (0.0, seconds),
        {
            "crossfed.round": begun.round_index,
            "crossfed.status": ended.status,
            "crossfed.asked": len(ended.asked),
            "crossfed.answered": len(ended.answered),
            "crossfed.bytes_down": ended.bytes_down,
            "crossfed.bytes_up": ended.bytes_up,
        },
        fault=fault,
    )
    yield whole
    yield from trace.phases(whole, "", "aggregator", ended.phases, (0.0, seconds))
    for place, report in enumerate(reports):
        key, times = f"site {place}", (report.asked_seconds, report.answered_seconds)
        about: dict[str, str | int] = {
            "crossfed.site": report.site,
            "crossfed.bytes_down": report.bytes_down,
            "crossfed.bytes_up": report.bytes_up,
        }
        if isinstance(report, SiteFailed):
            fault = f"{report.kind.value}: {report.message}"
            yield trace.span(key, "site", times, about, parent=whole, fault=fault)
        else:
            site = trace.span(key, "site", times, about, parent=whole)
            yield site
            yield from trace.phases(site, key, "site", report.phases, times)


@cache
def _resource() -> "Resource":
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 -- an extra

    return Resource.create({"service.name": "crossfed"})


class _Trace:
    """Makes the spans of one round.

    OpenTelemetry is an extra: it is imported once a round, not once a span.
    """

    def __init__(self, run: RunStarted, name: str, begun: float) -> None:
        """Take the run, a name that no other round has, and when the round began."""
        from opentelemetry import trace as api  # noqa: PLC0415
        from opentelemetry.sdk import trace as sdk  # noqa: PLC0415
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

        self._sdk, self._api, self._name, self._begun = sdk, api, name, begun
        self._id = _number(name, _TRACE_BYTES)
        self._scope = InstrumentationScope("crossfed")
        self._run = {"crossfed.run": run.run_id, "crossfed.job": run.job_name}

    def phases(
        self,
        parent: "ReadableSpan",
        key: str,
        whose: str,
        found: Sequence[Phase],
        within: tuple[float, float],
    ) -> "Iterator[ReadableSpan]":
        """Spans of phases, as far as they can have been within those times."""
        for index, phase in enumerate(found):
            start = min(within[0] + max(0.0, phase.start_seconds), within[1])
            end = min(start + max(0.0, phase.seconds), within[1])
            name = f"{whose}: {phase.name}"
            yield self.span(f"{key}/{index}", name, (start, end), {}, parent=parent)

    def span(
        self,
        key: str,
        name: str,
        seconds: tuple[float, float],
        attributes: Mapping[str, str | int],
        *,
        parent: "ReadableSpan | None" = None,
        fault: str = "",
    ) -> "ReadableSpan":
        """Make a span, from seconds after the round began."""
        api = self._api
        start, end = (self._begun + max(0.0, each) for each in seconds)
        return self._sdk.ReadableSpan(
            name=name,
            context=api.SpanContext(
                trace_id=self._id,
                span_id=_number(f"{self._name}#{key}", _SPAN_BYTES),
                is_remote=False,
                trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
            ),
            parent=None if parent is None else parent.context,
            resource=_resource(),
            attributes={**self._run, **attributes},
            status=api.Status(api.StatusCode.ERROR, fault) if fault else api.Status(),
            start_time=int(start * _NANO),
            end_time=int(max(start, end) * _NANO),
            instrumentation_scope=self._scope,
        )


def _number(name: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:size], "big") or 1


class TraceSender:
    """Sends the rounds of runs to a collector, by OTLP over HTTP."""

    def __init__(self, endpoint: str = "", *, since: float = 0.0) -> None:
        """Begin with nothing.

        Args:
            endpoint: URL for traces; empty for that of OpenTelemetry's variables.
            since: Rounds that ended before, in seconds since 1970, are left out.

        Raises:
            MissingExtra: The package is not installed.
        """
        with naming_extras():
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
        self._exporter = OTLPSpanExporter(endpoint=endpoint or None)
        self._since = since
        self._runs: dict[Path, tuple[EventTail, RoundTraces]] = {}
        self._pending: list[ReadableSpan] = []
        self.sent = 0  # Traces that the collector has taken.

    def look(self, runs: Sequence[RunFolder]) -> bool:
        """Send what has ended since the last look; return whether all runs are over.

        Raises:
            StoreUnavailable: The collector does not take it; the next look sends it.
        """
        failure: StoreUnavailable | None = None
        folders = {run.path: run for run in runs[-MAX_RUNS:]}
        self._runs = {
            path: known for path, known in self._runs.items() if path in folders
        }
        for path, run in folders.items():
            if path not in self._runs:
                self._runs[path] = self._begun(run)
            tail, traces = self._runs[path]
            events = tail.news()
            if tail.is_anew:
                traces = RoundTraces(since=self._since)
                self._runs[path] = tail, traces
            for event in events:
                self._pending += traces.add(event)
                if failure is None and len(self._pending) >= MAX_BATCH:
                    failure = self._send()
                # A collector that is down fills no memory.
                del self._pending[:-MAX_PENDING]
        failure = failure or self._send()
        if failure is not None:
            raise failure
        return all(traces.is_over for _, traces in self._runs.values())

    def _begun(self, run: RunFolder) -> tuple[EventTail, RoundTraces]:
        """Begin where rounds are sent: a long log takes minutes to read."""
        tail, traces = EventTail(run.events), RoundTraces(since=self._since)
        with contextlib.suppress(OSError):
            for event in EventTail(run.events, only=[RunStarted]).block():
                traces.add(event)
            tail.go_to_round(self._since)
        return tail, traces

    def _send(self) -> StoreUnavailable | None:
        """Send what waits; return why the collector does not take it."""
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415

        while self._pending:
            batch = self._pending[:MAX_BATCH]
            try:
                with os_errors(StoreUnavailable, "send traces"):  # A malformed URL.
                    taken = self._exporter.export(batch)
            except StoreUnavailable as error:
                return error
            if taken is not SpanExportResult.SUCCESS:
                return StoreUnavailable(
                    "the collector does not take traces: see whether it is up, and "
                    "OTEL_EXPORTER_OTLP_HEADERS, if it wants a token"
                )
            self.sent += sum(span.parent is None for span in batch)
            del self._pending[:MAX_BATCH]
        return None

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def export_traces(run: RunFolder, *, follow: bool, clock: Clock) -> int:
    """Send each ended round of a run; return how many there were.

    Args:
        run: Folder of a run, which may still be running.
        follow: Go on until the run ends.
        clock: Tells how long to wait.

    Raises:
        MissingExtra, StoreUnavailable: See ``TraceSender``.
    """
    sender = TraceSender()
    try:
        while not sender.look([run]) and follow:
            clock.sleep(LOOK_SECONDS)
        return sender.sent
    finally:
        sender.close()

"""Rounds as OpenTelemetry traces, as a collector receives them."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.event_samples import Script

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

from deploy.cli import commands as cli
from federation.errors import StoreUnavailable
from federation.event_log import EventWriter
from federation.events import RoundFinished, SiteAnswered
from federation.messages import FailureKind
from monitoring.runs import event_tail
from monitoring.runs.run_folder import RunFolder
from monitoring.web import traces
from monitoring.web.traces import TraceSender

SITES = ("a", "b")
ROOT = Path(__file__).parents[3]


class _Collector(HTTPServer):
    spans: list[Any]
    status = 200


class _Take(BaseHTTPRequestHandler):
    server: _Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.status == 200:
            asked = ExportTraceServiceRequest.FromString(body)
            for resource in asked.resource_spans:
                for scope in resource.scope_spans:
                    self.server.spans += scope.spans
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def collecting() -> Iterator[_Collector]:
    server = _Collector(("127.0.0.1", 0), _Take)
    server.spans = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def url(server: _Collector) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def run_of(folder: Path, **script: Any) -> RunFolder:
    run = RunFolder(folder / "job" / "run")
    with EventWriter(run.events) as log:
        for event in event_samples.run(Script(sites=SITES, rounds=3, **script)):
            log(event)
    return run


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: each.value.string_value or each.value.int_value
        for each in span.attributes
    }


def test_log_that_begins_anew_begins_no_round_of_the_one_before(tmp_path: Path):
    """A run was deleted in the middle of a round, and its name was taken again."""
    run = run_of(tmp_path)
    lines = run.events.read_bytes().splitlines(keepends=True)
    ends = next(at for at, line in enumerate(lines) if b"RoundFinished" in line)
    begins = [at for at, line in enumerate(lines) if b"RoundStarted" in line]
    with collecting() as server, closing(TraceSender(url(server))) as sender:
        run.events.write_bytes(b"".join(lines[: begins[0] + 2]))
        sender.look([run])
        run.events.write_bytes(lines[ends])
        sender.look([run])
    assert server.spans == []


def test_each_round_is_one_trace_from_the_coordinator_to_the_phases_of_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = run_of(tmp_path, failures=((2, "b", FailureKind.CRASHED),), message="oh")
    with collecting() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url(server))
        assert cli.main(["export-metrics", str(run.path), "--to", "otlp"]) == 0
        assert "3 traces" in capsys.readouterr().out
        spans = list(server.spans)
        assert cli.main(["export-metrics", str(run.path), "--to", "otlp"]) == 0
        again = server.spans[len(spans) :]
    # Sent again, they are the same spans, of which a collector keeps one.
    assert [span.span_id for span in again] == [span.span_id for span in spans]
    rounds = list(dict.fromkeys(span.trace_id for span in spans))
    events = run.read_events()
    ended = [event for event in events if isinstance(event, RoundFinished)]
    assert len(rounds) == len(ended) == 3
    for trace, row in zip(rounds, ended, strict=True):
        own = [span for span in spans if span.trace_id == trace]
        (root,) = [span for span in own if not span.parent_span_id]
        assert root.name == "round"
        assert attributes(root)["crossfed.round"] == row.round_index
        assert root.end_time_unix_nano == pytest.approx(row.at * 1e9, abs=1000)
        known = {span.span_id: span for span in own}
        assert len(known) == len(own)
        for span in own:
            above = known.get(span.parent_span_id, root)
            assert above.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= above.end_time_unix_nano + 1000
        answers = [
            event
            for event in events
            if isinstance(event, SiteAnswered) and event.round_index == row.round_index
        ]
        phases = sorted(f"site: {p.name}" for a in answers for p in a.phases)
        assert sorted(s.name for s in own if s.name.startswith("site: ")) == phases
    (failed,) = [span for span in spans if span.status.code == 2]
    assert attributes(failed)["crossfed.site"] == "b"
    assert failed.status.message == "crashed: oh"


def test_a_collector_that_is_down_gets_all_of_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And rounds of long ago are not sent to one that is new."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    run = run_of(tmp_path)
    with collecting() as server:
        place = f"{url(server)}/v1/traces"
        with closing(TraceSender(place)) as sender:
            server.status = 400
            with pytest.raises(StoreUnavailable, match="collector"):
                sender.look([run])
            server.status = 200
            assert sender.look([run])
            assert (sender.sent, len(server.spans) > 3) == (3, True)
            sender.look([run])
            assert sender.sent == 3
        lost = TraceSender("collector:4318")
        with closing(lost), pytest.raises(StoreUnavailable):
            lost.look([run])
        with closing(TraceSender(place, since=event_samples.START + 1e6)) as late:
            late.look([run])
            assert late.sent == 0


def test_every_round_of_a_long_run_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """However few spans are kept for a collector that is down."""
    monkeypatch.setattr(traces, "MAX_BATCH", 5)
    monkeypatch.setattr(traces, "MAX_PENDING", 8)
    run = run_of(tmp_path)
    with collecting() as server, closing(TraceSender(f"{url(server)}/t")) as sender:
        server.status = 400
        with pytest.raises(StoreUnavailable):
            sender.look([run])
        assert len(sender._pending) <= 8
    with collecting() as server, closing(TraceSender(f"{url(server)}/t")) as sender:
        assert sender.look([run])
    assert sender.sent == 3
    assert sum(not span.parent_span_id for span in server.spans) == 3


def test_monitor_that_starts_reads_no_rounds_of_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """But all of a round that went on then, however long, and of those after it."""
    run = RunFolder(tmp_path / "job" / "run")
    events = event_samples.run(Script(sites=SITES, rounds=30))
    with EventWriter(run.events) as log:
        for event in events:
            log(event)
    ends = [event.at for event in events if isinstance(event, RoundFinished)]
    for since in (0.0, ends[20] - 0.01, ends[20] + 0.01, ends[-1] + 1e6):
        found = []
        for size in (1 << 20, 500):  # All of it is in the first, larger block.
            monkeypatch.setattr(event_tail, "BLOCK_BYTES", size)
            with collecting() as server:
                sender = TraceSender(f"{url(server)}/v1/traces", since=since)
                with closing(sender):
                    assert sender.look([run])
                found.append([span.span_id for span in server.spans])
        assert found[0] == found[1]
        assert sender.sent == sum(at >= since for at in ends)
    with closing(TraceSender(since=ends[20])) as sender:
        tail, _ = sender._begun(run)
    assert tail.place[0] > run.events.stat().st_size / 2


@pytest.mark.parametrize(
    "modules",
    [
        "deploy.aggregator_host.coordinator_process, deploy.aggregator_host.service",
        "deploy.site_host.service",
        "deploy.aggregator_host.monitor_process, monitoring.web.traces",
    ],
)
def test_what_observes_is_imported_only_where_it_is_on(modules: str):
    """Nothing of it costs a run, or a site without a page."""
    program = (
        f"import sys, {modules}\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not found & {'opentelemetry', 'prometheus_client'}, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr

"""Opening and refreshing the page of a long run, and its report.

    python benchmarks/live_page.py [--rounds 100] [--sites 1000] [--folder DIR]

Writes the events of a run as a coordinator does, each site with numbers of its own in
every round; with `--rounds 10000` that is 10 GB. Then it measures, each in a process of
its own: the page from what the run has left, a refresh of it while rounds are added,
a scrape of its metrics, the report, the page from the events alone, and what traces,
metrics and measuring the machine take of a round of 60 s.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random

import machine
from prometheus_client import CollectorRegistry, generate_latest

from deploy.aggregator_host.monitor_process import LOOK_SECONDS
from deploy.site_host.machine_use import Machine, UseLog
from federation.clock import VirtualClock
from federation.event_log import EventWriter
from federation.events import (
    CheckpointSaved,
    Event,
    ModelEvaluated,
    RoundFinished,
    RoundStarted,
    RunStarted,
    SiteAnswered,
)
from federation.messages import MetricSums, Phase, Resources
from monitoring.runs import run_reader
from monitoring.runs.numbers_reader import NumbersReader
from monitoring.runs.run_folder import RunFolder, leave_report
from monitoring.runs.run_reader import RunReader
from monitoring.web.run_feed import RunFeed
from monitoring.web.run_metrics import RunsCollector
from monitoring.web.traces import TraceSender

ROUND_SECONDS = 60.0
BEGAN = 1_790_000_000.0
ADDED = 5  # Rounds, while the page is open.
SCRAPE_SECONDS = 15  # Of Prometheus.
SHARES = ("coordinator", "traces", "metrics", "machine_use")  # Of a round's time.


def begin(num_sites: int, rounds: int) -> RunStarted:
    return RunStarted(
        at=BEGAN,
        run_id="20260921-120000-abcdef",
        job_name="long",
        rounds=rounds,
        first_round=1,
        sites=tuple(f"site-{i:04d}" for i in range(num_sites)),
        parameters=1_000_000,
        engine="deployed",
        task="classification",
    )


def a_round(started: RunStarted, index: int, random: Random) -> Iterator[Event]:
    """Make the events of one round."""
    began, sites = BEGAN + ROUND_SECONDS * index, started.sites
    yield RoundStarted(at=began, round_index=index, cohort=sites)
    measured = []
    for number, site in enumerate(sites):
        sent, took = 0.001 * number, random.uniform(20, 55)
        own = sums(random, 1000, 2.0 / index**0.3)
        measured.append(own)
        yield SiteAnswered(
            at=began + took,
            round_index=index,
            site=site,
            asked_seconds=sent,
            answered_seconds=sent + took,
            bytes_down=4_000_123,
            bytes_up=4_000_000 + random.randrange(1000),
            num_examples=10_000,
            num_steps=100,
            weight=10_000.0,
            training=sums(random, 10_000, 2.1 / index**0.3),
            evaluation=own,
            phases=(
                Phase(name="decode", start_seconds=2.0, seconds=0.1),
                Phase(name="evaluate", start_seconds=2.1, seconds=random.random()),
                Phase(name="train", start_seconds=3.1, seconds=0.8 * took),
                Phase(name="encode", start_seconds=3.2 + 0.8 * took, seconds=0.1),
            ),
            resources=Resources(
                busy_seconds=0.9 * took,
                cpu_seconds=1.7 * took,
                peak_memory_bytes=900_000_000 + random.randrange(1 << 20),
                method="process",
            ),
        )
    none = (0,) * len(sites)
    yield ModelEvaluated(
        at=began + 56,
        round_index=index - 1,
        pooled=sum(measured[1:], measured[0]),
        sites=sites,
        by_site=tuple(measured),
        bytes_down=none,
        bytes_up=none,
    )
    yield RoundFinished(
        at=began + 57,
        round_index=index,
        status="completed",
        asked=sites,
        answered=sites,
        failed=(),
        bytes_down=4_000_123 * len(sites),
        bytes_up=4_000_500 * len(sites),
        seconds=57.0,
        phases=(Phase(name="exchange", start_seconds=0.0, seconds=56.0),),
        training=sums(random, 10_000 * len(sites), 2.1 / index**0.3),
        update_norm=random.random(),
    )
    yield CheckpointSaved(
        at=began + 58, round_index=index, bytes_written=4_000_000, seconds=0.5
    )


def sums(random: Random, count: int, loss: float) -> MetricSums:
    own = random.uniform(0.9, 1.1) * loss
    correct = {"correct": random.randrange(count)}
    return MetricSums(count=count, loss_sum=own * count, metrics=correct)


def write(folder: Path, num_sites: int, rounds: int) -> dict[str, float]:
    """Write a run as its coordinator does; CPU seconds of what it keeps and leaves."""
    run, random, taking = RunFolder(folder), Random(7), 0.0  # noqa: S311
    reader, numbers = RunReader(run.events), NumbersReader(run.events)
    with EventWriter(run.events) as log:
        started = begin(num_sites, rounds + ADDED)
        for index in range(rounds + 1):
            events = a_round(started, index, random) if index else [started]
            for event in events:
                log(event)
                began = time.thread_time()
                reader.take(event)
                numbers.take(event)
                taking += time.thread_time() - began
    run.job.write_text("")
    return {"bytes": run.events.stat().st_size, "take_cpu_per_round": taking / rounds}


def add(run: RunFolder, events: Iterable[Event]) -> float:
    """Go on with a run as another coordinator does; CPU seconds of its metrics."""
    numbers, taking = NumbersReader(run.events), 0.0
    numbers.look()
    with EventWriter(run.events) as log:
        for event in events:
            log(event)
            began = time.thread_time()
            numbers.take(event)
            taking += time.thread_time() - began
    return taking


def show(folder: Path) -> dict[str, float]:
    """Open the page."""
    feed = RunFeed(RunFolder(folder))
    feed.look()
    feed.page(BEGAN)
    return {}


def refresh(folder: Path, num_sites: int, rounds: int) -> dict[str, float]:
    """Add rounds; CPU seconds of reading one, and of making the page anew."""
    run, random = RunFolder(folder), Random(8)  # noqa: S311
    feed = RunFeed(run)
    feed.look()
    feed.page(BEGAN)
    started = begin(num_sites, rounds + ADDED)
    reading, making = 0.0, 0.0
    for index in range(rounds + 1, rounds + ADDED + 1):
        add(run, a_round(started, index, random))
        began = time.thread_time()
        feed.look()
        reading += time.thread_time() - began
        began = time.thread_time()
        feed.page(BEGAN)
        making += time.thread_time() - began
    return {"read_a_round": reading / ADDED, "make_the_page": making / ADDED}


def scrape(folder: Path, num_sites: int, rounds: int) -> dict[str, float]:
    """Answer Prometheus in a round, and again after each round; CPU seconds."""
    run, random = RunFolder(folder), Random(9)  # noqa: S311
    started = begin(num_sites, rounds)
    *unfinished, _, _ = a_round(started, rounds + ADDED + 1, random)
    add(run, unfinished)
    registry = CollectorRegistry()
    registry.register(RunsCollector(lambda: [run]))
    begun = time.thread_time()
    generate_latest(registry)
    first, later = time.thread_time() - begun, 0.0
    for index in range(rounds + ADDED + 1, rounds + 2 * ADDED + 1):
        add(run, a_round(started, index, random))
        begun = time.thread_time()
        generate_latest(registry)
        later += time.thread_time() - begun
    begun = time.thread_time()
    generate_latest(registry)
    still = time.thread_time() - begun
    return {"first": first, "after_a_round": later / ADDED, "without_news": still}


def observe(folder: Path, num_sites: int, rounds: int) -> dict[str, float]:
    """Trace rounds and answer Prometheus each 15 s; measure the machine each second.

    Returns:
        CPU time as a share of a round: of the coordinator, twice of the monitor's
        process, without the collector that the traces go to, and of a site.
    """
    run, random = RunFolder(folder), Random(10)  # noqa: S311
    started, times = begin(num_sites, rounds), dict.fromkeys(SHARES, 0.0)
    registry = CollectorRegistry()
    registry.register(RunsCollector(lambda: [run]))
    clock = VirtualClock(BEGAN)
    use = UseLog(
        folder=folder, clock=clock, is_at_work=lambda: True, read=Machine().read
    )
    first = rounds + 2 * ADDED + 1
    since = BEGAN + ROUND_SECONDS * first
    with collecting() as url, closing(TraceSender(url, since=since)) as sender:
        sender.look([run])
        generate_latest(registry)
        for index in range(first, first + ADDED):
            times[SHARES[0]] += add(run, a_round(started, index, random))
            for second in range(int(ROUND_SECONDS)):
                clock.sleep(1.0)
                marks = [time.thread_time()]
                if second % LOOK_SECONDS == 0:
                    sender.look([run])
                marks.append(time.thread_time())
                if second % SCRAPE_SECONDS == 0:
                    generate_latest(registry)
                marks.append(time.thread_time())
                use.look()
                marks.append(time.thread_time())
                for name, (a, b) in zip(SHARES[1:], pairwise(marks), strict=True):
                    times[name] += b - a
    return {name: spent / ROUND_SECONDS / ADDED for name, spent in times.items()}


@contextmanager
def collecting() -> Iterator[str]:
    """Take traces, and forget them."""

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Take) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()
        thread.join()


def report(folder: Path) -> dict[str, float]:
    leave_report(RunFolder(folder))
    return {}


def measured(name: str, work: Callable[[], dict[str, float]]) -> dict[str, object]:
    began, cpu = time.perf_counter(), time.process_time()
    found = work()
    return {
        "part": name,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where there is room")
    asked = parser.parse_args()
    size = {"sites": asked.sites, "rounds": asked.rounds}
    print(json.dumps(machine.facts("live_page", **size)))
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        folder = Path(place)
        cache = folder / run_reader.NAME
        parts: list[tuple[str, Callable[[], dict[str, float]]]] = [
            ("write", partial(write, folder, asked.sites, asked.rounds)),
            ("open", partial(show, folder)),
            ("report", partial(report, folder)),
            ("refresh", partial(refresh, folder, asked.sites, asked.rounds)),
            ("scrape", partial(scrape, folder, asked.sites, asked.rounds)),
            ("observe", partial(observe, folder, asked.sites, asked.rounds)),
            ("open without what the run left", partial(show, folder)),
        ]
        for name, work in parts:
            if "without" in name:
                cache.unlink(missing_ok=True)  # None of a small run.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                row = alone.submit(measured, name, work).result()
            print(json.dumps(row), flush=True)
            cells = (f"{key} {value:.3g}" for key, value in [*row.items()][1:])
            print(f"{name:<32}", "  ".join(cells), file=sys.stderr)


if __name__ == "__main__":
    main()

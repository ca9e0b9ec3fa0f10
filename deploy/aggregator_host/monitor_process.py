"""The aggregator's live page, metrics and alerts, as a process of their own.

``python -P -m crossfed.child deploy.aggregator_host.monitor_process CONFIG``. It reads
files of runs and nothing else: whatever happens to it, no run notices, and the service
starts it again. Two files beside ``aggregator.toml``, which only the operator may read,
hold what opens it: ``page.token``, and ``metrics.token`` for a Prometheus.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.aggregator_host import config as aggregator_file, host_secrets
from deploy.aggregator_host.config import AggregatorConfig
from deploy.exit_codes import FAILED
from deploy.service_log import service_log
from federation.clock import SystemClock
from federation.errors import FederationError
from federation.protocols import Clock

if TYPE_CHECKING:
    from monitoring.runs.run_folder import RunFolder
    from monitoring.web.alerts import Alert
    from monitoring.web.run_metrics import RunsCollector

LOOK_SECONDS = 2.0
RECENT_SECONDS = 86_400.0
# After a restart: the same traces again are the same.
RESENT_SECONDS = 3600.0
_PYTHON = [sys.executable, "-P", "-m", "crossfed.child"]


def command(config_path: Path) -> list[str]:
    """Return the command that starts it."""
    return [*_PYTHON, "deploy.aggregator_host.monitor_process", str(config_path)]


def address(config: AggregatorConfig) -> str:
    """Where the operator's browser finds the page, with the token.

    Raises:
        FederationError: The aggregator serves no page.
    """
    if not config.file.monitor.port:
        raise FederationError(
            "this aggregator serves no page: set monitor.port in aggregator.toml, for "
            "example to 8640, and start it again"
        )
    page, _ = host_secrets.tokens(config.folder)
    return f"http://127.0.0.1:{config.file.monitor.port}/?token={page}"


def serve(
    config: AggregatorConfig,
    stopped: threading.Event,
    *,
    clock: Clock,
    log: Callable[[str], None],
) -> None:
    """Serve the page, and send alerts, until ``stopped`` is set.

    Raises:
        FederationError: The port is taken, or a token is open to others.
    """
    # The service imports this module, too, but serves nothing itself.
    from deploy.aggregator_host import alert_delivery, host_facts  # noqa: PLC0415
    from monitoring.web import alerts  # noqa: PLC0415

    collector = _collector(config, clock)
    # A long log that another release has written takes minutes, and no scrape waits.
    threading.Thread(target=collector.look, daemon=True).start()
    delivery = alert_delivery.AlertDelivery(
        places=alert_delivery.places(config.file.alerts),
        path=config.folder / "alerts.json",
        clock=clock,
        listener=log,
    )
    host = host_facts.Host(config, clock)
    if config.file.monitor.traces:
        threading.Thread(
            target=_send_traces, args=(config, clock, stopped, log), daemon=True
        ).start()
    with _page(config, collector, clock):
        while not stopped.wait(LOOK_SECONDS):
            if not delivery.places:
                continue
            now = clock.now()
            of_host = alerts.of_host(host.facts(), now)
            delivery.deliver([*of_host, *_of_runs(config, collector, now)])


def _collector(config: AggregatorConfig, clock: Clock) -> "RunsCollector":
    """The numbers of the newest runs, and of all that go on."""
    from deploy.aggregator_host import run_queue  # noqa: PLC0415
    from monitoring.runs.find import find_runs  # noqa: PLC0415
    from monitoring.runs.run_numbers import RunNumbers  # noqa: PLC0415
    from monitoring.web.run_metrics import RunsCollector  # noqa: PLC0415

    def find() -> "list[RunFolder]":
        # The last ones are looked at: however old a run is, alerts need its numbers.
        handed = run_queue.handed_over(config.runs).runs
        going_on = {one.run for one in handed if one.outcome is None}
        return sorted(find_runs(config.runs), key=going_on.__contains__)

    def never_begun() -> dict[str, RunNumbers]:
        since = clock.now() - RECENT_SECONDS
        return {
            one.name: RunNumbers(job=one.run.path.parent.name, status=one.status)
            for one in run_queue.handed_over(config.runs).never_begun
            if one.ended_at > since
        }

    def waiting() -> set[str]:
        handed = run_queue.handed_over(config.runs).runs
        return {one.name for one in handed if one.status == "waiting"}

    return RunsCollector(find, never_begun, waiting)


def _send_traces(
    config: AggregatorConfig,
    clock: Clock,
    stopped: threading.Event,
    log: Callable[[str], None],
) -> None:
    """Send rounds as traces, apart from pages and alerts: a collector may be slow."""
    from monitoring.runs.find import find_runs  # noqa: PLC0415
    from monitoring.web.traces import TraceSender  # noqa: PLC0415

    told = ""
    try:
        sender = TraceSender(
            config.file.monitor.traces, since=clock.now() - RESENT_SECONDS
        )
    except FederationError as error:
        log(f"no traces are sent: {error}")
        return
    while not stopped.wait(LOOK_SECONDS):
        try:
            sender.look(find_runs(config.runs))
        except FederationError as error:
            if str(error) != told:
                told = str(error)
                log(f"traces wait: {told}")


def _of_runs(
    config: AggregatorConfig, collector: "RunsCollector", now: float
) -> Iterator["Alert"]:
    """Alerts of runs that go on, or have ended not long ago."""
    from deploy.aggregator_host import admission, owners, run_queue  # noqa: PLC0415
    from monitoring.runs.run_numbers import RunNumbers  # noqa: PLC0415
    from monitoring.web import alerts  # noqa: PLC0415

    known, gone = collector.look(), admission.revoked(config)
    runs = run_queue.handed_over(config.runs).runs
    for owner in owners.read(config.folder).owners:
        if owner.quota == owners.Usage():
            continue
        used = asdict(admission.usage(config, runs, owner.name, now))
        limits = asdict(owner.quota)
        yield from alerts.of_quotas(owner.name, {k: (used[k], limits[k]) for k in used})
    for one in runs:
        numbers = known.get(one.run.path.name)
        numbers = numbers or RunNumbers(job=one.run.path.parent.name)
        status, reason = ("", "") if one.outcome is None else (one.status, one.reason)
        # Whoever asks for alerts today need not hear of last year's runs.
        if not status or now < one.ended_at + RECENT_SECONDS:
            yield from alerts.of_run(
                one.run.path.name,
                numbers,
                now,
                status=status,
                reason=reason,
                revoked=gone,
            )


def _page(
    config: AggregatorConfig, collector: "RunsCollector", clock: Clock
) -> AbstractContextManager[object]:
    from deploy.aggregator_host.run_list import of_aggregator  # noqa: PLC0415
    from deploy.web_server import serving  # noqa: PLC0415
    from monitoring.web.app import live_app  # noqa: PLC0415

    if not config.file.monitor.port:
        return nullcontext()
    page, metrics = host_secrets.tokens(config.folder)
    pages = of_aggregator(config, clock, collector=collector)
    return serving(
        lambda port: live_app(
            pages,
            token=page,
            port=port,
            clock=clock,
            metrics=collector,
            metrics_token=metrics,
        ),
        config.file.monitor.port,
        clock=clock,
    )


def main(arguments: list[str]) -> None:
    """Serve until the service ends it."""
    stopped, clock = threading.Event(), SystemClock()
    log = service_log(clock)
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    os.nice(10)  # Training on the same host comes first.
    try:
        serve(aggregator_file.load(Path(arguments[0])), stopped, clock=clock, log=log)
    except FederationError as error:
        log(str(error))
        sys.exit(FAILED)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Debian's Prometheus, with the repository's rules, at an aggregator's metrics."""

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support import event_samples
from support.deployment import wait_for
from support.event_samples import Script
from support.programs import needs, program

from cloud_adapters.net.ports import free_port
from deploy.aggregator_host import host_secrets, monitor_process
from deploy.aggregator_host.config import AggregatorConfig, AggregatorFile, MonitorSpec
from federation.clock import SystemClock
from federation.event_log import EventWriter
from monitoring.runs.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.long, needs("prometheus")]

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
RUN, SITES = "20260101-000000-abcdef", event_samples.TWO_SITES


@pytest.fixture(name="port")
def _port(tmp_path: Path) -> Iterator[int]:
    """The port of a monitor, whose run's sites have been silent for long."""
    port, stopped = free_port(), threading.Event()
    file = AggregatorFile(monitor=MonitorSpec(port=port))
    config = AggregatorConfig(file=file, folder=tmp_path)
    host_secrets.make(tmp_path)
    with EventWriter(RunFolder(config.runs / "job" / RUN).events) as log:
        for event in event_samples.run(Script(rounds=3))[:-1]:
            log(event)
    thread = threading.Thread(
        target=monitor_process.serve,
        args=(config, stopped),
        kwargs={"clock": SystemClock(), "log": print},
    )
    thread.start()
    yield port
    stopped.set()
    thread.join()


@contextlib.contextmanager
def prometheus(folder: Path, scraped: int) -> Iterator[httpx.Client]:
    """Start it as its page says; the client asks its API."""
    page = (ROOT / "docs" / "howto" / "live-page.md").read_text("utf-8")
    text = page.partition("# prometheus.yml\n")[2].partition("```")[0]
    config = yaml.safe_load(text)
    (scrape,) = config["scrape_configs"]
    scrape["authorization"]["credentials_file"] = str(folder / host_secrets.METRICS)
    (place,) = scrape["static_configs"]
    place["targets"] = [f"127.0.0.1:{scraped}"]
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    path, port = folder / "prometheus.yml", free_port()
    path.write_text(yaml.safe_dump(config), "utf-8")
    process = subprocess.Popen(
        [
            *(program("prometheus"), f"--config.file={path}", "--log.level=warn"),
            *(f"--storage.tsdb.path={folder / 'data'}",),
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        cwd=folder,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1") as client:
            yield client
    finally:
        process.terminate()
        process.wait(60)


def test_prometheus_reads_the_metrics_and_its_rules_fire(tmp_path: Path, port: int):
    def asked(path: str, **query: str) -> Any:
        with contextlib.suppress(httpx.TransportError, json.JSONDecodeError):
            answer = client.get(path, params=query)
            return answer.json().get("data") if answer.is_success else None
        return None

    def rounds() -> Any:
        return (asked("query", query="crossfed_run_round") or {}).get("result")

    def firing() -> set[str]:
        found = (asked("alerts") or {}).get("alerts", ())
        return {a["labels"]["site"] for a in found if a["state"] == "firing"}

    with prometheus(tmp_path, port) as client:
        wait_for(rounds, "crossfed_run_round", 60)
        (row,) = rounds()
        assert (row["metric"]["run"], row["value"][1]) == (RUN, "3")
        assert row["metric"]["job"] == "two-clouds-quickstart"  # Not the scrape's.
        wait_for(lambda: firing() == {*SITES}, "an alert for each silent site", 60)
        (group,) = asked("rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}

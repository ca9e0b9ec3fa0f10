"""The aggregator's service as a whole: how it starts, ends and is started again."""

import contextlib
import json
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from faults import disks
from support import event_samples, superlink_state
from support.deployment import (
    Deployment,
    command_of,
    crossfed,
    crossfed_here,
    descendants,
    wait_for,
)
from support.event_samples import Script
from support.forked import shared
from support.programs import needs
from support.small_jobs import small_job

from cloud_adapters.net.ports import free_port
from deploy.aggregator_host import monitor_process, run_queue
from deploy.aggregator_host.run_queue import Outcome
from federation.event_log import EventWriter
from monitoring.runs.run_folder import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.flower,
    needs("nginx"),
]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Deployment]:
    """An aggregator that has not been started, and no site."""
    made = Deployment(folder=tmp_path, port=free_port(), server=shared())
    address = f"{made.host}:{made.port}"
    home = str(tmp_path / "aggregator")
    crossfed_here("aggregator", "init", home, "--host", made.host, "--listen", address)
    superlink_state.place(tmp_path / "aggregator" / "flower" / "state.db")
    try:
        yield made
    finally:
        made.stop()


def _health(host: Deployment) -> int:
    authority = str(host.folder / "aggregator" / "ca.crt")
    context = ssl.create_default_context(cafile=authority)
    try:
        url = f"https://{host.host}:{host.port}/health"
        with urllib.request.urlopen(url, context=context, timeout=5) as answer:
            return int(answer.status)
    except OSError:
        return 0


def _state(host: Deployment) -> str:
    """What ``/health`` says, in a word or two."""
    authority = str(host.folder / "aggregator" / "ca.crt")
    context = ssl.create_default_context(cafile=authority)
    url = f"https://{host.host}:{host.port}/health"
    try:
        with urllib.request.urlopen(url, context=context, timeout=5) as answer:
            return str(json.load(answer)["status"])
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["status"])
    except OSError:
        return ""


def _children(host: Deployment) -> set[int]:
    """The service's programs, once they have become what they are to be."""
    found = descendants(host.processes["aggregator"].pid)
    return {pid for pid in found if "superlink" in command_of(pid)}


def test_port_in_use_says_which_key_to_change(host: Deployment):
    """In one line, without a traceback, and nothing stays behind."""
    with socket.create_server((host.host, host.port)):
        done = crossfed("aggregator", "up", "--config", host.config, code=1)
    complaint = f"cannot listen on {host.host}:{host.port}: Address already in use"
    (line,) = [one for one in done.stderr.splitlines() if "cannot listen" in one]
    assert complaint in line
    assert "change listen in aggregator.toml" in line
    assert "Traceback" not in done.stderr
    assert not (host.folder / "aggregator" / "logs" / "superlink.log").exists()


def test_killed_service_starts_again(host: Deployment):
    """Nothing that it has started outlives it and keeps a port."""
    host.start_aggregator()
    wait_for(lambda: _health(host) == 200, "the service is well")
    before = _children(host)
    assert before
    host.kill("aggregator")
    host.start_aggregator()
    wait_for(lambda: _health(host) == 200, "the service is well again")
    assert not [pid for pid in before if "superlink" in command_of(pid)]
    log = (host.folder / "aggregator.log").read_text()
    assert "Traceback" not in log
    assert "superlink ended" not in log
    host.end("aggregator")
    said = (host.folder / "aggregator" / "logs" / "superlink.log").read_text()
    _, _, last = said.rpartition("Started server process")
    assert "Finished server process" in last  # It was not killed.


def test_logs_of_its_programs_are_bounded(host: Deployment):
    """While they write: nginx continues with an empty file."""
    host.start_aggregator()
    wait_for(lambda: _health(host) == 200, "the service is well")
    log = host.folder / "aggregator" / "proxy" / "access.log"
    os.truncate(log, 33 << 20)
    wait_for(lambda: log.stat().st_size == 0, "the log begins anew")
    with socket.create_connection((host.host, host.port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        plain.recv(100)
    wait_for(lambda: 0 < log.stat().st_size < 1 << 20, "nginx writes a line")
    assert b"\0" not in log.read_bytes()
    assert log.with_name("access.log.1").stat().st_size == 33 << 20


@needs("root", "mount")
def test_full_disk_is_named_and_passes(tmp_path: Path):
    """In the log and in ``/health``; an operator can still invite and revoke."""
    disk = tmp_path / "disk"
    with disks.disks([disk]):
        host = Deployment(folder=disk, port=free_port(), server=shared())
        address = f"{host.host}:{host.port}"
        home = str(disk / "aggregator")
        crossfed_here(
            "aggregator", "init", home, "--host", host.host, "--listen", address
        )
        try:
            host.start_aggregator()
            wait_for(lambda: _state(host) == "ok", "the service is well")
            token = crossfed_here(
                "aggregator", "invite", "one", "--config", host.config
            )
            one = str(tmp_path / "one")
            crossfed_here("enroll", "--folder", one, given=token.stdout)

            disks.fill(disk)
            wait_for(lambda: _state(host) == "disk full", "the disk is named")
            crossfed_here("aggregator", "revoke", "one", "--config", host.config)
            listed = crossfed_here(
                "aggregator", "sites", "--json", "--config", host.config
            )
            (row,) = json.loads(listed.stdout)["sites"]
            assert row["state"] == "revoked"

            disks.clear(disk)
            wait_for(lambda: _state(host) == "ok", "the service is well again")
        finally:
            host.stop()
        log = (disk / "aggregator.log").read_text()
        # The service may look while the disk is still being filled: then it names the
        # folder that it has looked at last, of the two on this disk.
        place = rf"the disk of {re.escape(home)}(/flower)?"
        assert re.search(rf"{place} has \d+ MiB free", log)
        assert "limits.reserve_mib in aggregator.toml" in log
        assert re.search(rf"{place} has enough free space again", log)
        assert "Traceback" not in log


def test_operator_has_a_page_and_metrics(host: Deployment):
    """Each with its own token; when their process is killed, another takes over."""
    port, config = free_port(), Path(host.config)
    config.write_text(f"{config.read_text()}\n[monitor]\nport = {port}\n")
    run = host.folder / "aggregator" / "runs" / "job" / "20260101-000000-abcdef"
    events = event_samples.run(Script(rounds=3))
    with EventWriter(run / "events.jsonl") as log:
        for event in events:
            log(event)
    host.start_aggregator()

    def get(path: str, headers: dict[str, str]) -> httpx.Response | None:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers)
        return None

    wait_for(lambda: get("/", {}) is not None, "the page")
    told = crossfed("aggregator", "page", "--config", host.config, "--json").stdout
    address = json.loads(told)["address"]
    with httpx.Client(follow_redirects=True) as browser:
        assert "20260101-000000-abcdef" in browser.get(address).text
    token = (host.folder / "aggregator" / "metrics.token").read_text()
    bearer = {"authorization": f"Bearer {token}"}

    def count() -> str:
        answer = get("/metrics", bearer)
        text = "" if answer is None else answer.text
        found = re.search(r"crossfed_run_rounds_ended_total\{.*\} (\S+)", text)
        return found[1] if found else ""

    assert count() == "3.0"
    for headers in ({}, {"authorization": "Bearer x"}, {"authorization": address}):
        refused = get("/metrics", headers)
        assert refused is not None
        assert refused.status_code == 403
    with_metrics_token = get("/", bearer)
    assert with_metrics_token is not None
    assert with_metrics_token.status_code == 403
    wait_for(lambda: _health(host) == 200, "the service is well")
    host.kill_child("monitor_process")
    wait_for(lambda: get("/metrics", bearer) is None, "the end of the page")
    assert _health(host) == 200
    wait_for(lambda: count() == "3.0", "another process of the page")
    log_text = (host.folder / "aggregator.log").read_text()
    assert token not in log_text
    assert address.partition("token=")[2] not in log_text


def test_failed_run_wakes_the_operator(host: Deployment):
    """Within seconds, without a page, and only once; a place that is down is logged."""
    told, config = host.folder / "told", Path(host.config)
    alerts = f'[[alerts]]\ncommand = ["/bin/sh", "-c", "cat >> {told}"]\n'
    alerts += f'[[alerts]]\nwebhook = "http://127.0.0.1:{free_port()}/"\n'
    config.write_text(f"{config.read_text()}\n{alerts}")
    runs = host.folder / "aggregator" / "runs" / "job"
    # No site has accepted its job: there is no event, only what came of it.
    for name, age in (("new", 0.0), ("old", 2 * monitor_process.RECENT_SECONDS)):
        run = RunFolder(runs / name)
        run_queue.submit(small_job(), run, at=0.0)
        run_queue.leave_outcome(run, Outcome(code=1, message="no site accepts it"))
        at = time.time() - age
        os.utime(run.path / run_queue.OUTCOME, (at, at))
    host.start_aggregator()
    wait_for(lambda: told.exists() and "failed" in told.read_text(), "the alert")
    record = host.folder / "aggregator" / "alerts.json"
    wait_for(record.exists, "a note of what was told")
    assert told.read_text().count("failed") == 1
    assert "run new (job)" in told.read_text()
    log = host.folder / "aggregator" / "logs" / "monitor.log"
    wait_for(lambda: "did not reach" in log.read_text(), "a line of the log")
    for line in log.read_text().splitlines():
        assert re.match(r"\d{4}(-\d\d){2} \d\d(:\d\d){2}Z crossfed: an alert", line)

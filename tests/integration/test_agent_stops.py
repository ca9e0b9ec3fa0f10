"""An agent that is asked to end does so within three seconds, whatever it is at."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import proxy_server
from support.deployment import CLOCK, SITES, Deployment, deployed, descendants, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.flower,
    pytest.mark.xdist_group("deployed"),
    pytest.mark.skipif(
        not proxy_server.installed(), reason="nginx is not installed (make nginx)"
    ),
]

JOB = Path(__file__).parents[2] / "jobs" / "quickstart.toml"
POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
max_clip_norm = 100.0
"""
SITE = SITES[0]
STOP_SECONDS = 3.0
WORK_SECONDS = 2.0


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(tmp_path_factory.mktemp("federation"), POLICY) as made:
        yield made


def _log(federation: Deployment) -> str:
    return (federation.folder / f"{SITE}.log").read_text()


def _connect(federation: Deployment, times: int) -> None:
    def is_connected() -> bool:
        return _log(federation).count("connected to") >= times

    wait_for(is_connected, f"the site connects {times} times")


def _stop(federation: Deployment) -> float:
    """Stop the agent as a supervisor does; how long it takes."""
    process = federation.processes.pop(SITE)
    begin = CLOCK.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    return CLOCK.monotonic() - begin


def _cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")


def test_agent_ends_within_seconds(federation: Deployment):
    """Idle, at work on a task of hours, and beside an aggregator that hangs.

    The aggregator lets the next one in at once: each has said that it goes.
    """
    _connect(federation, 1)
    assert _stop(federation) <= STOP_SECONDS

    federation.start_site(SITE)
    _connect(federation, 2)
    agent = federation.processes[SITE].pid
    federation.run(JOB, "training.local_steps=1000000000")
    wait_for(
        lambda: any(e["event"] == "RoundStarted" for e in federation.events()),
        "a round begins",
    )
    before = _cpu_seconds(agent)
    wait_for(lambda: _cpu_seconds(agent) > before + WORK_SECONDS, "the agent works")
    assert _stop(federation) <= STOP_SECONDS
    assert "a task that was at work comes again" in _log(federation)

    federation.start_site(SITE)
    _connect(federation, 3)
    assert "trying again" not in _log(federation)
    service = federation.processes["aggregator"].pid
    family = [service, *descendants(service)]
    try:
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        assert _stop(federation) <= STOP_SECONDS
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)

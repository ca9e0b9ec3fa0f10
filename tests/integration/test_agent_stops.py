"""An agent that is asked to end does so within three seconds, whatever it is at."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.deployment import (
    CLOCK,
    SITES,
    Deployment,
    crossfed_here as crossfed,
    deployed,
    descendants,
    wait_for,
)
from support.fake_imds import FakeImds
from support.held_models import HOLD
from support.programs import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.flower,
    needs("nginx"),
]

JOB = Path(__file__).parents[2] / "jobs" / "quickstart.toml"
POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
max_clip_norm = 100.0
functions = ["support.held_models:held_network", "clients.models:*", "clients.data:*"]
"""
SITE = SITES[0]
HELD = f"""
name = "held"
rounds = 10000
schedule = {{ minimum_sites = 1, round_deadline_seconds = 500 }}
training = {{ local_steps = 1, optimizer = {{ lr = 0.1 }} }}
data = {{ source = "clients.data:digits" }}
sites = [{{ name = "{SITES[0]}" }}, {{ name = "{SITES[1]}" }}]
[model]
factory = "support.held_models:held_network"
options = {{ inputs = 64, classes = 10 }}
"""
STOP_SECONDS = 3.0
WORK_SECONDS = 0.5


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Its sites are started by the tests."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    folder = tmp_path_factory.mktemp("federation")
    with deployed(folder, POLICY, environment=environment, started=False) as made:
        yield made


def _log(made: Deployment, site: str = SITE) -> str:
    path = made.folder / f"{site}.log"
    return path.read_text() if path.exists() else ""


def _start(made: Deployment, site: str, **environment: str) -> None:
    """Start an agent, and wait until it has connected."""
    before = _log(made, site).count("connected to")
    made.start_site(site, **environment)
    wait_for(
        lambda: _log(made, site).count("connected to") > before, f"{site} connects"
    )


def _stop(federation: Deployment, *sites: str) -> float:
    """Stop agents as a supervisor does; how long they take."""
    stopped = [federation.processes.pop(site) for site in sites]
    begin = CLOCK.monotonic()
    for process in stopped:
        process.send_signal(signal.SIGTERM)
    for process in stopped:
        assert process.wait(120) == 0
    return CLOCK.monotonic() - begin


def _cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
def test_round_does_not_wait_for_an_agent_that_is_stopped(federation: Deployment):
    """It gives notice, is asked nothing until it is back, and then takes part."""
    made, folder = federation, federation.folder
    leaves, stays = SITES
    held = {site: folder / f"{site}.hold" for site in SITES}
    held[leaves].touch()
    for site in SITES:
        made.start_site(site, **{HOLD: str(held[site])})
    job = folder / "held.toml"
    job.write_text(HELD)
    made.run(job)
    wait_for(held[leaves].with_suffix(".reached").exists, "the site works")
    # Its model sleeps for as long as the file is there: nothing interrupts it.
    assert _stop(made, leaves) <= STOP_SECONDS
    wait_for(lambda: made.rounds() > 0, "the round ends", 60)
    held[stays].touch()
    first = _rounds(made)[0]
    assert (first["status"], first["answered"]) == ("completed", [stays])
    assert first["failed"] == [["leaving", 1]]
    assert all(each["asked"] == [stays] for each in _rounds(made)[1:])
    at = ("--aggregator", made.config)

    def is_left_out() -> bool:
        (row,) = json.loads(crossfed("ps", *at, "--json").stdout)
        return bool(row["without"] == [f"{leaves} (gone: sigterm)"])

    # It is said after the round, whose end is an event of its own.
    wait_for(is_left_out, "the run continues without it", 60)
    assert f"{leaves} (gone: sigterm)" in crossfed("ps", *at).stdout.replace("\n", "")

    held[leaves].unlink()
    _start(made, leaves)
    held[stays].unlink()

    def takes_part() -> bool:
        return any(leaves in each["answered"] for each in _rounds(made))

    wait_for(takes_part, "it takes part", 60)
    held[stays].touch()
    (row,) = json.loads(crossfed("ps", *at, "--json").stdout)
    assert row["without"] == []
    assert row["back"] == [f"{leaves} (returned 1x)"]
    _take_back(made, leaves, held)
    crossfed("stop", "held", *at)
    made.end(stays)


def test_agent_ends_within_seconds(federation: Deployment):
    """Idle, at work on a task of hours, and beside an aggregator that hangs.

    The aggregator lets the next one in immediately: each has said that it goes.
    """
    begin, earlier = len(_log(federation)), federation.num_runs()
    federation.start_site(SITES[1])
    _start(federation, SITE)
    assert _stop(federation, SITE) <= STOP_SECONDS

    _start(federation, SITE)
    agent = federation.processes[SITE].pid
    federation.run(JOB, "training.local_steps=1000000000")
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.events("RoundStarted") != [], "a round begins")
    before = _cpu_seconds(agent)
    wait_for(lambda: _cpu_seconds(agent) > before + WORK_SECONDS, "the agent works")
    # The other is as busy, and would be to the end of the test.
    assert _stop(federation, *SITES) <= STOP_SECONDS
    said = _log(federation)[begin:]
    assert "was stopped in round 1" in said
    assert "Traceback" not in said

    _start(federation, SITE)
    assert "trying again" not in _log(federation)[begin:]
    service = federation.processes["aggregator"].pid
    family = [service, *descendants(service)]
    try:
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        assert _stop(federation, SITE) <= STOP_SECONDS
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)


def _rounds(federation: Deployment) -> list[dict[str, Any]]:
    return [e for e in federation.events() if e["event"] == "RoundFinished"]


def _take_back(made: Deployment, site: str, held: Mapping[str, Path]) -> None:
    """A spot machine finishes its task, and the round counts it; then it is gone.

    The other site works for as long as nothing is to happen: an open round costs no
    processor time.
    """
    hold, other = held[site], held[SITES[1]]
    made.end(site)
    path = made.folder / site / "site.toml"
    settings = path.read_text()
    path.write_text(f'{settings}\n[compute]\nnotices = "aws"\n')
    with FakeImds() as imds:
        endpoint = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url}
        _start(made, site, **{HOLD: str(hold)}, **endpoint)
        hold.with_suffix(".reached").unlink(missing_ok=True)
        hold.touch()
        other.unlink()
        wait_for(hold.with_suffix(".reached").exists, "the site works", 60)
        imds.action = {"action": "terminate", "time": "2999-01-01T00:00:00Z"}
        wait_for(lambda: "EC2 will terminate" in _log(made, site), "it is told", 60)
        hold.unlink()
        process = made.processes.pop(site)
        assert process.wait(60) == 0

        def is_gone() -> bool:
            at = ("--aggregator", made.config, "--json")
            (row,) = json.loads(crossfed("ps", *at).stdout)
            return bool(row["without"] == [f"{site} (leaving: spot)"])

        wait_for(is_gone, "the run continues without it", 60)
        (left,) = [e for e in made.events() if e.get("reasons") == ["spot"]]
        last = _rounds(made)[left["round_index"] - 1]
        assert (last["answered"], last["failed"]) == ([*SITES], [])
        assert _rounds(made)[left["round_index"]]["asked"] == [SITES[1]]
        other.touch()

        # A machine that is about to go takes no task: its agent does not connect.
        before = _log(made, site).count("connected to")
        made.start_site(site, **endpoint)
        assert made.processes.pop(site).wait(60) == 0
        assert _log(made, site).count("connected to") == before
        assert "site takes no task" in _log(made, site)
    path.write_text(settings)

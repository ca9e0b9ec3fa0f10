"""A site behind a network of its own, and what cuts of it do."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import proxy_server
from support.deployment import CLOCK, SITES, Deployment, deployed, wait_for

JOBS = Path(__file__).parents[2] / "jobs"
FLOOR = """
privacy = "record"
max_delta = 1e-3
max_clip_norm = 100.0
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("deployed"),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or not proxy_server.installed(),
        reason="needs root, iproute2 and nginx",
    ),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)  # noqa: S607 -- where it is differs


@pytest.fixture(scope="module")
def link() -> Iterator[str]:
    """A namespace with one cable to here; its name is that of the cable's end here."""
    name = f"cf{os.getpid() % 100000}"
    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", "10.79.13.1/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", "10.79.13.2/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "del", name)


@pytest.fixture(scope="module")
def federation(
    tmp_path_factory: pytest.TempPathFactory, link: str
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("federation")
    behind = {SITES[1]: link}
    with deployed(folder, FLOOR, host="10.79.13.1", namespaces=behind) as made:
        yield made


@pytest.mark.parametrize("seconds", [30.0, 120.0])
def test_a_cut_costs_what_it_covers(federation: Deployment, link: str, seconds: float):
    """The round in flight is lost, and those for which nobody waits any longer."""
    earlier = federation.num_runs()
    process = federation.run(
        JOBS / "private.toml", "rounds=10", "schedule.max_lost_rounds=8"
    )
    wait_for(
        lambda: federation.num_runs() > earlier and federation.rounds() >= 2, "rounds"
    )
    ip("link", "set", link, "down")
    CLOCK.sleep(seconds)
    ip("link", "set", link, "up")
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["status"] == "completed"
    lost = 10 - result["rounds_completed"]
    assert 1 <= lost <= (2 if seconds < 60 else 6)
    kinds = {
        event["kind"] for event in federation.events() if event["event"] == "SiteFailed"
    }
    assert "disconnected" in kinds

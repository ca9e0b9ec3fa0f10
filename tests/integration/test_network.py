"""A site behind a network of its own, and what cuts of it do."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import network
from support.deployment import CLOCK, SITES, Deployment, deployed, wait_for
from support.network import Network
from support.programs import needs

JOBS = Path(__file__).parents[2] / "jobs"
POLICY = """
privacy = "record"
total_epsilon = 1000.0
max_delta = 1e-3
max_clip_norm = 100.0
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("deployed"),
    needs("root", "ip", "nginx"),
]


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network.network([SITES[1]]) as made:
        yield made


@pytest.fixture(scope="module")
def federation(
    tmp_path_factory: pytest.TempPathFactory, net: Network
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("federation")
    with deployed(folder, POLICY, host=net.address, namespaces=net.namespaces) as made:
        yield made


@pytest.mark.parametrize("seconds", [30.0, 120.0])
def test_a_cut_costs_what_it_covers(
    federation: Deployment, net: Network, seconds: float
):
    """The round in flight is lost, and those for which nobody waits any longer."""
    earlier = federation.num_runs()
    process = federation.run(
        JOBS / "private.toml", "rounds=10", "schedule.max_lost_rounds=8"
    )
    wait_for(
        lambda: federation.num_runs() > earlier and federation.rounds() >= 2, "rounds"
    )
    net.pull([SITES[1]])
    CLOCK.sleep(seconds)
    net.plug([SITES[1]])
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

"""How long `up` waits for an aggregator on this host, and what it reports meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloud_adapters.compute.pool import Node, NodeState
from deploy.fleet import spec
from deploy.fleet.local_parties import await_service
from deploy.fleet.state import Deployment
from federation.clock import VirtualClock
from federation.errors import ComputeError

JOB = Path(__file__).parents[3] / "jobs" / "quickstart.toml"
FILE = f'name = "fed"\njob = "{JOB}"\n[[sites]]\nname = "aws-us-east-1"\n'


@dataclass
class Host:
    """This host, whose aggregator is as a test says from some time on."""

    clock: VirtualClock
    changes: Mapping[float, Mapping[str, Any]]
    log_text: str = "first\nlast\n"
    told: list[str] = field(default_factory=list)

    def nodes(self, _labels: Mapping[str, str]) -> Sequence[Node]:
        found: dict[str, Any] = {"state": NodeState.RUNNING, "ready": False}
        for since, change in self.changes.items():
            if self.clock.monotonic() >= since:
                found |= change
        old = Node(
            id="a-0",
            name="a",
            labels={},
            launched=0.0,
            state=NodeState.GONE,
            trouble="old",
        )
        return [old, Node(id="a-1", name="a", labels={}, launched=1.0, **found)]

    def log(self, node_id: str) -> str:
        return self.log_text * (node_id == "a-1")


def awaited(tmp_path: Path, serves_after: float, **changes: Any) -> Host:
    path, clock = tmp_path / "fed.toml", VirtualClock(0.0)
    path.write_text(FILE)
    host = Host(clock, {float(at[1:]): change for at, change in changes.items()})
    deployment = Deployment(
        plan=spec.load(path), pools={"local": host}, clock=clock, owner=""
    )

    def trouble_of() -> str | None:
        return None if clock.monotonic() >= serves_after else "it is not there"

    await_service(deployment, trouble_of, host.told.append)
    return host


def test_what_keeps_an_aggregator_from_its_work_is_told_at_once(tmp_path: Path):
    """Once, and before it is known whether it will serve."""
    again = {"trouble": "program ended with 1; again in 2 s: sites.json"}
    before = {"trouble": "program ended with 1: sites.json"}
    host = awaited(tmp_path, 30.0, t4=before, t8=again)
    first, ready = host.told
    assert first == "aggregator: program ended with 1: sites.json"
    assert ready.startswith("aggregator: ready after 30.")


def test_an_aggregator_that_has_ended_is_not_awaited(tmp_path: Path):
    gone = {"state": NodeState.GONE, "trouble": "its 1.8 s were over"}
    words = (
        r"ended before it served: its 1\.8 s were over\. Its log ends:\nfirst\nlast$"
    )
    with pytest.raises(ComputeError, match=words):
        awaited(tmp_path, 30.0, t2=gone)


def test_an_aggregator_that_does_not_serve_is_given_up(tmp_path: Path):
    with pytest.raises(ComputeError, match="after 60 s: it is not"):
        awaited(tmp_path, 90.0)

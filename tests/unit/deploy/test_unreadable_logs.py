"""A log that cannot be read is a word: no start, wait or watch ends with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cloud_adapters.compute.pool import Node, NodeState
from deploy.fleet import cloud_sites, spec
from deploy.fleet.state import Deployment
from federation.clock import VirtualClock
from federation.errors import ComputeError, ComputeForbidden, ComputeUnavailable

JOB = Path(__file__).parents[3] / "jobs" / "quickstart.toml"
FILE = f"""
name = "fed"
job = "{JOB}"
[[sites]]
name = "aws-us-east-1"
provider = "aws"
machine.region = "us-east-1"
machine.type = "p3.2xlarge"
"""
NODE = Node(id="i-1", name="site-a", state=NodeState.RUNNING, labels={}, launched=1.7e9)


@dataclass
class Cloud:
    """One whose consoles cannot be read."""

    error: ComputeError
    node: Node = NODE

    def nodes(self, _labels: Mapping[str, str]) -> Sequence[Node]:
        return [self.node]

    def log(self, _: str) -> str:
        raise self.error


@pytest.mark.parametrize("kind", [ComputeError, ComputeForbidden, ComputeUnavailable])
def test_a_machine_is_awaited_though_its_console_cannot_be_read(
    tmp_path: Path, kind: type[ComputeError]
):
    """It works; and if it ends, its end is named, not the console."""
    path, clock = tmp_path / "fed.toml", VirtualClock(1.7e9)
    path.write_text(FILE)
    plan, cloud = spec.load(path), Cloud(kind("pods/log is forbidden"))
    (site,) = plan.file.sites
    deployment = Deployment(plan=plan, pools={site.pool: cloud}, clock=clock, owner="")
    wait = cloud_sites._EnrolmentWait(deployment, site, NODE)
    for _ in range(3):
        clock.sleep(20.0)
        wait.check(wait.look(deployment.listed()), "it has not enrolled yet")
    cloud.node = replace(NODE, state=NodeState.GONE)
    with pytest.raises(ComputeError, match=r"has ended.*\n.*pods/log") as caught:
        wait.check(wait.look(deployment.listed()), "preempted")
    assert type(caught.value) is ComputeError

"""The pod of a head that has to end: SIGTERM, and 30 seconds until it is killed."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.deployment import wait_for

from cloud_adapters.compute import kube_manifest
from cloud_adapters.compute.local import LocalPool
from cloud_adapters.compute.pool import Node, NodeSpec, NodeState
from deploy.cli.up_verb import as_head
from deploy.fleet import kubernetes_head, spec as fleet_spec, state
from deploy.fleet.reconcile import AGGREGATOR, NodeRole, labels
from deploy.fleet.spec import DeploymentPlan
from federation.clock import SystemClock, VirtualClock

JOBS = Path(__file__).parents[3] / "jobs"
# Two programs of the image, without what makes them slow to start.
FILES = "#!/bin/sh\n"
UP = """#!/bin/sh
trap 'sleep 0.1; echo stopped; exit 1' TERM
echo works
while :; do sleep 0.02; done
"""


@pytest.fixture
def plan(tmp_path: Path) -> DeploymentPlan:
    path = tmp_path / "fed.toml"
    job = JOBS / "quickstart.toml"
    path.write_text(f'name = "fed"\njob = "{job}"\n[[sites]]\nname = "aws-us-east-1"\n')
    return fleet_spec.load(path)


def aggregator(plan: DeploymentPlan) -> tuple[LocalPool, Node]:
    """The node of an aggregator that does nothing."""
    pool = state.local_pool(plan, SystemClock())
    spec = NodeSpec(
        name=AGGREGATOR,
        command=["sleep", "60"],
        labels=labels("fed", "owner", NodeRole(name=AGGREGATOR, settings="0"), 1),
        max_seconds=60.0,
    )
    return pool, pool.launch(spec, "token")


def terminated() -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigtimedwait([], 10.0)
    return 0


def test_the_aggregator_of_a_head_stops_before_its_pod_is_killed(
    plan: DeploymentPlan, capsys: pytest.CaptureFixture[str]
):
    """And the code is not 0, with which the cluster would not replace the pod."""
    pool, _ = aggregator(plan)
    before = signal.getsignal(signal.SIGTERM)
    assert as_head(plan, SystemClock(), terminated) == 143
    (node,) = pool.nodes({})
    assert node.state is NodeState.GONE
    assert signal.getsignal(signal.SIGTERM) is before
    told = capsys.readouterr().err
    assert "aggregator has stopped" in told
    assert "next head resumes" in told


def test_an_aggregator_that_does_not_stop_in_time_is_named(
    plan: DeploymentPlan, tmp_path: Path
):
    """Its pod is killed, and says so before."""
    told: list[str] = []
    pool, node = aggregator(plan)
    (started,) = tmp_path.rglob("started.json")
    process = json.loads(started.read_text())["pid"]
    os.kill(process, signal.SIGSTOP)
    try:
        kubernetes_head.stop_aggregator(pool, "fed", VirtualClock(0.0), told.append)
    finally:
        os.kill(process, signal.SIGCONT)
    assert f"aggregator ended not within 25 s: aggregator ({node.id})" in told[1]
    assert "killed with the pod" in told[1]
    assert kubernetes_head.STOP_SECONDS < kube_manifest.GRACE_SECONDS
    wait_for(lambda: pool.nodes({})[0].state is NodeState.GONE, "its node has ended")


def test_a_head_without_an_aggregator_ends(plan: DeploymentPlan):
    told: list[str] = []
    pool = state.local_pool(plan, SystemClock())
    kubernetes_head.stop_aggregator(pool, "fed", SystemClock(), told.append)
    assert "stopped after 0.0 s" in told[1]


def test_a_head_that_is_done_has_the_code_of_its_work(plan: DeploymentPlan):
    assert as_head(plan, SystemClock(), lambda: 3) == 3


def test_a_pod_waits_for_its_programs_when_it_has_to_end(tmp_path: Path):
    """The first process of a container ignores SIGTERM unless it handles it."""
    for name, text in (("python", FILES), ("crossfed", UP)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shell, option, script = kubernetes_head.head_command("")
    script = script.replace(kubernetes_head.HEAD_FOLDER, str(tmp_path / "fed"))
    log = tmp_path / "log"
    with log.open("wb") as out:
        pod = subprocess.Popen(
            [shell, option, script],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            stdout=out,
        )
    wait_for(lambda: "works" in log.read_text(), "the head is at work", 30)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(30) == 143
    assert log.read_text() == "works\nstopped\n"

"""What every compute service promises.

Nodes of this host run programs here; those of clouds run none in a test, so what their
programs do is tested on this host alone.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.api_core.retry import Retry

from cloud_adapters.compute.local import LocalPool
from cloud_adapters.compute.pool import (
    ComputePool,
    Market,
    Node,
    NodeLimits,
    NodeSpec,
    NodeState,
    all_gone,
    wait_for,
)
from federation.clock import SystemClock
from federation.errors import ComputeError

CLOCK = SystemClock()
LABELS = {"crossfed-deployment": "contract", "crossfed-role": "site-a"}

# Says that it runs, and then does until it is asked to end.
WAITS = "import signal; print('it runs', flush=True); signal.pause()"


# Machines that the fakes know.
MACHINES: Mapping[str, Mapping[str, object]] = {
    "local": {},
    "ec2": {
        "machine": "m5.large",
        "zones": ("us-east-1b", "us-east-1a"),
        "image": "/aws/service/ami-amazon-linux-latest/"
        "al2023-ami-kernel-default-x86_64",
    },
    "gce": {
        "machine": "e2-standard-4",
        "zones": ("europe-west4-b", "europe-west4-a"),
        "image": "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
    },
    "kube": {
        "machine": "e2-standard-4",
        "zones": ("europe-west4-b", "europe-west4-a"),
        "image": f"registry.example.org/crossfed-site@sha256:{'ab' * 32}",
        "limits": NodeLimits(cpus=2, memory_gb=4.0, gpus=1),
    },
}


# Whether nodes that are gone are listed.
REMEMBERED: Mapping[str, int] = {
    "local": 1,
    "ec2": 1,
    "gce": 0,
    "kube": 1,
}


# Requests of a launch, at least.
LAUNCH_REQUESTS = {"ec2": 4, "gce": 4, "kube": 3}


class Spec:
    """Makes nodes that wait, as one service knows them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, **changed: object) -> NodeSpec:
        given: dict[str, object] = {
            "name": "site-a",
            "command": [sys.executable, "-c", WAITS],
            "labels": LABELS,
            "max_seconds": 600.0,
            **MACHINES[self.kind],
            **changed,
        }
        return NodeSpec(**given)  # type: ignore[arg-type]


PROCESSES = {"local"}


@pytest.fixture(
    params=[
        pytest.param(kind, marks=[pytest.mark.slow] * (kind in PROCESSES))
        for kind in MACHINES
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    """A service."""
    name: str = request.param
    return name


@pytest.fixture
def spec(kind: str) -> Spec:
    """What it is asked for."""
    return Spec(kind)


@pytest.fixture
def pool(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[ComputePool]:
    """The service; whatever it has launched is ended."""
    found: Any
    if kind in PROCESSES:
        found = LocalPool(
            folder=tmp_path / "nodes", working_folder=tmp_path, clock=CLOCK
        )
    else:
        found = request.getfixturevalue(f"{kind}_server").pool()
    yield found
    found.terminate([node.id for node in found.nodes({})])
    wait_for(found, {}, all_gone, what="all ended", seconds=60, clock=CLOCK)
    found.clean_up()


# Real processes take a second to start and to end; the fakes that are slow say so.
HERE = [pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(PROCESSES)]
ON_THIS_HOST = pytest.mark.parametrize("kind", HERE, indirect=True)


def eventually(
    pool: ComputePool, holds: Callable[[Node], bool], what: str = "it holds"
) -> Node:
    """Wait for the only node."""
    (node,) = wait_for(
        pool,
        LABELS,
        lambda nodes: len(nodes) == 1 and holds(nodes[0]),
        what=what,
        seconds=60,
        clock=CLOCK,
    )
    return node


def test_a_node_is_found_as_it_was_launched(pool: ComputePool, spec: Spec):
    """By any of its labels, with all that it was launched with."""
    begin = CLOCK.now()
    node = pool.launch(spec(market=Market.SPOT), "one")
    running = eventually(pool, lambda found: found.state is NodeState.RUNNING)
    assert running.id == node.id
    assert running.name == "site-a"
    assert running.market is Market.SPOT
    assert running.machine == spec().machine
    assert running.zone == (*spec().zones, "")[0]
    assert running.labels.items() >= LABELS.items()
    assert begin - 1 <= running.launched <= CLOCK.now() + 1
    assert running.ended is None
    assert running.seconds(running.launched + 5) == 5
    assert running.trouble == ""


@ON_THIS_HOST
def test_a_node_runs_its_program(pool: ComputePool, spec: Spec):
    """Whose output is in the log."""
    node = pool.launch(spec(), "one")
    wait_for(
        pool,
        LABELS,
        lambda _: "it runs" in pool.log(node.id),
        what="it says so",
        seconds=60,
        clock=CLOCK,
    )


def test_a_token_launches_one_node(pool: ComputePool, spec: Spec):
    """Also when several ask for it at once; another token launches another."""
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: pool.launch(spec(), "one").id, range(8)))
    assert len(set(found)) == 1
    assert len(pool.nodes(LABELS)) == 1
    assert pool.launch(spec(), "two").id not in found
    assert len(pool.nodes(LABELS)) == 2


def test_a_token_launches_one_node_whatever_is_asked_for(pool: ComputePool, spec: Spec):
    """A command that is repeated may know other settings, or a smaller budget."""
    node = pool.launch(spec(), "one")
    other = spec(
        max_seconds=300.0, user_data="#x\n", labels={**LABELS, "crossfed-settings": "2"}
    )
    again = pool.launch(other, "one")
    assert again.id == node.id
    assert "crossfed-settings" not in again.labels
    assert len(pool.nodes(LABELS)) == 1
    pool.terminate([node.id])
    wait_for(pool, LABELS, all_gone, what="it has ended", seconds=60, clock=CLOCK)
    assert pool.launch(other, "one").state is NodeState.GONE


def test_a_token_of_a_node_that_has_ended_launches_none(pool: ComputePool, spec: Spec):
    """It says that the node is gone; whoever wants another takes another token."""
    node = pool.launch(spec(), "one")
    pool.terminate([node.id])
    wait_for(pool, LABELS, all_gone, what="it has ended", seconds=60, clock=CLOCK)
    assert len(pool.nodes(LABELS)) == REMEMBERED[spec.kind]
    assert pool.launch(spec(), "one").state is NodeState.GONE
    assert all_gone(pool.nodes(LABELS))


def test_nodes_are_found_by_all_the_labels(pool: ComputePool, spec: Spec):
    """One that lacks a label, or has another value of it, is not."""
    node = pool.launch(spec(), "one")
    assert [each.id for each in pool.nodes({"crossfed-role": "site-a"})] == [node.id]
    assert pool.nodes({**LABELS, "crossfed-role": "site-b"}) == []
    assert pool.nodes({**LABELS, "crossfed-owner": "x"}) == []


def test_terminating_is_harmless_when_there_is_nothing_to_end(
    pool: ComputePool, spec: Spec
):
    """Ids that are unknown or gone are left alone, and others live on."""
    first, second = pool.launch(spec(), "one"), pool.launch(spec(), "two")
    pool.terminate([])
    pool.terminate(["no-such-node", first.id])
    pool.terminate([first.id])
    wait_for(
        pool,
        LABELS,
        lambda nodes: all_gone([node for node in nodes if node.id == first.id]),
        what="one has ended",
        seconds=60,
        clock=CLOCK,
    )
    pool.terminate([first.id])
    states = {node.id: node.state for node in pool.nodes(LABELS)}
    assert len(states) == 1 + REMEMBERED[spec.kind]
    assert states.pop(first.id, NodeState.GONE) is NodeState.GONE
    assert states == {second.id: NodeState.RUNNING}


@ON_THIS_HOST
def test_a_node_ends_by_itself(pool: ComputePool, spec: Spec):
    """After its time, though nobody is there to end it; it is paid for no longer."""
    node = pool.launch(spec(max_seconds=0.5), "one")
    gone = eventually(pool, lambda found: found.state is NodeState.GONE)
    assert gone.id == node.id
    assert gone.ended is not None
    assert 0.5 <= gone.seconds(CLOCK.now() + 1000) < 60


def test_waiting_in_vain_names_the_nodes(pool: ComputePool, spec: Spec):
    """And what they do instead."""
    node = pool.launch(spec(), "one")
    with pytest.raises(ComputeError, match=rf"they end not within 0 s: .*{node.id}"):
        wait_for(pool, LABELS, all_gone, what="they end", seconds=0, clock=CLOCK)


def test_log_of_no_node_is_empty(pool: ComputePool):
    """Whoever asks may have an old id."""
    assert pool.log("no-such-node") == ""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["ec2", "gce", "kube"], indirect=True)
def test_a_command_that_dies_at_any_request_can_be_repeated(
    kind: str, when: str, spec: Spec, request: pytest.FixtureRequest
):
    """It launches one node, and ends every one; whatever was carried out before."""
    server = request.getfixturevalue(f"{kind}_server")

    def dies(number: int, work: Callable[[ComputePool], object]) -> bool:
        """Do it with one request failing, then without; whether there is such a one."""
        pool = server.pool()
        if kind == "gce":
            pool = dataclasses.replace(pool, retry=Retry(predicate=lambda _: False))
        if kind == "kube":
            pool = dataclasses.replace(pool, tries=1)
        was_cut = server.cut(number, when)
        with contextlib.suppress(ComputeError):
            work(pool)
        found = was_cut()
        server.mend()
        if found:
            work(pool)
        return found

    def alive() -> list[str]:
        nodes = server.pool().nodes(LABELS)
        return [node.id for node in nodes if node.state is not NodeState.GONE]

    launches, ends = 0, 0
    while dies(launches + 1, lambda pool: pool.launch(spec(), "one")):
        launches += 1
        (found,) = alive()
        more = dies(ends + 1, lambda pool: pool.terminate([found]))  # noqa: B023
        ends += more
        assert alive() == []
        server.clear()
    assert launches >= LAUNCH_REQUESTS[kind]
    assert ends >= 2

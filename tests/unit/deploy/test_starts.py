"""Machines whose sites cannot start are reported, and not replaced without end."""

from dataclasses import replace

import pytest

from cloud_adapters.compute.pool import Node, NodeState
from deploy.fleet.boot_status import Starts
from federation.clock import VirtualClock
from federation.errors import ComputeUnavailable

ROLE = "site-a"
FAILED = "pip: no such version\ncrossfed: the site was not started: line 9 failed"
READY = "crossfed: site: it is ready"


class Machines:
    """Machines of one site, one after the other, and what they have said."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1.7e9)
        self.told: list[str] = []
        self.logs: dict[str, str] = {}
        self.starts = Starts(
            lambda node: self.logs[node.id],
            role="role",
            clock=self.clock,
            tell=self.told.append,
        )
        self.number = 0

    def start(self, log: str = "") -> Node:
        self.number += 1
        node = Node(
            id=f"i-{self.number}",
            name=ROLE,
            state=NodeState.RUNNING,
            labels={"role": ROLE},
            machine="g5.xlarge",
            launched=self.clock.now(),
        )
        self.logs[node.id] = log
        self.look(node)
        return node

    def look(self, *nodes: Node) -> None:
        self.clock.sleep(20.0)
        self.starts.look(nodes)


@pytest.fixture
def machines() -> Machines:
    return Machines()


def test_a_start_that_fails_is_reported_with_its_console(machines: Machines):
    """Once, while the machine is still there: some services then forget it."""
    node = machines.start(FAILED)
    machines.look(node)
    (line,) = machines.told
    assert line.startswith(f"{ROLE}: its machine i-1 could not start the site")
    assert "pip: no such version" in line
    assert machines.starts.failed == {ROLE: 1}


def test_a_machine_that_goes_before_it_is_ready_is_reported(machines: Machines):
    """With the last that was heard of it, though it is no longer listed."""
    machines.start("cloud-init: begins\n")
    machines.logs["i-1"] = ""
    machines.look()
    (line,) = machines.told
    assert "i-1 has ended before" in line
    assert "cloud-init: begins" in line


def test_pauses_grow_with_every_start_that_fails(machines: Machines):
    """Also when each launch succeeds."""
    pauses = []
    for _ in range(8):
        machines.start()
        machines.look()
        waited = 0.0
        while not machines.starts.may_replace(ROLE):
            machines.clock.sleep(1.0)
            waited += 1.0
        pauses.append(waited)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 5.0
    assert pauses[-1] == 300.0
    machines.start(READY)
    machines.start()
    machines.look()
    assert machines.starts.failed == {ROLE: 1}


def test_no_more_are_launched_after_three_that_say_that_they_failed(
    machines: Machines,
):
    """The fourth would fail like them. Machines that were taken back say nothing."""
    for _ in range(3):
        assert not machines.starts.is_given_up(ROLE)
        machines.start(FAILED)
        machines.look()
    machines.clock.sleep(1e6)
    assert machines.starts.is_given_up(ROLE)
    assert not machines.starts.may_replace(ROLE)
    assert "no more are launched" in machines.told[-1]


def test_a_console_that_cannot_be_read_stops_nothing():
    """That is said once."""
    told: list[str] = []

    def refuse(_: Node) -> str:
        raise ComputeUnavailable("cannot read the console of i-1")

    clock = VirtualClock()
    starts = Starts(refuse, role="role", clock=clock, tell=told.append)
    node = Node(
        id="i-1",
        name=ROLE,
        state=NodeState.STARTING,
        labels={},
        machine="m5.large",
        launched=0.0,
    )
    for _ in range(2):
        starts.look([node])
        clock.sleep(20.0)
    assert told == [f"{ROLE}: cannot read the console of i-1"]


CONNECTED = "crossfed: connected to a.example:8443 as node 7\n"


class Pods(Machines):
    """Pods of one site, of whose programs the cluster says how they ended."""

    def end(
        self,
        *,
        failed: bool = True,
        finished: bool = False,
        log: str = "",
        seconds: float = 0.0,
    ) -> None:
        """Start one, and have it end."""
        node = replace(self.start(log), machine="")
        self.clock.sleep(seconds)
        gone = replace(node, state=NodeState.GONE, failed=failed, finished=finished)
        self.look(gone)


@pytest.fixture
def pods() -> Pods:
    return Pods()


def test_a_pod_whose_program_fails_is_not_launched_without_end(pods: Pods):
    """Three failures are enough; one that is evicted, or told to end, is none."""
    for failed in (True, False, True):
        pods.end(failed=failed)
    assert not pods.starts.is_given_up(ROLE)
    pods.end()
    assert pods.starts.is_given_up(ROLE)
    assert "no more are launched" in pods.told[-1]
    assert "i-1 could not start the" in pods.told[0]
    assert "i-2 has ended before" in pods.told[1]
    assert pods.starts.not_started == [ROLE]


def test_a_pod_that_connects_and_fails_again_and_again_is_given_up(pods: Pods):
    """Each of them was ready, which would forgive a start that has failed."""
    for _ in range(3):
        assert not pods.starts.is_given_up(ROLE)
        pods.end(log=CONNECTED)
    assert "its machine i-3 failed" in pods.told[-2]
    assert pods.starts.not_started == []
    assert pods.starts.is_given_up(ROLE)


@pytest.mark.parametrize("log", [CONNECTED, ""])
def test_a_pod_that_ends_with_0_again_and_again_is_given_up(pods: Pods, log: str):
    """Nobody has asked it to end, and the next one would end, too."""
    for _ in range(3):
        assert not pods.starts.is_given_up(ROLE)
        pods.end(failed=False, finished=True, log=log)
    assert pods.starts.is_given_up(ROLE)


def test_a_pod_that_fails_before_anyone_looks_counts(pods: Pods):
    """Only if this command launched it: a cluster lists those of before for a day."""
    gone = Node(
        id="old",
        name=ROLE,
        state=NodeState.GONE,
        labels={"role": ROLE},
        launched=pods.clock.now(),
        failed=True,
        trouble="its program ended with 3 (Error)",
    )
    pods.logs = dict.fromkeys(("old", "new"), "no module named x")
    pods.look(gone)
    assert pods.starts.failed == {}
    pods.look(gone, replace(gone, id="new"))
    assert pods.starts.failed == {ROLE: 1}
    (line,) = pods.told
    assert "new could not start" in line
    assert "(its program ended with 3 (Error))" in line
    assert "no module named x" in line

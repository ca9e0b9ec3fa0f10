"""The seam to machines: what a cloud's compute service is asked for.

A node is one machine, on this host one process, and in a cluster one job. Nothing here
remembers a node: its labels do: if all else is lost, it is found by them and ended.

Implementations: ``local``, ``ec2``, ``gce`` and ``kube_jobs``, beside
this module. The contract suite is ``tests/contract/test_compute_pool.py``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cloud_adapters.compute.refusals import PASSING
from federation.errors import ComputeError

if TYPE_CHECKING:  # It brings numpy, and a process that waits is to be small.
    from federation.protocols import Clock

_LOOK_SECONDS = 0.1
_MOST_LOOK_SECONDS = 5.0


class Market(StrEnum):
    """How a machine is paid: spot is cheaper, and the cloud may take it back."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"


class NodeState(StrEnum):
    """What a node does. Only one that is gone costs nothing."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    GONE = "gone"

    @property
    def works(self) -> bool:
        """Whether the node works, or will when it has started."""
        return self in {NodeState.STARTING, NodeState.RUNNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """What a node that shares a machine may use, and is sure to get.

    Attributes:
        cpus: Number of CPUs.
        memory_gb: Memory, in GiB.
        gpus: Number of GPUs.
    """

    cpus: int
    memory_gb: float
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A machine to launch.

    Attributes:
        name: What people call it; letters, digits and hyphens.
        command: Program and arguments that a node of this host or of a cluster runs
            until it ends. No secrets: other users of the machine can read them.
        environment: Variables of the command, in addition to those of the machine. No
            secrets, either.
        user_data: What a machine of a cloud does when it starts, for cloud-init; see
            ``deploy.fleet.bootstrap``. In a cluster, the text of the file
            ``kube_manifest.USER_DATA``. No secrets: anyone who may describe the
            machine can read it, and so can every program on it.
        labels: By what it is found again; a few, each short.
        max_seconds: After so long the node ends by itself, with nobody's help.
        machine: Type of machine, for example ``g5.xlarge``; empty on this host.
        zones: Where it may run, the best first; empty on this host.
        market: How it is paid.
        accelerator: Type of the GPUs to attach to it, on Google Cloud; empty for those
            that its type has.
        gpus: Number of its GPUs.
        image: What it starts from, by the cloud's name for it.
        disk_gb: Size of its encrypted disk.
        disk_key: Key of the cloud's key service that encrypts it; empty for the key
            that the cloud takes.
        identity: Who its programs are to the cloud: an instance profile or the address
            of a service account. Empty for none.
        subnets: Where it is connected: one in each zone on AWS, one of the region on
            Google Cloud. Empty for the account's default ones.
        firewalls: What filters its traffic: ids of security groups, or network tags.
        limits: What a node of a cluster may use; None for all of its machine.
    """

    name: str
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str]
    max_seconds: float
    machine: str = ""
    zones: Sequence[str] = ()
    market: Market = Market.ON_DEMAND
    accelerator: str = ""
    gpus: int = 0
    user_data: str = ""
    image: str = ""
    disk_gb: int = 50
    disk_key: str = ""
    identity: str = ""
    subnets: Sequence[str] = ()
    firewalls: Sequence[str] = ()
    limits: NodeLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that was launched.

    Attributes:
        id: How the service knows it.
        name: What people call it.
        state: What it does.
        labels: As launched.
        machine: Type of machine.
        zone: Where it runs.
        market: How it is paid.
        launched: When it was, in seconds since 1970.
        ended: When it ended; None if it has not, or if that is unknown.
        trouble: What keeps it from working, as far as is known; empty if nothing is.
        ready: Whether its program has said that it is ready; None if this host
            cannot know.
        failed: Whether its service says that it ended by itself, and too early: its
            program with an error, or a machine that has shut itself down. It was
            neither ended by a command nor preempted.
        finished: Whether its service says that its program ended by itself, without an
            error.
    """

    id: str
    name: str
    state: NodeState
    labels: Mapping[str, str]
    machine: str = ""
    zone: str = ""
    market: Market = Market.ON_DEMAND
    launched: float
    ended: float | None = None
    trouble: str = ""
    ready: bool | None = None
    failed: bool = False
    finished: bool = False

    def seconds(self, now: float) -> float:
        """How long it has been paid for by a time."""
        return max(0.0, (now if self.ended is None else self.ended) - self.launched)


def gone(spec: NodeSpec, node_id: str) -> Node:
    """A node of which its service knows only that it has ended."""
    return Node(
        id=node_id,
        name=spec.name,
        state=NodeState.GONE,
        labels=spec.labels,
        machine=spec.machine,
        market=spec.market,
        launched=0.0,
        ended=0.0,
    )


class ComputePool(Protocol):
    """A compute service in one account and region.

    Every method may raise a ``ComputeError`` whose class says what a person can do.
    """

    def launch(self, spec: NodeSpec, token: str) -> Node:
        """Launch a node; the same token never launches a second one.

        Zones are tried in their order.

        Args:
            spec: The node.
            token: Names this launch. A caller who does not know whether a launch
                succeeded repeats it with the same token, and gets the node.

        Raises:
            NoCapacity: No zone has such a machine now.
        """
        ...

    def nodes(self, labels: Mapping[str, str]) -> Sequence[Node]:
        """Find nodes that carry all these labels, the oldest first.

        Nodes that are gone are listed for as long as the service remembers them, and
        one whose labels cannot be read as if it carried these.
        """
        ...

    def terminate(self, ids: Collection[str]) -> None:
        """Ask nodes to end, with the notice that the machine gives its programs.

        Returns immediately; ``wait_for`` waits. Those that are gone or unknown are
        ignored.
        """
        ...

    def log(self, node_id: str) -> str:
        """Return the last lines that a node's console or program wrote, 64 KiB at most.

        Empty if the service has none.
        """
        ...

    def clean_up(self) -> None:
        """Remove what nodes that are gone have left, other than their logs.

        Of a service that removes it by itself there is nothing to do.
        """
        ...


def log_of(pool: ComputePool, node_id: str) -> str:
    """What a node has written, or why that cannot be read: no reason to end."""
    try:
        return pool.log(node_id)
    except ComputeError as error:
        return f"(no log: {error})"


@runtime_checkable
class RoutedPool(Protocol):
    """A compute service whose machines need a way out of their subnets: a cloud's."""

    def check_route(self, spec: NodeSpec) -> None:
        """Refuse a machine that could reach nothing beyond its network.

        What surely leads nowhere is refused; a route may still lead to nothing, and
        firewalls are not looked at.

        Args:
            spec: Its zones and subnets count.

        Raises:
            MachineRefused: The message names the subnet and what to add.
            ComputeForbidden: The credentials may not look at networks.
        """
        ...


def wait_for(
    pool: ComputePool,
    labels: Mapping[str, str],
    holds: Callable[[Sequence[Node]], bool],
    *,
    what: str,
    seconds: float,
    clock: "Clock",
) -> Sequence[Node]:
    """Wait until something holds of the nodes that carry labels.

    Passing faults of the service are outlasted.

    Args:
        pool: The service.
        labels: Which nodes.
        holds: What to wait for.
        what: The same in words, for the message.
        seconds: How long.
        clock: Tells time.

    Returns:
        The nodes as they were then.

    Raises:
        ComputeError: It did not come to hold in time, or the service failed.
    """
    deadline = clock.monotonic() + seconds
    pause = _LOOK_SECONDS
    while True:
        is_over = clock.monotonic() >= deadline
        try:
            found = pool.nodes(labels)
        except PASSING:
            if is_over:
                raise
        else:
            if holds(found):
                return found
            if is_over:
                states = ", ".join(
                    f"{node.name} ({node.id}): {node.state}" for node in found
                )
                raise ComputeError(
                    f"{what} not within {seconds:g} s: "
                    f"{states or 'there is no such node'}"
                )
        clock.sleep(pause)
        pause = min(1.5 * pause, _MOST_LOOK_SECONDS)


def all_gone(nodes: Sequence[Node]) -> bool:
    """Whether none of some nodes is left to pay for."""
    return all(node.state is NodeState.GONE for node in nodes)

"""What has to happen so that the nodes that run become those that are wanted.

Pure: nodes in, decisions out. Their executor may be killed at any moment;
the same question is then asked again.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cloud_adapters.compute.pool import Node, NodeState
from federation.errors import ComputeError

DEPLOYMENT = "crossfed-deployment"
OWNER = "crossfed-owner"
ROLE = "crossfed-role"
NUMBER = "crossfed-number"
SETTINGS = "crossfed-settings"

AGGREGATOR = "aggregator"
SITE_PREFIX = "site-"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRole:
    """A node that is wanted.

    Attributes:
        name: ``aggregator``, or ``site-`` and the site's name.
        settings: Digest of all that the node reads when it starts.
    """

    name: str
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do for one role.

    Attributes:
        node: The node that fills it; None if one must be launched.
        number: The number to launch it with, if there is none.
        end: Nodes to end first.
    """

    role: NodeRole
    node: Node | None
    number: int
    end: Sequence[Node] = ()


def check_owner(nodes: Iterable[Node], owner: str, deployment: str) -> None:
    """Refuse to touch what another folder has started.

    Raises:
        ComputeError: A node that is not gone has another owner.
    """
    others = [
        node
        for node in nodes
        if node.state is not NodeState.GONE and node.labels.get(OWNER) != owner
    ]
    if others:
        names = ", ".join(f"{node.name} ({node.trouble or node.id})" for node in others)
        raise ComputeError(
            f"deployment {deployment!r} was brought up from another folder: {names}. "
            "Use that folder or choose another name; if the folder is lost, end these "
            "with crossfed down --any-owner"
        )


def check_first(nodes: Iterable[Node], owner: str, deployment: str) -> None:
    """Refuse to share a name with a folder that has launched under it before.

    Two commands may start together in two folders: neither finds a node, and each
    launches its own. Who has the oldest node keeps the name; of two as old, one of
    them. So all come to the same answer, as soon as they see both.

    Raises:
        ComputeError: The oldest node that is not gone has another owner.
    """
    alive = [node for node in nodes if node.state is not NodeState.GONE]
    first = min(alive, key=_age, default=None)
    if first is not None and first.labels.get(OWNER) != owner:
        raise ComputeError(
            f"deployment {deployment!r} is brought up from another folder at the same "
            f"time, which was first: {first.name} ({first.id}). Use that folder or "
            "choose another name"
        )


def _age(node: Node) -> tuple[float, str, str]:
    return node.launched, node.labels.get(OWNER, ""), node.id


def roles(sites: Iterable[str]) -> Collection[str]:
    """Roles of a deployment that need a node each, given the names of its sites."""
    return {AGGREGATOR, *(f"{SITE_PREFIX}{name}" for name in sites)}


def unwanted(nodes: Iterable[Node], wanted: Collection[str]) -> Sequence[Node]:
    """Nodes of roles that are not wanted, and that are not gone.

    Args:
        nodes: Nodes of the deployment.
        wanted: Names of roles; none are to end all nodes.
    """
    return [
        node
        for node in nodes
        if node.state is not NodeState.GONE and node.labels.get(ROLE) not in wanted
    ]


def decide(
    role: NodeRole,
    nodes: Sequence[Node],
    launched: int,
) -> Decision:
    """Decide what to do for a role.

    The number of a launch is written down before the launch. So if no node carries
    the last number, it is unknown whether the service got the request: it is repeated
    with the same number, of which the service launches one node at most.

    Args:
        role: Has the settings that its node must have.
        nodes: All nodes that are known, of every role.
        launched: The last number that a node of this role was launched with, as
            written down; 0 for none.
    """
    ours = [node for node in nodes if node.labels.get(ROLE) == role.name]
    numbers = {node.id: _number(node) for node in ours}
    highest = max([launched, *numbers.values()])
    alive = [node for node in ours if node.state.works]
    fitting = [node for node in alive if node.labels.get(SETTINGS) == role.settings]
    kept = max(fitting, key=lambda node: numbers[node.id], default=None)
    end = tuple(node for node in alive if node is not kept)
    if kept is not None:
        return Decision(role=role, node=kept, number=numbers[kept.id], end=end)
    is_unknown = highest > 0 and highest not in numbers.values()
    number = highest if is_unknown else highest + 1
    return Decision(role=role, node=None, number=number, end=end)


def labels(
    deployment: str, owner: str, role: NodeRole, number: int
) -> Mapping[str, str]:
    """Labels of a node."""
    return {
        DEPLOYMENT: deployment,
        OWNER: owner,
        ROLE: role.name,
        NUMBER: str(number),
        SETTINGS: role.settings,
    }


def _number(node: Node) -> int:
    text = node.labels.get(NUMBER, "")
    return int(text) if text.isdecimal() else 0

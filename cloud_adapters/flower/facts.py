"""What a SuperLink says of runs and nodes; nothing of Flower is imported for it."""

from dataclasses import dataclass

from federation.errors import FederationError

# Nodes sign the time, and Flower takes no signature that is five minutes old.
MOST_SKEW_SECONDS = 240.0


class SuperLinkUnavailable(FederationError):
    """The SuperLink of this host cannot be reached, or refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerRun:
    """What the SuperLink says of a run.

    Attributes:
        is_over: Whether nothing of it runs any more.
        status: In Flower's words.
    """

    is_over: bool
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerNodeInfo:
    """What the SuperLink says of a node.

    Attributes:
        node_id: Its number.
        status: ``registered``, ``online`` or ``offline``.
        public_key: As it was registered.
    """

    node_id: int
    status: str
    public_key: bytes

"""A SuperLink's information on runs and nodes, without an import of Flower."""

from dataclasses import dataclass

from federation.errors import FederationError

# Nodes sign the time, and Flower takes no signature that is five minutes old.
MOST_SKEW_SECONDS = 240.0


class SuperLinkUnavailable(FederationError):
    """The SuperLink of this host cannot be reached, or refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerRun:
    """The SuperLink's information on a run.

    Attributes:
        is_over: Whether nothing of it runs any more.
        status: In Flower's words.
    """

    is_over: bool
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerNodeInfo:
    """The SuperLink's information on a node.

    Attributes:
        node_id: Its number.
        status: ``registered``, ``online`` or ``offline``.
        public_key: As it was registered.
    """

    node_id: int
    status: str
    public_key: bytes

"""Information on a SuperLink's runs and nodes, without an import of Flower."""

from collections.abc import Sequence
from dataclasses import dataclass

from federation.errors import FederationError

# Nodes sign the time. Flower takes no signature that is 305 s old, or of a time more
# than 5 s ahead of its own.
MOST_AHEAD_SECONDS, MOST_BEHIND_SECONDS = 4.0, 240.0


def forbids_signing(ahead_seconds: float) -> bool:
    """Whether Flower may refuse signatures by a clock so far ahead of its own."""
    return not -MOST_BEHIND_SECONDS <= ahead_seconds <= MOST_AHEAD_SECONDS


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """Which sites a coordinator has, and which it waits for.

    Attributes:
        there: Names of sites that take part.
        missing: Those that it waits for.
        seconds: For how long at most, from then on.
        absent: Of those that it waits for, the ones that are not connected.
        what: What waits for them, as a subject; empty before the run begins.
        revoked: Of those that it waits for, the ones that were revoked.
    """

    there: tuple[str, ...]
    missing: tuple[str, ...]
    seconds: float
    absent: tuple[str, ...] = ()
    what: str = ""
    revoked: tuple[str, ...] = ()

    def lack(self, site: str) -> str:
        """Name a site that is waited for, and what it lacks."""
        lacks = "not connected" if site in self.absent else "has not answered yet"
        lacks = "revoked" if site in self.revoked else lacks
        return f"{site} ({lacks}{f': {self.what} waits' if self.what else ''})"


def not_connected(sites: Sequence[str]) -> str:
    """Say that sites are not connected, and what to do."""
    verb, whose = ("is", "its agent") if len(sites) == 1 else ("are", "their agents")
    names = ", ".join(sites)
    return (
        f"{names} {verb} not connected: start {whose} with crossfed site up, or look "
        "in the log"
    )

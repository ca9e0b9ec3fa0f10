"""The matrix as data: who is struck, by what, in which kind of run.

Kinds of runs are those that differ in what a lost message costs. With differential
privacy models of two runs are never the same, since noise is drawn anew, and without it
there is no ledger: so runs in secret come in two kinds each.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Victim(StrEnum):
    """A role in the federation."""

    COORDINATOR = "coordinator"
    SUPERLINK = "superlink"
    PROXY = "proxy"
    SITE = "site"
    RANK = "rank"
    STORE = "store"


class Deed(StrEnum):
    """What befalls it."""

    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"
    LONG_CUT = "long-cut"
    FULL = "disk-full"
    RESTART = "restart"


class Mode(StrEnum):
    """Kind of a run; ``faults.jobs`` has a job for each."""

    PLAIN = "plain"
    P1 = "p1"  # All sites must answer; one exchange a round.
    P2 = "p2"  # Three of four sites must answer; three exchanges a round.
    P1_PRIVATE = "p1-private"  # With differential privacy, and so with ledgers.
    P2_PRIVATE = "p2-private"


# How long a deed lasts; none for what is over immediately.
SECONDS = {Deed.FREEZE: 30.0, Deed.CUT: 30.0, Deed.LONG_CUT: 120.0, Deed.FULL: 30.0}

_LOOPBACK = "it talks over the loopback of its host, which nobody can cut"
_PIPE = "it talks to its agent over a pipe and shared memory"

# Pairs that make no sense, and why.
SENSELESS = {
    (Victim.COORDINATOR, Deed.CUT): f"{_LOOPBACK}; for its way to the store see there",
    (Victim.COORDINATOR, Deed.LONG_CUT): _LOOPBACK,
    (Victim.SUPERLINK, Deed.CUT): f"{_LOOPBACK}; the proxy's way to the sites is cut",
    (Victim.SUPERLINK, Deed.LONG_CUT): _LOOPBACK,
    (Victim.RANK, Deed.CUT): _PIPE,
    (Victim.RANK, Deed.LONG_CUT): _PIPE,
    (Victim.RANK, Deed.FULL): "it writes no file",
}

# Runs that may end early, and what their message must then say.
ADVICE = {
    (Victim.SITE, Deed.FULL): "free some space",
    (Victim.STORE, Deed.FULL): "free space",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One entry of the matrix."""

    victim: Victim
    deed: Deed
    mode: Mode

    @property
    def name(self) -> str:
        """As it is called on the command line and in tables."""
        return f"{self.victim}/{self.deed}/{self.mode}"

    @property
    def senseless(self) -> str:
        """Why it cannot be; empty if it can."""
        return SENSELESS.get((self.victim, self.deed), "")

    @property
    def advice(self) -> str:
        """What a run that ends early must say; empty if it must not end early."""
        return ADVICE.get((self.victim, self.deed), "")

    @property
    def seconds(self) -> float:
        """How long the deed lasts."""
        return SECONDS.get(self.deed, 0.0)

    @property
    def moment(self) -> float:
        """How long after the end of a round it is struck, 1.5 s at the most.

        Moments differ from cell to cell, and not from one try to the next.
        """
        return random.Random(self.name).uniform(0, 1.5)  # noqa: S311 -- no secret


def _all() -> Iterator[Cell]:
    for mode, victim, deed in itertools.product(Mode, Victim, Deed):
        yield Cell(victim=victim, deed=deed, mode=mode)


MATRIX = tuple(_all())
CELLS = tuple(cell for cell in MATRIX if not cell.senseless)

# For every change of the code, one after another in one run; none lasts. The others are
# in `make test-faults` and `make test-long`.
_CHAIN = ("coordinator/kill", "superlink/restart", "site/kill", "proxy/kill")
_NAMED = {cell.name: cell for cell in CELLS}
REPRESENTATIVE = tuple(_NAMED[f"{name}/{Mode.P1_PRIVATE}"] for name in _CHAIN)

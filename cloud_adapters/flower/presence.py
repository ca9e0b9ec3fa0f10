"""Which of Flower's nodes are connected, judged by their heartbeats."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from flwr.serverapp import Grid as FlowerApi

from cloud_adapters.flower.private.messages import NodeInfo
from federation.protocols import Clock
from federation.rounds.schedule import grace_seconds

# Nodes of ours send heartbeats every three seconds: see flower_node.
SILENT_SECONDS = 12.0
# What they announce. Flower's own nodes announce 30 s and keep to it: such a node
# counts as silent when Flower itself no longer lists it.
OUR_INTERVAL_SECONDS = 10.0
LOOK_SECONDS = 1.0
# Flower refuses a node that died without leaving for 20 s; then it must start.
RETURN_SECONDS = 90.0
# One that took leave is admitted right away: for as long as its program takes to start.
RESTART_SECONDS = 30.0


class Presence:
    """Knows which nodes are silent, and waits for those that may come back."""

    def __init__(
        self,
        api: FlowerApi,
        *,
        quorum: int,
        clock: Clock,
        pause: Callable[[float], None],
        grace: float | str | None = None,
        is_told: bool = True,
    ) -> None:
        """Watch no node yet.

        Args:
            api: Flower's own grid.
            quorum: Nodes without which an exchange is of no use; 0 to wait for none,
                because other tasks are open meanwhile.
            clock: Tells time.
            pause: Waits for so many seconds.
            grace: The job's: the part of the last round that a round with a quorum
                waits at most, half of it if deadlines are learnt; None to wait for as
                long as a restart takes.
            is_told: Whether Flower reports heartbeats; its simulation makes up one
                for all time.
        """
        self._get_nodes = getattr(api, "get_nodes", None) if is_told else None
        self._quorum = quorum
        self._clock = clock
        self._pause = pause
        self._grace = grace
        self._round, self._round_sent = 0, 0.0  # The newest, and when it was sent.
        self._gone: set[int] = set()
        self._fresh: dict[int, str] = {}  # With the time of their activation.
        # Until when Flower was to list each node without a further heartbeat.
        self._listed_until: dict[int, float] = {}
        self._left: set[int] = set()  # Nodes that took leave.
        self._next_look = clock.monotonic()

    def await_return(
        self,
        asked: set[int],
        deadline_seconds: float,
        tell: Callable[[Collection[int], float], None] = lambda _nodes, _seconds: None,
        *,
        round_index: int = 0,
    ) -> None:
        """Wait for nodes that have just gone: an agent that restarts is soon back.

        As long as too few are there for the exchange to be of use, this lasts until
        its deadline: rounds that are bound to be lost would soon end the run. With
        enough of them, a node that did not come in time is not awaited again
        until it has been back: a lost node would delay every round. Nodes that took
        leave have less time than those that died.

        Args:
            asked: Nodes of the exchange.
            deadline_seconds: How long it may take.
            tell: Called with the nodes that it waits for, and how long at most,
                whenever they change.
            round_index: Round that these tasks begin or continue; 0 for a handshake.
        """
        needed = min(self._quorum, len(asked))
        begin = self._clock.monotonic()
        most = self._grace_seconds(round_index, begin)
        silent, told = self.silent(asked), set[int]()
        self._gone -= asked - silent  # A question to some forgets no others.
        while silent and self._quorum:
            seconds = self._clock.monotonic() - begin
            enough = len(asked - silent) >= needed
            have_left = silent - self._gone <= self._left
            patience = RESTART_SECONDS if have_left else RETURN_SECONDS
            limit = min(patience, most) if enough else deadline_seconds
            if seconds >= limit:
                break
            if enough and not silent - self._gone:
                break
            if told != (told := silent):
                tell(silent, limit - seconds)
            self._pause(LOOK_SECONDS)
            silent = self.silent(asked)
        if told:
            tell((), 0.0)
        self._gone |= silent
        if round_index > self._round:
            self._round, self._round_sent = round_index, self._clock.monotonic()

    def _grace_seconds(self, round_index: int, now: float) -> float:
        """How long a new round waits by the job's grace; infinity without."""
        if self._grace is None or not 0 < self._round < round_index:
            return math.inf
        return grace_seconds(self._grace, now - self._round_sent)

    def note_gone(self, node: int) -> None:
        """Count a node as gone until the next look, as Flower reported."""
        self._fresh.pop(node, None)

    def has_left(self, node: int) -> bool:
        """Whether a node took leave, and did not come back when it was awaited.

        Before that it may be an agent that restarts.
        """
        return node in self._left & self._gone

    def silent(self, asked: set[int]) -> set[int]:
        """Nodes without a fresh heartbeat, as of the last look."""
        return set() if self._get_nodes is None else asked - self.activations().keys()

    def let_in(self, node: int) -> str | None:
        """When a node was let in, as of the last look; None if it was not there."""
        return self._fresh.get(node)

    def activations(self) -> Mapping[int, str]:
        """Nodes with a fresh heartbeat, and when each was let in.

        A node that ends and comes back is let in once more.
        """
        now = self._clock.monotonic()
        if self._get_nodes is not None and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            nodes = [*self._get_nodes()]
            self._note_left({node.node_id: node.online_until for node in nodes})
            self._fresh = _fresh(nodes, self._clock.now())
        return dict(self._fresh)

    def _note_left(self, listed: Mapping[int, float]) -> None:
        """Tell nodes that took leave from those that fell silent.

        Flower lists a silent node until its time is over, and one that took leave no
        longer.
        """
        now = self._clock.now()
        due = {node for node, until in self._listed_until.items() if now < until}
        self._left = (self._left | due) - listed.keys()
        self._listed_until |= listed


def _fresh(nodes: Iterable[NodeInfo], now: float) -> dict[int, str]:
    # A node is online for two intervals after a heartbeat; then it is not listed.
    return {
        node.node_id: node.last_activated_at
        for node in nodes
        if node.heartbeat_interval > OUR_INTERVAL_SECONDS
        or node.online_until - 2 * node.heartbeat_interval >= now - SILENT_SECONDS
    }

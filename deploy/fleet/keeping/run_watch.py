"""While ``crossfed up`` shows a run: what keeps its nodes from working."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from cloud_adapters.compute.pool import Node, NodeState, all_gone, log_of
from cloud_adapters.compute.refusals import PASSING
from deploy.fleet.deployment import Deployment
from deploy.fleet.keeping.keep import Keeper, Tell
from deploy.fleet.keeping.node_starts import starts_of
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, ROLE
from deploy.fleet.starting.starts import Starts
from deploy.fleet.tables.providers import LOCAL
from federation.errors import ComputeError

LOOK_SECONDS = 2.0
"""Between two looks at the nodes."""


class RunWatch:
    """Reports what keeps nodes from working, each once, while a run is shown."""

    def __init__(self, deployment: Deployment, tell: Tell) -> None:
        """Begin with what the logs say now, which is not reported.

        Args:
            deployment: Whose nodes are watched.
            tell: Called with a word about what keeps one from working.
        """
        self.keeper: Keeper | None = None
        self.starts: Starts = starts_of(deployment, tell)
        self._deployment, self._tell = deployment, tell
        self._worked: set[str] = set()
        self._reported: set[tuple[str, str]] = set()
        self._awaited: set[str] = set()
        self._next_look = 0.0
        self._lines: Counter[tuple[str, str]] = Counter()
        self.read_logs(is_new=False)

    def look(self) -> None:
        """Report what is new, if the last look is some time ago.

        Raises:
            ComputeError: The machine of the aggregator, or those of all sites, have
                ended, and nothing more will happen; one could not start its site; or
                the keeper ends.
        """
        now = self._deployment.clock.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        nodes = self._nodes()
        if nodes is None:
            return
        self._report(nodes)
        self.read_logs()
        if self.keeper is None:
            self.starts.look(nodes)
            self._check_ended(nodes)
        else:
            self.keeper.look(nodes)

    def _nodes(self) -> Sequence[Node] | None:
        """All nodes; None if a service fails now, which will pass or is kept."""
        try:
            return [*chain.from_iterable(self._deployment.listed().values())]
        except ComputeError as error:
            if self.keeper is None and not isinstance(error, PASSING):
                raise
            self._tell_once("", f"{error}; looked at again until it succeeds")
            return None

    def _report(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.trouble and node.state is not NodeState.GONE:
                self._tell_once(node.id, f"{node.name}: {node.trouble}")
            if node.ready and node.id in self._awaited:
                self._awaited.remove(node.id)
                self._tell(f"{node.name}: ready")
            elif node.ready is False:
                self._awaited.add(node.id)

    def _check_ended(self, nodes: Sequence[Node]) -> None:
        """Refuse to watch what has ended, for example because its time was over."""
        if failed := self.starts.not_started:
            raise ComputeError(
                f"{', '.join(failed)}: not started; the console of its machine is "
                "above. Fix what it says, and run crossfed up again, which resumes "
                "the run"
            )
        for who, aggregators in (
            ("the aggregator's machine has", True),
            ("the machines of all sites have", False),
        ):
            ours = [
                n for n in nodes if (n.labels.get(ROLE) == AGGREGATOR) == aggregators
            ]
            if not all_gone(ours):
                self._worked.add(who)
            # Services list a new machine late, and some none that is gone.
            elif aggregators or who in self._worked:
                why = f" ({ours[-1].trouble})" if ours and ours[-1].trouble else ""
                raise ComputeError(
                    f"{who} ended{why}: run crossfed up again, which resumes the run"
                )

    def _tell_once(self, node_id: str, message: str) -> None:
        if (node_id, message) not in self._reported:
            self._tell(message)
        self._reported.add((node_id, message))

    def read_logs(self, *, is_new: bool = True) -> None:
        """Report why sites on this host cannot load their data.

        This is for no one else: the operator of these sites runs the command.

        Args:
            is_new: Whether lines that were not there before are reported.
        """
        from deploy.site_host.data import CANNOT_LOAD  # noqa: PLC0415 -- imports torch

        pool = self._deployment.pools[LOCAL]
        for node in pool.nodes({DEPLOYMENT: self._deployment.name}):
            lines = log_of(pool, node.id).splitlines()
            found = Counter(line for line in lines if line.startswith(CANNOT_LOAD))
            for line, times in found.items():
                if is_new and times > self._lines[node.id, line]:
                    self._tell(f"{node.name}: {line}")
                self._lines[node.id, line] = times

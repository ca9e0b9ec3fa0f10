"""``crossfed down``: end every node of a deployment."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from cloud_adapters.compute.pool import ComputePool, Node, NodeState
from cloud_adapters.compute.refusals import PASSING
from deploy.fleet import reconcile
from deploy.fleet.loop import Patience, end_nodes
from deploy.fleet.machine_spec import LOCAL
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, OWNER, ROLE
from deploy.fleet.spec import Tell
from deploy.fleet.state import Deployment
from federation.errors import (
    ComputeError,
    ComputeUnreachable,
    FederationError,
    StoreUnavailable,
)
from monitoring.units import format_count

_END_SECONDS = 300.0
# A server that has not answered for so long may no longer exist.
_REACH_SECONDS = 600.0


def take_down(deployment: Deployment, *, any_owner: bool, tell: Tell) -> int:
    """End a deployment's nodes: sites first, so that they can say that they leave.

    A service that fails keeps no node of the others alive, and a node of another
    folder none of this one. What a passing fault has kept alive is ended after it. A
    service that cannot be reached for minutes is given up, since its cluster may be
    gone: what may still run there is reported.

    Args:
        deployment: What is known of it.
        any_owner: Whether to end also what another folder has started.
        tell: Called with a word about every step.

    Returns:
        How many nodes were ended.

    Raises:
        ComputeError: A service failed, a node is another folder's, or does not end in
            time.
        StoreUnavailable: The folder cannot be read or written.
    """
    clock, work = deployment.clock, _Ending(deployment, tell, any_owner=any_owner)
    begin, patience = clock.monotonic(), Patience(deployment.plan, clock, tell)
    while True:
        failures = work.end_all()
        is_gone = clock.monotonic() - begin >= _REACH_SECONDS
        passing = [
            error
            for _, error in failures
            if isinstance(error, PASSING)
            and not (is_gone and isinstance(error, ComputeUnreachable))
        ]
        if not passing or patience.is_worn_out(passing[0]):
            break
    ended = len(work.ended)
    if not failures:
        _forget_places(deployment, ended)
        return ended
    for pool, error in failures:
        if isinstance(error, ComputeUnreachable):
            tell(_may_run(deployment, pool))
    first = failures[0][1]
    told = "; ".join(dict.fromkeys(str(error) for _, error in failures))
    if told == str(first) and not ended:
        raise first
    raise type(first)(
        f"{told}; other nodes that were ended: {ended}. Run this command again"
    ) from first


def _may_run(deployment: Deployment, pool: str) -> str:
    """What may still run, and cost, at a service that could not be reached."""
    file = deployment.plan.file
    roles = [
        site.role
        for site in file.sites
        if site.pool == pool and deployment.launched(site.role)
    ]
    hours = f"{file.max_hours:g} hours after its launch"
    return (
        f"{pool} did not answer for {_REACH_SECONDS / 60:g} minutes. If it was "
        "deleted, nothing of this deployment runs there. If it exists, "
        f"{', '.join(roles) or 'nodes'} may still run there, each until {hours} at the "
        "latest: run this command again when it can be reached"
    )


def _forget_places(deployment: Deployment, ended: int) -> None:
    """Look no longer where nothing is left.

    Raises:
        StoreUnavailable: The folder cannot be written, though all nodes have ended.
    """
    try:
        deployment.forget_places()
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"{format_count(ended, 'node')} ended, {deployment.name} has no running "
            f"node, but this could not be noted: {error}"
        ) from error


@contextmanager
def naming_what_runs(deployment: Deployment, tell: Tell) -> Iterator[None]:
    """Say what still runs, and costs, if the block ends with an error."""
    try:
        yield
    except FederationError:
        if left := still_running(deployment):
            tell(left)
        raise


def still_running(deployment: Deployment) -> str:
    """What a command that failed leaves running, in words; empty for nothing.

    A service that fails hides no node of the others.
    """
    alive: list[str] = []
    unknown: list[str] = []
    for name, pool in deployment.pools.items():
        try:
            found = pool.nodes({DEPLOYMENT: deployment.name, OWNER: deployment.owner})
        except ComputeError:
            unknown.append(name)
            continue
        alive += [
            f"{node.name} ({node.id})"
            for node in found
            if node.state is not NodeState.GONE
        ]
    words = []
    if alive:
        words.append(f"still running: {', '.join(alive)}")
    if unknown:
        words.append(f"not known, because the service fails: {', '.join(unknown)}")
    if not words:
        return ""
    return (
        f"{'; '.join(words)}. Run this command again to continue, or crossfed down to "
        "end them; crossfed nodes lists them"
    )


def give_way(deployment: Deployment, tell: Tell) -> Mapping[str, Sequence[Node]]:
    """End all that this folder has started if another one was first with its name.

    Returns:
        Else, all nodes of the deployment, by pool.

    Raises:
        ComputeError: Another one was, or a service fails.
    """
    # Another folder cannot see this host's nodes, which would make each the first.
    listed = deployment.listed()
    found = [node for name, nodes in listed.items() if name != LOCAL for node in nodes]
    try:
        reconcile.check_first(found, deployment.owner, deployment.name)
    except ComputeError as error:
        tell(f"{error}; what was launched from this one is ended")
        patience = Patience(deployment.plan, deployment.clock, tell)
        work = _Ending(deployment, tell, any_owner=False)
        for pool in reversed([*deployment.pools.values()]):
            patience.repeated(partial(work.end_parties, pool))
        raise
    return listed


class _Ending:
    """Ends the nodes of a deployment, service by service.

    Attributes:
        ended: Ids of the nodes that have ended.
    """

    def __init__(self, deployment: Deployment, tell: Tell, *, any_owner: bool) -> None:
        self._deployment, self._tell, self._any_owner = deployment, tell, any_owner
        self.ended: set[str] = set()

    def end_all(self) -> Sequence[tuple[str, ComputeError | StoreUnavailable]]:
        """End what can be ended; the failures of services, with their names."""
        failures: list[tuple[str, ComputeError | StoreUnavailable]] = []
        # The aggregator's is the first and comes last: sites tell it that they leave.
        for name, pool in reversed([*self._deployment.pools.items()]):
            try:
                self._end_pool(pool)
            except (ComputeError, StoreUnavailable) as error:
                failures.append((name, error))
        return failures

    def end_parties(self, pool: ComputePool) -> None:
        """End sites, then the aggregator."""
        asked = {DEPLOYMENT: self._deployment.name}
        if not self._any_owner:
            asked[OWNER] = self._deployment.owner
        alive = reconcile.unwanted(pool.nodes(asked), ())
        for is_last in (False, True):
            self._end(
                pool,
                [n for n in alive if (n.labels.get(ROLE) == AGGREGATOR) is is_last],
            )
        pool.clean_up()

    def _end_pool(self, pool: ComputePool) -> None:
        """End the nodes of one service.

        Raises:
            ComputeError: The service fails, a node does not end in time, or another
                folder has one.
        """
        self.end_parties(pool)
        if not self._any_owner:
            found = pool.nodes({DEPLOYMENT: self._deployment.name})
            reconcile.check_owner(found, self._deployment.owner, self._deployment.name)

    def _end(self, pool: ComputePool, nodes: Sequence[Node]) -> None:
        end_nodes(
            pool,
            self._deployment.name,
            nodes,
            what="the nodes ended",
            seconds=_END_SECONDS,
            clock=self._deployment.clock,
        )
        self.ended |= {node.id for node in nodes}
        for node in nodes:
            self._tell(f"{node.name}: ended {node.id}")

"""``crossfed down``: end every node of a deployment."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cloud_adapters.compute.pool import (
    ComputePool,
    Node,
    NodesDamaged,
    NodeState,
    all_gone,
    wait_for,
)
from cloud_adapters.compute.refusals import PASSING
from deploy.fleet import reconcile
from deploy.fleet.loop import Patience
from deploy.fleet.machine_spec import LOCAL
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, HEAD, OWNER, ROLE
from deploy.fleet.spec import Tell
from deploy.fleet.state import Deployment
from federation.errors import ComputeError, FederationError, StoreUnavailable

_END_SECONDS, _LOOK_SECONDS = 300.0, 0.2


def take_down(deployment: Deployment, *, any_owner: bool, tell: Tell) -> int:
    """End a deployment's nodes: sites first, so that they can say that they leave.

    A service that fails keeps no node of the others alive, and a node of another
    folder none of this one. What a passing fault has kept alive is ended after it.

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
    ended: set[str] = set()
    patience = Patience(deployment.plan, clock=deployment.clock, tell=tell)
    while True:
        failures: list[ComputeError | StoreUnavailable] = []
        # The aggregator's is the first and comes last: sites tell it that they leave.
        for pool in reversed([*deployment.pools.values()]):
            # A head whose machine is lost may take long to end: its sites do not wait.
            for end in (_end_head, _end_others, _end_damaged):
                try:
                    end(deployment, pool, ended, any_owner=any_owner, tell=tell)
                except (ComputeError, StoreUnavailable) as error:
                    failures.append(error)
        passing = next((each for each in failures if isinstance(each, PASSING)), None)
        if passing is None or patience.is_worn_out(passing):
            break
    if not failures:
        _forget_places(deployment, len(ended))
        return len(ended)
    first, told = failures[0], "; ".join(dict.fromkeys(map(str, failures)))
    if told == str(first) and not ended:
        raise first
    raise type(first)(
        f"{told}; {len(ended)} other nodes were ended. Run this command again"
    ) from first


def _forget_places(deployment: Deployment, ended: int) -> None:
    """Look no longer where nothing is left.

    Raises:
        StoreUnavailable: The folder cannot be written, though all nodes have ended.
    """
    try:
        deployment.forget_places()
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"{ended} nodes were ended and {deployment.name} has no running node, but "
            f"this could not be noted: {error}"
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
            found = pool.nodes({DEPLOYMENT: deployment.name})
        except NodesDamaged as error:
            found = error.known
            alive += sorted(error.ids)
        except ComputeError:
            unknown.append(name)
            continue
        alive += [
            f"{node.name} ({node.id})"
            for node in _own(deployment, found)
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
        patience = Patience(deployment.plan, clock=deployment.clock, tell=tell)
        for pool in reversed([*deployment.pools.values()]):

            def end(pool: ComputePool = pool) -> None:
                own = _own(deployment, pool.nodes({DEPLOYMENT: deployment.name}))
                _end_all(deployment, pool, own, set(), tell)

            patience.repeated(end)
        raise
    return listed


def _end_head(
    deployment: Deployment,
    pool: ComputePool,
    ended: set[str],
    *,
    any_owner: bool,
    tell: Tell,
) -> None:
    """End the head in a cluster first, which would launch again what ends after it."""
    if deployment.plan.is_head:
        return
    found = _KnownNodes(pool).nodes({DEPLOYMENT: deployment.name, ROLE: HEAD})
    nodes = found if any_owner else _own(deployment, found)
    alive = [node for node in nodes if node.state is not NodeState.GONE]
    _end(deployment, pool, alive, ended, tell)


def _end_others(
    deployment: Deployment,
    pool: ComputePool,
    ended: set[str],
    *,
    any_owner: bool,
    tell: Tell,
) -> None:
    """End the nodes of one service that are no heads in a cluster.

    Raises:
        ComputeError: The service fails, a node does not end in time, or another
            folder has one.
    """
    found = _KnownNodes(pool).nodes({DEPLOYMENT: deployment.name})
    nodes = found if any_owner else _own(deployment, found)
    others = [node for node in nodes if node.labels.get(ROLE) != HEAD]
    _end_all(deployment, pool, others, ended, tell)
    if not any_owner:
        reconcile.check_owner(found, deployment.owner, deployment.name)


def _end_damaged(
    deployment: Deployment,
    pool: ComputePool,
    ended: set[str],
    *,
    any_owner: bool,
    tell: Tell,
) -> None:
    """End nodes of one service whose labels cannot be read.

    They are in this deployment's folder, so they are nobody else's.

    Raises:
        ComputeError: The service fails, or a node does not end in time.
    """
    del any_owner
    begin, ids = deployment.clock.monotonic(), frozenset[str]()
    while (damaged := _damaged(pool)) is not None:
        if new := damaged.ids - ids:
            names = ", ".join(sorted(new))
            tell(f"files of {names} are damaged: ended all the same")
            pool.terminate(new)
            ids |= new
        if deployment.clock.monotonic() - begin >= _END_SECONDS:
            raise ComputeError(f"not ended within {_END_SECONDS:g} s: {damaged}")
        deployment.clock.sleep(_LOOK_SECONDS)
    for each in sorted(ids):
        tell(f"ended {each}")
    ended |= ids
    if ids:
        pool.clean_up()


def _damaged(pool: ComputePool) -> NodesDamaged | None:
    try:
        pool.nodes({})
    except NodesDamaged as error:
        return error
    return None


@dataclass(frozen=True)
class _KnownNodes:
    """Lists the nodes of a service without those whose labels cannot be read."""

    pool: ComputePool

    def nodes(self, labels: Mapping[str, str]) -> Sequence[Node]:
        """See ``ComputePool``."""
        try:
            return self.pool.nodes(labels)
        except NodesDamaged as error:
            return error.known


def _own(deployment: Deployment, found: Sequence[Node]) -> Sequence[Node]:
    return [node for node in found if node.labels.get(OWNER) == deployment.owner]


def _end_all(
    deployment: Deployment,
    pool: ComputePool,
    found: Sequence[Node],
    ended: set[str],
    tell: Tell,
) -> None:
    """End nodes of one service, and note which. A head does not end itself here."""
    alive = [
        node
        for node in found
        if node.state is not NodeState.GONE
        and not (deployment.plan.is_head and node.labels.get(ROLE) == HEAD)
    ]
    sites = [node for node in alive if node.labels.get(ROLE) != AGGREGATOR]
    others = [node for node in alive if node.labels.get(ROLE) == AGGREGATOR]
    for group in (sites, others):
        _end(deployment, pool, group, ended, tell)
    pool.clean_up()


def _end(
    deployment: Deployment,
    pool: ComputePool,
    nodes: Sequence[Node],
    ended: set[str],
    tell: Tell,
) -> None:
    ids = {node.id for node in nodes}
    if not ids:
        return
    pool.terminate(ids)
    wait_for(
        _KnownNodes(pool),
        {DEPLOYMENT: deployment.name},
        lambda found: all_gone([node for node in found if node.id in ids]),
        what="the nodes ended",
        seconds=_END_SECONDS,
        clock=deployment.clock,
    )
    ended |= ids
    for node in nodes:
        tell(f"{node.name}: ended {node.id}")

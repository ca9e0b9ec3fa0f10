"""``crossfed down``: end every node of a deployment."""

from collections.abc import Callable, Sequence

from cloud_adapters.compute.pool import ComputePool, Node, NodeState, all_gone, wait_for
from deploy.fleet import reconcile
from deploy.fleet.deployment import Deployment
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, ROLE
from federation.errors import ComputeError
from federation.protocols import Clock

_END_SECONDS = 300.0

Tell = Callable[[str], None]


def take_down(deployment: Deployment, *, any_owner: bool, tell: Tell) -> int:
    """End a deployment's nodes: sites first, so that they can say that they leave.

    Args:
        deployment: What is known of it.
        any_owner: Whether to end also what another folder has started.
        tell: Called with a word about every step.

    A service that fails keeps no node of the others alive.

    Returns:
        How many nodes were ended.

    Raises:
        ComputeError: A service failed, a node is another folder's, or does not end in
            time.
    """
    ended = 0
    failures: list[ComputeError] = []
    # The aggregator's, which is the first, comes last: sites tell it that they leave.
    for pool in reversed([*deployment.pools.values()]):
        try:
            ended += _end_all(deployment, pool, any_owner=any_owner, tell=tell)
        except ComputeError as error:
            failures.append(error)
    if not failures:
        deployment.forget_places()
        return ended
    first, *others = failures
    if not others and not ended:
        raise first
    told = "; ".join(map(str, failures))
    raise type(first)(
        f"{told}; {ended} nodes of other services were ended. Give this command again"
    ) from first


def _end_all(
    deployment: Deployment, pool: ComputePool, *, any_owner: bool, tell: Tell
) -> int:
    """End the nodes of one service; how many."""
    found = pool.nodes({DEPLOYMENT: deployment.name})
    if not any_owner:
        reconcile.check_owner(found, deployment.owner, deployment.name)
    alive = [node for node in found if node.state is not NodeState.GONE]
    sites = [node for node in alive if node.labels.get(ROLE) != AGGREGATOR]
    others = [node for node in alive if node.labels.get(ROLE) == AGGREGATOR]
    for group in (sites, others):
        _end(pool, deployment.name, group, deployment.clock, tell)
    pool.clean_up()
    return len(alive)


def _end(
    pool: ComputePool, name: str, nodes: Sequence[Node], clock: Clock, tell: Tell
) -> None:
    ids = {node.id for node in nodes}
    if not ids:
        return
    pool.terminate(ids)
    wait_for(
        pool,
        {DEPLOYMENT: name},
        lambda found: all_gone([node for node in found if node.id in ids]),
        what="the nodes ended",
        seconds=_END_SECONDS,
        clock=clock,
    )
    for node in nodes:
        tell(f"{node.name}: ended {node.id}")

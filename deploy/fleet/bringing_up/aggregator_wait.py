"""Wait for an aggregator on this host, and report what keeps it from its work."""

from collections.abc import Callable

from cloud_adapters.compute.pool import Node, NodeState, log_of
from deploy.fleet.deployment import Deployment
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, ROLE
from deploy.fleet.starting.console import end_of
from federation.errors import ComputeError

_HEALTH_SECONDS = 60.0
_LOOK_SECONDS = 0.2
# Between two looks at its node.
_NODE_SECONDS = 2.0

Tell = Callable[[str], None]


def await_service(
    deployment: Deployment, trouble_of: Callable[[], str | None], tell: Tell
) -> None:
    """Wait until the aggregator serves, and report what keeps its program from that.

    Args:
        deployment: Whose aggregator it is.
        trouble_of: Returns why it does not serve; None if it does.
        tell: Called with a word about every step.

    Raises:
        ComputeError: Its node has ended, or it does not serve in time; with the last
            lines that it wrote.
    """
    clock, told = deployment.clock, ""
    begin = looked = clock.monotonic()
    while (trouble := trouble_of()) is not None:
        now = clock.monotonic()
        if now - looked > _NODE_SECONDS:
            looked, node = now, _newest(deployment)
            if node.state is NodeState.GONE:
                raise ComputeError(
                    f"the aggregator has ended before it served: {node.trouble}. "
                    f"{_end_of_log(deployment, node)}"
                )
            # Once: it is started again and again, and each end reads a bit different.
            # Of a program that is ready, it is old.
            if not told and node.trouble and not node.ready:
                told = node.trouble
                tell(f"aggregator: {told}")
        if now - begin > _HEALTH_SECONDS:
            raise ComputeError(
                f"the aggregator does not serve after {_HEALTH_SECONDS:g} s: "
                f"{trouble}. {_end_of_log(deployment, _newest(deployment))}"
            )
        clock.sleep(_LOOK_SECONDS)
    tell(f"aggregator: ready after {clock.monotonic() - begin:.1f} s")


def _newest(deployment: Deployment) -> Node:
    pool = deployment.pools[deployment.plan.file.aggregator.pool]
    labels = {DEPLOYMENT: deployment.name, ROLE: AGGREGATOR}
    *_, newest = pool.nodes(labels)
    return newest


def _end_of_log(deployment: Deployment, node: Node) -> str:
    pool = deployment.pools[deployment.plan.file.aggregator.pool]
    return f"Its log ends:\n{end_of(log_of(pool, node.id))}"

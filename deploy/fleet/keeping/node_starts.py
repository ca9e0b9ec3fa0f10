"""The starts of a deployment's machines, as their logs show them."""

from collections.abc import Callable

from cloud_adapters.compute.pool import Node
from deploy.fleet.deployment import Deployment
from deploy.fleet.placement import role_of
from deploy.fleet.reconcile import ROLE
from deploy.fleet.starting.starts import Starts
from deploy.fleet.tables.providers import LOCAL


def starts_of(deployment: Deployment, tell: Callable[[str], None]) -> Starts:
    """Follow the starts of a deployment's machines of clouds and of its pods.

    Nodes of this host say by themselves whether they are ready.
    """
    pools = {
        role_of(site): site.pool
        for site in deployment.plan.file.sites
        if site.provider != LOCAL
    }

    def read_log(node: Node) -> str | None:
        name = pools.get(node.labels.get(ROLE, ""))
        return None if name is None else deployment.pools[name].log(node.id)

    return Starts(read_log, role=ROLE, clock=deployment.clock, tell=tell)

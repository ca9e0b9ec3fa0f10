"""Have one node fill each role of a deployment, with the settings of now."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from cloud_adapters.compute.pool import (
    Node,
    NodeSpec,
    NodeState,
    all_gone,
    wait_for,
)
from deploy.fleet import reconcile
from deploy.fleet.deployment import Deployment
from deploy.fleet.reconcile import DEPLOYMENT, Decision, NodeRole

_END_SECONDS = 90.0
_SETTINGS_DIGITS = 16

Tell = Callable[[str], None]


class NodeRequest(NamedTuple):
    """A node to have.

    Attributes:
        pool: Name of the compute service, as ``SiteMachine.pool``.
        spec: The node; its name is that of the role. Labels are added to it.
        settings: All that it reads when it starts.
    """

    pool: str
    spec: NodeSpec
    settings: bytes


def decide(deployment: Deployment, request: NodeRequest) -> Decision:
    """What has to happen so that a node fills a role.

    Raises:
        ComputeError: The service fails.
    """
    spec = request.spec
    settings = request.settings + str(spec.max_seconds).encode()
    if spec.line is not None:
        settings += repr(spec.line).encode()
    digest = hashlib.sha256(settings).hexdigest()[:_SETTINGS_DIGITS]
    found = deployment.pools[request.pool].nodes({DEPLOYMENT: deployment.name})
    role = NodeRole(name=spec.name, settings=digest)
    return reconcile.decide(role, found, deployment.launched(spec.name))


def fill(deployment: Deployment, request: NodeRequest, tell: Tell) -> Node:
    """Have one node fill a role.

    Args:
        deployment: Whose role it is.
        request: The node.
        tell: Called with a word about every step.

    Raises:
        ComputeError: It could not be launched, or the one that it replaces not ended.
    """
    pool, role_name = deployment.pools[request.pool], request.spec.name
    decision = decide(deployment, request)
    if decision.end:
        tell(f"{role_name}: its settings have changed; the node that runs is replaced")
        ids = {node.id for node in decision.end}
        pool.terminate(ids)
        wait_for(
            pool,
            {DEPLOYMENT: deployment.name},
            lambda nodes: all_gone([node for node in nodes if node.id in ids]),
            what=f"the replaced node of {role_name} ended",
            seconds=_END_SECONDS,
            clock=deployment.clock,
        )
    if decision.node is not None:
        return decision.node
    number = decision.number
    while True:
        deployment.note_launch(role_name, number)
        labels = reconcile.labels(
            deployment.name, deployment.owner, decision.role, number
        )
        node = pool.launch(
            replace(request.spec, labels=labels),
            f"{deployment.owner}/{role_name}/{number}",
        )
        if node.state is not NodeState.GONE:
            tell(f"{role_name}: launched {node.id}")
            return node
        # An earlier command launched it with this number, and it has ended since.
        number += 1

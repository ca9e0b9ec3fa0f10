"""Sites that are pods of a Kubernetes cluster: what is launched, and who enrols.

A pod has no identity that its keys could be bound to before it has made them. So it
writes their digest to its log, and asks the aggregator again and again; the command
that launched it reads the log through the cluster's API server, and invites these keys
and no others. No secret is in the manifest, and the pod needs none of the cluster's
API.
"""

from collections.abc import Mapping
from typing import Any

import tomli_w

from cloud_adapters.compute.pool import Market, Node, NodeSpec
from cloud_adapters.identity import platforms
from deploy.fleet.bringing_up.operator import Operator
from deploy.fleet.deployment import Deployment
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.reconcile import SITE_PREFIX
from deploy.fleet.roles import NodeRequest
from deploy.fleet.starting import pod_command
from deploy.fleet.starting.user_data import MachineInvitation, Release
from deploy.fleet.tables.site_machine import SiteMachine
from federation import platform_identity
from federation.errors import JobError
from federation.platform_identity import PlatformIdentity

# Of all annotations of a pod.
_MAX_SETTINGS_BYTES = 200 << 10


def check(plan: DeploymentPlan, index: int) -> None:
    """Refuse a site whose pod could not be started.

    Raises:
        JobError: A key is missing or wrong.
    """
    given, site = plan.file.release, plan.file.sites[index]
    try:
        release = Release(
            wheel=given.wheel, sha256=given.sha256, extras=(), image=given.image
        )
    except ValueError as error:
        raise JobError(
            f"{plan.path}: pods run an image of a site: {error}", key="release"
        ) from None
    if not release.image:
        raise JobError(
            f"{plan.path}: is missing: {site.name!r} is a pod, which runs an image "
            "(deploy/containers); machines of clouds can run the same one, in place "
            "of release.wheel",
            key="release.image",
        )


def request(
    deployment: Deployment,
    site: SiteMachine,
    document: Mapping[str, Any],
    invitation: MachineInvitation,
) -> NodeRequest:
    """The job of a site.

    Args:
        deployment: Whose site it is.
        site: Its table.
        document: Its ``site.toml``.
        invitation: How it enrols.

    Raises:
        JobError: Its tables are larger than an annotation may be.
    """
    machine, text = site.machine, tomli_w.dumps(document)
    if len(text.encode()) > _MAX_SETTINGS_BYTES:
        raise JobError(
            f"{deployment.plan.path}: the tables of {site.name!r} have "
            f"{len(text.encode())} bytes, and a pod takes {_MAX_SETTINGS_BYTES}",
            key="sites",
        )
    spec = NodeSpec(
        name=f"{SITE_PREFIX}{site.name}",
        command=pod_command.command(invitation),
        labels={},
        max_seconds=deployment.max_seconds,
        machine=machine.type,
        zones=machine.zones,
        market=Market(machine.market),
        user_data=text,
        image=deployment.plan.file.release.image,
        disk_gb=machine.disk_gb,
        identity=machine.identity,
        limits=machine.cluster.limits,
    )
    # Where it runs may differ; what it is and does may not.
    kind = (spec.machine, spec.market, spec.image, spec.disk_gb, spec.identity)
    read = f"{spec.command}\n{text}\n{kind}\n{spec.limits}".encode()
    return NodeRequest(site.pool, spec, read)


def expected(
    deployment: Deployment, operator: Operator, site: SiteMachine, node: Node
) -> PlatformIdentity | None:
    """Whose keys may enrol as a site: those that its pod has shown.

    Args:
        deployment: Whose site it is.
        operator: Remembers what was checked: a log does not last.
        site: Its table.
        node: Its job.

    Returns:
        None if the pod has not shown any yet.

    Raises:
        ComputeError: The cluster fails.
    """
    known = operator.machine(site.name)
    place = site.machine.cluster.place
    if known is not None and (known.account, known.instance) == (place, node.id):
        return known
    keys = platforms.shown_keys(deployment.pools[site.pool].log(node.id))
    if not keys:
        return None
    return platform_identity.of_pod(keys, cluster=place, job=node.id)

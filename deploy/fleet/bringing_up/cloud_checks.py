"""What is wrong with the machine of a site of a cloud, before it costs anything."""

import ipaddress
from urllib.parse import urlsplit

from cloud_adapters.compute.pool import NodeSpec, RoutedPool
from deploy.fleet.bringing_up import pod_sites
from deploy.fleet.bringing_up.machine_request import (
    IMAGES,
    count_gpus,
    identity_of,
    release_of,
)
from deploy.fleet.deployment import Deployment
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.roles import Tell
from deploy.fleet.tables.providers import AWS, KUBERNETES
from deploy.fleet.tables.site_machine import SiteMachine
from federation.addresses import parse_address
from federation.errors import ComputeForbidden, JobError, MachineRefused


def check(plan: DeploymentPlan, index: int) -> None:
    """Refuse a site of a cloud whose machine could not enrol, before it costs anything.

    Raises:
        JobError: A key is missing or wrong.
    """
    site, file = plan.file.sites[index], plan.file
    if site.provider == KUBERNETES:
        pod_sites.check(plan, index)
    else:
        _check_machine(plan, site, f"sites[{index}].machine")
    address = file.aggregator.address
    # A service on this host has its machines on this host, too.
    is_far = not _is_loopback(urlsplit(site.machine.endpoint).hostname or "")
    if is_far and (
        not address or _is_loopback(parse_address(address, key="aggregator.address")[0])
    ):
        raise JobError(
            f"{plan.path}: {address or 'it is missing'}: machines of {site.provider} "
            "cannot reach this host's loopback interface: give HOST:PORT that they can",
            key="aggregator.address",
        )


def _check_machine(plan: DeploymentPlan, site: SiteMachine, table: str) -> None:
    """Refuse a machine of a cloud that cannot install or prove who it is."""
    try:
        release_of(plan, site)
    except ValueError as error:
        raise JobError(
            f"{plan.path}: machines of {site.provider} install a release: {error}",
            key="release",
        ) from None
    needed = ("identity", "role") if site.provider == AWS else ("identity",)
    for name in needed:
        if not getattr(site.machine, name):
            raise JobError(
                f"{plan.path}: is missing: by it, the machine proves who it is",
                key=f"{table}.{name}",
            )
    try:
        identity_of(site)
    except ValueError as error:
        key = "role" if site.provider == AWS else "identity"
        raise JobError(f"{plan.path}: {error}", key=f"{table}.{key}") from None


def check_gpus(deployment: Deployment) -> None:
    """Refuse machines with GPUs that nothing on them could use.

    Raises:
        JobError: A machine has GPUs, and would start from an image without a driver.
        ComputeError: A service fails.
    """
    for index, site in enumerate(deployment.plan.file.sites):
        if site.provider not in IMAGES or site.machine.image:
            continue
        gpus = count_gpus(deployment, site)
        if gpus:
            raise JobError(
                f"{deployment.plan.path}: is missing: {site.machine.type} of "
                f"{site.name!r} has {gpus} GPUs, and the default image has no driver "
                "for them: name one with NVIDIA's driver, cloud-init and Python 3.11 "
                "or newer, or a type of machine without GPUs",
                key=f"sites[{index}].machine.image",
            )


def check_routes(deployment: Deployment, tell: Tell) -> None:
    """Refuse machines that would be paid for, and could not install anything.

    Raises:
        JobError: A site's subnets have no way out; the message says what to add.
        ComputeError: A service fails.
    """
    for index, site in enumerate(deployment.plan.file.sites):
        pool, machine = deployment.pools[site.pool], site.machine
        if not isinstance(pool, RoutedPool):
            continue
        spec = NodeSpec(
            name=site.name,
            labels={},
            max_seconds=0.0,
            zones=machine.zones,
            subnets=machine.subnets,
        )
        try:
            pool.check_route(spec)
        except MachineRefused as error:
            key = f"sites[{index}].machine.subnets"
            raise JobError(f"{deployment.plan.path}: {error}", key=key) from None
        except ComputeForbidden as error:
            tell(
                f"whether {site.name} has a way out of its network is unknown: {error}"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified or found.is_link_local

"""The machine or pod of a site: what is asked for, and what it does first.

A pod has no identity that its keys could be bound to before it has made them. So it
writes their digest to its log, and asks the aggregator again and again; the command
that launched it reads the log through the cluster's API server, and invites these keys
and no others. No secret is in a manifest or in user data, since anyone who may list
jobs can read it, and a pod needs none of the cluster's API.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w

from cloud_adapters.compute.kube_manifest import STATE, USER_DATA
from cloud_adapters.compute.machine_types import num_gpus
from cloud_adapters.compute.pool import Market, Node, NodeSpec
from cloud_adapters.identity import platforms
from deploy.fleet.bootstrap import MachineInvitation, Release, render
from deploy.fleet.loop import NodeRequest
from deploy.fleet.machine_spec import AWS, GCP, KUBERNETES, SiteMachine
from deploy.fleet.reconcile import SITE_PREFIX
from deploy.fleet.roster_operator import Operator
from deploy.fleet.spec import DeploymentPlan
from deploy.fleet.state import Deployment
from federation import platform_identity
from federation.errors import JobError
from federation.platform_identity import PlatformIdentity
from privacy.membership.token import Token

POD_FOLDER = f"{STATE}/site"
# A shell that waits for a program ignores SIGTERM, which is the leave notice.
_POD_SCRIPT = """\
set -eu
umask 077
mkdir -p {folder}
cat {settings} > {folder}/site.toml
trap 'kill "$!"; exit 143' TERM
crossfed {enrol} &
wait "$!"
trap - TERM
exec crossfed site up --config {folder}/site.toml
"""

# Of all annotations of a pod.
_MAX_SETTINGS_BYTES = 200 << 10
IMAGES = {
    AWS: "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/"
    "ami-id",
    GCP: "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
}
"""Images that machines of a cloud start from by default; they have no GPU driver."""
_UNITS = Path(__file__).parents[1] / "systemd"
_UNIT_NAMES = (
    "crossfed-site.service",
    "crossfed-enrol.service",
    "crossfed.sysusers.conf",
    "nvidia.conf",
)


def pod_command(invitation: MachineInvitation) -> Sequence[str]:
    """The command of a pod whose user data is the site's ``site.toml``.

    Args:
        invitation: How it enrols.
    """
    enrol = shlex.join(invitation.words(POD_FOLDER))
    text = _POD_SCRIPT.format(folder=POD_FOLDER, settings=USER_DATA, enrol=enrol)
    return ("/bin/sh", "-c", text)


def check_pod(plan: DeploymentPlan, index: int) -> None:
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


def pod_request(
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
        command=pod_command(invitation),
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


def pod_identity(
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


def machine_request(
    deployment: Deployment, operator: Operator, site: SiteMachine, address: str
) -> NodeRequest:
    """The machine of a site, with all that it does when it starts.

    Args:
        deployment: The machine belongs to it.
        operator: The machine trusts the rosters that it signs.
        site: Its name, and the type and place of its machine.
        address: Where sites reach the aggregator.
    """
    plan, machine = deployment.plan, site.machine
    token = Token(
        address=address, authority=operator.authority, site=site.name, secret=b""
    )
    settings, gpus = dict(plan.settings[site.name]), count_gpus(deployment, site)
    if gpus:
        settings["compute"] = {"gpus": gpus, **settings.get("compute", {})}
    is_pod = site.provider == KUBERNETES
    if machine.market == Market.SPOT.value and not is_pod:
        settings["compute"] = {"notices": site.provider, **settings.get("compute", {})}
    document = {
        "name": site.name,
        "certificate": "site.pem",
        "roster_signer": operator.key.public.key.hex(),
        "aggregator": {"address": address, "authority": "ca.crt"},
        **settings,
    }
    invitation = MachineInvitation(
        token=token.text,
        organisation=site.organisation or plan.file.organisation or site.name,
        platform=site.provider,
        region=machine.region if site.provider == AWS else "",
    )
    if is_pod:
        return pod_request(deployment, site, document, invitation)
    spec = NodeSpec(
        name=f"{SITE_PREFIX}{site.name}",
        labels=machine.tags,
        max_seconds=deployment.max_seconds,
        machine=machine.type,
        zones=machine.zones,
        market=Market(machine.market),
        accelerator=machine.accelerator,
        gpus=gpus,
        image=machine.image or IMAGES[site.provider],
        disk_gb=machine.disk_gb,
        disk_key=machine.disk_key,
        identity=machine.identity,
        subnets=machine.subnets,
        firewalls=machine.firewalls,
    )
    units = {name: (_UNITS / name).read_text(encoding="utf-8") for name in _UNIT_NAMES}

    def text_of(seconds: float) -> str:
        return render(
            replace(spec, max_seconds=seconds),
            release_of(plan, site),
            tomli_w.dumps(document),
            units,
            invitation,
        )

    text = text_of(spec.max_seconds)
    # Where it runs may differ; what it is and does may not.
    kind = (spec.machine, spec.market, spec.image, spec.disk_gb, spec.identity)
    read = f"{text}\n{kind}\n{spec.subnets}\n{spec.firewalls}{spec.disk_key}".encode()
    return NodeRequest(site.pool, replace(spec, user_data=text), read, text_of)


def count_gpus(deployment: Deployment, site: SiteMachine) -> int:
    """How many GPUs a machine of a cloud has; a cluster counts those of its pods."""
    machine = site.machine
    if machine.accelerator:
        return machine.accelerators
    return num_gpus(deployment.pools[site.pool], machine.type, machine.zones)


def identity_of(site: SiteMachine, instance: str = "") -> PlatformIdentity:
    """Who a site's machine is to its cloud.

    Raises:
        ValueError: The role or the service account is not of the cloud's form.
    """
    machine = site.machine
    if site.provider == AWS:
        return platform_identity.of_role(
            machine.role, region=machine.region, instance=instance
        )
    return platform_identity.of_service_account(
        machine.identity, project=machine.project, instance=instance
    )


def release_of(plan: DeploymentPlan, site: SiteMachine) -> Release:
    """What a site's machine installs.

    Raises:
        ValueError: It is no release.
    """
    given = plan.file.release
    extras = dict.fromkeys((*given.extras, site.provider))
    return Release(**{**asdict(given), "extras": tuple(extras)})

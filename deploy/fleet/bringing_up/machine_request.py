"""The machine of a site of a cloud: what is asked for, and what it does first."""

from dataclasses import asdict, replace
from pathlib import Path

import tomli_w

from cloud_adapters.compute.machine_types import num_gpus
from cloud_adapters.compute.pool import Market, NodeSpec
from deploy.fleet.bringing_up import pod_sites
from deploy.fleet.bringing_up.operator import Operator
from deploy.fleet.deployment import Deployment
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.reconcile import SITE_PREFIX
from deploy.fleet.roles import NodeRequest
from deploy.fleet.starting.user_data import MachineInvitation, Release, render
from deploy.fleet.tables.providers import AWS, GCP, KUBERNETES
from deploy.fleet.tables.site_machine import SiteMachine
from federation import platform_identity
from federation.platform_identity import PlatformIdentity
from privacy.membership.token import Token

IMAGES = {
    AWS: "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/"
    "ami-id",
    GCP: "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
}
"""Images that machines of a cloud start from by default; they have no GPU driver."""

_UNITS = Path(__file__).parents[2] / "systemd"
_UNIT_NAMES = (
    "crossfed-site.service",
    "crossfed-enrol.service",
    "crossfed.sysusers.conf",
    "nvidia.conf",
)


def request(
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
        return pod_sites.request(deployment, site, document, invitation)
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

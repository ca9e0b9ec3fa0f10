"""The nodes that a deployment needs: what is asked for, and what each does first.

Pure: a plan and what is known of its aggregator and machines in, requests out. The same
requests have the same settings, so a node that fits is kept, and no other is.

A pod has no identity that its keys could be bound to before it has made them. So it
writes their digest to its log, and asks the aggregator again and again; the command
that launched it reads the log through the cluster's API server, and invites these keys
and no others. No secret is in a manifest or in user data, since anyone who may list
jobs can read it, and a pod needs none of the cluster's API.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from cloud_adapters.compute.kube_manifest import STATE, USER_DATA
from cloud_adapters.compute.pool import Market, NodeSpec
from deploy.fleet.bootstrap import MachineInvitation, Release, render
from deploy.fleet.loop import NodeRequest
from deploy.fleet.machine_spec import AWS, GCP, KUBERNETES, LOCAL, SiteMachine
from deploy.fleet.reconcile import AGGREGATOR
from deploy.fleet.spec import DeploymentPlan
from federation import platform_identity
from federation.errors import JobError
from federation.job import code_files
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
AGGREGATOR_FILE, SITE_FILE = "aggregator.toml", "site.toml"
WRITTEN = "# Written by crossfed up from the deployment file: change that one.\n\n"
_UNITS = Path(__file__).parents[1] / "systemd"
_UNIT_NAMES = (
    "crossfed-site.service",
    "crossfed-enrol.service",
    "crossfed.sysusers.conf",
    "nvidia.conf",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What requests depend on besides the plan.

    Attributes:
        address: Where sites reach the aggregator.
        settings: Its ``aggregator.toml``.
        authority: Fingerprint of its authority, hexadecimal.
        signer: Public key of the operator who signs rosters for machines of clouds and
            for pods, hexadecimal.
        gpus: GPUs of machines of clouds, by the names of their sites.
    """

    address: str
    settings: bytes = b""
    authority: str = ""
    signer: str = ""
    gpus: Mapping[str, int] = field(default_factory=dict)


def wanted(plan: DeploymentPlan, known: Known) -> Mapping[str, NodeRequest]:
    """List the node that each role of a deployment needs, by role.

    Raises:
        JobError: The tables of a pod are larger than an annotation may be.
        ValueError: The user data of a machine is larger than its cloud takes.
    """
    path = plan.aggregator / AGGREGATOR_FILE
    own = _program(plan, AGGREGATOR, ("aggregator", "up", "--config", str(path)))
    found = {AGGREGATOR: NodeRequest(LOCAL, own, known.settings)}
    make = {LOCAL: _local, KUBERNETES: _pod}
    for site in plan.file.sites:
        found[site.role] = make.get(site.provider, _machine)(plan, known, site)
    return found


def _local(plan: DeploymentPlan, known: Known, site: SiteMachine) -> NodeRequest:
    """A process of this host."""
    path = plan.site(site.name) / SITE_FILE
    spec = _program(plan, site.role, ("site", "up", "--config", str(path)))
    text = f"{WRITTEN}{tomli_w.dumps(_site_file(plan, known, site))}"
    return NodeRequest(site.pool, spec, text.encode())


def _program(plan: DeploymentPlan, role: str, words: Sequence[str]) -> NodeSpec:
    """A process of this host that runs a command of crossfed."""
    named_in = (plan.job, plan.path.resolve())
    folders = dict.fromkeys(str(file.parent) for file in named_in)
    return NodeSpec(
        name=role,
        command=[sys.executable, "-m", "crossfed", *words],
        # A user's own files are found from the files that name them.
        environment={code_files.FOLDERS: os.pathsep.join(folders)},
        labels={},
        max_seconds=plan.max_seconds,
    )


def _pod(plan: DeploymentPlan, known: Known, site: SiteMachine) -> NodeRequest:
    """A job of a cluster.

    Raises:
        JobError: Its tables are larger than an annotation may be.
    """
    machine, text = site.machine, tomli_w.dumps(_site_file(plan, known, site))
    if len(text.encode()) > _MAX_SETTINGS_BYTES:
        raise JobError(
            f"{plan.path}: the tables of {site.name!r} have {len(text.encode())} "
            f"bytes, and a pod takes {_MAX_SETTINGS_BYTES}",
            key="sites",
        )
    spec = NodeSpec(
        name=site.role,
        command=pod_command(_invitation(plan, known, site)),
        labels={},
        max_seconds=plan.max_seconds,
        machine=machine.type,
        zones=machine.zones,
        market=Market(machine.market),
        user_data=text,
        image=plan.file.release.image,
        disk_gb=machine.disk_gb,
        identity=machine.identity,
        limits=machine.cluster.limits,
    )
    # Where it runs may differ; what it is and does may not.
    kind = (spec.machine, spec.market, spec.image, spec.disk_gb, spec.identity)
    read = f"{spec.command}\n{text}\n{kind}\n{spec.limits}".encode()
    return NodeRequest(site.pool, spec, read)


def _machine(plan: DeploymentPlan, known: Known, site: SiteMachine) -> NodeRequest:
    """A machine of a cloud."""
    machine, document = site.machine, _site_file(plan, known, site)
    spec = NodeSpec(
        name=site.role,
        labels=machine.tags,
        max_seconds=plan.max_seconds,
        machine=machine.type,
        zones=machine.zones,
        market=Market(machine.market),
        accelerator=machine.accelerator,
        gpus=known.gpus.get(site.name, 0),
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
            _invitation(plan, known, site),
        )

    text = text_of(spec.max_seconds)
    # Where it runs may differ; what it is and does may not.
    kind = (spec.machine, spec.market, spec.image, spec.disk_gb, spec.identity)
    read = f"{text}\n{kind}\n{spec.subnets}\n{spec.firewalls}{spec.disk_key}".encode()
    return NodeRequest(site.pool, replace(spec, user_data=text), read, text_of)


def _site_file(
    plan: DeploymentPlan, known: Known, site: SiteMachine
) -> Mapping[str, Any]:
    """The ``site.toml`` of a site."""
    settings = dict(plan.settings[site.name])
    found: dict[str, Any] = {"name": site.name, "certificate": "site.pem"}
    if site.provider != LOCAL:
        found["roster_signer"] = known.signer
    more: dict[str, Any] = {}
    if site.is_spot:
        more["notices"] = site.provider
    if gpus := known.gpus.get(site.name, 0):
        more["gpus"] = gpus
    if more:
        settings["compute"] = {**more, **settings.get("compute", {})}
    address = {"address": known.address, "authority": "ca.crt"}
    return {**found, "aggregator": address, **settings}


def _invitation(
    plan: DeploymentPlan, known: Known, site: SiteMachine
) -> MachineInvitation:
    """How a machine or pod enrols; there is no secret in it."""
    token = Token(
        address=known.address, authority=known.authority, site=site.name, secret=b""
    )
    return MachineInvitation(
        token=token.text,
        organisation=site.organisation or plan.file.organisation or site.name,
        platform=site.provider,
        region=site.machine.region if site.provider == AWS else "",
    )


def pod_command(invitation: MachineInvitation) -> Sequence[str]:
    """The command of a pod whose user data is the site's ``site.toml``.

    Args:
        invitation: How it enrols.
    """
    enrol = shlex.join(invitation.words(POD_FOLDER))
    text = _POD_SCRIPT.format(folder=POD_FOLDER, settings=USER_DATA, enrol=enrol)
    return ("/bin/sh", "-c", text)


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

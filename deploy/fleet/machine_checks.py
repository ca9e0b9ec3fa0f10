"""What is wrong in a table ``[[sites]]`` of the deployment file."""

import re

from cloud_adapters.compute.machine_types import RequiresSpec
from deploy.fleet import machine_spec
from deploy.fleet.machine_spec import (
    AWS,
    GCP,
    KUBERNETES,
    LOCAL,
    CloudMachine,
    ClusterSpec,
    SiteMachine,
)
from deploy.site_host import config as site_file
from deploy.site_host.config import ComputeSpec
from federation.errors import JobError

# Why a key is nothing for a pod, by its name.
_NOT_IN_CLUSTERS = {
    "region": "the cluster is in cluster.context",
    "project": "the cluster is in cluster.context",
    "accelerator": "state GPUs in cluster.gpus",
    "accelerators": "state GPUs in cluster.gpus",
    "requires": "state what the pod gets in cluster, and type if it matters",
    "image": "it runs release.image",
    "role": "its service account may have one, and identity names that",
    "disk_key": "its storage class decides",
    "tags": "label its namespace",
    "subnets": "it has the network of its cluster",
    "firewalls": "the namespace's network policies filter its traffic",
}


def check_site(site: SiteMachine, table: str, *, has_deadline: bool) -> None:
    """Refuse a site that could not be started as its table says.

    Args:
        site: The table.
        table: Its name, for example ``sites[0]``.
        has_deadline: Whether the file states ``deadline_hours``.

    Raises:
        JobError: A key is missing or wrong.
    """
    _check_machine(site, f"{table}.machine")
    _check_settings(site, table)
    _check_sizes(site, table, has_deadline=has_deadline)


def _check_machine(site: SiteMachine, table: str) -> None:
    if site.provider == LOCAL:
        _check_local(site.machine, table)
    elif site.provider == KUBERNETES:
        _check_cluster(site, table)
    elif site.machine.cluster != ClusterSpec():
        raise JobError(
            f"is for provider {KUBERNETES}: remove it", key=f"{table}.cluster"
        )
    else:
        _check_cloud(site, table)


def _check_local(machine: CloudMachine, table: str) -> None:
    if machine != CloudMachine():
        raise JobError(
            f"has keys for the providers {AWS}, {GCP} and {KUBERNETES}: remove them, "
            "or name one of these as provider",
            key=table,
        )


def _check_cloud(site: SiteMachine, table: str) -> None:
    machine = site.machine
    is_open = machine.requires != RequiresSpec()
    if is_open and machine.type:
        raise JobError("is stated twice: remove type or requires", key=f"{table}.type")
    needed = {AWS: ("region", "type"), GCP: ("region", "type", "project", "zones")}
    for name in needed[site.provider]:
        if not getattr(machine, name) and not (is_open and name == "type"):
            raise JobError(
                f"is missing for provider {site.provider}", key=f"{table}.{name}"
            )
    _check_tags(site, table)
    for zone in machine.zones:
        if not zone.startswith(machine.region):
            raise JobError(
                f"{zone!r} is not in region {machine.region}", key=f"{table}.zones"
            )
    _check_accelerator(site, table, is_open=is_open)
    if site.provider == GCP and len(machine.subnets) > 1:
        raise JobError("names more than one for a region", key=f"{table}.subnets")


def _check_tags(site: SiteMachine, table: str) -> None:
    for name in site.machine.tags:
        # Both clouds' own and ours, by which machines are found again.
        if re.match(r"crossfed-|aws:|name$", name, re.IGNORECASE) or (
            site.provider == GCP and not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name)
        ):
            raise JobError(
                f"{name!r} is reserved, or no name of a label in {site.provider}",
                key=f"{table}.tags",
            )


def _check_accelerator(site: SiteMachine, table: str, *, is_open: bool) -> None:
    if site.machine.accelerator and (site.provider != GCP or is_open):
        raise JobError(
            "is for a machine of gcp with a type: remove it, or name the type",
            key=f"{table}.accelerator",
        )


def _check_cluster(site: SiteMachine, table: str) -> None:
    for name, why in _NOT_IN_CLUSTERS.items():
        if getattr(site.machine, name) != getattr(CloudMachine(), name):
            raise JobError(
                f"is not for provider {KUBERNETES}: {why}", key=f"{table}.{name}"
            )
    machine_spec.check_cluster(
        site.machine.cluster, identity=site.machine.identity, table=table
    )
    site_table = table.rpartition(".")[0]
    if site.dollars_per_hour is None:
        raise JobError(
            f"is missing for provider {KUBERNETES}: no table knows what a cluster's "
            "machines cost; 0 if nothing",
            key=f"{site_table}.dollars_per_hour",
        )
    if site.compute.notices != ComputeSpec().notices:
        raise JobError(
            f"is not for provider {KUBERNETES}: a pod that has to go gets SIGTERM, "
            "which is its notice",
            key=f"{site_table}.compute.notices",
        )


def _check_settings(site: SiteMachine, table: str) -> None:
    """Refuse what ``site.toml`` would be refused for."""
    aggregator = site_file.AggregatorSpec(address="127.0.0.1:1", authority="ca.crt")
    whole = site_file.SiteFile(
        name=site.name,
        aggregator=aggregator,
        data=site.data,
        compute=site.compute,
        policy=site.policy,
        home=site.home,
    )
    try:
        site_file.check(whole)
    except JobError as error:
        raise JobError(error.reason, key=f"{table}.{error.key}") from None


def _check_sizes(site: SiteMachine, table: str, *, has_deadline: bool) -> None:
    """Refuse sizes that a site could not be moved between."""
    if not site.sizes:
        return
    kinds = [size.type for size in site.sizes]
    for name, is_wrong, why in (
        ("sizes", not site.is_of_cloud, f"is for {AWS} and {GCP}: remove it"),
        (
            "sizes",
            site.machine.type not in kinds or len({*kinds}) < len(kinds),
            "must name machine.type, and each type once",
        ),
        (
            "machine.accelerator",
            bool(site.machine.accelerator),
            "is the same on every size, so nothing would be gained: remove it or sizes",
        ),
        (
            "home.url",
            not site.home.url,
            "is missing: another machine would have none of its keys and ledgers",
        ),
        (
            "dollars_per_hour",
            site.dollars_per_hour is not None,
            "is of one machine: state it in sizes",
        ),
        (
            "sizes",
            site.is_spot and has_deadline,
            "and deadline_hours both move a spot machine: remove one of them",
        ),
    ):
        if is_wrong:
            raise JobError(why, key=f"{table}.{name}")

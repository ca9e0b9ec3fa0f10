"""Compute services of a deployment: those its file names, and those it has used."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cloud_adapters.compute.local import LocalPool
from cloud_adapters.compute.pool import ComputePool
from cloud_adapters.extras import naming_extras
from deploy.fleet import deployment_record
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.deployment_record import PoolPlace
from deploy.fleet.tables.providers import AWS, KUBERNETES, LOCAL
from federation.errors import CorruptObject
from federation.protocols import Clock


def pools_of(plan: DeploymentPlan, clock: Clock) -> Mapping[str, ComputePool]:
    """Open every compute service that a deployment names or has used, this host first.

    Raises:
        ComputeError: The name of a region or a profile is wrong.
        MissingExtra: The library of one is not installed.
    """
    pools: dict[str, ComputePool] = {LOCAL: local_pool(plan, clock)}
    pools.update((name, _cloud(place, clock)) for name, place in places(plan).items())
    return pools


def local_pool(plan: DeploymentPlan, clock: Clock) -> LocalPool:
    """Open the processes of a deployment on this host."""
    # A user's own models and data are found from where the deployment file is.
    here = plan.path.parent.absolute()
    return LocalPool(folder=nodes_folder(plan), working_folder=here, clock=clock)


def places(plan: DeploymentPlan) -> Mapping[str, PoolPlace]:
    """Clouds that the file names, then those that only the folder's record does."""
    try:
        record = deployment_record.read(plan.folder)
    except CorruptObject:  # ``deployment.opened`` raises it.
        record = None
    before = {} if record is None else {each.pool: each for each in record.places}
    # A head that an earlier file has named has left a volume, and perhaps a Service.
    found = {
        name: replace(place, has_head=place.has_head or _had_head(before.get(name)))
        for name, place in named_places(plan).items()
    }
    return {**found, **{k: v for k, v in before.items() if k not in found}}


def _had_head(place: PoolPlace | None) -> bool:
    return place is not None and place.has_head


def named_places(plan: DeploymentPlan) -> Mapping[str, PoolPlace]:
    """Clouds that the file names, by the names of their pools."""
    found = {
        site.pool: PoolPlace(
            pool=site.pool,
            provider=site.provider,
            region=site.machine.region,
            project=site.machine.project,
            endpoint=site.machine.endpoint,
            context=site.machine.cluster.context,
            namespace=site.machine.cluster.namespace,
        )
        for site in plan.file.sites
        if site.pool != LOCAL
    }
    machine = plan.file.aggregator
    if plan.has_head:
        found[machine.pool] = PoolPlace(
            pool=machine.pool,
            provider=machine.provider,
            region="",
            project="",
            endpoint=machine.endpoint,
            context=machine.cluster.context,
            namespace=machine.cluster.namespace,
            has_head=True,
        )
    return found


def nodes_folder(plan: DeploymentPlan) -> Path:
    """Folder of the nodes of this host."""
    return plan.folder / "nodes"


def _cloud(place: PoolPlace, clock: Clock) -> ComputePool:
    with naming_extras():
        if place.provider == KUBERNETES:
            from cloud_adapters.compute import kube_jobs  # noqa: PLC0415 -- the extra

            return kube_jobs.connect(
                place.context,
                place.namespace,
                clock=clock,
                endpoint=place.endpoint,
                has_head=place.has_head,
            )
        if place.provider == AWS:
            from cloud_adapters.compute import ec2  # noqa: PLC0415 -- the extra aws

            return ec2.connect(place.region, place.endpoint, clock=clock)
        from cloud_adapters.compute import gce  # noqa: PLC0415 -- the extra gcp

        return gce.connect(place.project, place.endpoint)

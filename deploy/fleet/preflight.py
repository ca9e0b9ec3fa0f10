"""What is checked before a deployment is brought up, so that nothing is half done."""

import ipaddress
import math
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from clients.privacy.site_policy import check_work
from cloud_adapters.compute.machine_types import num_gpus
from cloud_adapters.compute.pool import NodeSpec, NodeState, RoutedPool
from deploy.aggregator_host.parties import check_job
from deploy.fleet import spending
from deploy.fleet.loop import NodesByPool
from deploy.fleet.machine_spec import AWS, KUBERNETES, LOCAL, SiteMachine
from deploy.fleet.reconcile import ROLE
from deploy.fleet.spec import DeploymentPlan, Tell
from deploy.fleet.state import Deployment
from deploy.fleet.wanted import identity_of, release_of
from federation.addresses import parse_address
from federation.errors import (
    ComputeError,
    ComputeForbidden,
    CorruptObject,
    JobError,
    MachineRefused,
)
from federation.ids import SiteId
from federation.job.spec import JobSpec

_CONFIG = "aggregator.toml"
# With so few, no threshold lets a sum open without one of them.
_FEW_SECRET_SITES = 3
# Programs of this host start one after the other, the last of them with at least
# ``spending.LEAST_SECONDS`` of the budget left.
_LOCAL_MINUTES = 2.0


def check_cloud_site(plan: DeploymentPlan, index: int) -> None:
    """Refuse a site of a cloud whose machine could not enrol, before it costs anything.

    Raises:
        JobError: A key is missing or wrong.
    """
    site = plan.file.sites[index]
    _check_release(plan, site)
    if site.is_of_cloud:
        _check_identity(plan, site, f"sites[{index}].machine")
    address = plan.file.aggregator.address
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


def _check_release(plan: DeploymentPlan, site: SiteMachine) -> None:
    """Refuse a machine that cannot install anything, or a pod without an image."""
    try:
        release = release_of(plan, site)
    except ValueError as error:
        raise JobError(
            f"{plan.path}: machines of {site.provider} install a release: {error}",
            key="release",
        ) from None
    if site.provider == KUBERNETES and not release.image:
        raise JobError(
            f"{plan.path}: is missing: {site.name!r} is a pod, which runs an image "
            "(deploy/containers); machines of clouds can run the same one, in place "
            "of release.wheel",
            key="release.image",
        )


def _check_identity(plan: DeploymentPlan, site: SiteMachine, table: str) -> None:
    """Refuse a machine of a cloud that cannot prove who it is."""
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


def check_gpus(deployment: Deployment) -> Mapping[str, int]:
    """Count GPUs of machines, and refuse those that nothing on them could use.

    Returns:
        GPUs of each machine of a cloud, by its site; clusters count those of pods.

    Raises:
        JobError: A machine has GPUs, and would start from an image without a driver.
        ComputeError: A service fails.
    """
    found: dict[str, int] = {}
    for index, site in enumerate(deployment.plan.file.sites):
        if not site.is_of_cloud:
            continue
        machine = site.machine
        gpus = machine.accelerators if machine.accelerator else 0
        if not machine.accelerator:
            pool = deployment.pools[site.pool]
            gpus = num_gpus(pool, machine.type, machine.zones)
        if gpus and not machine.image:
            raise JobError(
                f"{deployment.plan.path}: is missing: {machine.type} of "
                f"{site.name!r} has {gpus} GPUs, and the default image has no driver "
                "for them: name one with NVIDIA's driver, cloud-init and Python 3.11 "
                "or newer, or a type of machine without GPUs",
                key=f"sites[{index}].machine.image",
            )
        found[site.name] = gpus
    return found


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


def check_before(plan: DeploymentPlan, job: JobSpec) -> None:
    """Refuse what no deployment can do, before anything is made or started.

    Raises:
        JobError: The job cannot be run so, or names other sites.
    """
    check_sites(plan, job)
    for index, site in enumerate(plan.file.sites):
        if site.provider != LOCAL:
            check_cloud_site(plan, index)
            _check_home(plan, index)
    if job.relays:
        raise JobError(
            f"{plan.job}: crossfed up starts no relays: start aggregator, relays and "
            "sites one by one, and run the job with crossfed run",
            key="relays",
        )
    try:
        check_job(job)
        check_work_allowed(plan, job)
    except JobError as error:
        raise JobError(f"{plan.job}: {error}") from None


def check_sites(plan: DeploymentPlan, job: JobSpec) -> None:
    """Refuse sites that the job does not have.

    Raises:
        JobError: The deployment names one.
    """
    known = {site.name for site in job.sites}
    for index, site in enumerate(plan.file.sites):
        if site.name not in known:
            raise JobError(
                f"{plan.path}: {site.name!r} is no site of {plan.job}, which has "
                f"{', '.join(sorted(known))}",
                key=f"sites[{index}].name",
            )


def check_work_allowed(plan: DeploymentPlan, job: JobSpec) -> None:
    """Refuse more work than a site's policy allows: its machine would do nothing.

    Raises:
        JobError: The job asks for more; the key is that of the job.
    """
    for site in plan.file.sites:
        check_work(job, site.policy, SiteId(site.name))


def _check_home(plan: DeploymentPlan, index: int) -> None:
    """Refuse a deadline for a spot machine that takes its keys and ledgers along."""
    site = plan.file.sites[index]
    if plan.file.deadline_hours is not None and site.is_spot and not site.home.url:
        raise JobError(
            f"{plan.path}: is missing: deadline_hours may move the site to another "
            "machine, and without a home its keys and ledgers would be lost",
            key=f"sites[{index}].home.url",
        )


def notices(job: JobSpec) -> Iterator[str]:
    """Say what a person should know of a job before it is brought up."""
    secure, sites = job.privacy.secure_aggregation, len(job.sites)
    if secure.enabled and sites <= _FEW_SECRET_SITES:
        yield (
            f"with secure aggregation over {sites} sites, a site that leaves or fails "
            "during a round may cost that round"
        )


def check_budget(deployment: Deployment) -> None:
    """Refuse to start machines that a budget would end before they work.

    Raises:
        JobError: It is spent, or what is left of it is; the message says what would do.
        ComputeError: A service fails.
    """
    plan = deployment.plan
    limit = plan.file.max_dollars
    if limit is None:
        return
    spent = spending.read(plan.folder).dollars
    if spent >= limit:
        raise JobError(
            f"{plan.path}: its machines have cost ${spent:,.2f} so far, and "
            f"may cost {limit:g}: raise it, or use another folder for a new budget",
            key="max_dollars",
        )
    if not _runs(deployment):
        check_start_budget(plan, now=deployment.clock.now())


def check_start_budget(plan: DeploymentPlan, *, now: float) -> None:
    """Refuse a budget that machines would have spent before they work, if none runs.

    Args:
        plan: The deployment, whose folder may not exist yet.
        now: Seconds since 1970.

    Raises:
        JobError: The message says what would do.
    """
    limit = plan.file.max_dollars
    if limit is None:
        return
    spent = spending.read(plan.folder).dollars
    hourly = sum(spending.budget_prices(plan, now=now).values())
    minutes = _LOCAL_MINUTES
    takes = f"{minutes:g} minutes"
    if plan.file.has_clouds and plan.file.start.machine_minutes >= minutes:
        minutes = plan.file.start.machine_minutes
        takes = f"start.machine_minutes = {minutes:g}"
    least = spent + hourly * minutes / 60.0
    if limit < least:
        raise JobError(
            f"{plan.path}: {limit:g} would be spent before the machines work: together "
            f"they cost ${hourly:,.2f} an hour and take {takes} to start. "
            f"${spent:,.2f} are spent so far: give at least "
            f"{math.ceil(least * 100) / 100:.2f}",
            key="max_dollars",
        )


def _runs(deployment: Deployment) -> bool:
    """Whether a node of the deployment runs, which has started then."""
    return any(
        node.state is not NodeState.GONE
        for nodes in deployment.listed().values()
        for node in nodes
    )


def check_aggregator_kept(plan: DeploymentPlan) -> None:
    """Refuse to make a second aggregator for sites that trust the first one.

    Raises:
        CorruptObject: Its folder is gone, or has lost its configuration.
    """
    folder = plan.aggregator
    sites = [plan.site(site.name) for site in plan.file.sites]
    enrolled = [site for site in sites if (site / "site.pem").exists()]
    if (folder / _CONFIG).exists() or not enrolled:
        return
    names = ", ".join(site.name for site in enrolled)
    certificates = " ".join(str(site / "site.pem") for site in enrolled)
    raise CorruptObject(
        f"the aggregator that {names} enrolled with is lost: {folder} has no "
        f"{_CONFIG}, and sites trust no other one. Restore the folder from a backup. "
        f"If there is none: crossfed down, rm {certificates} (nothing else: ledgers "
        "are beside them), and crossfed up, which makes a new aggregator and enrols "
        "the sites again"
    )


def check_moved(deployment: Deployment, listed: NodesByPool) -> None:
    """Refuse to start a site a second time because the file moves it elsewhere.

    Args:
        deployment: Whose sites they are.
        listed: All its nodes, by pool.

    Raises:
        ComputeError: Its machine in another place still runs, and costs.
    """
    plan = deployment.plan
    pools = {site.role: site.pool for site in plan.file.sites}
    for name, nodes in listed.items():
        if name == LOCAL:
            continue
        for node in nodes:
            wanted = pools.get(node.labels.get(ROLE, ""), name)
            if node.state is not NodeState.GONE and wanted != name:
                raise ComputeError(
                    f"{plan.path} has {node.name} in {wanted!r}, but {node.id} is in "
                    f"{name!r}, has the site's keys and ledger, and costs: name "
                    f"{name!r} again, or end it with crossfed down first"
                )

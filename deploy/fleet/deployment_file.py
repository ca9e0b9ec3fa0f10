"""The deployment file: which machines a federation runs on, and for how long.

What a run computes is in its job, which the deployment file names. Nothing here is
part of what sites agree on. Its larger tables are in ``deploy.fleet.tables``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cloud_adapters.compute.kube_head import IN_CLUSTER
from deploy.aggregator_host.config import PlatformsSpec
from deploy.fleet.starting import cluster_head
from deploy.fleet.tables import aggregator_machine, site_checks, start_spec
from deploy.fleet.tables.aggregator_machine import AggregatorMachine
from deploy.fleet.tables.providers import KUBERNETES
from deploy.fleet.tables.site_machine import SiteMachine
from deploy.fleet.tables.start_spec import StartSpec
from deploy.wiring import exchange
from deploy.wiring.exchange import ExchangeSpec
from federation.errors import JobError
from federation.ids import check_name
from federation.job import job_file
from federation.job.job_keys import key
from federation.job.spec import JobSpec

# Those of site.toml that a site here may have.
_TABLES = ("data", "compute", "policy", "home")
# What clouds take in a label's value.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSpec:
    """What machines of clouds install: a wheel or a container image, and not both.

    Attributes:
        wheel: URL of a wheel of crossfed: `https://`, `s3://BUCKET/KEY` or
            `gs://BUCKET/KEY`, which the machines' own identities may read.
        sha256: Digest of the wheel, 64 hexadecimal digits.
        extras: Extras of crossfed to install with it; that of the machine's cloud is
            added.
        image: Container image of a site with its digest, `NAME@sha256:...`.
    """

    wheel: str = ""
    sha256: str = ""
    extras: tuple[str, ...] = ("flower",)
    image: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFile:
    """A deployment.

    Attributes:
        name: Name of the deployment. All machines carry it as a label, by which
            `crossfed down` finds them; lower-case letters, digits and hyphens, at most
            40.
        job: The job file, relative to this file.
        organisation: Who operates the aggregator and the sites.
        max_hours: Every machine ends by itself after so many hours, even if no one is
            left to end it.
        max_dollars: What all its machines may cost together, in all its runs. Each ends
            by itself when all of them would have spent it, and `crossfed up --keep`
            ends them when it is spent. Needs prices that are younger than 90 days. None
            for no budget.
        deadline_hours: The run should be done so many hours after it has begun:
            `crossfed up --keep` then moves spot machines of sites with a home to
            machines on demand while there is time to, and before that to cheaper
            zones. None for no deadline.
        prices: Price table, relative to this file, in place of that of the release; for
            example one that `tools/refresh_prices.py` has written.
        start: When `crossfed up` may start machines.
        folder: Folder for keys, runs and the state of local sites, relative to this
            file; by default `deployments/NAME`.
        aggregator: Where the aggregator runs.
        sites: Sites to start, one `[[sites]]` table each. Other sites of the job
            join with their own operators.
        exchange: As `[exchange]` in `aggregator.toml` and every `site.toml`.
        release: What machines of clouds install.
        platforms: As `[platforms]` in `aggregator.toml`.
    """

    name: str
    job: str
    organisation: str = ""
    max_hours: float = key(default=12.0, above=0.0, high=24.0 * 30)
    max_dollars: float | None = key(default=None, above=0.0)
    deadline_hours: float | None = key(default=None, above=0.0)
    prices: str = ""
    start: StartSpec = StartSpec()
    folder: str = ""
    aggregator: AggregatorMachine = AggregatorMachine()
    sites: tuple[SiteMachine, ...]
    exchange: ExchangeSpec = ExchangeSpec()
    release: ReleaseSpec = ReleaseSpec()
    platforms: PlatformsSpec = PlatformsSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """A deployment file, with its paths made whole.

    Attributes:
        file: What was read.
        path: Where from.
        folder: Keys, runs and the state of local sites.
        job: The job file.
        settings: For each site, the tables of its ``site.toml`` as they were written:
            ``data``, ``compute``, ``policy`` and ``exchange``.
        exchange: The table ``exchange`` of every party, in one of that name; empty if
            there is none.
        platforms: The same of the table ``platforms``, for the aggregator alone.
        prices: The price table; None for that of this release.
    """

    file: DeploymentFile
    path: Path
    folder: Path
    job: Path
    settings: Mapping[str, Mapping[str, Any]]
    exchange: Mapping[str, Any]
    platforms: Mapping[str, Any] = field(default_factory=dict)
    prices: Path | None = None

    @property
    def has_head(self) -> bool:
        """Whether its aggregator is a pod, which starts its sites."""
        return self.file.aggregator.provider == KUBERNETES

    @property
    def is_head(self) -> bool:
        """Whether this is what that pod reads, in the cluster of its sites."""
        return not self.has_head and any(
            site.machine.cluster.context == IN_CLUSTER for site in self.file.sites
        )


def load(path: Path) -> DeploymentPlan:
    """Read a deployment file.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or wrong; the
            message names file and key.
    """
    file = _addressed(job_file.load_table(path, DeploymentFile, _check))
    document = job_file.read_toml(path)
    shared = {name: document[name] for name in ("exchange",) if name in document}
    # In one order: a node whose settings read differently is replaced.
    settings = {
        table["name"]: {**shared, **{n: table[n] for n in _TABLES if n in table}}
        for table in document["sites"]
    }
    # A link to the file means the same deployment.
    here = path.resolve().parent
    folder = here / (file.folder or f"deployments/{file.name}")
    return DeploymentPlan(
        file=file,
        path=path,
        # Without "..", since both are shown. The folder itself may be a link, which
        # is for others to refuse.
        folder=folder.parent.resolve() / folder.name,
        job=(here / file.job).resolve(),
        settings=settings,
        exchange=shared,
        platforms={n: document[n] for n in ("platforms",) if n in document},
        prices=here / file.prices if file.prices else None,
    )


def _addressed(file: DeploymentFile) -> DeploymentFile:
    """The file with the address of an aggregator in a pod, if it states none."""
    machine = file.aggregator
    if machine.provider != KUBERNETES or machine.address:
        return file
    address = cluster_head.address(file.name, machine.cluster.namespace)
    return replace(file, aggregator=replace(machine, address=address))


def load_job(plan: DeploymentPlan) -> JobSpec:
    """Read the job of a deployment.

    Raises:
        JobError: It cannot be read, or is not one that can be run; the message names
            the job file.
    """
    try:
        return job_file.load(plan.job)
    except JobError as error:
        if str(plan.job) in error.reason:
            raise
        raise JobError(f"{plan.job}: {error}") from error


def _check(file: DeploymentFile) -> None:
    if not _NAME.fullmatch(file.name):
        raise JobError(
            "must be 1 to 40 lower-case letters, digits and hyphens, and begin with a "
            "letter: clouds take nothing else as a label",
            key="name",
        )
    aggregator_machine.check_addresses(file.aggregator)
    _check_paths(file)
    _check_names(file)
    aggregator_machine.check(file.aggregator, file.sites, prices=file.prices)
    start_spec.check(file.start, file.sites)
    has_deadline = file.deadline_hours is not None
    for index, site in enumerate(file.sites):
        site_checks.check(site, f"sites[{index}]", has_deadline=has_deadline)
    exchange.check(file.exchange)


def _check_paths(file: DeploymentFile) -> None:
    paths = (
        ("job", file.job),
        ("folder", file.folder),
        ("prices", file.prices),
    )
    for name, text in paths:
        if "\0" in text or (name == "job" and not text):
            raise JobError(f"{text!r:.200} is no path", key=name)


def _check_names(file: DeploymentFile) -> None:
    names = [site.name for site in file.sites]
    if not names:
        raise JobError("name at least one site to start", key="sites")
    for index, name in enumerate(names):
        try:
            check_name(name)
        except ValueError as error:
            raise JobError(str(error), key=f"sites[{index}].name") from None
        if name in names[:index]:
            raise JobError(f"names {name!r} twice", key=f"sites[{index}].name")

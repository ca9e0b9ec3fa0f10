"""The deployment file: which machines a federation runs on, and for how long.

What a run computes is in its job, which the deployment file names. Nothing here is
part of what sites agree on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clients.privacy.policy_spec import PolicySpec
from cloud_adapters.compute.kube_head import IN_CLUSTER
from cloud_adapters.compute.machine_types import RequiresSpec
from cloud_adapters.compute.pool import Line, Market
from deploy.aggregator_host.config import PlatformsSpec
from deploy.fleet.choosing import start_window
from deploy.fleet.starting import cluster_head, cluster_spec
from deploy.fleet.starting.cluster_spec import ClusterSpec
from deploy.site_host import config as site_file
from deploy.site_host.config import ComputeSpec, LocalDataSpec
from deploy.site_host.home_spec import HomeSpec
from deploy.wiring import exchange
from deploy.wiring.exchange import ExchangeSpec
from federation.addresses import parse_address
from federation.errors import JobError
from federation.ids import check_name
from federation.job import job_file
from federation.job.job_keys import key
from federation.job.spec import JobSpec

LOCAL, AWS, GCP, KUBERNETES = "local", "aws", "gcp", "kubernetes"
PROVIDERS = (LOCAL, AWS, GCP, KUBERNETES)
# Their machines have prices in the table, and a cloud to vouch for them.
CLOUDS = (AWS, GCP)
PROCESS, NAMESPACE, CONTAINER = "process", "namespace", "container"
ISOLATIONS = (PROCESS, NAMESPACE, CONTAINER)
MARKETS = tuple(market.value for market in Market)
# Those of site.toml that a site here may have.
_TABLES = ("data", "compute", "policy", "home")
# The pool of containers of this host.
CONTAINERS = f"{LOCAL} containers"
# What clouds take in a label's value.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorMachine:
    """The machine of the aggregator.

    Attributes:
        provider: Who runs the machine: `local` is this host, where its keys stay, and
            `kubernetes` a pod of a cluster, where they are on a volume of its own. All
            sites of the file are then pods of the same namespace. No other provider
            runs it.
        isolation: What it is there: a `process`, or a `container` of podman, which has
            the aggregator's folder alone and a network in which it reaches its sites
            and this host, and nothing else. A container needs root, and sites that
            are containers or namespaces of this host.
        image: Of such a container or of the pod: an image of an aggregator
            (deploy/containers); of a pod with its digest, `NAME@sha256:...`.
        address: `HOST:PORT` where sites reach it; by default a free port of the
            loopback interface, chosen once, or of a pod that of its Service.
        listen: `ADDRESS:PORT` to listen on; by default, `address`, or port 8443 of a
            pod.
        connect_seconds: How long a run waits for its sites to connect.
        dollars_per_hour: What its machine costs.
        dollars_per_gigabyte: What traffic costs that leaves it.
        cluster: The cluster of the pod, and what the pod gets; for provider
            `kubernetes` alone, as are all further keys.
        identity: The pod's service account, which may launch jobs in the namespace
            (deploy/kubernetes/overlays/head).
        disk_gb: Size of its volume, which stays after `crossfed down`. One that is
            there keeps its size.
        disk_dollars_per_month: What the volume costs. None if you do not know.
        endpoint: URL of the API server, if it is not the context's own.
    """

    provider: str = LOCAL
    isolation: str = key(default=PROCESS, choices=(PROCESS, CONTAINER))
    image: str = ""
    address: str = ""
    listen: str = ""
    connect_seconds: float = key(default=600.0, above=0.0)
    dollars_per_hour: float = key(default=0.0, low=0.0)
    dollars_per_gigabyte: float = key(default=0.0, low=0.0)
    cluster: ClusterSpec = ClusterSpec()
    identity: str = "crossfed-head"
    disk_gb: int = key(default=50, low=1, high=16384)
    disk_dollars_per_month: float | None = key(default=None, low=0.0)
    endpoint: str = ""

    @property
    def pool(self) -> str:
        """Name of the compute service."""
        if self.provider == KUBERNETES:
            return f"{KUBERNETES} {self.cluster.place}"
        return CONTAINERS if self.isolation == CONTAINER else self.provider


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSpec:
    """What connects a site whose machine is a `namespace` or a `container`.

    Attributes:
        rate_mbit: Width, in each direction; 0 for no limit.
        delay_ms: Added to every packet, in each direction. The kernel needs netem.
    """

    rate_mbit: float = key(default=0.0, low=0.0, high=1e6)
    delay_ms: float = key(default=0.0, low=0.0, high=10_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudMachine:
    """The machine of a site. Providers `aws` and `gcp` take most keys.

    They take none of `isolation`, `line` and `cluster`. Provider `kubernetes` takes
    `cluster`, `zones`, `type`, `market`, `disk_gb`, `identity` and `endpoint`.

    Attributes:
        isolation: What a `local` machine is: a `process` in this host's network; a
            process in a `namespace`, a network of its own on which it reaches the
            aggregator and nothing else; or a `container`, which has such a network
            and the site's folder alone. The last two need root.
        line: What connects a namespace or a container.
        region: Where it runs, for example `us-east-1` or `europe-west4`.
        project: Id of the Google Cloud project.
        zones: Zones of the region to try, the best first. On AWS, by default all that
            have a subnet of the account.
        type: Type of machine, for example `g5.xlarge` or `g2-standard-4`.
        accelerator: Type of the GPUs to attach to a machine of Google Cloud whose type
            has none, for example `nvidia-tesla-t4` to `n1-standard-4`; for gcp only.
        accelerators: How many of them.
        requires: What the machine needs at least, in place of its type: the cheapest
            that the region and its zones have is taken when the site is first started.
        market: `on-demand`, or `spot`, which is cheaper and may be taken back.
        image: What it starts from: the name of a container's image, which has none by
            default; the id of an AMI or `/aws/service/...` on AWS;
            `projects/P/global/images/...` on Google Cloud; by default, Ubuntu 24.04 for
            amd64. A machine of a cloud needs cloud-init and Python 3.11 or newer; one
            with GPUs needs an image with NVIDIA's driver, so it has no default.
        disk_gb: Size of its encrypted disk.
        identity: Who its programs are to the cloud: the name of an instance profile on
            AWS, the address of a service account on Google Cloud. The machine proves
            by it who it is.
        role: ARN of the role in that instance profile; for AWS only.
        subnets: Where it is connected: ids of subnets on AWS, one in each zone; the
            name of one subnet on Google Cloud. By default, those of the account.
        firewalls: What filters its traffic: ids of security groups on AWS, network
            tags on Google Cloud. It has no public address in any case.
        endpoint: URL of the compute service or API server, if it is not the cloud's or
            the context's own.
        cluster: The cluster, and what the site gets of it; for provider `kubernetes`
            alone. There, `type` is a label of the nodes to use and `identity` a service
            account of the namespace, both optional.
    """

    isolation: str = key(default=PROCESS, choices=ISOLATIONS)
    line: LineSpec = LineSpec()
    region: str = ""
    project: str = ""
    zones: tuple[str, ...] = ()
    type: str = ""
    accelerator: str = ""
    accelerators: int = key(default=1, low=1, high=16)
    requires: RequiresSpec = RequiresSpec()
    market: str = key(default=Market.ON_DEMAND.value, choices=MARKETS)
    image: str = ""
    disk_gb: int = key(default=50, low=10, high=16384)
    identity: str = ""
    role: str = ""
    subnets: tuple[str, ...] = ()
    firewalls: tuple[str, ...] = ()
    endpoint: str = ""
    cluster: ClusterSpec = ClusterSpec()

    @property
    def priced_as(self) -> str:
        """Its name in a price table: GPUs that are attached cost besides its type."""
        if not self.accelerator:
            return self.type
        return f"{self.type} + {self.accelerators} x {self.accelerator}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSpec:
    """A machine that a site may have instead, between rounds.

    Attributes:
        type: Its type.
        speed: Work per second, in any unit that is the same for all sizes of the site.
        dollars_per_hour: Its price in the site's market; by default that of the table.
    """

    type: str
    speed: float = key(above=0.0)
    dollars_per_hour: float | None = key(default=None, low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteMachine:
    """A site that this deployment starts, and what its operator decides.

    Attributes:
        name: Name of the site, as in the job.
        provider: Who runs the machine: `local` is a process on this host, `aws` an
            instance of EC2, `gcp` one of Compute Engine, `kubernetes` a job of a
            cluster.
        organisation: Who answers for the site; by default the deployment's.
        dollars_per_hour: What its machine costs; by default what `crossfed plan` finds
            in its price table, and nothing on this host. In a cluster it must be
            stated.
        on_demand_dollars_per_hour: What a machine on demand would cost, if this one is
            a spot machine that a deadline may move.
        dollars_per_gigabyte: What traffic costs that leaves its machine.
        machine: The machine.
        data: As `[data]` in `site.toml`.
        compute: As `[compute]` in `site.toml`.
        policy: As `[policy]` in `site.toml`.
        home: As `[home]` in `site.toml`. With it, another machine takes over the site's
            keys and ledgers.
        sizes: Machines that it may have, that of `machine.type` among them: `crossfed
            up --keep` then gives it a larger one between rounds while all others wait
            for it, and a smaller one while it waits. By default, it keeps its machine.
    """

    name: str
    provider: str = key(default=LOCAL, choices=PROVIDERS)
    organisation: str = ""
    dollars_per_hour: float | None = key(default=None, low=0.0)
    on_demand_dollars_per_hour: float | None = key(default=None, low=0.0)
    dollars_per_gigabyte: float | None = key(default=None, low=0.0)
    machine: CloudMachine = CloudMachine()
    data: LocalDataSpec = LocalDataSpec()
    compute: ComputeSpec = ComputeSpec()
    policy: PolicySpec = PolicySpec()
    home: HomeSpec = HomeSpec()
    sizes: tuple[SizeSpec, ...] = ()

    def sized(self, kind: str) -> "SiteMachine":
        """The site with one of its sizes, and what that states of its price.

        Args:
            kind: Type of one of ``sizes``.
        """
        (size,) = (each for each in self.sizes if each.type == kind)
        machine = replace(self.machine, type=kind)
        return replace(self, machine=machine, dollars_per_hour=size.dollars_per_hour)

    @property
    def pool(self) -> str:
        """Name of the compute service: one account and region, project or namespace."""
        where = {
            AWS: self.machine.region,
            GCP: self.machine.project,
            KUBERNETES: self.machine.cluster.place,
        }
        if self.machine.isolation == CONTAINER:
            return CONTAINERS
        return " ".join(filter(None, (self.provider, where.get(self.provider))))

    def in_market(self, market: str) -> "SiteMachine":
        """The site with a machine of another market, and what it states of its price.

        Args:
            market: One of ``MARKETS``.
        """
        if market == self.machine.market:
            return self
        is_spot = market == Market.SPOT.value
        hourly = None if is_spot else self.on_demand_dollars_per_hour
        machine = replace(self.machine, market=market)
        return replace(self, machine=machine, dollars_per_hour=hourly)

    @property
    def is_movable(self) -> bool:
        """Whether a deadline may move it: its file says spot, and it has a home.

        What a cluster's machines cost is not known well enough to choose between them.
        """
        is_spot = self.machine.market == Market.SPOT.value
        return self.provider in CLOUDS and is_spot and bool(self.home.url)

    @property
    def line(self) -> Line | None:
        """What connects it to this host; None if it is in this host's network."""
        if self.machine.isolation == PROCESS:
            return None
        line = self.machine.line
        return Line(rate_mbit=line.rate_mbit, delay_ms=line.delay_ms)


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
class StartSpec:
    """When machines may be started. Those that run, and replacements, do not wait.

    Attributes:
        window: Hours of every day in the time of a place, for example `22:00-06:00
            Europe/Berlin`; by default, at any time.
        max_spot_dollars_per_hour: What an hour of each spot machine of a cloud may cost
            when machines are started: the highest of its zones now on AWS; on Google
            Cloud, which publishes no such prices, that of the price table. None for
            any price.
        max_grams_per_kwh: What carbon intensity the electricity of each region may
            have, in grams of CO2-equivalent per kWh. None for any.
        carbon: Table of carbon intensity, relative to this file; yours, since none is
            in the release. It is read again every 30 seconds while `crossfed up` waits.
        at_latest_hours: After so many hours of waiting, prices and carbon intensity no
            longer count, and the window alone does. They count from the first
            `crossfed up` that waits to the first that starts machines, or to `crossfed
            down`. None to wait for as long as it takes.
        machine_minutes: How long a machine takes from its request until its site
            works: installation and takeover. `crossfed up --keep` counts it for each
            move before a deadline and for each change of size.
    """

    window: str = ""
    max_spot_dollars_per_hour: float | None = key(default=None, above=0.0)
    max_grams_per_kwh: float | None = key(default=None, above=0.0)
    carbon: str = ""
    at_latest_hours: float | None = key(default=None, above=0.0)
    machine_minutes: float = key(default=15.0, above=0.0, high=600.0)


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
            example one that `crossfed plan --refresh-prices` has written.
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
        return any(
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
    for name, address in (
        ("address", file.aggregator.address),
        ("listen", file.aggregator.listen),
    ):
        if address:
            parse_address(address, key=f"aggregator.{name}")
    _check_paths(file)
    _check_names(file)
    _check_aggregator(file)
    _check_start(file)
    for index, site in enumerate(file.sites):
        _check_machine(site, f"sites[{index}].machine")
        _check_settings(site, f"sites[{index}]")
        _check_sizes(file, index)
    exchange.check(file.exchange)


def _check_start(file: DeploymentFile) -> None:
    """Refuse conditions of a start that could hold back nothing."""
    start = file.start
    start_window.parse(start.window, key="start.window")
    clouds = [site for site in file.sites if site.provider in CLOUDS]
    spots = [site for site in clouds if site.machine.market == Market.SPOT.value]
    has_ceiling = start.max_grams_per_kwh is not None
    has_price = start.max_spot_dollars_per_hour is not None
    for name, is_wrong, why in (
        ("carbon", has_ceiling and not start.carbon, "is missing: name your table"),
        (
            "max_grams_per_kwh",
            bool(start.carbon) and not has_ceiling,
            "is missing: a table without a ceiling holds nothing back",
        ),
        ("max_grams_per_kwh", has_ceiling and not clouds, "is for sites of clouds"),
        (
            "max_spot_dollars_per_hour",
            has_price and not spots,
            "is for spot machines of clouds, and no site has one",
        ),
        (
            "at_latest_hours",
            start.at_latest_hours is not None and not (has_ceiling or has_price),
            "has no effect without a ceiling: the window always counts",
        ),
    ):
        if is_wrong:
            raise JobError(why, key=f"start.{name}")


def _check_paths(file: DeploymentFile) -> None:
    paths = (
        ("job", file.job),
        ("folder", file.folder),
        ("prices", file.prices),
        ("start.carbon", file.start.carbon),
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


# What to do about an aggregator that `crossfed up` does not start, by its provider.
_ELSEWHERE = dict.fromkeys(
    CLOUDS,
    "install crossfed on a machine of that cloud and give crossfed up there, with its "
    "address as aggregator.address",
)


def _check_aggregator(file: DeploymentFile) -> None:
    machine = file.aggregator
    if machine.provider == KUBERNETES:
        _check_head(file)
        return
    if machine.provider != LOCAL:
        what = _ELSEWHERE.get(
            machine.provider, f"name {LOCAL!r} or {KUBERNETES!r}, or remove the key"
        )
        raise JobError(
            f"{machine.provider!r:.80}: crossfed up starts the aggregator on this host "
            f"or in a cluster only: {what}",
            key="aggregator.provider",
        )
    _check_local_aggregator(file)


def _check_local_aggregator(file: DeploymentFile) -> None:
    machine, local = file.aggregator, AggregatorMachine()
    for name in ("cluster", "identity", "disk_gb", "disk_dollars_per_month"):
        if getattr(machine, name) != getattr(local, name):
            raise JobError(
                f"is for provider {KUBERNETES!r}: remove it, or name that",
                key=f"aggregator.{name}",
            )
    _check_container(file)


def _check_container(file: DeploymentFile) -> None:
    machine = file.aggregator
    is_container = machine.isolation == CONTAINER
    if is_container is not bool(machine.image):
        raise JobError(
            "is missing: name an image of an aggregator (deploy/containers)"
            if is_container
            else f"is for isolation {CONTAINER!r}: remove it, or name that",
            key="aggregator.image",
        )
    if not is_container:
        return
    for name in ("address", "listen"):
        if getattr(machine, name):
            raise JobError(
                f"is not for isolation {CONTAINER!r}, which has an address of its own",
                key=f"aggregator.{name}",
            )
    for index, site in enumerate(file.sites):
        if site.line is None:
            raise JobError(
                f"{site.name!r} cannot reach an aggregator in a container: name "
                f"{CONTAINER!r} or {NAMESPACE!r}",
                key=f"sites[{index}].machine.isolation",
            )


def _check_head(file: DeploymentFile) -> None:
    """Refuse an aggregator in a pod that could not start the sites of the file."""
    machine = file.aggregator
    cluster_spec.check(machine.cluster, identity=machine.identity, table="aggregator")
    cluster_head.check(
        machine.image,
        address=machine.address,
        listen=machine.listen,
        gpus=machine.cluster.gpus,
    )
    if machine.isolation != PROCESS:
        raise JobError(
            f"is for provider {LOCAL}: remove it", key="aggregator.isolation"
        )
    if file.prices:
        raise JobError(
            "is not read in a cluster, where dollars_per_hour of every site is stated: "
            "remove it",
            key="prices",
        )
    for index, site in enumerate(file.sites):
        if site.pool != machine.pool:
            raise JobError(
                f"{site.name!r} is in {site.pool!r}: an aggregator in "
                f"{machine.pool!r} starts sites of its own namespace only; have the "
                "operator of any other site enrol it with a token",
                key=f"sites[{index}].provider",
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


def _check_sizes(file: DeploymentFile, index: int) -> None:
    """Refuse sizes that a site could not be moved between."""
    site, table = file.sites[index], f"sites[{index}]"
    if not site.sizes:
        return
    kinds = [size.type for size in site.sizes]
    is_spot = site.machine.market == Market.SPOT.value
    for name, is_wrong, why in (
        ("sizes", site.provider not in CLOUDS, f"is for {AWS} and {GCP}: remove it"),
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
            is_spot and file.deadline_hours is not None,
            "and deadline_hours both move a spot machine: remove one of them",
        ),
    ):
        if is_wrong:
            raise JobError(why, key=f"{table}.{name}")


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
    is_container = machine.isolation == CONTAINER
    own = CloudMachine(
        isolation=machine.isolation,
        line=machine.line,
        image=machine.image if is_container else "",
    )
    if is_container and not machine.image:
        raise JobError(
            "is missing: name an image of a site (deploy/containers)",
            key=f"{table}.image",
        )
    if machine != own:
        raise JobError(
            f"has keys for the providers {AWS}, {GCP} and {KUBERNETES}: remove them, "
            "or name one of these as provider",
            key=table,
        )
    if machine.isolation == PROCESS and machine.line != LineSpec():
        raise JobError(
            f"is for isolation {NAMESPACE!r} or {CONTAINER!r}: a process has the "
            "host's network",
            key=f"{table}.line",
        )


def _check_cloud(site: SiteMachine, table: str) -> None:
    machine = site.machine
    if machine.isolation != PROCESS or machine.line != LineSpec():
        raise JobError(
            f"isolation and line are for provider {LOCAL}: remove them", key=table
        )
    is_open = machine.requires != RequiresSpec()
    if is_open and machine.type:
        raise JobError("is stated twice: remove type or requires", key=f"{table}.type")
    needed = {AWS: ("region", "type"), GCP: ("region", "type", "project", "zones")}
    for name in needed[site.provider]:
        if not getattr(machine, name) and not (is_open and name == "type"):
            raise JobError(
                f"is missing for provider {site.provider}", key=f"{table}.{name}"
            )
    for zone in machine.zones:
        if not zone.startswith(machine.region):
            raise JobError(
                f"{zone!r} is not in region {machine.region}", key=f"{table}.zones"
            )
    _check_accelerator(site, table, is_open=is_open)
    if site.provider == GCP and len(machine.subnets) > 1:
        raise JobError("names more than one for a region", key=f"{table}.subnets")


def _check_accelerator(site: SiteMachine, table: str, *, is_open: bool) -> None:
    if site.machine.accelerator and (site.provider != GCP or is_open):
        raise JobError(
            "is for a machine of gcp with a type: remove it, or name the type",
            key=f"{table}.accelerator",
        )


# Why a key is nothing for a pod, by its name.
_NOT_IN_CLUSTERS = {
    "isolation": "it is a container in any case",
    "line": "it has the network of its cluster",
    "region": "the cluster is in cluster.context",
    "project": "the cluster is in cluster.context",
    "accelerator": "state GPUs in cluster.gpus",
    "accelerators": "state GPUs in cluster.gpus",
    "requires": "state what the pod gets in cluster, and type if it matters",
    "image": "it runs release.image",
    "role": "its service account may have one, and identity names that",
    "subnets": "it has the network of its cluster",
    "firewalls": "the namespace's network policies filter its traffic",
}


def _check_cluster(site: SiteMachine, table: str) -> None:
    for name, why in _NOT_IN_CLUSTERS.items():
        if getattr(site.machine, name) != getattr(CloudMachine(), name):
            raise JobError(
                f"is not for provider {KUBERNETES}: {why}", key=f"{table}.{name}"
            )
    cluster_spec.check(
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

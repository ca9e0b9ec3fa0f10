"""Tables of machines in the deployment file, and what is wrong in them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from clients.privacy.policy_spec import PolicySpec
from cloud_adapters.compute.machine_types import RequiresSpec
from cloud_adapters.compute.pool import Market, NodeLimits
from deploy.fleet.reconcile import SITE_PREFIX
from deploy.site_host import config as site_file
from deploy.site_host.config import ComputeSpec, LocalDataSpec
from deploy.site_host.home_spec import HomeSpec
from federation.addresses import parse_address
from federation.errors import JobError
from federation.job.job_keys import key

LOCAL, AWS, GCP, KUBERNETES = "local", "aws", "gcp", "kubernetes"
PROVIDERS = (LOCAL, AWS, GCP, KUBERNETES)
# Their machines have prices in the table, and a cloud to vouch for them.
CLOUDS = (AWS, GCP)
MARKETS = tuple(market.value for market in Market)


_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_ACCOUNT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_MOST_CHARS = 200
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A Kubernetes cluster, and what a pod of this deployment gets there.

    Attributes:
        context: Context of your kubeconfig. There is no default, so that `crossfed
            down` looks where `crossfed up` launched.
        namespace: Namespace of the pod's job.
        cpus: Number of CPUs.
        memory_gb: Memory, in GiB.
        gpus: Number of NVIDIA GPUs.
    """

    context: str = ""
    namespace: str = ""
    cpus: int = key(default=2, low=1, high=1024)
    memory_gb: float = key(default=8.0, above=0.0, high=65536.0)
    gpus: int = key(default=0, low=0, high=64)

    @property
    def place(self) -> str:
        """Cluster and namespace, in one name."""
        return f"{self.context}/{self.namespace}"

    @property
    def limits(self) -> NodeLimits:
        """What the pod gets."""
        return NodeLimits(cpus=self.cpus, memory_gb=self.memory_gb, gpus=self.gpus)


def check_cluster(cluster: ClusterSpec, *, identity: str, table: str) -> None:
    """Refuse a cluster that cannot be found, or an account that none can have.

    Args:
        cluster: The table.
        identity: Name of the pod's service account; empty for the default one.
        table: Where the machine is in the file.

    Raises:
        JobError: A key is missing or wrong.
    """
    for name in ("context", "namespace"):
        if not getattr(cluster, name):
            raise JobError(
                "is missing for provider kubernetes", key=f"{table}.cluster.{name}"
            )
    if len(cluster.context) > _MOST_CHARS or not cluster.context.isprintable():
        raise JobError(
            f"must be at most {_MOST_CHARS} printable characters",
            key=f"{table}.cluster.context",
        )
    if not _NAMESPACE.fullmatch(cluster.namespace):
        raise JobError(
            f"{cluster.namespace!r:.80} is no namespace: 1 to 63 lower-case letters, "
            "digits and hyphens",
            key=f"{table}.cluster.namespace",
        )
    if identity and not _ACCOUNT.fullmatch(identity):
        raise JobError(
            f"{identity!r:.80} is no service account of Kubernetes",
            key=f"{table}.identity",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudMachine:
    """The machine of a site: its keys for `aws`, `gcp` and `kubernetes`.

    Providers `aws` and `gcp` take all keys except `cluster`; provider `kubernetes`
    takes `cluster`, `zones`, `type`, `market`, `disk_gb`, `identity` and `endpoint`.

    Attributes:
        region: Region, for example `us-east-1` or `europe-west4`.
        project: ID of the Google Cloud project.
        zones: Zones of the region to try, the best first. On AWS, by default all zones
            in which the account has a subnet.
        type: Machine type, for example `g5.xlarge` or `g2-standard-4`.
        accelerator: GPU type to attach to a Google Cloud machine whose type has none,
            for example `nvidia-tesla-t4` to `n1-standard-4`.
        accelerators: Number of GPUs to attach.
        requires: What the machine needs at least, in place of its type: the cheapest
            that the region and its zones have is taken when the site is first started.
        market: `on-demand`, or `spot`, which is cheaper and may be preempted.
        image: Machine image: an AMI or `/aws/service/...` on AWS,
            `projects/P/global/images/...` on Google Cloud. Default: Ubuntu 24.04 for
            amd64. It needs cloud-init and Python 3.11 or newer, and NVIDIA's driver for
            GPUs, for which there is no default.
        disk_gb: Size of the encrypted disk, in GB.
        disk_key: Your own key for the disk: ID or ARN of an AWS KMS key, or
            `projects/P/locations/L/keyRings/R/cryptoKeys/K` on Google Cloud. Default:
            the cloud's key.
        tags: Your own tags (AWS: machine, disk, network interface) or labels (Google
            Cloud: machine, disk), by name.
        identity: Cloud identity of the machine's programs: an instance profile on AWS,
            a service account on Google Cloud. The machine proves who it is with it.
        role: ARN of the role in the instance profile; AWS only.
        subnets: Subnets: on AWS their IDs, one in each zone; on Google Cloud the name
            of one. Default: the account's own.
        firewalls: Security group IDs on AWS, network tags on Google Cloud. The machine
            has no public address in any case.
        endpoint: URL of the compute service or API server, if it is not the cloud's or
            the context's own.
        cluster: The cluster, and what the site gets of it; for provider `kubernetes`
            alone. There, `type` is a label of the nodes to use and `identity` a service
            account of the namespace, both optional.
    """

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
    disk_key: str = ""
    tags: Mapping[str, str] = key(default={})
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
        type: The cloud's name of the machine type, such as `g5.xlarge`.
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
        provider: Where the site runs: `local` in a process on this host, `aws` on EC2,
            `gcp` on Compute Engine, `kubernetes` as a job of a cluster.
        organisation: Organisation of the site; by default the deployment's.
        dollars_per_hour: Price of its machine. Default: that of the price table, and
            nothing on this host. In a cluster it must be stated.
        on_demand_dollars_per_hour: Price on demand of a spot machine that a deadline
            may move.
        dollars_per_gigabyte: Price of traffic that leaves its machine, with all that
            NAT adds in both directions.
        machine: What machine the site runs on.
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
    def role(self) -> str:
        """Role of its node."""
        return f"{SITE_PREFIX}{self.name}"

    @property
    def pool(self) -> str:
        """Name of the compute service: one account and region, project or namespace."""
        where = {
            AWS: self.machine.region,
            GCP: self.machine.project,
            KUBERNETES: self.machine.cluster.place,
        }
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
        return self.is_spot and bool(self.home.url)

    @property
    def is_of_cloud(self) -> bool:
        """Whether a cloud runs it, whose machines have prices in the table."""
        return self.provider in CLOUDS

    @property
    def is_spot(self) -> bool:
        """Whether it is on a spot machine of a cloud."""
        return self.is_of_cloud and self.machine.market == Market.SPOT.value


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorMachine:
    """The aggregator, which runs on this host.

    Attributes:
        address: `HOST:PORT` where sites reach the aggregator. Default: a free loopback
            port, chosen once.
        listen: `ADDRESS:PORT` to listen on. Default: `address`.
        connect_seconds: How long a run waits for its sites to connect.
        dollars_per_hour: Price of its machine.
        dollars_per_gigabyte: Price of traffic that leaves it.
    """

    address: str = ""
    listen: str = ""
    connect_seconds: float = key(default=600.0, above=0.0)
    dollars_per_hour: float = key(default=0.0, low=0.0)
    dollars_per_gigabyte: float = key(default=0.0, low=0.0)


def check_addresses(machine: AggregatorMachine) -> None:
    """Refuse an address that is not ``HOST:PORT``.

    Raises:
        JobError: One of them is not.
    """
    for name, address in (("address", machine.address), ("listen", machine.listen)):
        if address:
            parse_address(address, key=f"aggregator.{name}")


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
    check_cluster(site.machine.cluster, identity=site.machine.identity, table=table)
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

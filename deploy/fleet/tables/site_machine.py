"""A table ``[[sites]]`` of the deployment file: a site, its machine and its settings.

What would be wrong in one is in ``site_checks``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from clients.privacy.policy_spec import PolicySpec
from cloud_adapters.compute.machine_types import RequiresSpec
from cloud_adapters.compute.pool import Market
from deploy.fleet.tables.cluster_spec import ClusterSpec
from deploy.fleet.tables.providers import (
    AWS,
    CLOUDS,
    GCP,
    KUBERNETES,
    LOCAL,
    MARKETS,
    PROVIDERS,
)
from deploy.site_host.config import ComputeSpec, LocalDataSpec
from deploy.site_host.home_spec import HomeSpec
from federation.job.job_keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudMachine:
    """The machine of a site. Providers `aws` and `gcp` take most keys.

    They take no `cluster`. Provider `kubernetes` takes `cluster`, `zones`, `type`,
    `market`, `disk_gb`, `identity` and `endpoint`.

    Attributes:
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
        market: `on-demand`, or `spot`, which is cheaper and may be preempted.
        image: What it starts from: the id of an AMI or `/aws/service/...` on AWS;
            `projects/P/global/images/...` on Google Cloud; by default, Ubuntu 24.04 for
            amd64. A machine of a cloud needs cloud-init and Python 3.11 or newer; one
            with GPUs needs an image with NVIDIA's driver, so it has no default.
        disk_gb: Size of its encrypted disk.
        disk_key: Your own key for it: the id or ARN of a key of AWS KMS, or
            `projects/P/locations/L/keyRings/R/cryptoKeys/K` on Google Cloud. By
            default, the cloud's own key.
        tags: Names and values that your organisation wants on all that costs: tags of
            machine, disk and network interface on AWS, labels of machine and disk on
            Google Cloud.
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
        provider: Who runs the machine: `local` is a process on this host, `aws` an
            instance of EC2, `gcp` one of Compute Engine, `kubernetes` a job of a
            cluster.
        organisation: Who answers for the site; by default the deployment's.
        dollars_per_hour: What its machine costs; by default what `crossfed plan` finds
            in its price table, and nothing on this host. In a cluster it must be
            stated.
        on_demand_dollars_per_hour: What a machine on demand would cost, if this one is
            a spot machine that a deadline may move.
        dollars_per_gigabyte: What traffic costs that leaves its machine, with all that
            NAT adds to it and to what arrives.
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
        is_spot = self.machine.market == Market.SPOT.value
        return self.provider in CLOUDS and is_spot and bool(self.home.url)

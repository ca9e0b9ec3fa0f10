"""The table ``[aggregator]`` of the deployment file: where the aggregator runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.fleet.starting import cluster_head
from deploy.fleet.tables import cluster_spec
from deploy.fleet.tables.cluster_spec import ClusterSpec
from deploy.fleet.tables.providers import (
    CLOUDS,
    KUBERNETES,
    LOCAL,
)
from deploy.fleet.tables.site_machine import SiteMachine
from federation.addresses import parse_address
from federation.errors import JobError
from federation.job.job_keys import key

# What to do about an aggregator that `crossfed up` does not start, by its provider.
_ELSEWHERE = dict.fromkeys(
    CLOUDS,
    "install crossfed on a machine of that cloud and run crossfed up there, with its "
    "address as aggregator.address",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorMachine:
    """The machine of the aggregator.

    Attributes:
        provider: Who runs the machine: `local` is this host, where its keys stay, and
            `kubernetes` a pod of a cluster, where they are on a volume of its own. All
            sites of the file are then pods of the same namespace. No other provider
            runs it.
        image: Image of the pod: an image of an aggregator (deploy/containers) with its
            digest, `NAME@sha256:...`.
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
        return self.provider


def check_addresses(machine: AggregatorMachine) -> None:
    """Refuse an address that is not ``HOST:PORT``.

    Raises:
        JobError: One of them is not.
    """
    for name, address in (("address", machine.address), ("listen", machine.listen)):
        if address:
            parse_address(address, key=f"aggregator.{name}")


def check(
    machine: AggregatorMachine, sites: Sequence[SiteMachine], *, prices: str
) -> None:
    """Refuse an aggregator that cannot be started, or that the sites cannot reach.

    Args:
        machine: The table.
        sites: Sites of the file.
        prices: Price table that the file names; empty for none.

    Raises:
        JobError: A key is missing or wrong.
    """
    if machine.provider == KUBERNETES:
        _check_head(machine, sites, prices)
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
    _check_local(machine)


def _check_local(machine: AggregatorMachine) -> None:
    local = AggregatorMachine()
    for name in (
        "cluster",
        "identity",
        "disk_gb",
        "disk_dollars_per_month",
        "endpoint",
        "image",
    ):
        if getattr(machine, name) != getattr(local, name):
            raise JobError(
                f"is for provider {KUBERNETES!r}: remove it, or name that",
                key=f"aggregator.{name}",
            )


def _check_head(
    machine: AggregatorMachine, sites: Sequence[SiteMachine], prices: str
) -> None:
    """Refuse an aggregator in a pod that could not start the sites of the file."""
    cluster_spec.check(machine.cluster, identity=machine.identity, table="aggregator")
    cluster_head.check(
        machine.image,
        address=machine.address,
        listen=machine.listen,
        gpus=machine.cluster.gpus,
    )
    if prices:
        raise JobError(
            "is not read in a cluster, where dollars_per_hour of every site is stated: "
            "remove it",
            key="prices",
        )
    for index, site in enumerate(sites):
        if site.pool != machine.pool:
            raise JobError(
                f"{site.name!r} is in {site.pool!r}: an aggregator in "
                f"{machine.pool!r} starts sites of its own namespace only; have the "
                "operator of any other site enrol it with a token",
                key=f"sites[{index}].provider",
            )

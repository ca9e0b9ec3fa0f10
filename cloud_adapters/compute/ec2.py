"""Nodes that are instances of Amazon EC2, in one account and region.

A launch is found again by a tag with the digest of its token. The service's own token
covers the seconds until a new instance is listed; it is another one in each zone, since
a token belongs to one set of parameters. So a command that is killed, and repeated in
these seconds while an earlier zone has machines again, may launch a second instance:
the next look finds both, and ``crossfed up`` ends one.

A repeated launch may request something else than before: settings, the rest of
a budget and what an image's name means all change. The service refuses that for as long
as it knows the token. Then the token's instance counts: that which is listed within a
minute, or else one that is gone.

Instances end, and are not stopped, when they shut themselves down: a node whose time is
over costs nothing more, even if its operator is gone.

Source: Amazon EC2 API reference, RunInstances, and "Ensuring idempotency".
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from botocore.config import Config

from cloud_adapters.compute import ec2_errors
from cloud_adapters.compute.machine_types import MachineType, SpotPrice
from cloud_adapters.compute.pool import Market, Node, NodeSpec, NodeState, gone
from cloud_adapters.net import aws_session
from federation.errors import (
    ComputeError,
    ComputeUnavailable,
    MachineRefused,
    NoCapacity,
)

if TYPE_CHECKING:
    from federation.protocols import Clock

# Of the launch: the digest of its token.
TOKEN_TAG = "crossfed-token"  # noqa: S105 -- the name of a tag
_NAME_TAG = "Name"
_PARAMETER = "/aws/service/"
_TAGGED = ("instance", "volume", "network-interface")
_NUM_FILTER_VALUES = 200
# A type has a few new prices a day and zone.
_PRICE_PAGES, _PRICE_PAGE_SIZE = 20, 1000
_LOOK_SECONDS = 2.0
_STATES: Mapping[str, NodeState] = {
    "pending": NodeState.STARTING,
    "running": NodeState.RUNNING,
    "shutting-down": NodeState.STOPPING,
    "stopping": NodeState.STOPPING,
    "stopped": NodeState.STOPPING,
    "terminated": NodeState.GONE,
}
_ASKED = frozenset({"", "Client.UserInitiatedShutdown"})
# Of an instance that has shut itself down; one that is preempted has a code of the
# service's. Source: API reference, StateReason.
_BY_ITSELF = "Client.InstanceInitiatedShutdown"
# The service tells it in no other way.
_ENDED = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (GMT|UTC)\)")

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ec2Pool:
    """Instances of one account in one region; see ``ComputePool``.

    Attributes:
        region: Name of the region, for messages.
        ec2: A client of boto3, which repeats what fails for a moment.
        ssm: Another one, for images that have a name.
        clock: Tells time.
        page_size: How many instances to ask for at once.
        list_seconds: After so long, each instance is listed that has not ended.
    """

    region: str
    ec2: Any
    ssm: Any
    clock: "Clock"
    page_size: int = 200
    list_seconds: float = 60.0

    def launch(self, spec: NodeSpec, token: str) -> Node:
        """See ``ComputePool``.

        Raises:
            MachineRefused: There is no such image, subnet, zone or type.
            QuotaReached: The account may not have more of them.
        """
        digest = hashlib.sha256(token.encode()).hexdigest()
        known = self._launched(digest)
        if known is not None:
            return known
        image, root = self._image(spec.image)
        refusals: list[ComputeError] = []
        for zone, subnet in self._places(spec):
            try:
                answer = self._call(
                    "run_instances",
                    f"launch {spec.name} ({spec.machine}) in {zone}",
                    **_request(spec, digest, subnet),
                    ImageId=image,
                    BlockDeviceMappings=[_disk(root, spec)],
                    ClientToken=hashlib.sha256(f"{token}/{zone}".encode()).hexdigest(),
                )
            except ComputeError as error:
                code = ec2_errors.code_of(error.__cause__)
                if code == ec2_errors.TOKEN_IS_SPENT:
                    return gone(spec, digest)
                if code == ec2_errors.TOKEN_IS_USED:
                    return self._listed(digest) or gone(spec, digest)
                if code != ec2_errors.NOT_IN_ZONE and not isinstance(error, NoCapacity):
                    raise
                refusals.append(error)
                continue
            return _node(answer["Instances"][0])
        # Where no zone has the type, waiting does not help.
        is_full = any(isinstance(each, NoCapacity) for each in refusals)
        kind = NoCapacity if is_full else MachineRefused
        raise kind("; ".join(map(str, refusals)))

    def nodes(self, labels: Mapping[str, str]) -> Sequence[Node]:
        """See ``ComputePool``; those that are gone are listed for about an hour."""
        return sorted(self._found(labels), key=lambda node: (node.launched, node.id))

    def terminate(self, ids: Collection[str]) -> None:
        """See ``ComputePool``."""
        wanted = sorted(ids)
        for begin in range(0, len(wanted), _NUM_FILTER_VALUES):
            some = wanted[begin : begin + _NUM_FILTER_VALUES]
            # A request that names one unknown instance ends none of the others.
            found = self._found({}, [{"Name": "instance-id", "Values": some}])
            alive = [node.id for node in found if node.state is not NodeState.GONE]
            if alive:
                doing = f"end {', '.join(alive)} in {self.region}"
                self._call("terminate_instances", doing, InstanceIds=alive)

    def log(self, node_id: str) -> str:
        """See ``ComputePool``: what the machine wrote to its console."""
        filters = [{"Name": "instance-id", "Values": [node_id]}]
        if not self._found({}, filters):
            return ""
        doing = f"read the console of {node_id} in {self.region}"
        read = partial(self._call, "get_console_output", doing, InstanceId=node_id)
        try:
            answer = read(Latest=True)
        except ComputeError as error:
            if ec2_errors.code_of(error.__cause__) != ec2_errors.NO_LATEST:
                raise
            answer = read()  # Of its boot, and some minutes old.
        text: str = answer.get("Output", "")
        return text

    def clean_up(self) -> None:
        """See ``ComputePool``: the cloud does it."""

    def check_route(self, spec: NodeSpec) -> None:
        """See ``RoutedPool``; interface endpoints count as a way out, to services."""
        doing = f"find a way out of subnets in {self.region}"
        subnets = self._subnets(spec)
        used = [subnets[zone] for zone in spec.zones or sorted(subnets)]
        networks = [{"Name": "vpc-id", "Values": sorted({e["VpcId"] for e in used})}]
        answer = self._call("describe_route_tables", doing, Filters=networks)
        tables = {
            each.get("SubnetId") or table["VpcId"]: table["Routes"]
            for table in answer["RouteTables"]
            for each in table["Associations"]
            if each.get("SubnetId") or each.get("Main")
        }
        closed = [
            each
            for each in used
            if not any(
                map(
                    _leads_out,
                    tables.get(each["SubnetId"], tables.get(each["VpcId"], ())),
                )
            )
        ]
        if not closed:
            return
        kind = {"Name": "vpc-endpoint-type", "Values": ["Interface"]}
        answer = self._call("describe_vpc_endpoints", doing, Filters=[*networks, kind])
        private = {each["VpcId"] for each in answer["VpcEndpoints"]}
        names = [each["SubnetId"] for each in closed if each["VpcId"] not in private]
        if names:
            raise MachineRefused(
                f"cannot {doing}: {', '.join(names)} of {closed[0]['VpcId']} have no "
                "route to a NAT gateway, and machines have no public address: name "
                "others in subnets (deploy/terraform/aws/network makes some), or add "
                "a NAT gateway and a route of 0.0.0.0/0 to it"
            )

    def machine_types(
        self, names: Collection[str], zones: Sequence[str]
    ) -> Sequence[MachineType]:
        """See ``MachineCatalogue``."""
        wanted = [{"Name": "instance-type", "Values": sorted(names)}]
        doing = f"list types of machines in {self.region}"
        answer = self._call("describe_instance_types", doing, Filters=wanted)
        offered = self._call(
            "describe_instance_type_offerings",
            doing,
            LocationType="availability-zone",
            Filters=wanted,
        )
        places: dict[str, list[str]] = {}
        for each in offered["InstanceTypeOfferings"]:
            if not zones or each["Location"] in zones:
                places.setdefault(each["InstanceType"], []).append(each["Location"])
        return [
            _machine_type(each, sorted(places[each["InstanceType"]]))
            for each in answer["InstanceTypes"]
            if each["InstanceType"] in places
        ]

    def spot_prices(
        self, machine: str, zones: Sequence[str], since: float
    ) -> Sequence[SpotPrice]:
        """See ``SpotMarket``: DescribeSpotPriceHistory, for Linux."""
        doing = (
            f"read spot prices of {machine} in {self.region} "
            "(ec2:DescribeSpotPriceHistory)"
        )
        wanted: dict[str, Any] = {
            "InstanceTypes": [machine],
            "ProductDescriptions": ["Linux/UNIX"],
            "StartTime": datetime.fromtimestamp(since, UTC),
            "MaxResults": _PRICE_PAGE_SIZE,
        }
        if zones:
            wanted["Filters"] = [{"Name": "availability-zone", "Values": [*zones]}]
        found: list[SpotPrice] = []
        for _ in range(_PRICE_PAGES):
            answer = self._call("describe_spot_price_history", doing, **wanted)
            found += [_price(row, doing) for row in answer["SpotPriceHistory"]]
            wanted["NextToken"] = answer.get("NextToken")
            if not wanted["NextToken"]:
                return sorted(found, key=lambda each: (each.at, each.zone))
        raise ComputeUnavailable(
            f"cannot {doing}: it has more than {_PRICE_PAGES * _PRICE_PAGE_SIZE} prices"
        )

    def _launched(self, digest: str) -> Node | None:
        """The instance of a token; None if none is listed."""
        return min(
            self._found({TOKEN_TAG: digest}),
            key=lambda node: (node.state is NodeState.GONE, node.id),
            default=None,
        )

    def _listed(self, digest: str) -> Node | None:
        """Wait for the instance of a token; None if it is not listed any more."""
        end = self.clock.monotonic() + self.list_seconds
        while (found := self._launched(digest)) is None:
            if self.clock.monotonic() >= end:
                return None
            self.clock.sleep(_LOOK_SECONDS)
        return found

    def _found(
        self, labels: Mapping[str, str], filters: Sequence[Answer] = ()
    ) -> list[Node]:
        """Find nodes of ours, also those that have ended."""
        asked = [
            *filters,
            # Without it, no label would mean every instance of the account.
            {"Name": "tag-key", "Values": [TOKEN_TAG]},
            *({"Name": f"tag:{n}", "Values": [v]} for n, v in labels.items()),
        ]
        found: list[Answer] = []
        following: dict[str, str] = {}
        while True:
            answer = self._call(
                "describe_instances",
                f"list instances in {self.region}",
                Filters=asked,
                MaxResults=self.page_size,
                **following,
            )
            for reservation in answer["Reservations"]:
                found += reservation["Instances"]
            if not answer.get("NextToken"):
                break
            following = {"NextToken": answer["NextToken"]}
        nodes = map(_node, found)
        # The service takes * and ? in values for wildcards.
        return [node for node in nodes if labels.items() <= node.labels.items()]

    def _image(self, name: str) -> tuple[str, str]:
        """The image's id, and the name of its first disk."""
        doing = f"find the image {name} in {self.region}"
        if name.startswith(_PARAMETER):
            found = self._call("get_parameter", doing, self.ssm, Name=name)
            name = found["Parameter"]["Value"]
        answer = self._call("describe_images", doing, ImageIds=[name])
        if not answer["Images"]:
            raise MachineRefused(
                f"cannot {doing}: there is no such image for this account: correct "
                "image"
            )
        root: str = answer["Images"][0]["RootDeviceName"]
        return name, root

    def _subnets(self, spec: NodeSpec) -> Mapping[str, Answer]:
        """Subnets that a machine may be in, by zone."""
        doing = f"find subnets in {self.region}"
        wanted: Answer = {"SubnetIds": list(spec.subnets)}
        if not spec.subnets:
            wanted = {"Filters": [{"Name": "default-for-az", "Values": ["true"]}]}
        answer = self._call("describe_subnets", doing, **wanted)
        subnets = {each["AvailabilityZone"]: each for each in answer["Subnets"]}
        lacking = [zone for zone in spec.zones if zone not in subnets]
        if lacking or not subnets:
            raise MachineRefused(
                f"cannot {doing}: {', '.join(lacking) or 'the region'} has none; name "
                "one of each zone in subnets"
            )
        return subnets

    def _places(self, spec: NodeSpec) -> Sequence[tuple[str, str]]:
        """Zones to try, each with the subnet to use there."""
        subnets = self._subnets(spec)
        zones = [*(spec.zones or sorted(subnets))]
        if spec.market is Market.SPOT and len(zones) > 1:
            zones = self._cheapest_first(spec.machine, zones)
        return [(zone, subnets[zone]["SubnetId"]) for zone in zones]

    def _cheapest_first(self, machine: str, zones: Sequence[str]) -> list[str]:
        """Order zones by the spot prices of the hour's beginning.

        Not by those of now: a launch that is repeated must try zones in the same order,
        because each zone has a token of its own.
        """
        hour = self.clock.now() // 3600.0 * 3600.0
        try:
            found = self.spot_prices(machine, zones, hour)
        except ComputeError:  # A launch does not fail for want of a price.
            return [*zones]
        prices = {each.zone: each.dollars_per_hour for each in found if each.at <= hour}
        return sorted(zones, key=lambda zone: prices.get(zone, math.inf))

    def _call(
        self, operation: str, doing: str, client: Any = None, **parameters: Any
    ) -> Answer:
        request: Callable[..., Answer] = getattr(client or self.ec2, operation)
        try:
            return request(**parameters)
        except ec2_errors.FAILURES as error:
            raise ec2_errors.translate(error, doing) from error


def connect(region: str, endpoint: str = "", *, clock: "Clock") -> Ec2Pool:
    """Open the service with the environment's credentials.

    Args:
        region: For example ``us-east-1``.
        endpoint: URL of the service; empty for the region's own.
        clock: Tells time.

    Raises:
        ComputeError: The profile that the environment names is not there, or region
            or endpoint are malformed.
    """
    doing = f"open EC2 in {region}"
    config = Config(
        connect_timeout=5,
        read_timeout=60,
        # Reads, and writes that have a token or can be repeated anyway.
        retries={"mode": "standard", "total_max_attempts": 5},
        user_agent_extra="crossfed",
    )
    try:
        session = aws_session.new_session()
        ec2, ssm = (
            session.client(
                service,
                region_name=region,
                endpoint_url=endpoint or None,
                config=config,
            )
            for service in ("ec2", "ssm")
        )
    except ValueError as error:
        raise MachineRefused(f"cannot {doing}: {error}") from error
    except ec2_errors.FAILURES as error:
        raise ec2_errors.translate(error, doing) from error
    return Ec2Pool(region=region, ec2=ec2, ssm=ssm, clock=clock)


def _request(spec: NodeSpec, digest: str, subnet: str) -> dict[str, Any]:
    """What is the same for every zone, but for the subnet."""
    tags = {**spec.labels, _NAME_TAG: spec.name, TOKEN_TAG: digest}
    pairs = [{"Key": name, "Value": value} for name, value in tags.items()]
    interface: dict[str, Any] = {
        "DeviceIndex": 0,
        "SubnetId": subnet,
        "AssociatePublicIpAddress": False,
        "DeleteOnTermination": True,
    }
    if spec.firewalls:
        interface["Groups"] = list(spec.firewalls)
    request: dict[str, Any] = {
        "MinCount": 1,
        "MaxCount": 1,
        "InstanceType": spec.machine,
        "NetworkInterfaces": [interface],
        "InstanceInitiatedShutdownBehavior": "terminate",
        # Sessions alone, and none through a proxy on the machine.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": pairs} for kind in _TAGGED
        ],
        "UserData": spec.user_data,
    }
    if spec.identity:
        request["IamInstanceProfile"] = {"Name": spec.identity}
    if spec.market is Market.SPOT:
        request["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
            },
        }
    return request


def _leads_out(route: Answer) -> bool:
    """Whether a machine without a public address gets anywhere by a route.

    Of internet gateways it gets no answers, and prefix lists lead to a store alone.
    """
    gateway = route.get("GatewayId") or ""
    is_useless = gateway == "local" or gateway.startswith("igw-")
    has_addresses = bool(route.get("DestinationCidrBlock"))
    return route.get("State") == "active" and has_addresses and not is_useless


def _disk(device: str, spec: NodeSpec) -> Answer:
    key = {"KmsKeyId": spec.disk_key} if spec.disk_key else {}
    return {
        "DeviceName": device,
        "Ebs": {
            **key,
            "VolumeSize": spec.disk_gb,
            "VolumeType": "gp3",
            "Encrypted": True,
            "DeleteOnTermination": True,
        },
    }


def _machine_type(described: Answer, zones: Sequence[str]) -> MachineType:
    gpus = described.get("GpuInfo", {}).get("Gpus", [])
    first = gpus[0] if gpus else {}
    return MachineType(
        name=described["InstanceType"],
        gpus=sum(each.get("Count", 1) for each in gpus),
        gpu=first.get("Name", ""),
        gpu_memory_gb=first.get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024,
        cpus=described["VCpuInfo"]["DefaultVCpus"],
        memory_gb=described["MemoryInfo"]["SizeInMiB"] / 1024,
        zones=zones,
    )


def _price(row: Answer, doing: str) -> SpotPrice:
    dollars = float(row["SpotPrice"])
    if not 0.0 < dollars < math.inf:
        raise ComputeUnavailable(f"cannot {doing}: {row['SpotPrice']} is no price")
    return SpotPrice(
        zone=row["AvailabilityZone"],
        at=row["Timestamp"].timestamp(),
        dollars_per_hour=dollars,
    )


def _node(instance: Answer) -> Node:
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
    state = instance["State"]["Name"]
    is_spot = instance.get("InstanceLifecycle") == "spot"
    return Node(
        id=instance["InstanceId"],
        name=tags.get(_NAME_TAG, ""),
        state=_STATES[state],
        labels=tags,
        machine=instance["InstanceType"],
        zone=instance["Placement"]["AvailabilityZone"],
        market=Market.SPOT if is_spot else Market.ON_DEMAND,
        launched=instance["LaunchTime"].timestamp(),
        ended=_ended(instance) if _STATES[state] is NodeState.GONE else None,
        trouble=_trouble(instance, state),
        failed=instance.get("StateReason", {}).get("Code") == _BY_ITSELF,
    )


def _trouble(instance: Answer, state: str) -> str:
    reason = instance.get("StateReason", {})
    words: str = reason.get("Message", "") or reason.get("Code", "")
    if state == "stopped":
        return f"it is stopped, and its disk still costs: end it ({words})"
    return "" if reason.get("Code", "") in _ASKED else words


def _ended(instance: Answer) -> float | None:
    found = _ENDED.search(instance.get("StateTransitionReason", ""))
    if found is None:
        return None
    at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    return at.timestamp()

"""Instances of EC2: what is asked for, where, and what the answers mean."""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from support import s3_server
from support.ec2_server import IMAGE, ZONES, Ec2Server, Form

from cloud_adapters.compute import ec2, ec2_errors
from cloud_adapters.compute.pool import Market, NodeSpec, NodeState
from federation.clock import VirtualClock
from federation.errors import (
    ComputeError,
    ComputeForbidden,
    ComputeUnauthenticated,
    ComputeUnavailable,
    MachineRefused,
    NoCapacity,
    QuotaReached,
)

LABELS = {"crossfed-deployment": "x"}


def spec(**changed: Any) -> NodeSpec:
    given = {
        "name": "site-a",
        "labels": LABELS,
        "max_seconds": 600.0,
        "machine": "m5.large",
        "zones": ZONES,
        "image": IMAGE,
    }
    return NodeSpec(**{**given, **changed})


def values(form: Form, prefix: str) -> dict[str, str]:
    """Fields of a form below a prefix."""
    return {
        name.removeprefix(prefix): value
        for name, value in form.items()
        if name.startswith(prefix)
    }


def test_spot_prices_are_read_from_the_time_asked_for(ec2_server: Ec2Server):
    """Page by page, the price that held then included; of the zones that are asked."""
    ec2_server.prices = [
        (ZONES[0], "2026-11-26T00:00:00Z", "0.5"),
        (ZONES[1], "2026-11-26T01:00:00Z", "0.9"),
        (ZONES[0], "2026-11-26T10:00:00Z", "0.4"),
        (ZONES[0], "2026-11-26T12:00:00Z", "0.3"),
        (ZONES[0], "2026-11-26T14:00:00Z", "0.2"),
    ]
    since = datetime(2026, 11, 26, 11, tzinfo=UTC).timestamp()
    found = ec2_server.pool().spot_prices("g5.xlarge", ZONES[:1], since)
    assert [each.dollars_per_hour for each in found] == [0.4, 0.3, 0.2]
    assert {each.zone for each in found} == {ZONES[0]}
    assert found[1].at == since + 3600.0
    every = ec2_server.pool().spot_prices("g5.xlarge", (), since)
    assert {each.zone for each in every} == {*ZONES}
    ec2_server.prices = [(ZONES[0], "2026-11-26T00:00:00Z", "0.0")]
    with pytest.raises(ComputeUnavailable, match=r"0\.0 is no price"):
        ec2_server.pool().spot_prices("g5.xlarge", (), since)


def test_a_spot_machine_is_launched_in_the_cheapest_zone(ec2_server: Ec2Server):
    """By the prices of the hour's beginning: a repeated launch tries the same order."""
    ec2_server.prices = [
        (ZONES[0], "2026-11-26T00:00:00Z", "0.5"),
        (ZONES[1], "2026-11-26T00:00:00Z", "0.4"),
        (ZONES[0], "2026-11-26T12:10:00Z", "0.1"),
    ]
    noon = datetime(2026, 11, 26, 12, tzinfo=UTC).timestamp()
    clock = VirtualClock(noon + 1800.0)
    for market, zone in ((Market.SPOT, ZONES[1]), (Market.ON_DEMAND, ZONES[0])):
        pool = replace(ec2_server.pool(), clock=clock)
        node = pool.launch(spec(market=market, zones=ZONES[:2]), market.value)
        assert node.zone == zone
    clock.sleep(3600.0)
    later = replace(ec2_server.pool(), clock=clock)
    node = later.launch(spec(market=Market.SPOT, zones=ZONES[:2]), "later")
    assert node.zone == ZONES[0]
    # Without prices, the order of the file counts.
    ec2_server.prices = [(ZONES[1], "2026-11-26T00:00:00Z", "0.0")]
    node = later.launch(spec(market=Market.SPOT, zones=ZONES[:2]), "unpriced")
    assert node.zone == ZONES[0]


def test_instances_are_closed_and_end_for_good(ec2_server: Ec2Server):
    """The request has what moto does not keep."""
    iam = s3_server.client(ec2_server.url, service="iam")
    iam.create_instance_profile(InstanceProfileName="site")
    ec2_server.pool().launch(
        spec(market=Market.SPOT, identity="site", disk_gb=70, user_data="#x\n"), "one"
    )
    (form,) = ec2_server.launches()
    assert form["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert values(form, "MetadataOptions.") == {
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": "1",
    }
    assert form["NetworkInterface.1.AssociatePublicIpAddress"] == "false"
    assert form["NetworkInterface.1.DeleteOnTermination"] == "true"
    assert values(form, "BlockDeviceMapping.1.") == {
        "DeviceName": "/dev/xvda",
        "Ebs.VolumeSize": "70",
        "Ebs.VolumeType": "gp3",
        "Ebs.Encrypted": "true",
        "Ebs.DeleteOnTermination": "true",
    }
    assert form["IamInstanceProfile.Name"] == "site"
    assert values(form, "InstanceMarketOptions.") == {
        "MarketType": "spot",
        "SpotOptions.SpotInstanceType": "one-time",
        "SpotOptions.InstanceInterruptionBehavior": "terminate",
    }
    tagged = [form[f"TagSpecification.{n}.ResourceType"] for n in (1, 2, 3)]
    assert tagged == ["instance", "volume", "network-interface"]
    for number in (1, 2, 3):
        tags = values(form, f"TagSpecification.{number}.Tag.").values()
        assert {"crossfed-deployment", "x", "Name", "site-a"} <= set(tags)


def test_zones_are_tried_in_their_order(ec2_server: Ec2Server):
    """The next one where one has no machines; each with its own subnet."""
    pool = ec2_server.pool()
    first: list[str] = []

    def refusal(form: Form) -> str | None:
        if form["Action"] == "RunInstances" and not first:
            first.append(form["NetworkInterface.1.SubnetId"])
            return "InsufficientInstanceCapacity"
        return None

    ec2_server.refusal = refusal
    assert pool.launch(spec(zones=ZONES[::-1]), "one").zone == ZONES[0]
    used = [form["NetworkInterface.1.SubnetId"] for form in ec2_server.launches()]
    assert used[0] == first[0] != used[1]


@pytest.mark.parametrize(
    ("code", "error", "tries"),
    [
        ("InsufficientInstanceCapacity", NoCapacity, 2),
        ("SpotMaxPriceTooLow", NoCapacity, 2),
        ("VcpuLimitExceeded", QuotaReached, 1),
        ("UnauthorizedOperation", ComputeForbidden, 1),
    ],
)
def test_a_refused_launch_launches_nothing(
    ec2_server: Ec2Server, code: str, error: type[ComputeError], tries: int
):
    """All zones are tried and named where that can help, and else one."""
    pool = ec2_server.pool()
    ec2_server.refusal = lambda form: code if form["Action"] == "RunInstances" else None
    with pytest.raises(error, match=code) as caught:
        pool.launch(spec(), "one")
    for zone in ZONES[:tries]:
        assert f"launch site-a (m5.large) in {zone}" in str(caught.value)
    assert len(ec2_server.launches()) == tries
    ec2_server.refusal = lambda _: None
    assert pool.nodes({}) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"image": "ami-00000000000000000"}, "correct image.*InvalidAMIID.NotFound"),
        ({"image": "/aws/service/none"}, "correct image.*ParameterNotFound"),
        ({"subnets": ("subnet-0",)}, "correct subnets.*InvalidSubnetID"),
        ({"zones": ("us-east-1z",)}, "us-east-1z has none;"),
    ],
)
def test_what_does_not_exist_is_named(
    ec2_server: Ec2Server, changed: dict[str, Any], words: str
):
    """Before anything is launched."""
    if changed.get("image", "").startswith("ami-"):
        # moto lists nothing, where Amazon refuses.
        ec2_server.refusal = lambda form: (
            "InvalidAMIID.NotFound" if form["Action"] == "DescribeImages" else None
        )
    with pytest.raises(MachineRefused, match=words):
        ec2_server.pool().launch(spec(**changed), "one")
    assert ec2_server.launches() == []


def test_a_node_that_the_service_has_forgotten_is_gone(ec2_server: Ec2Server):
    """Its token launches none, though no tag says so any more."""
    pool = ec2_server.pool()
    node = pool.launch(spec(), "one")
    pool.terminate([node.id])
    tags = [{"Key": name} for name in node.labels]
    pool.ec2.delete_tags(Resources=[node.id], Tags=tags)
    assert pool.nodes({}) == []
    assert pool.launch(spec(), "one").state is NodeState.GONE
    assert pool.nodes({}) == []


def test_a_stopped_instance_still_costs(ec2_server: Ec2Server):
    """It is not gone, and says why."""
    pool = ec2_server.pool()
    node = pool.launch(spec(), "one")
    pool.ec2.stop_instances(InstanceIds=[node.id])
    (found,) = pool.nodes({})
    assert found.state is NodeState.STOPPING
    assert "its disk still costs" in found.trouble


def test_a_launch_whose_answer_is_lost_is_repeated(ec2_server: Ec2Server):
    """The service's token finds it, though it is not listed yet."""
    pool = ec2_server.pool()
    ec2_server.loses = lambda form: form["Action"] == "RunInstances"
    with pytest.raises(ComputeUnavailable, match="try again later"):
        pool.launch(spec(), "one")
    ec2_server.loses = lambda _: False
    ec2_server.is_blind = True
    node = pool.launch(spec(), "one")
    ec2_server.is_blind = False
    assert [each.id for each in pool.nodes({})] == [node.id]
    assert len(ec2_server.launches()) == 2


class Patient(VirtualClock):
    """After a wait, the service lists its instances."""

    def __init__(self, server: Ec2Server) -> None:
        super().__init__()
        self.server = server

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.server.is_blind = False


def test_a_token_with_other_parameters_waits_for_its_instance(ec2_server: Ec2Server):
    """The service refuses it while the instance is not listed yet."""
    pool = ec2_server.pool(clock=Patient(ec2_server))
    node = pool.launch(spec(), "one")
    ec2_server.is_blind = True
    assert pool.launch(spec(user_data="#x\n"), "one").id == node.id
    assert [each.id for each in pool.nodes({})] == [node.id]


def test_a_token_with_other_parameters_whose_instance_has_ended_is_spent(
    ec2_server: Ec2Server,
):
    """The service refuses it for a day, but lists the instance for an hour only."""
    clock = VirtualClock()
    pool = ec2_server.pool(clock=clock)
    pool.terminate([pool.launch(spec(), "one").id])
    ec2_server.is_blind = True
    assert pool.launch(spec(user_data="#x\n"), "one").state is NodeState.GONE
    assert 30.0 <= clock.monotonic() <= 120.0


def test_the_actions_that_are_named_suffice(
    ec2_server: Ec2Server, request: pytest.FixtureRequest
):
    """Of an error's advice; and each of them is needed."""
    iam = s3_server.client(ec2_server.url, service="iam")
    iam.create_user(UserName="operator")
    made = iam.create_access_key(UserName="operator")["AccessKey"]
    secret = {"key": made["AccessKeyId"], "secret": made["SecretAccessKey"]}
    pool = ec2_server.pool(
        ec2=s3_server.client(ec2_server.url, service="ec2", **secret),
        ssm=s3_server.client(ec2_server.url, service="ssm", **secret),
    )

    def allow(actions: Sequence[str]) -> None:
        statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        document = {"Version": "2012-10-17", "Statement": [statement]}
        ec2_server.enforce_policies(after=math.inf)
        iam.put_user_policy(
            UserName="operator",
            PolicyName="fleet",
            PolicyDocument=json.dumps(document),
        )
        ec2_server.enforce_policies()

    client = s3_server.client(ec2_server.url, service="ec2")
    vpc = client.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    closed = client.create_subnet(
        VpcId=vpc, AvailabilityZone=ZONES[0], CidrBlock="10.9.0.0/24"
    )["Subnet"]["SubnetId"]

    def use(token: str) -> None:
        with contextlib.suppress(MachineRefused):
            pool.check_route(spec(zones=ZONES[:1], subnets=(closed,)))
        pool.machine_types(["m5.large"], ZONES)
        pool.spot_prices("m5.large", ZONES, 0.0)
        node = pool.launch(spec(), token)
        pool.log(node.id)
        pool.terminate([node.id])

    request.addfinalizer(lambda: ec2_server.enforce_policies(after=math.inf))
    allow(ec2_errors.ACTIONS)
    use("all")
    # moto does not hold tags of a launch against a policy.
    for action in set(ec2_errors.ACTIONS) - {"ec2:CreateTags"}:
        allow([each for each in ec2_errors.ACTIONS if each != action])
        with pytest.raises(ComputeForbidden, match=action):
            use(action)


def test_a_machine_that_is_not_nitro_shows_the_console_of_its_boot(
    ec2_server: Ec2Server,
):
    """Only Nitro has the newest output; another refusal is an error as before."""
    pool = ec2_server.pool()
    node = pool.launch(spec(machine="p3.2xlarge"), "xen")
    read = "GetConsoleOutput"
    ec2_server.refusal = lambda form: (
        "UnsupportedOperation" if form["Action"] == read and "Latest" in form else None
    )
    assert pool.log(node.id)
    asked = [form for form in ec2_server.requests if form["Action"] == read]
    assert ["Latest" in form for form in asked] == [True, False]
    ec2_server.refusal = lambda form: (
        "UnauthorizedOperation" if form["Action"] == read else None
    )
    with pytest.raises(ComputeForbidden):
        pool.log(node.id)


def failure(code: str, status: int = 400, message: str = "words") -> ClientError:
    answer = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, "RunInstances")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (failure("InsufficientInstanceCapacity", 500), NoCapacity),
        (failure("Unsupported"), MachineRefused),
        (failure("InsufficientFreeAddressesInSubnet"), NoCapacity),
        (failure("MaxSpotInstanceCountExceeded"), QuotaReached),
        (failure("VolumeLimitExceeded"), QuotaReached),
        (failure("InvalidAMIID.Malformed"), MachineRefused),
        (failure("InvalidInstanceType"), MachineRefused),
        (failure("InvalidGroup.NotFound"), MachineRefused),
        (failure("InvalidParameterValue"), MachineRefused),
        (failure("UnauthorizedOperation", 403), ComputeForbidden),
        (failure("OptInRequired", 403), ComputeForbidden),
        (failure("AuthFailure", 401), ComputeUnauthenticated),
        (failure("ExpiredToken", 400), ComputeUnauthenticated),
        (failure("RequestExpired", 400), ComputeUnauthenticated),
        (failure("RequestLimitExceeded", 503), ComputeUnavailable),
        (failure("SomethingNew", 503), ComputeUnavailable),
        (NoCredentialsError(), ComputeUnauthenticated),
        (EndpointConnectionError(endpoint_url="https://x"), ComputeUnavailable),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, Exception) else "",
)
def test_failures_become_ours(error: Exception, expected: type[ComputeError]):
    """With what was done, what to do and what the service says."""
    made = ec2_errors.translate(error, "launch site-a in us-east-1a")
    assert type(made) is expected
    assert str(made).startswith("cannot launch site-a in us-east-1a: ")


def test_an_unknown_instance_profile_is_named():
    """The service says it with a code of many meanings."""
    words = "Value (x) for parameter iamInstanceProfile.name is invalid."
    made = ec2_errors.translate(failure("InvalidParameterValue", 400, words), "launch")
    assert type(made) is MachineRefused
    assert "correct identity" in str(made)


def test_a_region_that_is_malformed_is_refused():
    """Before any request."""
    with pytest.raises(ComputeError, match="open EC2 in no region"):
        ec2.connect("no region", clock=VirtualClock())


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("Client.InstanceInitiatedShutdown", True),
        ("Client.UserInitiatedShutdown", False),
        ("Server.SpotInstanceTermination", False),
        ("", False),
    ],
)
def test_an_instance_that_shuts_itself_down_has_failed(
    code: str,
    failed: bool,  # noqa: FBT001
):
    """And has not been taken back."""
    described = {
        "InstanceId": "i-1",
        "InstanceType": "m5.large",
        "State": {"Name": "terminated"},
        "StateReason": {"Code": code, "Message": code},
        "Placement": {"AvailabilityZone": ZONES[0]},
        "LaunchTime": datetime(2026, 11, 26, tzinfo=UTC),
    }
    assert ec2._node(described).failed is failed


def test_subnets_without_a_way_out_are_refused(ec2_server: Ec2Server):
    """An internet gateway, which default networks have, is of no use to them."""
    client, pool = s3_server.client(ec2_server.url, service="ec2"), ec2_server.pool()
    pool.check_route(spec())  # The accounts of tests have a NAT gateway there.
    vpc = client.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    here = {"VpcId": vpc, "AvailabilityZone": ZONES[0]}
    closed, open_ = (
        client.create_subnet(**here, CidrBlock=f"10.9.{each}.0/24")["Subnet"][
            "SubnetId"
        ]
        for each in range(2)
    )
    gateway = client.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    client.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    tables = client.describe_route_tables(
        Filters=[{"Name": "vpc-id", "Values": [vpc]}]
    )["RouteTables"]
    client.create_route(
        RouteTableId=tables[0]["RouteTableId"],
        DestinationCidrBlock="0.0.0.0/0",
        GatewayId=gateway,
    )
    own = client.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    client.associate_route_table(RouteTableId=own, SubnetId=open_)
    nat = client.create_nat_gateway(SubnetId=closed)["NatGateway"]["NatGatewayId"]
    client.create_route(
        RouteTableId=own, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat
    )

    def ask(subnet: str) -> None:
        pool.check_route(spec(zones=ZONES[:1], subnets=(subnet,)))

    ask(open_)
    with pytest.raises(MachineRefused, match=f"{closed} of {vpc} .*NAT gateway"):
        ask(closed)
    # A gateway of S3 alone leads nowhere else; interfaces of services do.
    store = f"com.amazonaws.{s3_server.REGION}.s3"
    client.create_vpc_endpoint(
        VpcId=vpc, ServiceName=store, RouteTableIds=[tables[0]["RouteTableId"]]
    )
    with pytest.raises(MachineRefused):
        ask(closed)
    client.create_vpc_endpoint(
        VpcId=vpc,
        ServiceName=store,
        VpcEndpointType="Interface",
        SubnetIds=[closed],
    )
    ask(closed)

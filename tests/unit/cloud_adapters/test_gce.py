"""Instances of Compute Engine: what is asked for, where, and what the answers mean."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import google.auth.exceptions
import pytest
import requests
from google.api_core import exceptions as api
from google.api_core.retry import Retry
from support.fake_gce import PROJECT, TYPES, ZONES, FakeGce, Resource
from support.google_server import GoogleError
from support.programs import needs, program

from cloud_adapters.compute import gce, gce_errors
from cloud_adapters.compute.pool import Market, NodeSpec, NodeState
from federation.errors import (
    ComputeError,
    ComputeForbidden,
    ComputeUnauthenticated,
    ComputeUnavailable,
    MachineRefused,
    NoCapacity,
    QuotaReached,
)

LABELS = {"crossfed-deployment": "x", "crossfed-role": "site-a"}
STOCKOUT = ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "There are none.")


def spec(**changed: Any) -> NodeSpec:
    given = {
        "name": "site-a",
        "labels": LABELS,
        "max_seconds": 600.0,
        "machine": TYPES[0],
        "zones": ZONES,
        "image": "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
    }
    return NodeSpec(**{**given, **changed})


def test_gpus_are_attached_to_a_machine_without_any(gce_server: FakeGce):
    """Such a machine cannot move to another host while it runs, so it ends instead."""
    gce_server.pool().launch(spec(accelerator="nvidia-tesla-t4", gpus=2), "one")
    gce_server.pool().launch(spec(), "two")
    body, plain = gce_server.inserted
    assert body["guestAccelerators"] == [
        {
            "acceleratorType": f"zones/{ZONES[0]}/acceleratorTypes/nvidia-tesla-t4",
            "acceleratorCount": 2,
        }
    ]
    assert body["scheduling"]["onHostMaintenance"] == "TERMINATE"
    assert "guestAccelerators" not in plain
    assert "onHostMaintenance" not in plain["scheduling"]


def test_instances_are_closed_and_end_for_good(gce_server: FakeGce):
    """The service deletes them, whoever is left to ask."""
    gce_server.pool().launch(
        spec(
            market=Market.SPOT,
            identity="site@p-1.iam.gserviceaccount.com",
            disk_gb=70,
            subnets=("sites",),
            firewalls=("no-entry",),
            user_data="#cloud-config\n",
        ),
        "one",
    )
    (body,) = gce_server.inserted
    assert body["scheduling"] == {
        "provisioningModel": "SPOT",
        "instanceTerminationAction": "DELETE",
        "maxRunDuration": {"seconds": "600"},
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
    }
    (interface,) = body["networkInterfaces"]
    assert interface == {"subnetwork": "regions/europe-west4/subnetworks/sites"}
    assert body["tags"] == {"items": ["no-entry"]}
    (disk,) = body["disks"]
    assert disk["autoDelete"] is True
    assert disk["initializeParams"]["diskSizeGb"] == "70"
    assert disk["initializeParams"]["labels"].items() >= LABELS.items()
    assert set(body["shieldedInstanceConfig"].values()) == {True}
    (account,) = body["serviceAccounts"]
    assert account["email"] == "site@p-1.iam.gserviceaccount.com"
    items = {item["key"]: item["value"] for item in body["metadata"]["items"]}
    assert items["user-data"] == "#cloud-config\n"


def test_machines_with_gpus_do_not_move(gce_server: FakeGce):
    """The service refuses them else; others move while they run."""
    pool = gce_server.pool()
    for number, kind in enumerate(TYPES):
        pool.launch(spec(machine=kind), str(number))
    plain, gpu = (body["scheduling"] for body in gce_server.inserted)
    assert "onHostMaintenance" not in plain
    assert gpu["onHostMaintenance"] == "TERMINATE"
    assert plain["provisioningModel"] == gpu["provisioningModel"] == "STANDARD"


def test_labels_of_any_form_are_found(gce_server: FakeGce):
    """Whole, although the service takes few characters."""
    pool = gce_server.pool()
    names = ["Site.of_many-words", "site.of_many-words", "s" * 70]
    for number, name in enumerate(names):
        pool.launch(spec(name=name, labels={"crossfed-role": name}), str(number))
    for name in names:
        (found,) = pool.nodes({"crossfed-role": name})
        assert found.name == name
        assert found.labels["crossfed-role"] == name


@pytest.mark.parametrize("pace", ["quick", "slow"])
def test_zones_are_tried_in_their_order(gce_server: FakeGce, pace: str):
    """The next one where one has no machines, also if the service takes its time."""
    gce_server.slow_operations = pace == "slow"
    gce_server.refusal = lambda zone, _: STOCKOUT if zone == ZONES[1] else None
    pool = gce_server.pool()
    node = pool.launch(spec(zones=ZONES[::-1]), "one")
    assert (node.zone, node.state) == (ZONES[0], NodeState.RUNNING)
    assert len(gce_server.inserted) == 2


@pytest.mark.parametrize(
    ("refused", "error", "tries"),
    [
        (STOCKOUT, NoCapacity, 2),
        (("ZONE_RESOURCE_POOL_EXHAUSTED", "none"), NoCapacity, 2),
        (("QUOTA_EXCEEDED", "Quota 'NVIDIA_L4_GPUS' exceeded."), QuotaReached, 1),
        (("RESOURCE_NOT_FOUND", "no such network"), MachineRefused, 1),
        (("CONDITION_NOT_MET", "Constraint constraints/x"), ComputeForbidden, 1),
        (("SOMETHING_NEW", "what?"), ComputeError, 1),
    ],
)
def test_a_refused_launch_launches_nothing(
    gce_server: FakeGce,
    refused: tuple[str, str],
    error: type[ComputeError],
    tries: int,
):
    """All zones are tried and named where that can help, and else one."""
    gce_server.refusal = lambda *_: refused
    pool = gce_server.pool()
    with pytest.raises(error, match=refused[0]) as caught:
        pool.launch(spec(), "one")
    assert type(caught.value) is error
    for zone in ZONES[:tries]:
        assert f"launch site-a (e2-standard-4) in {zone}" in str(caught.value)
    assert len(gce_server.inserted) == tries
    assert pool.nodes({}) == []


def test_a_launch_that_failed_can_be_repeated(gce_server: FakeGce):
    """With its token: the service must not repeat its answer."""
    pool = gce_server.pool()
    gce_server.refusal = lambda *_: STOCKOUT
    for _ in range(2):
        with pytest.raises(NoCapacity):
            pool.launch(spec(), "one")
    gce_server.refusal = lambda *_: None
    assert pool.launch(spec(), "one").state is NodeState.RUNNING


def test_a_launch_whose_command_was_killed_is_found(gce_server: FakeGce):
    """Its operation has not ended; another command waits for it."""
    gce_server.slow_operations = True
    pool = gce_server.pool()
    place = gce._GceLaunch(spec(), "one", "0" * 40)
    request = {
        "project": PROJECT,
        "zone": ZONES[0],
        "instance_resource": gce._instance(place, ZONES[0]),
    }
    pool.clients.instances.insert_unary(request=request)
    assert pool._failed(place, ZONES[0]) is None
    assert pool._made(place).state is NodeState.RUNNING


@pytest.mark.parametrize("pace", ["quick", "slow"])
def test_a_launch_whose_answer_is_lost_is_repeated(gce_server: FakeGce, pace: str):
    """With its request id, so that there is one instance."""
    gce_server.slow_operations = pace == "slow"
    left = ["compute.instances.insert", "compute.zoneOperations.wait"]

    def loses(method: str) -> bool:
        return method in left and not left.remove(method)  # type: ignore[func-returns-value]

    gce_server.loses = loses
    pool = gce_server.pool()
    node = pool.launch(spec(), "one")
    assert [each.id for each in pool.nodes({})] == [node.id]
    assert len(gce_server.inserted) == 1
    left.append("compute.instances.delete")
    pool.terminate([node.id])
    assert pool.nodes({}) == []


def test_what_does_not_exist_is_named(gce_server: FakeGce):
    """With what the service says of it."""
    pool = gce_server.pool()
    with pytest.raises(MachineRefused, match=r"resource\.machineType.*x9"):
        pool.launch(spec(machine="x9"), "one")
    with pytest.raises(MachineRefused, match="Unknown zone"):
        pool.launch(spec(zones=("mars-1",)), "one")
    with pytest.raises(MachineRefused, match="name its zones"):
        pool.launch(spec(zones=()), "one")
    assert gce_server.inserted == []


def test_a_stopped_instance_still_costs(gce_server: FakeGce):
    """It is not gone, says why, and can be ended."""
    pool = gce_server.pool()
    node = pool.launch(spec(), "one")
    place: Resource = gce_server.instances[ZONES[0], node.id.partition("/")[2]]
    place["status"] = "TERMINATED"
    (found,) = pool.nodes({})
    assert found.state is NodeState.STOPPING
    assert "its disk still costs" in found.trouble
    pool.terminate([node.id])
    assert pool.nodes({}) == []


@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [
        (400, "invalid", MachineRefused),
        (403, "forbidden", ComputeForbidden),
        (403, "quotaExceeded", QuotaReached),
        (403, "rateLimitExceeded", ComputeUnavailable),
        (403, "accessNotConfigured", ComputeForbidden),
        (404, "notFound", MachineRefused),
        (412, "conditionNotMet", ComputeForbidden),
        (429, "rateLimitExceeded", ComputeUnavailable),
        (503, "backendError", ComputeUnavailable),
    ],
)
def test_answers_become_ours(
    gce_server: FakeGce, status: int, reason: str, expected: type[ComputeError]
):
    """With what was done and what the service says."""
    once = Retry(predicate=lambda _: False)
    pool = dataclasses.replace(gce_server.pool(), retry=once)
    gce_server.faults = [GoogleError(status, reason, "its words")]
    with pytest.raises(
        expected, match=f"^cannot list instances of.* p-1: .*{reason} its words"
    ):
        pool.nodes({})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (api.Unauthorized("no"), ComputeUnauthenticated),
        (google.auth.exceptions.DefaultCredentialsError(), ComputeUnauthenticated),
        (google.auth.exceptions.RefreshError(), ComputeUnauthenticated),
        (google.auth.exceptions.TransportError(), ComputeUnavailable),
        (requests.exceptions.ConnectionError(), ComputeUnavailable),
        (api.RetryError("late", requests.exceptions.Timeout()), ComputeUnavailable),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_failures_on_the_way_become_ours(
    error: Exception, expected: type[ComputeError]
):
    """Credentials are the caller's business, and connections the network's."""
    assert type(gce_errors.translate(error, "launch site-a")) is expected


def test_a_fault_that_passes_is_outlasted(gce_server: FakeGce):
    """A request that can be repeated is."""
    pool = gce_server.pool()
    gce_server.faults = [GoogleError(503, "backendError", "a moment")]
    assert pool.launch(spec(), "one").state is NodeState.RUNNING


@needs("gcloud")
def test_gcloud_finds_and_ends_what_we_launch(gce_server: FakeGce, tmp_path: Path):
    """Google's own client understands our instances, and the fake its requests."""
    node = gce_server.pool().launch(spec(), "one")
    zone, _, name = node.id.partition("/")

    def gcloud(*words: str) -> str:
        override = f"{gce_server.url}/compute/v1/"
        done = subprocess.run(
            [program("gcloud"), "compute", "instances", *words, "--project", PROJECT],
            env={
                **os.environ,
                "CLOUDSDK_CONFIG": str(tmp_path),
                "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": override,
                "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
                "CLOUDSDK_CORE_DISABLE_PROMPTS": "true",
                "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
                "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = json.loads(gcloud("describe", name, "--zone", zone, "--format", "json"))
    assert found["labels"].items() >= LABELS.items()
    gcloud("delete", name, "--zone", zone)
    assert gce_server.pool().nodes({}) == []


def test_networks_without_a_way_out_are_refused(gce_server: FakeGce):
    """Cloud NAT of another network, or of other subnets, is of no use to them."""
    pool, network = gce_server.pool(), "https://example/global/networks"

    def ask(*subnets: str) -> None:
        pool.check_route(spec(subnets=subnets))

    ask()
    with pytest.raises(MachineRefused, match=r"network own .*Cloud NAT"):
        ask("own-machines")
    some = "https://example/regions/europe-west4/subnetworks/own-machines"
    nat = {
        "sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS",
        "subnetworks": [{"name": some}],
    }
    gce_server.routers = [{"network": f"{network}/own", "nats": [nat]}]
    ask("own-machines")
    ask(f"projects/{PROJECT}/regions/europe-west4/subnetworks/own-machines")
    for subnets in (["own-others"], []):
        with pytest.raises(MachineRefused, match="has no Cloud NAT"):
            ask(*subnets)
    gateway = "https://example/global/gateways/default-internet-gateway"
    route = {"network": f"{network}/own", "destRange": "0.0.0.0/0"}
    gce_server.routes = [{**route, "nextHopGateway": gateway}]
    with pytest.raises(MachineRefused, match="has no Cloud NAT"):
        ask("own-others")
    gce_server.routes = [{**route, "nextHopIp": "10.0.0.9"}]
    ask("own-others")
    gce_server.routes = []
    gce_server.routers = [
        {"network": f"{network}/own", "bgpPeers": [{"name": "office"}]}
    ]
    ask("own-others")


def test_a_policy_is_no_lack_of_rights():
    """Compute Engine answers both with the same status."""
    reason = [{"reason": "forbidden"}]
    words = "Constraint constraints/compute.restrictCloudNATUsage violated"
    found = gce_errors.translate(api.Forbidden(words, errors=reason), "launch a")
    assert "organisation's policy" in str(found)
    lacking = api.Forbidden("Required 'compute.x' permission", errors=reason)
    for role in ("networkViewer", "instanceAdmin", "serviceAccountUser"):
        assert role in str(gce_errors.translate(lacking, "launch a"))
    quota = gce_errors.of_operation([("GPU_QUOTA", "x")], "launch a")
    assert isinstance(quota, QuotaReached)

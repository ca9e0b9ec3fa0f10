"""Faults of a cloud that pass by themselves end no phase of a deployment.

One list says which they are, ``refusals.PASSING``. Here each phase meets each of them,
and the answers of the three services are sorted by it.
"""

import argparse
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from google.api_core import exceptions as google
from kubernetes.client import ApiException
from support.fake_kube import NAMESPACE, FakeKube, KubeError

from cloud_adapters.compute import ec2_errors, gce_errors, kube_errors
from cloud_adapters.compute.pool import Node, NodeSpec, NodeState
from cloud_adapters.compute.refusals import PASSING
from deploy.cli import up_verb
from deploy.fleet import (
    cloud_sites,
    down as fleet_down,
    loop,
    spec as fleet_spec,
    state,
)
from deploy.fleet.loop import NodeRequest, Patience
from deploy.fleet.reconcile import AGGREGATOR, ROLE
from deploy.fleet.spec import DeploymentPlan
from deploy.fleet.state import Deployment
from deploy.fleet.supervisor import LOOK_SECONDS, Keeper, RunWatch
from federation.clock import SystemClock, VirtualClock
from federation.errors import (
    ComputeError,
    ComputeForbidden,
    ComputeUnauthenticated,
    ComputeUnavailable,
    ComputeUnreachable,
    MachineRefused,
    QuotaReached,
)

JOB = Path(__file__).parents[3] / "jobs" / "quickstart.toml"
SITES = ("aws-us-east-1", "gcp-us-central1", "azure-eastus")
POOL, START = "aws us-east-1", SystemClock().now()
FAULT = ComputeUnavailable("told by a test")
LASTING = (ComputeForbidden, ComputeUnauthenticated, MachineRefused, QuotaReached)


class Cloud:
    """An in-memory compute service whose next requests fail.

    Attributes:
        faults: What is raised, one at a request.
        passes: After how many requests.
        lists: How many lists were asked for.
    """

    def __init__(self) -> None:
        self.faults: list[ComputeError] = []
        self.passes = self.lists = 0
        self.launched: dict[str, Node] = {}

    def _meet(self) -> None:
        self.passes -= 1
        if self.faults and self.passes < 0:
            raise self.faults.pop()

    def launch(self, spec: NodeSpec, token: str) -> Node:
        self._meet()
        made = Node(
            id=f"{spec.name}-{len(self.launched)}",
            name=spec.name,
            state=NodeState.RUNNING,
            labels=spec.labels,
            launched=START,
        )
        return self.launched.setdefault(token, made)

    def nodes(self, labels: Mapping[str, str]) -> Sequence[Node]:
        self.lists += 1
        self._meet()
        found = self.launched.values()
        return [node for node in found if labels.items() <= node.labels.items()]

    def terminate(self, ids: Collection[str]) -> None:
        self._meet()
        for token, node in self.launched.items():
            if node.id in ids:
                self.launched[token] = replace(node, state=NodeState.GONE, ended=START)

    def log(self, _: str) -> str:
        self._meet()
        return ""

    def clean_up(self) -> None:
        self._meet()


class Fleet:
    """A deployment of three machines of one cloud, and one of this host."""

    def __init__(self, folder: Path) -> None:
        path = folder / "fed.toml"
        tables = "".join(
            f'[[sites]]\nname = "{name}"\nprovider = "aws"\n'
            'machine = { region = "us-east-1", type = "m5.large" }\n'
            for name in SITES
        )
        path.write_text(f'name = "fed"\njob = "{JOB}"\nmax_hours = 6.0\n{tables}')
        self.plan = fleet_spec.load(path)
        self.clock, self.told, self.cloud = VirtualClock(START), list[str](), Cloud()
        self.deployment = Deployment(
            plan=self.plan,
            pools={"local": Cloud(), POOL: self.cloud},
            clock=self.clock,
            owner="me",
        )
        self.plan.folder.mkdir(parents=True)
        self.fill("local", AGGREGATOR)

    def requests(self) -> Mapping[str, NodeRequest]:
        return {name: request(POOL, f"site-{name}") for name in SITES}

    def fill(self, pool: str, role: str) -> Node:
        return loop.fill(self.deployment, request(pool, role), self.told.append)

    def start(self) -> None:
        """As ``up`` does until a machine of each site is there."""
        patience = Patience(self.plan, self.clock, self.told.append)
        for name in SITES:
            patience.repeated(lambda name=name: self.fill(POOL, f"site-{name}"))

    def watch(self) -> None:
        """As ``up`` does without ``--keep`` while a run goes on."""
        watch = RunWatch(self.deployment, self.told.append)
        for _ in range(4):
            self.clock.sleep(LOOK_SECONDS)
            watch.look()

    def resume(self) -> None:
        """As ``up --keep`` does after a pause."""

        def restore(_: Deployment) -> None:
            for name in SITES:
                self.fill(POOL, f"site-{name}")

        keeper = Keeper(
            self.deployment,
            restore,
            hourly={},
            tell=self.told.append,
        )
        keeper.resume()

    def down(self) -> None:
        fleet_down.take_down(self.deployment, any_owner=False, tell=self.told.append)

    def alive(self) -> list[str]:
        found = self.cloud.launched.values()
        return sorted(n.labels[ROLE] for n in found if n.state is not NodeState.GONE)


def request(pool: str, role: str) -> NodeRequest:
    spec = NodeSpec(name=role, labels={}, max_seconds=600.0)
    return NodeRequest(pool, spec, b"settings")


@pytest.fixture
def site_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    return Fleet(tmp_path)


PHASES: Mapping[str, Callable[[Fleet], None]] = {
    "start": Fleet.start,
    "watch": Fleet.watch,
    "resume": Fleet.resume,
    "down": Fleet.down,
}
ROLES = sorted(f"site-{name}" for name in SITES)


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_that_passes_ends_no_phase(
    site_fleet: Fleet, phase: str, kind: type[ComputeError]
):
    """It is told once, and each phase does its work; no machine is launched twice."""
    if phase in {"watch", "down"}:
        site_fleet.start()
    site_fleet.told.clear()
    site_fleet.cloud.faults = [kind("told by a test")] * 3
    PHASES[phase](site_fleet)
    assert site_fleet.cloud.faults == []
    assert site_fleet.alive() == ([] if phase == "down" else ROLES)
    assert len(site_fleet.cloud.launched) == len(SITES)
    (line,) = [line for line in site_fleet.told if "told by a test" in line]
    assert line.endswith("until it succeeds")


@pytest.mark.parametrize("kind", LASTING)
@pytest.mark.parametrize("phase", ["start", "watch", "down"])
def test_a_fault_that_needs_a_person_ends_a_phase_at_once(
    site_fleet: Fleet, phase: str, kind: type[ComputeError]
):
    if phase != "start":
        site_fleet.start()
    site_fleet.cloud.faults = [kind("told by a test")] * 100
    begin = site_fleet.clock.now()
    with pytest.raises(kind, match="told by a test"):
        PHASES[phase](site_fleet)
    assert site_fleet.clock.now() - begin <= LOOK_SECONDS


@pytest.mark.parametrize("phase", ["start", "down"])
def test_no_fault_is_outlasted_beyond_the_hours(site_fleet: Fleet, phase: str):
    """Then all machines have ended by themselves."""
    site_fleet.cloud.faults = [ComputeUnavailable("told by a test")] * 1000
    with pytest.raises(ComputeUnavailable, match="told by a test"):
        PHASES[phase](site_fleet)
    assert site_fleet.clock.now() == pytest.approx(START + 6 * 3600.0, abs=1.0)


def test_down_gives_up_a_cluster_that_is_gone(site_fleet: Fleet):
    """Its API server may not exist any more: ``max_hours`` would be waited for."""
    site_fleet.start()
    site_fleet.told.clear()
    site_fleet.cloud.faults = [ComputeUnreachable("told by a test")] * 1000
    with pytest.raises(ComputeUnreachable, match="told by a test"):
        site_fleet.down()
    waited = site_fleet.clock.now() - START
    assert 600.0 <= waited <= 1200.0
    told = "\n".join(site_fleet.told)
    assert all(f"{role}" in site_fleet.told[-1] for role in [POOL, *ROLES])
    assert re.search("may still run.*6 hours", site_fleet.told[-1])
    # The others' nodes are ended before, and it is ended when it answers in time.
    assert f"{AGGREGATOR}: ended" in told
    assert told.index(f"{AGGREGATOR}: ended") < told.index("may still run")
    site_fleet.cloud.faults = [ComputeUnreachable("told by a test")] * 3
    site_fleet.down()
    assert site_fleet.alive() == []


def test_a_fault_while_machines_end_keeps_none_alive(site_fleet: Fleet):
    """Each request of ``down`` may meet one; all that end are counted."""
    for number in range(8):
        site_fleet.fill("local", AGGREGATOR)
        site_fleet.start()
        site_fleet.cloud.passes, site_fleet.cloud.faults = number, [FAULT]
        ended = fleet_down.take_down(
            site_fleet.deployment, any_owner=False, tell=site_fleet.told.append
        )
        assert site_fleet.alive() == []
        assert ended == 1 + len(SITES), number


def failure(code: str, status: int = 400) -> ClientError:
    answer = {
        "Error": {"Code": code, "Message": "words"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, "RunInstances")


AWS_PASSING = """
RequestLimitExceeded Throttling ThrottlingException EC2ThrottledException SlowDown
InsufficientInstanceCapacity InsufficientHostCapacity ReservationCapacityExceeded
UnfulfillableCapacity InsufficientFreeAddressesInSubnet SpotMaxPriceTooLow
"""
AWS_LASTING = """
Unsupported UnauthorizedOperation AuthFailure VcpuLimitExceeded InvalidInstanceType
MaxSpotInstanceCountExceeded InvalidSubnetID.NotFound ExpiredToken OptInRequired
"""
GCE_PASSING = """
ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS STOCKOUT RATE_LIMIT_EXCEEDED
RESOURCE_OPERATION_RATE_EXCEEDED INTERNAL_ERROR RESOURCE_NOT_READY
"""
GCE_LASTING = "QUOTA_EXCEEDED RESOURCE_NOT_FOUND CONDITION_NOT_MET PERMISSIONS_ERROR"


def test_answers_of_services_are_sorted_by_one_list():
    """Those that pass, and those that need a person."""
    passing = [
        *(ec2_errors.translate(failure(code), "x") for code in AWS_PASSING.split()),
        ec2_errors.translate(failure("Unheard", 503), "x"),
        ec2_errors.translate(EndpointConnectionError(endpoint_url="https://x"), "x"),
        *(gce_errors.of_operation([(c, "words")], "x") for c in GCE_PASSING.split()),
        gce_errors.translate(google.TooManyRequests("words"), "x"),
        gce_errors.translate(google.ServiceUnavailable("words"), "x"),
        *(
            kube_errors.translate(ApiException(status=status), "x")
            for status in (409, 429, 500, 503)
        ),
        kube_errors.translate(ConnectionResetError(), "x"),
        kube_errors.not_scheduled("0/3 nodes are available", "x"),
    ]
    assert [str(each) for each in passing if not isinstance(each, PASSING)] == []
    lasting = [
        *(ec2_errors.translate(failure(code), "x") for code in AWS_LASTING.split()),
        *(gce_errors.of_operation([(c, "words")], "x") for c in GCE_LASTING.split()),
        *(
            kube_errors.translate(ApiException(status=status), "x")
            for status in (401, 403, 404, 422)
        ),
    ]
    assert [str(each) for each in lasting if isinstance(each, PASSING)] == []


def test_a_start_asks_for_one_list_at_a_look(site_fleet: Fleet):
    """For all roles of a service, and not one for each of them; nor each second."""
    starts = cloud_sites._SiteStarts(
        deployment=site_fleet.deployment,
        operator=None,  # type: ignore[arg-type]  # Nobody enrols here.
        tell=site_fleet.told.append,
    )
    listed = fleet_down.give_way(site_fleet.deployment, site_fleet.told.append)
    site_fleet.cloud.lists = 0
    nodes = starts.launch(site_fleet.requests(), listed)
    assert site_fleet.cloud.lists == len(SITES)
    site_fleet.cloud.lists, end = 0, site_fleet.clock.now() + 36.0

    def look() -> tuple[str | None, str]:
        return ("there" if site_fleet.clock.now() >= end else None), ""

    (site, *_) = site_fleet.plan.file.sites
    assert starts._await(site, nodes[site.name], look, "not yet") == "there"
    assert site_fleet.cloud.lists == 8


@pytest.mark.parametrize("kind", PASSING)
def test_a_machine_is_awaited_through_a_fault(
    site_fleet: Fleet, kind: type[ComputeError]
):
    """It goes on meanwhile; if that lasts too long, the fault is named."""
    starts = cloud_sites._SiteStarts(
        deployment=site_fleet.deployment,
        operator=None,  # type: ignore[arg-type]
        tell=site_fleet.told.append,
    )
    (site, *_) = site_fleet.plan.file.sites
    node = site_fleet.fill(POOL, f"site-{site.name}")
    site_fleet.cloud.faults = [kind("told by a test")] * 3
    end = site_fleet.clock.now() + 60.0

    def look() -> tuple[str | None, str]:
        return ("there" if site_fleet.clock.now() >= end else None), ""

    assert starts._await(site, node, look, "not yet") == "there"
    assert len([line for line in site_fleet.told if "told by a test" in line]) == 1
    site_fleet.cloud.faults = [kind("told by a test")] * 1000
    with pytest.raises(kind):
        starts._await(site, node, lambda: (None, ""), "not yet")


def in_cluster(folder: Path, kube: FakeKube) -> DeploymentPlan:
    image = f"registry.example.org/crossfed@sha256:{'ab' * 32}"
    path = folder / "fed.toml"
    path.write_text(f"""
name = "fed"
job = "{JOB}"
release.image = "{image}"
[[sites]]
name = "aws-us-east-1"
provider = "kubernetes"
dollars_per_hour = 0.0
[sites.machine]
endpoint = "{kube.url}"
cluster = {{ context = "test", namespace = "{NAMESPACE}", cpus = 4 }}
[sites.policy]
privacy = "none"
""")
    return fleet_spec.load(path)


def options(**given: object) -> argparse.Namespace:
    clock = VirtualClock(SystemClock().now())  # The fake cluster's time is real.
    base = {"clock": clock, "accept": "", "keep": False, "detach": True, "json": False}
    base["older"] = ""
    return argparse.Namespace(**base | given)


def throttled(kube: FakeKube, requests: int) -> list[str]:
    """Refuse the next requests of a cluster; those that it got."""
    seen: list[str] = []

    def refusal(request: object) -> KubeError | None:
        seen.append(str(request))
        if len(seen) > requests:
            return None
        return KubeError(429, "TooManyRequests", "slow down")

    kube.refusal = refusal
    return seen


@pytest.mark.flower
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of Flower's import.
@pytest.mark.parametrize("folder", ["missing", "there"])
def test_up_outlasts_throttling(
    tmp_path: Path,
    kube_server: FakeKube,
    folder: str,
    capsys: pytest.CaptureFixture[str],
):
    """While its folder is opened, and while it brings up: it comes to what lasts."""
    plan = in_cluster(tmp_path, kube_server)
    given = options()
    if folder == "there":
        with state.opened(plan, random_bytes=os.urandom, clock=given.clock):
            pass
    # Another folder's machine, which no fault hides in the end.
    spec = NodeSpec(
        name="site-x",
        labels={"crossfed-deployment": "fed", "crossfed-owner": "other"},
        max_seconds=600.0,
        image="x",
        command=["sh"],
    )
    kube_server.pool().launch(spec, "token")
    seen = throttled(kube_server, 10)
    job = fleet_spec.load_job(plan)
    with pytest.raises(ComputeError, match="from another folder"):
        up_verb._up_here(given, plan, job)
    assert len(seen) > 10
    assert capsys.readouterr().err.count("tried again until") == 1

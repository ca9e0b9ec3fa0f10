"""``crossfed up`` with an aggregator in a cluster: its head, and what that reads."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_kube import NAMESPACE, FakeKube, KubeError, Resource

from cloud_adapters.compute import kube_manifest
from cloud_adapters.compute.pool import NodeSpec, NodeState
from deploy.cli.terminal import show
from deploy.fleet import kubernetes_head, reconcile, spec as fleet_spec, state
from deploy.fleet.down import take_down
from deploy.fleet.kubernetes_head import MAX_BUNDLE_BYTES, HeadBundle
from deploy.fleet.leftovers import leftovers
from deploy.fleet.prices import Prices
from deploy.fleet.spec import DeploymentPlan
from deploy.fleet.state import Deployment
from federation import durable_files
from federation.clock import SystemClock, VirtualClock
from federation.errors import ComputeError, CorruptObject, JobError
from federation.job import job_file

IMAGE = f"registry.example.org/crossfed-aggregator@sha256:{'cd' * 32}"
NO_PRICES = Prices(as_of="2026-11-01", machines=(), egress=())


def text(url: str, **aggregator: str) -> str:
    table = {
        "provider": '"kubernetes"',
        "image": f'"{IMAGE}"',
        "cluster": f'{{ context = "test", namespace = "{NAMESPACE}" }}',
        "endpoint": f'"{url}"',
        "disk_dollars_per_month": "4.0",
        "connect_seconds": "90.0",
        **aggregator,
    }
    lines = "\n".join(f"{name} = {value}" for name, value in table.items() if value)
    return f"""
name = "fed"
job = "jobs/quick.toml"
[aggregator]
{lines}
[release]
image = "registry.example.org/crossfed-site@sha256:{"ab" * 32}"
[[sites]]
name = "here"
provider = "kubernetes"
dollars_per_hour = 1.5
[sites.machine]
endpoint = "{url}"
cluster = {{ context = "test", namespace = "{NAMESPACE}", cpus = 4 }}
[sites.policy]
privacy = "none"
"""


Write = Callable[..., DeploymentPlan]


@pytest.fixture
def write(tmp_path: Path, kube_server: FakeKube) -> Write:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "quick.toml").write_text('name = "quick"\n')

    def written(**aggregator: str) -> DeploymentPlan:
        path = tmp_path / "fed.toml"
        path.write_text(text(kube_server.url, **aggregator))
        return fleet_spec.load(path)

    return written


def opened(plan: DeploymentPlan) -> Any:
    clock = VirtualClock(SystemClock().now())
    return state.opened(plan, random_bytes=lambda n: b"\x01" * n, clock=clock)


def launched(job: Resource) -> Mapping[str, Any]:
    """What the pod of a job reads."""
    template = job["spec"]["template"]["metadata"]
    found: Mapping[str, Any] = json.loads(template["annotations"]["crossfed/user-data"])
    return found


def site_job(deployment: Deployment, kube: FakeKube) -> str:
    """Launch a site as the head does; its ID.

    Without a request, since the server may be at work on another one.
    """
    role = reconcile.NodeRole(name="site-here", settings="x")
    spec = NodeSpec(
        name=role.name,
        labels=reconcile.labels(deployment.name, deployment.owner, role, 1),
        max_seconds=600.0,
        image=IMAGE,
        command=["sh"],
    )
    made = kube._create(kube_manifest.job(spec, "ab" * 20))
    return str(made["metadata"]["name"])


def test_the_pod_reads_a_file_of_its_own_whose_aggregator_is_there(
    write: Write, kube_server: FakeKube, tmp_path: Path
):
    """With the same sites, in the cluster of the pod, and under the same owner."""
    plan = write()
    assert plan.file.aggregator.address == f"crossfed-fed.{NAMESPACE}.svc:8443"
    assert (plan.has_head, plan.is_head) == (True, False)
    with opened(plan) as deployment:
        kubernetes_head.up(deployment, accept="12ab $(x)", older="stop", tell=print)
    (job,) = kube_server.created
    assert job["metadata"]["labels"]["crossfed-role"] == "head"
    script = job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert "--accept '12ab $$(x)' --older stop" in script
    given = tmp_path / "bundle"
    given.write_text(json.dumps(launched(job)))
    pod = tmp_path / "pod"
    pod.mkdir()
    kubernetes_head.write_files(given, pod)
    found = fleet_spec.load(pod / "fed.toml")
    assert (found.has_head, found.is_head) == (False, True)
    assert found.folder == pod / "deployment"
    assert found.job.read_text() == plan.job.read_text()
    machine = found.file.aggregator
    assert machine.pool == "local"
    assert machine.address == plan.file.aggregator.address
    assert (machine.listen, machine.connect_seconds) == ("0.0.0.0:8443", 90.0)
    (site,), (before,) = found.file.sites, plan.file.sites
    assert site.pool == f"kubernetes in-cluster/{NAMESPACE}"
    cluster = replace(before.machine.cluster, context="in-cluster")
    machine = replace(before.machine, cluster=cluster)
    assert site == replace(before, machine=machine)
    assert found.settings == plan.settings
    record = json.loads((pod / "deployment" / "deployment.json").read_text())
    assert record["owner"] == deployment.owner


def test_a_volume_keeps_its_numbers_under_a_new_owner(tmp_path: Path):
    """The folder that launches may be lost; another deployment's is refused."""
    folder = tmp_path / "deployment"
    state.adopt(folder, "fed", "one")
    path = folder / "deployment.json"
    record = json.loads(path.read_text())
    record["launches"] = [{"role": "aggregator", "number": 7, "max_seconds": 60.0}]
    path.write_text(json.dumps(record))
    state.adopt(folder, "fed", "two")
    found = json.loads(path.read_text())
    assert found["owner"] == "two"
    assert found["launches"][0]["number"] == 7
    with pytest.raises(CorruptObject, match="belongs to deployment 'fed'"):
        state.adopt(folder, "other", "two")


def test_a_bundle_that_is_damaged_or_missing_is_refused(tmp_path: Path):
    for content in ("{", '{"name": "fed"}'):
        (tmp_path / "given").write_text(content)
        with pytest.raises(CorruptObject, match="run crossfed up again"):
            kubernetes_head.write_files(tmp_path / "given", tmp_path)
    with pytest.raises(SystemExit, match="is missing"):
        kubernetes_head.main([str(tmp_path / "none"), str(tmp_path)])
    whole = HeadBundle(
        name="fed", owner="o", deployment="d", job="j" * MAX_BUNDLE_BYTES
    )
    with pytest.raises(JobError, match="shorten one of them"):
        whole.text()
    durable_files.write_json(tmp_path / "given", replace(whole, job="j"))
    kubernetes_head.main([str(tmp_path / "given"), str(tmp_path)])


def test_a_head_is_replaced_only_when_something_has_changed(
    write: Write, kube_server: FakeKube
):
    with opened(write()) as deployment:
        first = kubernetes_head.up(deployment, accept="", tell=print)
        assert kubernetes_head.up(deployment, accept="", tell=print).id == first.id
    with opened(write(connect_seconds="91.0")) as deployment:
        second = kubernetes_head.up(deployment, accept="", tell=print)
    assert second.id != first.id
    assert len(kube_server.claims) == 1


def test_a_running_head_is_not_replaced_for_a_digest(
    write: Write, kube_server: FakeKube
):
    """Neither one that is left out, nor another, which is refused with a way out."""
    digest = "AB12" * 16
    with opened(write()) as deployment:
        first = kubernetes_head.up(deployment, accept=digest, tell=print)
        for same in ("", digest, "ab12 " * 8):
            assert (
                kubernetes_head.up(deployment, accept=same, tell=print).id == first.id
            ), same
        with pytest.raises(JobError, match="without --accept") as caught:
            kubernetes_head.up(deployment, accept="cd34" * 8, tell=print)
        assert f"kubectl -n {NAMESPACE} delete job {first.id}" in str(caught.value)
        assert f"was started with {digest.lower()}" in str(caught.value)
        assert len(kube_server.created) == 1
        del kube_server.jobs[first.id], kube_server.pods[first.id]
        kubernetes_head.up(deployment, accept="cd34" * 8, tell=print)
    assert "--accept " + "cd34" * 8 in json.dumps(kube_server.created[-1])


def test_a_head_that_was_started_without_a_digest_takes_none(
    write: Write, kube_server: FakeKube
):
    with opened(write()) as deployment:
        kubernetes_head.up(deployment, accept="", tell=print)
        with pytest.raises(JobError, match="started with no digest"):
            kubernetes_head.up(deployment, accept="cd34" * 8, tell=print)
    assert len(kube_server.created) == 1


def test_another_deployment_of_the_namespace_is_named(
    write: Write, kube_server: FakeKube
):
    """Its jobs could mount the volume, which has keys; one that is gone could not."""
    told: list[str] = []
    with opened(write()) as deployment:
        kubernetes_head.up(deployment, accept="", tell=told.append)
        assert not any("namespace" in line for line in told)
        labels = {reconcile.DEPLOYMENT: "theirs"}
        spec = NodeSpec(
            name="x", labels=labels, max_seconds=60.0, image=IMAGE, command=["sh"]
        )
        made = kube_server._create(kube_manifest.job(spec, "cd" * 20))
        kubernetes_head.up(deployment, accept="", tell=told.append)
        (warning,) = (line for line in told if "namespace" in line)
        assert f"namespace {NAMESPACE} also has jobs" in warning
        assert "mount the volume of" in warning
        kube_server.finish(made["metadata"]["name"], 0)
        kubernetes_head.up(deployment, accept="", tell=told.append)
    assert told.count(warning) == 1


@pytest.mark.parametrize("budget", ["", "max_dollars = 1.0\n"])
def test_a_head_has_time_to_end_its_sites(
    write: Write, kube_server: FakeKube, budget: str
):
    """When the hours are over or the budget is spent, which it counts itself."""
    path = write().path
    path.write_text(f"{budget}max_hours = 2.0\n{path.read_text()}")
    with opened(fleet_spec.load(path)) as deployment:
        kubernetes_head.up(deployment, accept="", tell=print)
        assert deployment.plan.max_seconds == 7200.0
    (job,) = kube_server.created
    assert job["spec"]["activeDeadlineSeconds"] == 7200 + 900
    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 7200 + 900


def test_what_a_head_writes_is_shown_until_it_ends(write: Write, kube_server: FakeKube):
    """And its exit code is that of the command."""
    shown: list[str] = []
    with opened(write()) as deployment:
        head = kubernetes_head.up(deployment, accept="", tell=print)
        lines = ["one\n", "two\n", "crossfed head: up ended with 3\n"]

        def log(_: str) -> str:
            """A line more at each look; at the last one the pod has ended."""
            if len(lines) == len(shown) + 1:
                kube_server.finish(head.id, 3)
            return "".join(lines[: len(shown) + 1])

        kube_server.log_of = log
        code = kubernetes_head.follow(deployment, head, print, shown.append)
    assert code == 3
    assert [f"{line}\n" for line in shown] == lines


def test_a_head_whose_log_may_not_be_read_is_followed(
    write: Write, kube_server: FakeKube
):
    """Who may list jobs need not have the right to read logs: that is said once."""
    told: list[str] = []
    with opened(write()) as deployment:
        head = kubernetes_head.up(deployment, accept="", tell=print)
        reads: list[str] = []

        def refusal(request: Any) -> KubeError | None:
            if not request.path.split("?")[0].endswith("/log"):
                return None
            reads.append(request.path)
            if len(reads) == 2:
                kube_server.finish(head.id, 0)
            return KubeError(403, "Forbidden", "pods/log is forbidden")

        kube_server.refusal = refusal
        assert kubernetes_head.follow(deployment, head, told.append, print) == 1
    assert ["read again until" in line for line in told] == [True, False]
    assert "pods/log: get" in told[0]


def test_a_head_that_is_taken_away_says_what_to_do(write: Write, kube_server: FakeKube):
    told: list[str] = []
    with opened(write()) as deployment:
        head = kubernetes_head.up(deployment, accept="", tell=print)
        deployment.pools[deployment.plan.file.aggregator.pool].terminate([head.id])
        assert kubernetes_head.follow(deployment, head, told.append, print) == 1
        assert "up again, which continues" in told[-1]
        del kube_server.jobs[head.id]
        with pytest.raises(ComputeError, match="not listed any more"):
            kubernetes_head.follow(deployment, head, told.append, print)


def test_a_head_is_followed_through_a_fault_of_its_service(
    write: Write, kube_server: FakeKube
):
    """It goes on meanwhile; what is wrong is told once."""
    told: list[str] = []
    with opened(write()) as deployment:
        head = kubernetes_head.up(deployment, accept="", tell=print)
        away = KubeError(503, "ServiceUnavailable", "It is upgraded.")
        requests: list[str] = []

        def refusal(request: Any) -> KubeError | None:
            requests.append(request.path)
            if len(requests) == 10:  # After two looks of four tries each.
                kube_server.logs[head.id] = "crossfed head: up ended with 0\n"
                kube_server.finish(head.id, 0)
            return away if len(requests) < 10 else None

        kube_server.refusal = refusal
        assert kubernetes_head.follow(deployment, head, told.append, print) == 0
    (once,) = told
    assert "It is upgraded.); looked" in once


def test_a_head_that_was_killed_has_no_success(write: Write, kube_server: FakeKube):
    """Although the last line of its log says so, which others may have sent."""
    with opened(write()) as deployment:
        head = kubernetes_head.up(deployment, accept="", tell=print)
        for code in (0, 256):
            kube_server.logs[head.id] = f"crossfed head: up ended with {code}\n"
            kube_server.finish(head.id, 137)
            assert kubernetes_head.follow(deployment, head, print, print) == 1


def test_only_new_lines_of_a_log_are_shown():
    a, b, c, d = "abcd"
    for before, after, expected in (
        ([], [a, b], [a, b]),
        ([a, b], [a, b, c], [c]),
        ([a, b], [a, b], []),
        # The first lines are cut off.
        ([a, b, c], [b, c, d], [d]),
        ([a, b, a], [a, b, a, b], [b]),
        # Another pod's.
        ([a, b], [c, d], [c, d]),
        ([a, b], [], []),
    ):
        assert [*kubernetes_head.new_lines(before, after)] == expected, (before, after)


def test_a_log_controls_no_terminal(capsys: pytest.CaptureFixture[str]):
    show("a\x1b[2J\tb")
    assert capsys.readouterr().err == "a [2J\tb\n"


def test_down_ends_the_head_first_and_keeps_the_volume(
    write: Write, kube_server: FakeKube
):
    """It would launch the sites again. The volume is listed with its price."""
    with opened(write()) as deployment:
        head = kubernetes_head.up(deployment, accept="", tell=print)
        site = site_job(deployment, kube_server)
        ends: list[str] = []
        kube_server.ends = ends.append
        assert take_down(deployment, any_owner=False, tell=print) == 2
        assert ends == [head.id, site]
        assert not kube_server.services
        found = [
            each
            for each in leftovers(deployment, None, NO_PRICES)
            if "cluster" in each.what
        ]
    (volume,) = found
    assert volume.place == f"test/{NAMESPACE} crossfed-fed"
    assert (volume.num_bytes, volume.dollars) == (50 << 30, 4.0)


@pytest.mark.slow
def test_sites_end_although_the_machine_of_their_head_is_lost(
    write: Write, kube_server: FakeKube
):
    """Nobody can say when its pod has ended, and sites cost meanwhile."""
    with opened(write()) as deployment:
        head = kubernetes_head.up(deployment, accept="", tell=print)
        site = site_job(deployment, kube_server)
        kube_server.ends = lambda name: setattr(
            kube_server, "slow_end", name == head.id
        )
        with pytest.raises(ComputeError, match="1 other nodes were ended") as caught:
            take_down(deployment, any_owner=False, tell=print)
        assert "not within 300 s: head" in str(caught.value)
        states = {node.id: node.state for node in kube_server.pool().nodes({})}
        assert states == {head.id: NodeState.STOPPING, site: NodeState.GONE}
        kube_server.let_go()
        assert take_down(deployment, any_owner=False, tell=print) == 0


def test_down_from_another_pod_ends_the_head(write: Write, kube_server: FakeKube):
    """That of a continuous build, say, which is no head but is in the cluster, too."""
    plan = write()
    inside = plan.path.read_text().replace('"test"', '"in-cluster"')
    plan.path.write_text(inside)
    with opened(fleet_spec.load(plan.path)) as deployment:
        assert not deployment.plan.is_head
        kubernetes_head.up(deployment, accept="", tell=print)
        assert take_down(deployment, any_owner=False, tell=print) == 1
        assert not kube_server.pods


def test_a_pod_does_not_use_the_way_in_from_outside(write: Write):
    """A tunnel to the API server, say; the pod has the server's address itself."""
    plan = write()
    document = job_file.read_toml(plan.path)
    document["sites"][0]["machine"]["endpoint"] = "https://127.0.0.1:16443"
    assert "16443" not in kubernetes_head.for_pod(document, plan.file)


def test_a_volume_that_cannot_be_looked_at_is_named(
    write: Write, kube_server: FakeKube
):
    """And hides nothing else that stays."""
    with opened(write()) as deployment:
        kube_server.refusal = lambda request: (
            KubeError(403, "Forbidden", "no") if "claims" in request.path else None
        )
        (volume,) = leftovers(deployment, None, NO_PRICES)
    assert (volume.num_bytes, volume.dollars) == (None, None)
    assert "persistentvolumeclaims: create, list" in volume.trouble


def test_a_site_that_a_head_launches_while_it_ends_is_ended_too(
    write: Write, kube_server: FakeKube
):
    with opened(write()) as deployment:
        kubernetes_head.up(deployment, accept="", tell=print)

        def launch(name: str) -> None:
            if "head" in name:
                site_job(deployment, kube_server)

        kube_server.ends = launch
        assert take_down(deployment, any_owner=False, tell=print) == 2
        assert not kube_server.pods


def test_a_head_ends_its_sites_and_not_itself(
    write: Write, kube_server: FakeKube, tmp_path: Path
):
    """Neither as a node that the file does not name."""
    with opened(write()) as deployment:
        head = kubernetes_head.up(deployment, accept="", tell=print)
        site = site_job(deployment, kube_server)
    (given := tmp_path / "bundle").write_text(
        json.dumps(launched(kube_server.created[0]))
    )
    kubernetes_head.write_files(given, tmp_path)
    with opened(fleet_spec.load(tmp_path / "fed.toml")) as inside:
        assert inside.owner == deployment.owner
        found = kube_server.pool().nodes({})
        assert not reconcile.unwanted(found, reconcile.roles(["here"], is_head=True))
        ended = reconcile.unwanted(found, reconcile.roles([]))
        assert {node.id for node in ended} == {head.id, site}
        assert take_down(inside, any_owner=False, tell=print) == 1
    states = {n.id: n.state for n in kube_server.pool().nodes({})}
    assert states == {head.id: NodeState.RUNNING, site: NodeState.GONE}


def test_a_second_aggregator_is_refused(write: Write, kube_server: FakeKube):
    """The one of this host has the authority that sites trust."""
    with opened(write()) as deployment:
        deployment.plan.aggregator.mkdir()
        with pytest.raises(JobError, match="its sites trust no"):
            kubernetes_head.up(deployment, accept="", tell=print)
    assert not kube_server.created


def test_a_head_that_the_file_no_longer_names_leaves_what_is_known(
    write: Write, kube_server: FakeKube
):
    """Until the deployment is taken down."""
    with opened(write()) as deployment:
        kubernetes_head.up(deployment, accept="", tell=print)
    local = write(
        provider='"local"',
        image="",
        cluster="",
        endpoint="",
        disk_dollars_per_month="",
        address='"fed.example.org:8443"',
    )
    with opened(local) as deployment:
        assert take_down(deployment, any_owner=False, tell=print) == 1
        (volume,) = (
            each
            for each in leftovers(deployment, None, NO_PRICES)
            if "cluster" in each.what
        )
    assert volume.place.endswith("crossfed-fed")
    assert not kube_server.services
    with opened(local) as deployment:
        (pool,) = (v for k, v in deployment.pools.items() if k != "local")
        assert not pool.volumes({})


def test_mistakes_in_the_table_of_a_head_are_named(write: Write):
    other = f'{{ context = "other", namespace = "{NAMESPACE}" }}'
    gpus = f'{{ context = "test", namespace = "{NAMESPACE}", gpus = 1 }}'
    for changed, key, reason in (
        ({"image": ""}, "aggregator.image", "is missing"),
        ({"image": '"a:1"'}, "aggregator.image", "names no digest"),
        ({"cluster": ""}, "aggregator.cluster.context", "is missing"),
        ({"cluster": gpus}, "aggregator.cluster.gpus", "uses no GPU"),
        ({"cluster": other}, "sites[0].provider", "its own namespace"),
        ({"identity": '"A b"'}, "aggregator.identity", "no service account"),
        ({"listen": '"0.0.0.0:1"'}, "aggregator.listen", "listen there"),
        ({"provider": ""}, "aggregator.cluster", "is for provider 'kubernetes'"),
        ({"provider": '"aws"'}, "aggregator.provider", "on this host or"),
        ({"provider": '"x"'}, "aggregator.provider", "name 'local' or 'kubernetes'"),
    ):
        with pytest.raises(JobError, match=reason) as caught:
            write(**changed)
        assert f"{key}: " in str(caught.value), changed
    local = {"provider": "", "image": "", "cluster": "", "disk_dollars_per_month": ""}
    with pytest.raises(JobError, match="is for provider 'kubernetes'") as caught:
        write(**local)
    assert "aggregator.endpoint: " in str(caught.value)
    plan = write(listen='"0.0.0.0:1"', address='"fed.example.org:1"')
    assert kubernetes_head._head(plan).host == ""
    path = plan.path
    path.write_text(f'prices = "mine.toml"\n{path.read_text()}')
    with pytest.raises(JobError, match="read in a cluster"):
        fleet_spec.load(path)

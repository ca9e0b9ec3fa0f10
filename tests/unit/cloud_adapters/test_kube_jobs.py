"""Jobs of a cluster: what is asked for, where, and what the answers mean."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import urllib3
from kubernetes.client import ApiException
from kubernetes.config import ConfigException
from support.fake_kube import (
    IMAGE,
    NAMESPACE,
    TYPES,
    ZONES,
    FakeKube,
    KubeError,
    Resource,
)

from cloud_adapters.compute import kube_errors, kube_jobs, kube_manifest, kube_nodes
from cloud_adapters.compute.pool import Market, NodeLimits, NodeSpec, NodeState
from federation.clock import SystemClock, VirtualClock
from federation.errors import (
    ComputeError,
    ComputeForbidden,
    ComputeUnauthenticated,
    ComputeUnavailable,
    ComputeUnreachable,
    MachineRefused,
    NoCapacity,
    QuotaReached,
)

LABELS = {"crossfed-deployment": "x", "crossfed-role": "site-a"}
QUOTA = 'pods "x" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=1'


def spec(**changed: Any) -> NodeSpec:
    given = {
        "name": "site-a",
        "labels": LABELS,
        "max_seconds": 600.0,
        "image": IMAGE,
        "command": ["/bin/sh", "-c", "echo $HOME $(HOME) $$"],
        "limits": NodeLimits(cpus=2, memory_gb=4.0),
    }
    return NodeSpec(**{**given, **changed})


def launched(server: FakeKube, **changed: Any) -> Resource:
    """The job that a node comes to."""
    server.pool().launch(spec(**changed), str(len(server.created)))
    return server.created[-1]


def pod(job: Resource) -> Resource:
    found: Resource = job["spec"]["template"]["spec"]
    return found


def terms(job: Resource) -> list[dict[str, tuple[str, tuple[str, ...]]]]:
    """Alternatives of nodes that a job may run on: by label, operator and values."""
    affinity = pod(job)["affinity"]["nodeAffinity"]
    required = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    return [
        {e["key"]: (e["operator"], (*e["values"],)) for e in term["matchExpressions"]}
        for term in required["nodeSelectorTerms"]
    ]


def test_jobs_are_closed_and_end_for_good(kube_server: FakeKube):
    """The cluster ends them, and removes them a day later, whoever is left to ask."""
    job = launched(kube_server, identity="site-a", disk_gb=70, user_data="name = 1\n")
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["activeDeadlineSeconds"] == 600
    assert job["spec"]["ttlSecondsAfterFinished"] == 24 * 3600
    found = pod(job)
    assert found["activeDeadlineSeconds"] == 600
    assert found["restartPolicy"] == "Never"
    assert found["serviceAccountName"] == "site-a"
    assert found["automountServiceAccountToken"] is False
    assert found["securityContext"]["runAsNonRoot"] is True
    (container,) = found["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert container["resources"]["limits"] == {
        "cpu": "2",
        "memory": "4096Mi",
        "ephemeral-storage": "71Gi",
    }
    assert found["volumes"][0] == {"name": "state", "emptyDir": {"sizeLimit": "70Gi"}}
    text = job["spec"]["template"]["metadata"]["annotations"]["crossfed/user-data"]
    assert text == "name = 1\n"
    for labels in (job["metadata"]["labels"], found_labels(job)):
        assert labels.items() >= LABELS.items()


def found_labels(job: Resource) -> dict[str, str]:
    labels: dict[str, str] = job["spec"]["template"]["metadata"]["labels"]
    return labels


def test_commands_arrive_as_they_were_written(kube_server: FakeKube):
    """Kubernetes would put variables into them."""
    (container,) = pod(launched(kube_server))["containers"]
    assert container["command"][2] == "echo $$HOME $$(HOME) $$$$"


def test_gpus_are_asked_for_by_their_resource(kube_server: FakeKube):
    """And machines that have them keep other pods away."""
    limits = NodeLimits(cpus=8, memory_gb=64.0, gpus=2)
    found = pod(launched(kube_server, limits=limits))
    (container,) = found["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert [each["key"] for each in found["tolerations"]] == ["nvidia.com/gpu"]
    assert pod(launched(kube_server))["tolerations"] == []


def test_spot_machines_are_chosen_by_any_clouds_label(kube_server: FakeKube):
    """And others are never taken back, whatever the cluster has."""
    job = launched(kube_server, market=Market.SPOT, zones=ZONES, machine=TYPES[0])
    assert len(terms(job)) == 4
    for term in terms(job):
        assert term["topology.kubernetes.io/zone"] == ("In", ZONES)
        assert term["node.kubernetes.io/instance-type"] == ("In", (TYPES[0],))
    assert {"cloud.google.com/gke-spot", "karpenter.sh/capacity-type"} <= {
        each["key"] for each in pod(job)["tolerations"]
    }
    (term,) = terms(launched(kube_server))
    assert term["eks.amazonaws.com/capacityType"] == ("NotIn", ("SPOT",))
    assert {operator for operator, _ in term.values()} == {"NotIn"}


@pytest.mark.parametrize("zones", [(), ZONES[:1], ZONES])
def test_the_zone_is_known_if_the_cluster_says_it_or_there_is_one(
    kube_server: FakeKube, zones: tuple[str, ...]
):
    kube_server.zone = None
    node = kube_server.pool().launch(spec(zones=zones), "one")
    assert node.zone == (zones[0] if len(zones) == 1 else "")


def test_labels_of_any_form_are_found(kube_server: FakeKube):
    """Whole, although Kubernetes takes few characters."""
    pool = kube_server.pool()
    names = ["Site.of_many-words", "s" * 70, "-é", "a b"]
    for number, name in enumerate(names):
        pool.launch(spec(name=name, labels={"crossfed-role": name}), str(number))
    for name in names:
        (found,) = pool.nodes({"crossfed-role": name})
        assert found.name == name
        assert found.labels["crossfed-role"] == name


def test_jobs_of_others_are_left_alone(kube_server: FakeKube):
    """Whatever their labels say otherwise."""
    pool = kube_server.pool()
    node = pool.launch(spec(), "one")
    del kube_server.jobs[node.id]["metadata"]["labels"][kube_manifest.TOKEN_LABEL]
    assert pool.nodes({}) == []
    pool.terminate([node.id])
    assert kube_server.jobs[node.id]["spec"]["activeDeadlineSeconds"] == 600


@pytest.mark.parametrize(
    ("fate", "error", "match"),
    [
        ("unschedulable", NoCapacity, "Insufficient nvidia.com/gpu"),
        ("ImagePullBackOff manifest unknown", MachineRefused, "correct release.image"),
        ("InvalidImageName x", MachineRefused, "InvalidImageName"),
        ("CreateContainerConfigError no user", MachineRefused, "no user"),
        (f"refused Error: {QUOTA}", QuotaReached, "larger ResourceQuota"),
        ("refused pods is forbidden: no account", MachineRefused, "does not admit"),
        ("exit 3", ComputeError, "its program ended with 3"),
        ("exit 0", ComputeError, "right after its start"),
    ],
)
def test_a_refused_launch_leaves_nothing_that_may_begin_later(
    kube_server: FakeKube, fate: str, error: type[ComputeError], match: str
):
    """Nor does anybody wait for what the cluster has refused for good."""
    kube_server.fate = lambda _: fate
    clock = VirtualClock(time.time())
    pool = kube_server.pool(clock=clock)
    begin = clock.monotonic()
    with pytest.raises(error, match=match) as caught:
        pool.launch(spec(), "one")
    assert type(caught.value) is error
    assert f"launch site-a in test/{NAMESPACE}" in str(caught.value)
    waits = pool.schedule_seconds if error is NoCapacity else 0
    assert waits <= clock.monotonic() - begin <= waits + 5
    (node,) = pool.nodes({})
    assert node.state is NodeState.GONE
    assert kube_server.pods.keys() <= ({node.id} if "exit" in fate else set())
    assert pool.launch(spec(), "one").state is NodeState.GONE


def test_a_cluster_may_take_its_time_to_add_a_machine(kube_server: FakeKube):
    """Then the node is launched as if it had been there."""
    kube_server.fate = lambda _: "unschedulable"

    class Autoscaler(VirtualClock):
        """Adds a machine after two minutes."""

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now() > 120:
                (pod,) = kube_server.pods.values()
                pod["status"] = kube_server._status(pod, "running", "")

    node = kube_server.pool(clock=Autoscaler()).launch(spec(), "one")
    assert node.state is NodeState.RUNNING
    assert node.trouble == ""


def test_troubles_are_shown(kube_server: FakeKube):
    """What keeps a node from working, for as long as it does."""
    pool = kube_server.pool()
    node = pool.launch(spec(), "one")
    (found,) = kube_server.pods.values()
    for kind, words, trouble in (
        ("unschedulable", "no node", "no node"),
        ("ErrImagePull", "timeout", "ErrImagePull: timeout"),
        ("exit", "137", "its program ended with 137 (Error)"),
        ("running", "", ""),
    ):
        found["spec"].pop("nodeName", None)
        found["status"] = kube_server._status(found, kind, words)
        assert pool.nodes({})[0].trouble == trouble
    kube_server.jobs[node.id]["spec"]["suspend"] = True
    assert "suspended" in pool.nodes({})[0].trouble


@pytest.mark.parametrize(
    ("code", "reason", "status", "failed"),
    [
        (3, "Error", {}, True),
        (137, "OOMKilled", {}, True),
        (137, "Error", {}, False),
        (143, "Error", {}, False),
        (1, "Error", {"reason": "Evicted"}, False),
        (
            1,
            "Error",
            {"conditions": [{"type": "DisruptionTarget", "status": "True"}]},
            False,
        ),
    ],
)
def test_a_program_that_fails_is_told_from_a_pod_that_is_taken_back(
    kube_server: FakeKube,
    *,
    code: int,
    reason: str,
    status: dict[str, Any],
    failed: bool,
):
    """The next pod would fail, too, and only then are they limited."""
    pool = kube_server.pool()
    node = pool.launch(spec(), "one")
    assert not pool.nodes({})[0].failed
    (found,) = kube_server.pods.values()
    found["status"] = kube_server._status(found, "exit", str(code)) | status
    (container,) = found["status"]["containerStatuses"]
    container["state"]["terminated"]["reason"] = reason
    assert pool.nodes({})[0].failed is failed
    pool.terminate([node.id])
    assert not pool.nodes({})[0].failed


@pytest.mark.parametrize(
    ("condition", "told", "finished"),
    [(None, False, True), ("DisruptionTarget", False, False), (None, True, False)],
)
def test_a_program_that_ends_with_0_by_itself_is_told_from_one_that_is_drained(
    kube_server: FakeKube, *, condition: str | None, told: bool, finished: bool
):
    """All of them end with 0, also one that was told to end."""
    pool = kube_server.pool()
    node = pool.launch(spec(), "one")
    assert not pool.nodes({})[0].finished
    (found,) = kube_server.pods.values()
    if condition:
        found["status"]["conditions"] = [{"type": condition, "status": "True"}]
    if told:
        pool.terminate([node.id])
    complete = {
        "type": "Complete",
        "status": "True",
        "lastTransitionTime": "2026-11-26T00:00:00Z",
    }
    kube_server.jobs[node.id]["status"] = {"conditions": [complete]}
    assert pool.nodes({})[0].finished is finished


def test_a_node_whose_time_is_over_says_so(kube_server: FakeKube):
    """One that was asked to end has no trouble."""
    pool = kube_server.pool()
    first, second = pool.launch(spec(), "one"), pool.launch(spec(), "two")
    kube_server._fail(kube_server.jobs[first.id], "DeadlineExceeded", "too long")
    pool.terminate([second.id])
    troubles = {node.id: node.trouble for node in pool.nodes({})}
    assert troubles == {first.id: "its time was over", second.id: ""}
    assert all(node.ended is not None for node in pool.nodes({}))


def test_a_node_is_gone_when_its_pod_is(kube_server: FakeKube):
    """It may need its grace period; nobody waits for it by mistake."""
    kube_server.slow_end = True
    pool = kube_server.pool()
    node = pool.launch(spec(), "one")
    pool.terminate([node.id])
    assert pool.nodes({})[0].state is NodeState.STOPPING
    kube_server.let_go()
    assert pool.nodes({})[0].state is NodeState.GONE


def test_the_log_is_that_of_the_program(kube_server: FakeKube):
    """Its end; nothing before the program begins or after the pod is removed."""
    pool = kube_server.pool()
    node = pool.launch(spec(), "one")
    kube_server.logs[node.id] = "".join(f"line {n:>60}\n" for n in range(3000))
    text = pool.log(node.id)
    assert len(text) == (64 << 10) // 66 * 66  # Whole lines.
    assert text.startswith("line ")
    assert text.endswith(f"line {2999:>60}\n")
    (found,) = kube_server.pods.values()
    found["status"]["phase"] = "Pending"
    assert pool.log(node.id) == ""
    pool.terminate([node.id])
    assert pool.log(node.id) == ""


def test_a_log_is_cut_between_lines():
    """A line that began before is not its rest; one too long by itself has an end."""
    whole = "x" * ((64 << 10) - 1) + "\n"
    for text, expected in (
        (whole, whole),
        (f"before\n{whole}", whole),
        (f"before{whole}a\nb\n", "a\nb\n"),
        ("y" * (65 << 10), "y" * (64 << 10)),
    ):
        assert kube_nodes.end_of_log(text) == expected


@pytest.mark.parametrize(
    "given",
    [
        '{"labels": 5}',
        '{"labels": {"crossfed-number": 5}}',
        '{"zones": 5}',
        '{"zones": [{}]}',
        "[" * 100_000,
        "[]",
        "{",
    ],
)
def test_a_job_that_others_have_written_hides_no_node(
    kube_server: FakeKube, given: str
):
    pool = kube_server.pool()
    nodes = [pool.launch(spec(), token).id for token in ("one", "two")]
    kube_server.jobs[nodes[0]]["metadata"]["annotations"]["crossfed/given"] = given
    found = {node.id: node.name for node in pool.nodes({})}
    assert found == {nodes[0]: nodes[0], nodes[1]: spec().name}


@pytest.mark.parametrize(
    ("status", "words", "error", "advice"),
    [
        (400, "bad", MachineRefused, "correct what it names"),
        (401, "Unauthorized", ComputeUnauthenticated, "sign in again"),
        (403, "exceeded quota: jobs", QuotaReached, "ResourceQuota"),
        (403, 'User "x" cannot create', ComputeForbidden, "jobs.batch: create"),
        (404, 'namespaces "x" not found', MachineRefused, "no such namespace"),
        (422, "Invalid value", MachineRefused, "correct what it names"),
        (429, "too many", ComputeUnavailable, "fewer requests"),
        (500, "etcd", ComputeUnavailable, "fault of its own"),
    ],
)
def test_answers_say_what_to_do(
    kube_server: FakeKube,
    status: int,
    words: str,
    error: type[ComputeError],
    advice: str,
):
    """Each is one class, with the server's words and without its headers."""
    kube_server.refusal = lambda _: KubeError(status, "x", words)
    pool = kube_server.pool(clock=VirtualClock())
    with pytest.raises(error, match=advice) as caught:
        pool.launch(spec(), "one")
    assert type(caught.value) is error
    assert f"{status} {words}" in str(caught.value)
    assert "header" not in str(caught.value).lower()


def test_what_fails_for_a_moment_is_tried_again(kube_server: FakeKube):
    """Not what would fail for ever."""
    pool = kube_server.pool(clock=VirtualClock())
    faults = [KubeError(429, "x", "x"), KubeError(503, "x", "x")]
    kube_server.refusal = lambda _: faults.pop() if faults else None
    assert pool.launch(spec(), "one").state is NodeState.RUNNING
    asked = len(kube_server.requests)
    kube_server.refusal = lambda _: KubeError(403, "x", "x")
    with pytest.raises(ComputeForbidden):
        pool.nodes({})
    assert len(kube_server.requests) == asked + 1


def test_who_may_not_read_events_waits(kube_server: FakeKube):
    """And learns in the end that there is no machine."""
    kube_server.fate = lambda _: f"refused {QUOTA}"
    forbidden = KubeError(403, "Forbidden", "events is forbidden")
    kube_server.refusal = lambda r: forbidden if r.path.endswith("events") else None
    pool = kube_server.pool(clock=VirtualClock())
    with pytest.raises(NoCapacity, match="scheduler says nothing"):
        pool.launch(spec(), "one")


def test_failures_on_the_way_say_what_to_do():
    """Whatever the library raises is one of ours, with no secrets in it."""
    cases = {
        ConfigException("no context"): ComputeUnauthenticated,
        urllib3.exceptions.ProtocolError("secret"): ComputeUnreachable,
        OSError("secret"): ComputeUnreachable,
        ValueError("secret"): ComputeUnavailable,
        ApiException(status=0, reason="?"): MachineRefused,
    }
    for failure, error in cases.items():
        found = kube_errors.translate(failure, "launch x")
        assert type(found) is error
        assert "secret" not in str(found)


def test_a_cluster_that_is_away_is_one_error():
    pool = kube_jobs.connect(
        "c", "n", clock=VirtualClock(), endpoint="http://127.0.0.1:9"
    )
    with pytest.raises(ComputeUnreachable, match="cannot be reached"):
        pool.nodes({})


def test_credentials_are_those_of_the_context(
    kube_server: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Read when they are needed; one that is not there is named."""
    file = tmp_path / "config"
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file)
    )
    pool = kube_jobs.connect("here", NAMESPACE, clock=SystemClock())
    with pytest.raises(ComputeUnauthenticated, match="correct context"):
        pool.nodes({})
    cluster = {"name": "c", "cluster": {"server": kube_server.url}}
    user = {"name": "u", "user": {"token": "token-of-a-person"}}
    context = {"name": "here", "context": {"cluster": "c", "user": "u"}}
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "users": [user],
                "contexts": [context],
            }
        )
    )
    assert kube_jobs.connect("here", NAMESPACE, clock=SystemClock()).nodes({}) == []
    sent = kube_server.requests[-1].headers["authorization"]
    assert sent == "Bearer token-of-a-person"
    # To an endpoint without TLS goes none.
    assert kube_server.pool().nodes({}) == []
    assert "authorization" not in kube_server.requests[-1].headers

"""The head of a deployment in a cluster: its job, its volume and its Service."""

from typing import Any

import pytest
from support.fake_kube import IMAGE, NAMESPACE, FakeKube

from cloud_adapters.compute import kube_jobs, kube_manifest
from cloud_adapters.compute.pool import ClusterHead, NodeLimits, NodeSpec, NodeState
from federation.clock import VirtualClock
from federation.errors import ComputeUnauthenticated, MachineRefused, NoCapacity

LABELS = {"crossfed-deployment": "fed", "crossfed-role": "head"}
HEAD = ClusterHead(
    service="crossfed-fed",
    host=f"crossfed-fed.{NAMESPACE}.svc",
    port=8443,
    volume="crossfed-fed",
    volume_gb=50,
)


def spec(**changed: Any) -> NodeSpec:
    given = {
        "name": "head",
        "labels": LABELS,
        "max_seconds": 600.0,
        "image": IMAGE,
        "command": ["/bin/sh", "-c", "echo"],
        "identity": "crossfed-head",
        "limits": NodeLimits(cpus=2, memory_gb=4.0),
        "head": HEAD,
    }
    return NodeSpec(**{**given, **changed})


def test_a_head_has_its_volume_and_the_rights_of_its_account(kube_server: FakeKube):
    """A node that is no head has neither."""
    pool = kube_server.pool(has_head=True)
    node = pool.launch(spec(), "1")
    (job,) = kube_server.created
    template = job["spec"]["template"]
    pod = template["spec"]
    assert pod["automountServiceAccountToken"] is True
    assert pod["serviceAccountName"] == "crossfed-head"
    states = [each for each in pod["volumes"] if each["name"] == "state"]
    assert states == [
        {"name": "state", "persistentVolumeClaim": {"claimName": "crossfed-fed"}}
    ]
    # It reaches itself without its Service.
    assert pod["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": [HEAD.host]}]
    # A pod that is taken away is replaced; one whose program fails is not.
    ignored, failed = job["spec"]["podFailurePolicy"]["rules"]
    assert (ignored["action"], failed["action"]) == ("Ignore", "FailJob")
    assert job["spec"]["backoffLimit"] == 0
    service, claim = kube_server.services["crossfed-fed"], kube_server.claims
    assert service["spec"]["type"] == "ClusterIP"
    selector = service["spec"]["selector"]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert claim["crossfed-fed"]["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert node.state is NodeState.RUNNING
    assert pool.launch(spec(), "1").id == node.id
    pool.launch(spec(name="site-a", head=None), "2")
    site = kube_server.created[-1]["spec"]
    assert "podFailurePolicy" not in site
    assert site["template"]["spec"]["automountServiceAccountToken"] is False
    assert len(kube_server.services) == len(kube_server.claims) == 1


def test_a_head_follows_another_on_its_volume_and_never_beside_it(
    kube_server: FakeKube,
):
    pool = kube_server.pool(has_head=True, clock=VirtualClock())
    first = pool.launch(spec(), "1")
    with pytest.raises(NoCapacity, match="used by another pod"):
        pool.launch(spec(), "2")
    pool.terminate([first.id])
    assert pool.launch(spec(), "3").state is NodeState.RUNNING
    assert len(kube_server.claims) == 1


def test_a_service_goes_with_its_head_and_the_volume_stays(kube_server: FakeKube):
    """And is listed with its size."""
    pool = kube_server.pool(has_head=True)
    node = pool.launch(spec(), "1")
    pool.clean_up()
    assert kube_server.services
    pool.terminate([node.id])
    # Whoever has no head there needs no rights to look.
    kube_server.pool().clean_up()
    assert kube_server.services
    pool.clean_up()
    assert not kube_server.services
    pool.clean_up()
    (volume,) = pool.volumes({"crossfed-deployment": "fed"})
    assert (volume.name, volume.gigabytes) == (f"test/{NAMESPACE} crossfed-fed", 50.0)
    assert not pool.volumes({"crossfed-deployment": "other"})
    assert not kube_server.pool().volumes({"crossfed-deployment": "fed"})
    assert kube_manifest.label("fed") == "fed"
    # Made again, with the next head.
    pool.launch(spec(), "2")
    assert [*kube_server.services] == ["crossfed-fed"]


def test_a_service_without_a_job_is_left_to_who_launches(kube_server: FakeKube):
    pool = kube_server.pool(has_head=True)
    pool._make_head(spec(), "launch")
    pool.clean_up()
    assert [*kube_server.services] == ["crossfed-fed"]


def test_a_service_that_others_have_made_since_is_left(kube_server: FakeKube):
    """The head that had one of that name is still listed."""
    pool = kube_server.pool(has_head=True)
    node = pool.launch(spec(), "1")
    pool.terminate([node.id])
    del kube_server.services["crossfed-fed"]["metadata"]["labels"]["crossfed-service"]
    pool.clean_up()
    assert [*kube_server.services] == ["crossfed-fed"]


def test_what_others_have_made_is_not_taken_for_that_of_a_head(kube_server: FakeKube):
    """Sites would be sent elsewhere, or keys be put on a volume of others."""
    pool = kube_server.pool(has_head=True)
    pool.launch(spec(), "1")
    for kept, kind in (
        (kube_server.services, "Service"),
        (kube_server.claims, "PersistentVolumeClaim"),
    ):
        labels = kept["crossfed-fed"]["metadata"]["labels"]
        own = labels.pop("crossfed-service")
        with pytest.raises(MachineRefused, match=f"another {kind} crossfed-fed"):
            pool.launch(spec(), "2")
        labels["crossfed-service"] = own
    assert len(kube_server.created) == 1


def test_a_head_whose_name_is_taken_leaves_no_volume(kube_server: FakeKube):
    """It would stay, and cost."""
    pool = kube_server.pool(has_head=True)
    pool._make_head(spec(), "launch")
    kube_server.claims.clear()
    del kube_server.services["crossfed-fed"]["metadata"]["labels"]["crossfed-service"]
    with pytest.raises(MachineRefused, match="another Service crossfed-fed"):
        pool.launch(spec(), "1")
    assert not kube_server.claims


def test_a_volume_of_unknown_size_is_listed(kube_server: FakeKube):
    pool = kube_server.pool(has_head=True)
    pool.launch(spec(), "1")
    requests = kube_server.claims["crossfed-fed"]["spec"]["resources"]["requests"]
    requests["storage"] = "much"
    (volume,) = pool.volumes({})
    assert volume.gigabytes is None


def test_a_program_outside_of_a_cluster_has_no_account_of_one():
    pool = kube_jobs.connect("in-cluster", NAMESPACE, clock=VirtualClock())
    with pytest.raises(ComputeUnauthenticated, match="in-cluster"):
        pool.nodes({})

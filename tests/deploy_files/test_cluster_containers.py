"""Sites of a cluster as containers of their image: a run, and their end.

The API server is that of ``support.fake_kube``; what it is asked for runs as it would
in a pod: another user, a read-only root, and a shell as the first process.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.test_cluster_sites import Cluster
from support.deployment import crossfed_here as crossfed
from support.fake_kube import FakeKube
from support.pod_container import PodContainer
from support.programs import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("containers"),
    needs("root", "podman", "images", "nginx"),
]


@pytest.fixture
def cluster(kube_server: FakeKube, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, kube_server, PodContainer)
    try:
        yield made
    finally:
        made.close()


def test_sites_in_containers_train_and_go(cluster: Cluster):
    """A leave notice reaches the program through the shell that waits for it."""
    cluster.write(home=False)
    up = cluster.up("--json")
    pods = cluster.boot(2)
    out, err = up.communicate(300)
    assert up.returncode == 0, err + "".join(pod.log for pod in pods)
    assert json.loads(out)["rounds_completed"] == 1
    crossfed("down", str(cluster.path))
    assert cluster.nodes() == []
    for pod in pods:
        assert pod.process.wait(30) == 0, pod.log

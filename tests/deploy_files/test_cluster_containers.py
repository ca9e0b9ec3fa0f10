"""A cluster's head and sites as containers of the images: a run, and a head's end.

The API server is that of ``support.fake_kube``; what it is asked for runs as it would
in a pod: another user, a read-only root, and a shell as the first process.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.test_cluster_head import (
    Kubelet,
    check_a_run_with_a_lost_head,
    file as file,  # noqa: PLC0414 -- a fixture
)
from support.fake_kube import FakeKube
from support.pod_container import PodContainer
from support.programs import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("containers"),
    needs("root", "podman", "images"),
]


@pytest.fixture
def kubelet(kube_server: FakeKube, tmp_path: Path) -> Iterator[Kubelet]:
    made = Kubelet(tmp_path, kube_server, PodContainer)
    try:
        yield made
    finally:
        made.close()


def test_a_cluster_trains_in_containers(kubelet: Kubelet, file: Path):
    """Though its head has to end while sites enrol."""
    check_a_run_with_a_lost_head(kubelet, file)

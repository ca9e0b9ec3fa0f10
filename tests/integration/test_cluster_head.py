"""``crossfed up`` with an aggregator in a cluster, from one command to a model.

The cluster is an API server on loopback. The test boots each pod: it takes the manifest
back and runs the pod's own command on this host.
"""

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.deployment import crossfed_here as crossfed, free_port, wait_for
from support.fake_kube import IMAGE, NAMESPACE, FakeKube
from support.forked import Forked, shared
from support.pod_process import PodProcess
from support.programs import needs

from cloud_adapters.compute.kube_manifest import GRACE_SECONDS

JOBS = Path(__file__).parents[2] / "jobs"
SITES = ("aws-us-east-1", "gcp-us-central1")

pytestmark = [
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.xdist_group("fleet"),
    pytest.mark.timeout(600),
    needs("nginx"),
]


class Pod(Protocol):
    """A pod of the fake cluster that runs on this host."""

    name: str
    process: subprocess.Popen[bytes]

    def __init__(
        self, folder: Path, job: Mapping[str, Any], volume: Path | None = None
    ) -> None: ...

    @property
    def log(self) -> str: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


class Kubelet:
    """Boots the pods of a cluster as soon as there are jobs, and sees them end."""

    def __init__(
        self, folder: Path, kube: FakeKube, boot: type[Pod] = PodProcess
    ) -> None:
        self.folder, self.kube, self.boot = folder, kube, boot
        self.pods: dict[str, Pod] = {}
        kube.log_of = lambda name: self.pods[name].log if name in self.pods else ""
        kube.ends = lambda name: self.pods[name].end() if name in self.pods else None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(0.1):
            for name, job in [*self.kube.jobs.items()]:
                if name in self.kube.pods and name not in self.pods:
                    volume = self.folder / "volume" if "head" in name else None
                    place = self.folder / f"pod-{len(self.pods)}"
                    self.pods[name] = self.boot(place, job, volume)
            for name, pod in self.pods.items():
                code = pod.process.poll()
                if code is not None and self.runs(name):
                    self.kube.finish(name, code)

    def runs(self, name: str) -> bool:
        """Whether the cluster has the pod of a job that runs."""
        status = self.kube.pods.get(name, {}).get("status", {})
        return bool(status.get("phase") == "Running")

    def close(self) -> None:
        self._closed.set()
        self._thread.join(30)
        for pod in self.pods.values():
            pod.close()


@pytest.fixture
def kubelet(kube_server: FakeKube, tmp_path: Path) -> Iterator[Kubelet]:
    made = Kubelet(tmp_path, kube_server)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def file(kube_server: FakeKube, tmp_path: Path) -> Path:
    """The deployment file of a job of one round."""
    text = (JOBS / "quickstart.toml").read_text()
    head, _, tail = text.partition("[privacy.secure_aggregation]")
    head = head.replace("rounds = 30", "rounds = 1")
    (tmp_path / "job.toml").write_text(head + tail[tail.index("[[sites]]") :])
    cluster = f'{{ context = "test", namespace = "{NAMESPACE}" }}'
    tables = [
        f"""
[[sites]]
name = "{site}"
provider = "kubernetes"
dollars_per_hour = 0
[sites.machine]
endpoint = "{kube_server.url}"
cluster = {cluster}
[sites.policy]
privacy = "none"
secure_aggregation = false
"""
        for site in SITES
    ]
    # Names of Services lead nowhere on this host.
    address = f"127.0.0.1:{free_port()}"
    path = tmp_path / "fed.toml"
    path.write_text(f"""
name = "fed"
job = "job.toml"
[aggregator]
provider = "kubernetes"
image = "{IMAGE}"
address = "{address}"
listen = "{address}"
endpoint = "{kube_server.url}"
cluster = {cluster}
[release]
image = "{IMAGE}"
{"".join(tables)}""")
    return path


def nodes(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        crossfed("nodes", str(file), "--json").stdout
    )
    return [each for each in found if each["state"] != "gone"]


def lose(kubelet: Kubelet) -> None:
    """Have the cluster end the head's pod, which leaves nothing that runs in it."""
    (head,) = (pod for name, pod in kubelet.pods.items() if "head" in name)
    head.end()
    # Kubernetes would kill what still runs then.
    assert head.process.wait(GRACE_SECONDS) == 143, head.log
    assert "aggregator has stopped" in head.log
    (node,) = (kubelet.folder / "volume").glob("fed/deployment/nodes/aggregator-*")
    assert (node / "ended.json").exists()
    wait_for(lambda: not kubelet.runs(head.name), "the cluster sees that it ended", 60)


def test_a_cluster_trains_and_ends_by_itself(kubelet: Kubelet, file: Path):
    """Though its head is lost while sites enrol; what stays is the volume."""
    check_a_run_with_a_lost_head(kubelet, file)


def check_a_run_with_a_lost_head(kubelet: Kubelet, file: Path) -> None:
    """See that a run completes although the cluster ends its first head."""
    out, err = (file.parent / f"up.{each}" for each in ("out", "err"))

    def up(*words: str) -> Forked:
        return shared().start(
            "up", str(file), *words, out=out, err=err, environment=os.environ
        )

    first = up("--detach")
    first.communicate(100)
    assert first.returncode == 0, err.read_text()
    wait_for(lambda: len(kubelet.kube.jobs) == 3, "the head has launched sites", 300)
    roles = {each["node"] for each in nodes(file)}
    assert roles == {"head", *(f"site-{site}" for site in SITES)}
    lose(kubelet)
    second = up("--json")
    second.communicate(300)
    told = err.read_text()
    logs = "".join(pod.log for pod in kubelet.pods.values())
    assert second.returncode == 0, told + logs
    # The first command has written the name of the head alone.
    head, _, summary = out.read_text().partition("\n")
    found = json.loads(summary)
    assert found["exit_code"] == 0
    # The next head, since the first was lost.
    assert found["node"] in kubelet.pods.keys() - {head}
    assert "roster 3 of 2 sites is signed" in told
    assert "run completed" in logs
    assert nodes(file) == []
    # Of the sites none was launched again.
    assert len(kubelet.kube.created) == 4
    (runs,) = (file.parent / "volume").glob("fed/deployment/aggregator/runs/*/*")
    assert (runs / "events.jsonl").exists()
    down = json.loads(crossfed("down", str(file), "--json").stdout)
    (volume,) = (each for each in down["left"] if "in a cluster" in each["what"])
    assert volume["place"] == f"test/{NAMESPACE} crossfed-fed"
    assert not kubelet.kube.services

"""``crossfed up`` with sites in a cluster, whose pods enrol by the keys in their logs.

The cluster is an API server on loopback. A test boots each pod: it takes the manifest
back and runs the pod's own command on this host.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.deployment import crossfed_here as crossfed, wait_for
from support.fake_kube import IMAGE, NAMESPACE, FakeKube, KubeError
from support.forked import Forked, shared
from support.pod_process import PodProcess
from support.programs import needs

from cloud_adapters.identity import platforms
from cloud_adapters.net.ports import free_port
from deploy.exit_codes import BAD_JOB, FAILED
from privacy.secagg.agreement import roster

JOBS = Path(__file__).parents[2] / "jobs"
SITES = ("aws-us-east-1", "gcp-us-central1")
POLICY = 'privacy = "none"\nsecure_aggregation = false\n'

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Cluster:
    """A deployment whose sites are pods."""

    def __init__(
        self,
        folder: Path,
        kube: FakeKube,
        start: Callable[[Path, Mapping[str, Any]], Any] = PodProcess,
    ) -> None:
        self.folder, self.kube, self.start = folder, kube, start
        self.path = folder / "fed.toml"
        self.pods: dict[str, Any] = {}
        self.ups: list[Forked] = []
        kube.log_of = lambda name: self.pods[name].log if name in self.pods else ""
        kube.ends = self.end

    def write(self, *, release: str = f'image = "{IMAGE}"', home: bool = True) -> None:
        text = (JOBS / "quickstart.toml").read_text()
        head, _, tail = text.partition("[privacy.secure_aggregation]")
        head = head.replace("rounds = 30", "rounds = 1")
        (self.folder / "job.toml").write_text(head + tail[tail.index("[[sites]]") :])
        kept = f'[sites.home]\nurl = "file://{self.folder}/home"\nlease_seconds = 2'
        first = ("spot", kept if home else "")
        about = dict(zip(SITES, (first, ("on-demand", "")), strict=True))
        tables = [
            f"""
[[sites]]
name = "{site}"
provider = "kubernetes"
organisation = "$(HOME) 'A'"
dollars_per_hour = 0
[sites.machine]
endpoint = "{self.kube.url}"
market = "{market}"
cluster = {{ context = "test", namespace = "{NAMESPACE}", gpus = 1 }}
{table}
[sites.policy]
{POLICY}"""
            for site, (market, table) in about.items()
        ]
        self.path.write_text(f"""
name = "fed"
job = "job.toml"
[aggregator]
address = "127.0.0.1:{free_port()}"
[release]
{release}
{"".join(tables)}""")

    def up(self, *words: str) -> Forked:
        number = len(self.ups)
        out, err = (self.folder / f"up-{number}.{each}" for each in ("out", "err"))
        made = shared().start(
            "up", str(self.path), *words, out=out, err=err, environment=os.environ
        )
        self.ups.append(made)
        return made

    @property
    def told(self) -> str:
        return (self.folder / f"up-{len(self.ups) - 1}.err").read_text()

    def boot(self, number: int) -> list[Any]:
        """Boot the pods of all jobs, of which there are so many at the end."""

        def booted() -> bool:
            for name, job in [*self.kube.jobs.items()]:
                if name in self.kube.pods and name not in self.pods:
                    folder = self.folder / f"pod-{len(self.pods)}"
                    self.pods[name] = self.start(folder, job)
            running = len(self.pods) < number and self.ups[-1].poll() is None
            assert running or len(self.pods) >= number, self.told
            return len(self.pods) >= number

        wait_for(booted, f"the cluster has {number} jobs", 200)
        return [*self.pods.values()]

    def end(self, name: str) -> None:
        if name in self.pods:
            self.pods[name].end()

    def nodes(self) -> list[dict[str, Any]]:
        text = crossfed("nodes", str(self.path), "--json").stdout
        found: list[dict[str, Any]] = json.loads(text)
        return [node for node in found if node["state"] != "gone"]

    def close(self) -> None:
        for process in self.ups:
            process.kill()
            process.wait(60)
        if (self.folder / "deployments").exists():
            crossfed("down", str(self.path))
        for pod in self.pods.values():
            pod.close()


@pytest.fixture
def cluster(kube_server: FakeKube, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, kube_server)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.long
@pytest.mark.deploy
@pytest.mark.xdist_group("fleet")
@needs("nginx")
def test_pods_train_and_go(cluster: Cluster):
    """From one command to the first model; one is replaced; nothing is left."""
    cluster.write()
    up = cluster.up("--json")
    pods = cluster.boot(2)
    out, err = up.communicate(200)
    assert up.returncode == 0, err + "".join(pod.log for pod in pods)
    assert json.loads(out)["rounds_completed"] == 1
    assert "roster 3 of 2 sites is signed" in err
    for pod in pods:
        keys = platforms.shown_keys(pod.log)
        assert f"kubernetes test/{NAMESPACE} {keys} {pod.name} is enrolled" in err
        assert roster.load(pod.site / "roster.toml").serial == 3
        assert (pod.site.stat().st_mode & 0o777) == 0o700
        assert "notices" not in (pod.site / "site.toml").read_text()
    assert len(cluster.nodes()) == 3
    # One is taken back. The next has its keys, from its home, and shows no others.
    first = next(pod for pod in pods if SITES[0] in pod.name)
    cluster.kube.pool().terminate([first.name])
    assert first.process.wait(30) == 0, first.log
    again = cluster.up("--detach")
    following = cluster.boot(3)[-1]
    _, err = again.communicate(100)
    assert again.returncode == 0, err + following.log
    assert f"its keys are in file://{cluster.folder}/home" in err
    wait_for(lambda: "connected to" in following.log, "it works", 200)
    assert platforms.shown_keys(following.log) == ""
    before, after = (
        (each.site / "identity.pem").read_bytes() for each in (first, following)
    )
    assert before == after
    crossfed("down", str(cluster.path))
    assert cluster.nodes() == []
    assert cluster.kube.pods == {}
    for pod in cluster.pods.values():
        assert pod.process.wait(30) == 0, pod.log


@needs("nginx")
def test_a_pod_that_has_to_go_while_it_enrols_goes(cluster: Cluster):
    """Immediately: a shell would wait for the program, and be killed in the end."""
    cluster.write()
    cluster.kube.refusal = lambda request: (
        KubeError(403, "Forbidden", "no") if request.path.endswith("/log") else None
    )
    up = cluster.up("--detach")
    pod = cluster.boot(2)[0]
    wait_for(lambda: platforms.shown_keys(pod.log), "it shows its keys", 200)
    pod.end()
    assert pod.process.wait(10) == 143
    up.kill()
    up.wait(60)


@needs("nginx")
def test_leftovers_are_found_and_ended_by_their_labels(cluster: Cluster):
    """Though the folder that launched them is lost; not without being told to.

    A command that is killed is given again, and launches no third one.
    """
    cluster.write()
    cluster.kube.fate = lambda _: "pulling"
    for number in (1, 2):
        up = cluster.up("--detach")
        wait_for(lambda n=number: len(cluster.kube.jobs) == n, "there is a job", 200)
        up.kill()
        up.wait(60)
    assert len(cluster.kube.created) == 2
    folder = cluster.folder / "deployments"
    # What a lost folder does not end here, this test does.
    crossfed_nodes = {node["node"] for node in cluster.nodes()}
    assert crossfed_nodes == {"aggregator", *(f"site-{site}" for site in SITES)}
    kept = cluster.folder / "kept"
    shutil.move(folder, kept)
    refused = crossfed("down", str(cluster.path), code=FAILED)
    assert "was brought up from" in refused.stderr
    down = crossfed("down", str(cluster.path), "--any-owner", "--json")
    assert json.loads(down.stdout)["ended"] == 2
    assert cluster.kube.pods == {}
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(kept, folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f'image = "{IMAGE}"', "", "install a release"),
        (f'image = "{IMAGE}"', 'image = "x:1"', "names no digest"),
        (
            f'image = "{IMAGE}"',
            f'wheel = "https://a.b/c.whl"\nsha256 = "{"ab" * 32}"',
            "release.image: ",
        ),
        ("gpus = 1", "gpus = -1", "sites[0].machine.cluster.gpus"),
        ('context = "test", ', "", "machine.cluster.context: is missing"),
        (f'"{NAMESPACE}"', '"No_Name"', "no namespace"),
        ("dollars_per_hour = 0\n", "", "sites[0].dollars_per_hour: is missing"),
        ('market = "spot"', 'region = "x"', "machine.region: is not for provider"),
        ('market = "spot"', 'image = "x"', "it runs release.image"),
        ('market = "spot"', "requires = { gpus = 1 }", "what the pod gets"),
        ('market = "spot"', 'accelerator = "x"', "state GPUs in cluster.gpus"),
        ('market = "spot"', 'firewalls = ["x"]', "network policies"),
        ('market = "spot"', 'identity = "A b"', "no service account"),
        (
            "[sites.policy]",
            '[sites.compute]\nnotices = "aws"\n[sites.policy]',
            "SIGTERM",
        ),
        ('provider = "kubernetes"', 'provider = "gcp"', "machine.cluster: is for"),
        ('provider = "kubernetes"', 'provider = "azure"', "sites[0].provider"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    cluster: Cluster, old: str, new: str, message: str
):
    """With the key; neither here nor there."""
    cluster.write()
    cluster.path.write_text(cluster.path.read_text().replace(old, new, 1))
    refused = crossfed("up", str(cluster.path), code=BAD_JOB)
    assert message in refused.stderr
    assert cluster.kube.created == []
    assert not (cluster.folder / "deployments").exists()

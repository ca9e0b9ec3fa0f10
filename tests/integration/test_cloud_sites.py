"""``crossfed up`` with machines of two clouds, which enrol by who they are.

The clouds are on loopback and launch records. A test boots each machine: it takes the
user data back from its cloud and starts, as processes of this host, what cloud-init
would. The machine asks a metadata service for its identity, as it would there.
"""

import base64
import json
import os
import shlex
import shutil
import signal
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import fake_gce, fake_platforms
from support.deployment import crossfed_here as crossfed, wait_for
from support.ec2_server import IMAGE, REGION, Ec2Server
from support.fake_gce import FakeGce
from support.fake_imds import FakeImds
from support.fake_platforms import ACCOUNT, EMAIL, ROLE, CheckingSts, GoogleMachine
from support.forked import Forked, shared
from support.programs import needs

from cloud_adapters.net.ports import free_port
from deploy.exit_codes import BAD_JOB, FAILED
from federation.clock import SystemClock
from privacy.secagg.agreement import roster

JOBS = Path(__file__).parents[2] / "jobs"
AWS_SITE, GCP_SITE = "aws-us-east-1", "gcp-us-central1"
POLICY = 'privacy = "none"\nsecure_aggregation = false\n'
DIGEST = "ab" * 32
RELEASE = f"""
[release]
wheel = "https://example.org/crossfed-0.1.0-py3-none-any.whl"
sha256 = "{DIGEST}"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("fleet"),
    needs("nginx"),
]


class Machine:
    """One that a cloud has launched, booted as far as a process of this host can."""

    def __init__(self, folder: Path, user_data: str, about: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, **about}
        self.processes: list[Forked] = []
        config = json.loads(user_data.partition("\n")[2])
        files = {each["path"]: each["content"] for each in config["write_files"]}
        folder.mkdir(mode=0o700)
        (folder / "site.toml").write_text(files["/etc/crossfed/site.toml"])
        unit = files["/etc/systemd/system/crossfed-enrol.service.d/machine.conf"]
        (line,) = (
            each
            for each in unit.splitlines()
            if each.startswith("ExecStart=/opt/crossfed/bin/crossfed enroll")
        )
        self.words = [
            str(folder) if word == "/var/lib/crossfed-site" else word
            for word in shlex.split(line)[1:]
        ]

    def start(self, *words: str) -> Forked:
        out, err = (self.folder / f"{words[0]}.{each}" for each in ("out", "err"))
        made = shared().start(*words, out=out, err=err, environment=self.environment)
        self.processes.append(made)
        return made

    def enrol(self) -> Forked:
        return self.start(*self.words)

    def work(self) -> Forked:
        return self.start("site", "up", "--config", str(self.folder / "site.toml"))

    def told(self, verb: str) -> str:
        path = self.folder / f"{verb}.err"
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(60)


class Clouds:
    """A deployment of two clouds, with all that vouches for machines in them."""

    def __init__(self, folder: Path, aws: Ec2Server, gcp: FakeGce) -> None:
        self.folder, self.aws, self.gcp = folder, aws, gcp
        self.imds, self.sts, self.google = FakeImds(), CheckingSts(), GoogleMachine()
        self.sts.secret = "secret-of-the-instance"  # noqa: S105
        self.sts.session = "session-of-the-instance"
        self.path = folder / "fed.toml"
        self.machines: list[Machine] = []
        self.ups: list[Forked] = []

    def write(self, address: str, *, endpoints: bool = True, more: str = "") -> None:
        text = (JOBS / "quickstart.toml").read_text()
        head, _, tail = text.partition("[privacy.secure_aggregation]")
        head = head.replace("rounds = 30", "rounds = 1")
        (self.folder / "job.toml").write_text(head + tail[tail.index("[[sites]]") :])
        aws, gcp = (
            f'endpoint = "{url}"' if endpoints else ""
            for url in (self.aws.url, self.gcp.url)
        )
        where = f'[aggregator]\naddress = "{address}"\n' if address else ""
        self.path.write_text(f"""
name = "fed"
job = "job.toml"
organisation = "Hôpital \\"A\\""
{where}
[platforms]
sts = "{self.sts.url}/"
google_certificates = "{self.google.url}/certs"

[[sites]]
name = "{AWS_SITE}"
provider = "aws"
[sites.machine]
region = "{REGION}"
type = "m5.large"
image = "{IMAGE}"
market = "spot"
identity = "crossfed-profile"
role = "arn:aws:iam::{ACCOUNT}:role/{ROLE}"
{aws}
[sites.home]
url = "file://{self.folder}/home"
lease_seconds = 2
[sites.policy]
{POLICY}
[[sites]]
name = "{GCP_SITE}"
provider = "gcp"
[sites.machine]
region = "europe-west4"
project = "{fake_gce.PROJECT}"
zones = ["{fake_gce.ZONES[0]}"]
type = "{fake_gce.TYPES[0]}"
identity = "{EMAIL}"
{gcp}
[sites.policy]
{POLICY}
{more}""")

    def up(self, *words: str) -> Forked:
        out, err = self.folder / "up.out", self.folder / "up.err"
        made = shared().start(
            "up", str(self.path), *words, out=out, err=err, environment=os.environ
        )
        self.ups.append(made)
        return made

    @property
    def told(self) -> str:
        return (self.folder / "up.err").read_text()

    @property
    def aggregator(self) -> Path:
        return self.folder / "deployments" / "fed" / "aggregator"

    def boot(self, cloud: str) -> Machine:
        """Boot the machine that a cloud has launched last."""
        folder = self.folder / f"machine-{len(self.machines)}"
        if cloud == "aws":
            wait_for(lambda: self.has(self.aws_nodes()), "EC2 has an instance", 60)
            self.sts.arn = fake_platforms.arn_of(session=self.aws_nodes()[-1])
            data = base64.b64decode(self.aws.launches()[-1]["UserData"]).decode()
            about = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.imds.url}
        else:
            wait_for(lambda: self.has(self.gcp.instances), "GCE has an instance", 60)
            (zone, name), found = [*self.gcp.instances.items()][-1]
            self.google.changes = {"machine": {"zone": zone, "instance_name": name}}
            items = {i["key"]: i["value"] for i in found["metadata"]["items"]}
            data = items["user-data"]
            host = self.google.url.removeprefix("http://")
            names = ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT")
            about = dict.fromkeys(names, host)
        made = Machine(folder, data, about)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            made.environment.pop(name)
        self.machines.append(made)
        return made

    def has(self, nodes: object) -> bool:
        """Whether there is one; the command must be at work."""
        assert nodes or self.ups[-1].poll() is None, self.told
        return bool(nodes)

    def aws_nodes(self) -> list[str]:
        labels = {"crossfed-deployment": "fed"}
        nodes = self.aws.pool().nodes(labels)
        return [node.id for node in nodes if node.state != "gone"]

    def nodes(self) -> list[dict[str, Any]]:
        text = crossfed("nodes", str(self.path), "--json").stdout
        found: list[dict[str, Any]] = json.loads(text)
        return [node for node in found if node["state"] != "gone"]

    def close(self) -> None:
        for process in self.ups:
            process.kill()
            process.wait(60)
        for machine in self.machines:
            machine.end()
        if (self.folder / "deployments").exists():
            crossfed("down", str(self.path))
        for server in (self.imds, self.sts, self.google):
            server.__exit__(None, None, None)


@pytest.fixture
def clouds(
    ec2_server: Ec2Server,
    gce_server: FakeGce,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Clouds]:
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "GCE_", "CLOUDSDK_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    ec2_server.make_profile("crossfed-profile")
    shared().imports("support.cloud_libraries")
    made = Clouds(tmp_path, ec2_server, gce_server)
    try:
        yield made
    finally:
        made.close()


def test_machines_of_two_clouds_train_and_go(clouds: Clouds):
    """From one command to the first model; a machine is replaced; nothing is left."""
    clouds.write(f"127.0.0.1:{free_port()}", more=RELEASE)
    up = clouds.up("--json")
    machines = [clouds.boot("aws"), clouds.boot("gcp")]
    enrolments = [machine.enrol() for machine in machines]
    for process, machine in zip(enrolments, machines, strict=True):
        _, err = process.communicate(120)
        assert process.returncode == 0, err + clouds.told
        assert roster.load(machine.folder / "roster.toml").serial >= 1
        machine.work()
    out, err = up.communicate(200)
    assert up.returncode == 0, err
    assert json.loads(out)["rounds_completed"] == 1
    assert "roster" in err
    assert "is signed" in err
    settings = [(machine.folder / "site.toml").read_text() for machine in machines]
    assert 'notices = "aws"' in settings[0]  # It is a spot machine.
    assert "notices" not in settings[1]
    assert len(clouds.nodes()) == 3
    # One is taken back. The next has its keys, from its home, and enrols no others.
    gone = clouds.aws_nodes()
    machines[0].end()
    clouds.aws.pool().terminate(gone)
    again = clouds.up("--detach")
    _, err = again.communicate(60)
    assert again.returncode == 0, err
    assert err.count("launched") == 4
    assert clouds.aws_nodes() != gone
    following = clouds.boot("aws")
    assert following.enrol().wait(60) == 0
    following.work()
    wait_for(lambda: "connected to" in following.told("site"), "it works", 60)
    before, after = (
        (each.folder / "identity.pem").read_bytes() for each in (machines[0], following)
    )
    assert before == after
    for machine in clouds.machines:
        machine.end()
    crossfed("down", str(clouds.path))
    assert clouds.nodes() == []
    assert clouds.aws_nodes() == []
    assert clouds.gcp.instances == {}


def test_nothing_is_started_for_a_network_without_a_way_out(clouds: Clouds):
    """Its machine could install nothing, and the others would wait for it, and cost."""
    clouds.write(f"127.0.0.1:{free_port()}", more=RELEASE)
    clouds.gcp.routers.clear()
    up = clouds.up()
    assert up.wait(60) == BAD_JOB
    assert "sites[1].machine.subnets" in clouds.told
    assert (clouds.aws.launches(), clouds.gcp.inserted) == ([], [])
    assert clouds.nodes() == []


@pytest.mark.long
def test_of_two_commands_at_once_one_gives_way(clouds: Clouds, tmp_path: Path):
    """Each folder has an aggregator on its host, older than all machines."""
    clouds.write(f"127.0.0.1:{free_port()}", more=RELEASE)
    folder = tmp_path / "second"
    folder.mkdir()
    shutil.copy(tmp_path / "job.toml", folder)
    second = folder / "fed.toml"
    address = tomllib.loads(clouds.path.read_text())["aggregator"]["address"]
    other = f"127.0.0.1:{free_port()}"
    second.write_text(clouds.path.read_text().replace(address, other))
    out, err = folder / "up.out", folder / "up.err"
    late = shared().start("up", str(second), out=out, err=err, environment=os.environ)
    clouds.ups.append(late)
    wait_for(lambda: "aggregator: launched" in err.read_text(), "it has begun", 60)
    late.send_signal(signal.SIGSTOP)  # It has looked, and found nobody.
    clouds.up()
    wait_for(lambda: f"site-{GCP_SITE}: launched" in clouds.told, "both run", 60)
    SystemClock().sleep(1.1)  # EC2 tells launches to the second: neither is first.
    late.send_signal(signal.SIGCONT)
    assert late.wait(120) == FAILED
    assert "which was first: site-" in err.read_text()
    assert "aggregator: ended" in err.read_text()
    assert sorted(node["node"] for node in clouds.nodes()) == [
        "aggregator",
        f"site-{AWS_SITE}",
        f"site-{GCP_SITE}",
    ]
    assert clouds.ups[-1].poll() is None, clouds.told
    assert (len(clouds.aws_nodes()), len(clouds.gcp.instances)) == (1, 1)

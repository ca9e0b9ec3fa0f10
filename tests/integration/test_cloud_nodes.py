"""``crossfed nodes``, ``down`` and ``up`` where machines are those of clouds."""

import json
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import fake_gce
from support.deployment import crossfed_here as crossfed
from support.ec2_server import IMAGE, REGION, ZONES, Ec2Server
from support.enrolments import Federation
from support.fake_gce import FakeGce
from support.fleets import bring_up, requests_of

from cloud_adapters.compute.pool import ComputePool, NodeSpec
from deploy.cli.terminal import tell
from deploy.exit_codes import BAD_JOB, FAILED
from deploy.fleet import (
    cloud_sites,
    loop,
    preflight,
    reconcile,
    spec as fleet_spec,
    state,
)
from deploy.fleet.preflight import check_moved
from deploy.fleet.reconcile import NodeRole
from deploy.fleet.state import Deployment
from deploy.fleet.supervisor import RunWatch
from federation.clock import SystemClock, VirtualClock
from federation.errors import ComputeError, JobError

pytestmark = pytest.mark.slow
JOBS = Path(__file__).parents[2] / "jobs"
SITES = ("aws-us-east-1", "gcp-us-central1")


class Clouds:
    """A deployment file of two clouds, and their services."""

    def __init__(self, path: Path, aws: Ec2Server, gcp: FakeGce) -> None:
        self.path = path
        self.aws, self.gcp = aws, gcp

    def launch(self, owner: str) -> None:
        """Launch a site in each, as ``up`` will."""
        specs: list[tuple[ComputePool, str, dict[str, Any]]] = [
            (
                self.aws.pool(),
                SITES[0],
                {"machine": "m5.large", "zones": ZONES, "image": IMAGE},
            ),
            (
                self.gcp.pool(),
                SITES[1],
                {
                    "machine": fake_gce.TYPES[0],
                    "zones": fake_gce.ZONES,
                    "image": "projects/x/global/images/y",
                },
            ),
        ]
        for pool, site, given in specs:
            role = NodeRole(name=f"site-{site}", settings="0")
            labels = reconcile.labels("fed", owner, role, 1)
            spec = NodeSpec(name=role.name, labels=labels, max_seconds=600, **given)
            pool.launch(spec, f"{owner}/{site}/1")

    def opened(self) -> AbstractContextManager[Deployment]:
        """Hold the folder, as a command does."""
        plan = fleet_spec.load(self.path)
        return state.opened(plan, random_bytes=os.urandom, clock=SystemClock())

    def nodes(self) -> list[dict[str, Any]]:
        """What ``nodes`` shows."""
        found: list[dict[str, Any]] = json.loads(
            crossfed("nodes", str(self.path), "--json", "--all").stdout
        )
        return found


@pytest.fixture
def clouds(
    ec2_server: Ec2Server,
    gce_server: FakeGce,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Clouds:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    path = tmp_path / "fed.toml"
    path.write_text(f"""
name = "fed"
job = "job.toml"

[[sites]]
name = "{SITES[0]}"
provider = "aws"
[sites.machine]
region = "{REGION}"
type = "m5.large"
endpoint = "{ec2_server.url}"

[[sites]]
name = "{SITES[1]}"
provider = "gcp"
[sites.machine]
region = "europe-west4"
project = "{fake_gce.PROJECT}"
zones = ["europe-west4-a"]
type = "e2-standard-4"
endpoint = "{gce_server.url}"
""")
    shutil.copy(JOBS / "quickstart.toml", tmp_path / "job.toml")
    return Clouds(path, ec2_server, gce_server)


def test_leftovers_are_found_and_ended_by_their_labels(clouds: Clouds):
    """Though the folder that launched them is lost; not without being told to."""
    clouds.launch("lost")
    found = {(node["provider"], node["node"]): node["state"] for node in clouds.nodes()}
    assert found == {
        (f"aws {REGION}", f"site-{SITES[0]}"): "running",
        (f"gcp {fake_gce.PROJECT}", f"site-{SITES[1]}"): "running",
    }
    refused = crossfed("down", str(clouds.path), code=FAILED)
    assert refused.stderr.count("was brought up from another folder") == 2
    down = crossfed("down", str(clouds.path), "--any-owner", "--json")
    assert json.loads(down.stdout)["ended"] == 2
    assert {node["state"] for node in clouds.nodes()} == {"gone"}
    assert json.loads(crossfed("nodes", str(clouds.path), "--json").stdout) == []
    again = crossfed("down", str(clouds.path), "--any-owner", "--json")
    assert json.loads(again.stdout)["ended"] == 0


def test_a_cloud_that_fails_keeps_no_machine_of_another(clouds: Clouds):
    """It is told that some may be left, and the same command ends them later."""
    clouds.launch("lost")
    clouds.aws.refusal = lambda _: "UnauthorizedOperation"
    shown = crossfed("nodes", str(clouds.path), "--json", code=FAILED)
    assert f"aws {REGION}: " in shown.stderr
    assert [node["node"] for node in json.loads(shown.stdout)] == [f"site-{SITES[1]}"]
    down = crossfed("down", str(clouds.path), "--any-owner", code=FAILED)
    assert "ec2:RunInstances" in down.stderr
    assert "nodes that were ended: 1" in down.stderr
    assert clouds.gcp.instances == {}
    clouds.aws.refusal = lambda _: None
    crossfed("down", str(clouds.path), "--any-owner")
    assert {node["state"] for node in clouds.nodes()} == {"gone"}


def test_up_starts_nothing_that_cannot_enrol(clouds: Clouds):
    """Neither there nor here, and names what is missing."""
    up = crossfed("up", str(clouds.path), code=BAD_JOB)
    assert "release: " in up.stderr
    assert "wheel or an image" in up.stderr
    assert clouds.nodes() == []
    assert not (clouds.path.parent / "deployments").exists()
    assert clouds.aws.launches() == []
    assert clouds.gcp.inserted == []


def test_a_site_that_moves_leaves_no_machine_unseen(clouds: Clouds):
    """The file names another region, but the folder knows where machines are."""
    with clouds.opened() as deployment:
        clouds.launch(deployment.owner)
        deployment.note_launch(f"site-{SITES[0]}", 1, 600.0)
    text = clouds.path.read_text()
    clouds.path.write_text(text.replace(f'"{REGION}"', '"us-west-2"'))
    assert f"aws {REGION}" in {node["provider"] for node in clouds.nodes()}
    with (
        clouds.opened() as deployment,
        pytest.raises(ComputeError, match=rf"costs: name 'aws {REGION}' again"),
    ):
        check_moved(deployment, deployment.listed())
    assert len(clouds.aws.launches()) == 1
    crossfed("down", str(clouds.path))
    with clouds.opened() as deployment:  # Nothing is left there to look for.
        assert f"aws {REGION}" not in deployment.pools
    clouds.path.write_text(text)
    assert {node["state"] for node in clouds.nodes()} == {"gone"}


def test_nothing_is_launched_while_a_site_would_lose_its_ledger(clouds: Clouds):
    """The first site costs nothing if the second one refuses."""
    text = clouds.path.read_text()
    wheel = f'wheel = "https://example.org/x.whl"\nsha256 = "{"ab" * 32}"'
    clouds.path.write_text(f"{text}\n[release]\n{wheel}\n")
    folder = clouds.path.parent / "enrolled"
    folder.mkdir()
    federation = Federation(folder=folder)
    federation.site(SITES[1])
    with (
        clouds.opened() as deployment,
        pytest.raises(ComputeError, match=r"privacy ledger .* on a machine"),
    ):
        bring_up(deployment, federation.config, print)
    assert clouds.aws.launches() == []


GPU = {"m5.large": "g5.xlarge", fake_gce.TYPES[0]: fake_gce.TYPES[1]}


@pytest.mark.parametrize("kind", GPU)
def test_a_gpu_is_not_rented_for_an_image_without_its_driver(clouds: Clouds, kind: str):
    """The site would train with the CPU, and nobody would know why it is slow."""
    text = clouds.path.read_text()
    clouds.path.write_text(text.replace(kind, GPU[kind]))
    with clouds.opened() as deployment:
        with pytest.raises(JobError, match="has 1 GPUs, and the default im") as caught:
            preflight.check_gpus(deployment)
        assert caught.value.key.endswith("].machine.image")
    clouds.path.write_text(
        clouds.path.read_text().replace(f'"{GPU[kind]}"', f'"{GPU[kind]}"\nimage = "x"')
    )
    with clouds.opened() as deployment:
        preflight.check_gpus(deployment)
    clouds.path.write_text(text)
    with clouds.opened() as deployment:
        preflight.check_gpus(deployment)


def test_a_network_without_a_way_out_is_refused(clouds: Clouds):
    """It would install nothing, for half an hour at full price."""
    told: list[str] = []
    clouds.gcp.routers.clear()
    clouds.aws.refusal = lambda form: (
        "UnauthorizedOperation" if form["Action"] == "DescribeRouteTables" else None
    )
    with clouds.opened() as deployment:
        with pytest.raises(JobError, match=r"fed\.toml: .* no Cloud NAT") as caught:
            preflight.check_routes(deployment, told.append)
        assert caught.value.key == "sites[1].machine.subnets"
        # Who may not look at networks may still use them, and is told.
        (line,) = told
        assert f"whether {SITES[0]} has a way out" in line


def test_a_site_with_gpus_does_not_start_without_them(clouds: Clouds):
    """Its machine is launched with them, and its agent counts those that it sees."""
    text = clouds.path.read_text()
    wheel = f'wheel = "https://example.org/x.whl"\nsha256 = "{"ab" * 32}"'
    attached = 'accelerator = "nvidia-tesla-t4"\naccelerators = 2\nimage = "x"'
    kind = f'type = "{fake_gce.TYPES[0]}"'
    clouds.path.write_text(
        f"{text}\n[release]\n{wheel}\n".replace(kind, f"{kind}\n{attached}")
    )
    folder = clouds.path.parent / "enrolled"
    folder.mkdir()
    config = Federation(folder=folder).config
    with clouds.opened() as deployment:
        _, requests = requests_of(deployment, config)
        asked = [requests[site.role].spec for site in deployment.plan.file.sites]
    assert [spec.gpus for spec in asked] == [0, 2]
    assert "gpus = 2" in asked[1].user_data
    assert "nvidia.conf" in asked[1].user_data
    assert "nvidia" not in asked[0].user_data
    assert asked[1].accelerator == "nvidia-tesla-t4"


def test_tags_and_a_key_of_ones_own(clouds: Clouds):
    """On all that costs, beside ours; a machine is found again by ours alone."""
    text = clouds.path.read_text()
    name = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
    own = 'tags = { "cost-center" = "Ward 7" }\ndisk_key = "%s"\n'
    for kind, key, extra in (
        ('"m5.large"', "alias/own", f'image = "{IMAGE}"\nidentity = "p"\n'),
        (f'"{fake_gce.TYPES[0]}"', name, 'identity = "a@b"\n'),
    ):
        text = text.replace(kind, f"{kind}\n{own % key}{extra}")
    head = '[release]\nwheel = "https://x/x.whl"\n'
    clouds.path.write_text(
        text.replace("[[sites]]", f'{head}sha256 = "{"ab" * 32}"\n[[sites]]', 1)
    )
    clouds.aws.make_profile("p")
    folder = clouds.path.parent / "enrolled"
    folder.mkdir()
    config = Federation(folder=folder).config
    with clouds.opened() as deployment:
        _, requests = requests_of(deployment, config)
        for site in deployment.plan.file.sites:
            asked = requests[site.role]
            node = loop.fill(deployment, asked, print)
            assert node.labels["crossfed-role"] == f"site-{site.name}"
            assert loop.fill(deployment, asked, print).id == node.id
    (form,) = clouds.aws.launches()
    assert form["BlockDeviceMapping.1.Ebs.KmsKeyId"] == "alias/own"
    tagged = [n for n, value in form.items() if value == "cost-center"]
    assert len(tagged) == 3  # Instance, disk and interface.
    assert [form[n.replace("Key", "Value")] for n in tagged] == ["Ward 7"] * 3
    (body,) = clouds.gcp.inserted
    (disk,) = body["disks"]
    assert disk["diskEncryptionKey"] == {"kmsKeyName": name}
    labels = disk["initializeParams"]["labels"]
    assert labels == body["labels"]
    assert labels["cost-center"].startswith("ward-7-")  # It takes no capitals.
    for wrong in ("crossfed-role", "aws:x", "Name"):
        clouds.path.write_text(text.replace("cost-center", wrong))
        with pytest.raises(JobError, match=f"'{wrong}' is reserved"):
            fleet_spec.load(clouds.path)


def test_the_agent_of_a_machine_without_its_gpus_ends(tmp_path: Path):
    """With the code that systemd does not restart."""
    site = tmp_path / "site.toml"
    site.write_text(
        'name = "a"\n[compute]\ngpus = 64\n[aggregator]\naddress = "127.0.0.1:1"\n'
        'authority = "ca.crt"\n'
    )
    done = crossfed("site", "up", "--config", str(site), code=BAD_JOB)
    assert "compute.gpus: this site needs 64 GPUs and sees" in done.stderr


def test_a_start_that_fails_ends_the_wait_with_the_console(clouds: Clouds):
    """Immediately, though the machine is there for minutes, for somebody to look."""
    clouds.gcp.console = "crossfed: the site was not started: line 9 failed"
    with clouds.opened() as deployment:
        clouds.launch(deployment.owner)
        deployment.clock = VirtualClock()
        site = deployment.plan.file.sites[1]
        (node,) = deployment.pools[site.pool].nodes({})
        wait = cloud_sites._EnrolmentWait(deployment, site, node)
        wait.check(wait.look(deployment.listed()), "it has not enrolled yet")
        deployment.clock.sleep(20.0)
        with pytest.raises(ComputeError, match="not start the site") as caught:
            wait.check(wait.look(deployment.listed()), "it has not enrolled yet")
    assert str(caught.value).endswith(clouds.gcp.console)


def test_a_machine_of_before_is_not_taken_for_one_that_is_listed_late(clouds: Clouds):
    """EC2 lists one that has ended for an hour, and a new one only after a while."""
    with clouds.opened() as deployment:
        clouds.launch(deployment.owner)
        site = deployment.plan.file.sites[0]
        pool = deployment.pools[site.pool]
        (node,) = pool.nodes({})
        pool.terminate([node.id])
        wait = cloud_sites._EnrolmentWait(deployment, site, replace(node, id="i-new"))
        assert wait.look(deployment.listed()) is None
        wait.check(None, "it has not enrolled yet")
        old = cloud_sites._EnrolmentWait(deployment, site, node)
        with pytest.raises(ComputeError, match="its machine has ended"):
            old.check(old.look(deployment.listed()), "it has not enrolled yet")


def test_up_refuses_a_deadline_and_a_budget_without_prices(clouds: Clouds):
    """They are needed when a site is moved, long after everything costs."""
    text = clouds.path.read_text()
    wheel = f'wheel = "https://example.org/x.whl"\nsha256 = "{"ab" * 32}"'
    head = (
        'deadline_hours = 3\nmax_dollars = 9\naggregator.address = "192.0.2.1:8443"\n'
    )
    aws = 'type = "m5.large"\nmarket = "spot"\nidentity = "p"\n'
    role = 'role = "arn:aws:iam::123456789012:role/r"'
    gcp = 'type = "e2-standard-4"\nidentity = "a@p-1.iam.gserviceaccount.com"'
    text = text.replace("[[sites]]", f"{head}[[sites]]", 1)
    text = text.replace('type = "m5.large"', f"{aws}{role}")
    text = text.replace('type = "e2-standard-4"', gcp)
    home = f"[sites.home]\nurl = 'file:///mnt/home'\n[[sites]]\nname = \"{SITES[1]}\""
    text = text.replace(f'[[sites]]\nname = "{SITES[1]}"', home)
    clouds.path.write_text(f"{text}\n[release]\n{wheel}\n")
    up = crossfed("up", str(clouds.path), "--keep", code=BAD_JOB)
    assert "needs new prices" in up.stderr
    assert clouds.aws.launches() == []
    assert not (clouds.path.parent / "deployments").exists()


def test_who_watches_is_told_of_a_start_that_fails(
    clouds: Clouds, capsys: pytest.CaptureFixture[str]
):
    """Otherwise the run would wait for the site until its machine's hours are over."""
    with clouds.opened() as deployment:
        clouds.launch(deployment.owner)
        watch = RunWatch(deployment, tell)
        clouds.gcp.console = "crossfed: the site was not started: line 9 failed"
        with pytest.raises(ComputeError, match=f"site-{SITES[1]}: not started"):
            watch.look()
    assert "line 9 failed" in capsys.readouterr().err


def test_a_machine_of_a_cloud_ends_when_the_budget_is_spent(clouds: Clouds):
    """By its own timer and by the service's, which nobody has to watch."""
    text = clouds.path.read_text().replace(
        'provider = "', 'dollars_per_hour = 3.0\nprovider = "'
    )
    wheel = f'wheel = "https://example.org/x.whl"\nsha256 = "{"ab" * 32}"'
    head = f"max_dollars = 12.0\n[release]\n{wheel}\n[[sites]]"
    clouds.path.write_text(text.replace("[[sites]]", head, 1))
    folder = clouds.path.parent / "enrolled"
    folder.mkdir()
    config = Federation(folder=folder).config
    with clouds.opened() as deployment:
        site = deployment.plan.file.sites[1]
        request = requests_of(deployment, config)[1][site.role]
        node = loop.fill(deployment, request, print)
        assert loop.fill(deployment, request, print).id == node.id
    (body,) = clouds.gcp.inserted
    assert body["scheduling"]["maxRunDuration"] == {"seconds": str(2 * 3600)}
    (user_data,) = (
        item["value"]
        for item in body["metadata"]["items"]
        if item["key"] == "user-data"
    )
    assert "--on-boot=7200s" in user_data

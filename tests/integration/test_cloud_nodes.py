"""``crossfed nodes``, ``down`` and ``up`` where machines are those of clouds."""

import json
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support import fake_gce
from support.deployment import crossfed
from support.ec2_server import IMAGE, REGION, ZONES, Ec2Server
from support.enrolments import Federation
from support.fake_gce import FakeGce

from cloud_adapters.compute.pool import ComputePool, NodeSpec
from deploy.exit_codes import BAD_JOB, FAILED
from deploy.fleet import (
    cloud_sites,
    deployment as fleet,
    deployment_file,
    reconcile,
)
from deploy.fleet.deployment import Deployment
from deploy.fleet.reconcile import NodeRole
from deploy.fleet.start_checks import check_moved
from federation.clock import SystemClock
from federation.errors import ComputeError

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
        plan = deployment_file.load(self.path)
        return fleet.opened(plan, random_bytes=os.urandom, clock=SystemClock())

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
    assert "1 nodes of other services were ended" in down.stderr
    assert clouds.gcp.instances == {}
    clouds.aws.refusal = lambda _: None
    crossfed("down", str(clouds.path), "--any-owner")
    assert {node["state"] for node in clouds.nodes()} == {"gone"}


def test_up_starts_nothing_that_cannot_enrol(clouds: Clouds):
    """Neither there nor here, and names what is missing."""
    up = crossfed("up", str(clouds.path), code=BAD_JOB)
    assert "release: " in up.stderr
    assert "a release is a wheel or an image, and not both" in up.stderr
    assert clouds.nodes() == []
    assert not (clouds.path.parent / "deployments").exists()
    assert clouds.aws.launches() == []
    assert clouds.gcp.inserted == []


def test_a_site_that_moves_leaves_no_machine_unseen(clouds: Clouds):
    """The file names another region, but the folder knows where machines are."""
    with clouds.opened() as deployment:
        clouds.launch(deployment.owner)
        deployment.note_launch(f"site-{SITES[0]}", 1)
    text = clouds.path.read_text()
    clouds.path.write_text(text.replace(f'"{REGION}"', '"us-west-2"'))
    assert f"aws {REGION}" in {node["provider"] for node in clouds.nodes()}
    with (
        clouds.opened() as deployment,
        pytest.raises(ComputeError, match=rf"costs: name 'aws {REGION}' again"),
    ):
        check_moved(deployment)
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
        pytest.raises(ComputeError, match="privacy ledger were on a machine that is"),
    ):
        cloud_sites.bring_up(
            deployment,
            federation.config,
            "192.0.2.1:8443",
            accept="",
            random_bytes=os.urandom,
            tell=print,
        )
    assert clouds.aws.launches() == []

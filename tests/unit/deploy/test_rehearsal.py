"""A deployment of clouds on this host: nothing of the clouds is left in it."""

import re
from pathlib import Path

import pytest

from deploy.fleet import deployment_file, offers, rehearsal
from deploy.fleet.tables.providers import CONTAINERS, LOCAL
from federation.clock import VirtualClock
from federation.errors import JobError

TEXT = """
name = "fed"
job = "job.toml"
max_dollars = 5.0
deadline_hours = 2.0

[start]
window = "22:00-06:00 Europe/Berlin"

[aggregator]
address = "aggregator.example.org:8443"

[exchange]
url = "s3://bucket/messages"

[[sites]]
name = "site-a"
provider = "aws"
sizes = [{ type = "m7i.large", speed = 1.0 }, { type = "m7i.xlarge", speed = 2.0 }]
[sites.machine]
region = "us-east-1"
type = "m7i.large"
[sites.data]
source = "s3://patients/scans"
name = "patients"
[sites.compute]
ranks = 2
notices = "aws"
gpus = 1
[sites.policy]
privacy = "none"
[sites.home]
url = "s3://bucket/home"
encryption = { key = "aws-kms:alias/key" }

[[sites]]
name = "site-b"
[sites.data]
source = "x:y"
"""
IMAGES = "localhost/crossfed:1-cpu"


def load(tmp_path: Path) -> deployment_file.DeploymentPlan:
    path = tmp_path / "fed.toml"
    path.write_text(TEXT)
    return deployment_file.load(path)


@pytest.mark.parametrize("images", ["", IMAGES])
def test_no_cloud_bucket_or_home_is_touched(tmp_path: Path, images: str):
    """Above all no home: the real keys and ledgers of the site are there."""
    plan = rehearsal.on_this_host(load(tmp_path), images=images)
    assert {site.provider for site in plan.file.sites} == {LOCAL}
    assert "s3://" not in repr(plan.file)
    assert "s3://" not in repr((plan.settings, plan.exchange))
    assert plan.file.aggregator.address == ""
    assert (plan.file.max_dollars, plan.file.deadline_hours) == (None, None)
    assert plan.file.start.window == ""
    assert offers.with_types(plan, clock=VirtualClock(0.0), tell=print) == plan


def test_sites_keep_what_they_decide(tmp_path: Path):
    """Policy, ranks and the name of the records; a site of this host, its data."""
    plan = rehearsal.on_this_host(load(tmp_path))
    assert plan.settings == {
        "site-a": {
            "compute": {"ranks": 2},
            "policy": {"privacy": "none"},
            "data": {"name": "patients"},
        },
        "site-b": {"data": {"source": "x:y"}},
    }


def test_each_form_has_a_folder_of_its_own(tmp_path: Path):
    """So what a rehearsal spends is never in the ledger of the deployment itself."""
    plan = load(tmp_path)
    folders = {
        plan.folder,
        rehearsal.on_this_host(plan).folder,
        rehearsal.on_this_host(plan, images=IMAGES).folder,
    }
    assert len(folders) == 3


def test_its_folder_is_that_of_no_other_deployment(tmp_path: Path):
    """One that is called as this one with a suffix: `down --purge` would delete it."""
    plan = load(tmp_path)
    found = {
        rehearsal.on_this_host(plan).folder,
        rehearsal.on_this_host(plan, images=IMAGES).folder,
    }
    for other in ("fed-local", "fed-containers"):
        plan.path.write_text(TEXT.replace('name = "fed"', f'name = "{other}"'))
        assert deployment_file.load(plan.path).folder not in found


@pytest.mark.parametrize(
    "images", ["crossfed", "host:5000/crossfed", ":1", "x:", "-v/:/x:1", "a b:1"]
)
def test_images_without_name_or_tag_are_refused(tmp_path: Path, images: str):
    """Before podman reads them as something else."""
    with pytest.raises(JobError, match="--images: "):
        rehearsal.on_this_host(load(tmp_path), images=images)


def test_every_party_is_a_container(tmp_path: Path):
    file = rehearsal.on_this_host(load(tmp_path), images=IMAGES).file
    assert {file.aggregator.pool, *(site.pool for site in file.sites)} == {CONTAINERS}
    assert file.aggregator.image == "localhost/crossfed-aggregator:1-cpu"
    assert {s.machine.image for s in file.sites} == {"localhost/crossfed-site:1-cpu"}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('isolation = "container"', "aggregator.image"),
        ('image = "x"', "aggregator.image"),
        (
            'isolation = "container"\nimage = "x"\naddress = "h:1"',
            "aggregator.address",
        ),
        (
            'isolation = "container"\nimage = "x"',
            "sites[0].machine.isolation",
        ),
    ],
)
def test_an_aggregator_that_no_site_could_reach_is_refused(
    tmp_path: Path, text: str, key: str
):
    path = tmp_path / "fed.toml"
    begin = 'name = "fed"\njob = "job.toml"\n'
    path.write_text(f'{begin}[aggregator]\n{text}\n[[sites]]\nname = "site-a"\n')
    with pytest.raises(JobError, match=re.escape(f"{key}: ")):
        deployment_file.load(path)

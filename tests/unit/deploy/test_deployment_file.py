"""Deployment files: machines of clouds, and what is wrong with them."""

from pathlib import Path

import pytest

from cloud_adapters.compute.local import LocalPool
from deploy.fleet import deployment, deployment_file
from federation.clock import SystemClock
from federation.errors import JobError

AWS = """
[[sites]]
name = "a"
provider = "aws"
[sites.machine]
region = "us-east-1"
type = "g5.xlarge"
"""
GCP = """
[[sites]]
name = "b"
provider = "gcp"
[sites.machine]
region = "europe-west4"
project = "p-1"
zones = ["europe-west4-a"]
type = "g2-standard-4"
"""


def load(folder: Path, *sites: str) -> deployment_file.DeploymentPlan:
    path = folder / "fed.toml"
    path.write_text('name = "fed"\njob = "job.toml"\n' + "".join(sites))
    return deployment_file.load(path)


def test_one_service_is_opened_for_each_place(tmp_path: Path):
    """A region or a project; and this host, which may have nodes in any case."""
    again = AWS.replace('"a"', '"c"')
    other = AWS.replace('"a"', '"d"').replace("us-east-1", "eu-west-1")
    plan = load(tmp_path, AWS, GCP, again, other)
    pools = deployment.pools_of(plan, SystemClock())
    assert list(pools) == ["local", "aws us-east-1", "gcp p-1", "aws eu-west-1"]
    assert isinstance(pools["local"], LocalPool)


@pytest.mark.parametrize(
    ("table", "key", "words"),
    [
        (AWS.replace('type = "g5.xlarge"', ""), "type", "is missing for provider aws"),
        (AWS.replace('region = "us-east-1"', ""), "region", "is missing"),
        (AWS + 'zones = ["us-west-2a"]', "zones", "'us-west-2a' is not in region"),
        (AWS.replace('"aws"', '"local"'), "", "for the providers aws and gcp"),
        (AWS + 'market = "cheap"', "market", "on-demand"),
        (GCP.replace('project = "p-1"', ""), "project", "is missing for provider gcp"),
        (GCP.replace('zones = ["europe-west4-a"]', ""), "zones", "is missing"),
        (GCP + 'subnets = ["a", "b"]', "subnets", "more than one"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(
    tmp_path: Path, table: str, key: str, words: str
):
    """With file and key."""
    with pytest.raises(JobError, match=words) as caught:
        load(tmp_path, table)
    assert "fed.toml" in str(caught.value)
    assert f"machine{'.' * bool(key)}{key}" in str(caught.value)

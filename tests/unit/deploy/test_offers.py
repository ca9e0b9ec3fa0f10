"""The cheapest machine that meets what a site requires, where its data may be."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from support import fake_gce
from support.ec2_server import REGION, ZONES, Ec2Server
from support.fake_gce import FakeGce

from cloud_adapters.compute.machine_types import MachineType, RequiresSpec
from cloud_adapters.compute.pool import ComputePool, NodeSpec
from deploy.fleet import placement, spec
from deploy.fleet.prices import MachinePrice, Prices
from federation.errors import JobError

PRICES = Prices(
    as_of="2026-11-01",
    machines=tuple(
        MachinePrice(
            provider=provider, region=region, machine=name, on_demand=price, spot=spot
        )
        for provider, region, name, price, spot in (
            ("aws", REGION, "p4d.24xlarge", 32.77, 12.0),
            ("aws", REGION, "g5.xlarge", 1.006, None),
            ("aws", REGION, "g5.12xlarge", 5.672, 2.1),
            ("aws", REGION, "m5.large", 0.096, 0.04),
            ("aws", "eu-west-1", "g5.2xlarge", 0.001, 0.001),
            ("gcp", "europe-west4", "e2-standard-4", 0.15, None),
            ("gcp", "europe-west4", "g2-standard-4", 0.78, 0.31),
        )
    ),
    egress=(),
)
AWS = f"""
provider = "aws"
[sites.machine]
region = "{REGION}"
"""
GCP = f"""
provider = "gcp"
[sites.machine]
region = "europe-west4"
project = "{fake_gce.PROJECT}"
"""


def plan(folder: Path, machine: str) -> spec.DeploymentPlan:
    path = folder / "fed.toml"
    path.write_text(
        f'name = "fed"\njob = "job.toml"\n[[sites]]\nname = "site"\n{machine}'
    )
    return spec.load(path)


def chosen(
    folder: Path, machine: str, pools: Mapping[str, ComputePool], told: list[str]
) -> str:
    found = placement.resolved(plan(folder, machine), pools, PRICES, told.append)
    return found.file.sites[0].machine.type


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        ("gpus = 1", "g5.xlarge"),
        ("gpus = 2", "g5.12xlarge"),
        ('gpu = "A100"', "p4d.24xlarge"),
        ("gpus = 1\nmemory_gb = 64.0", "g5.12xlarge"),
        ("cpus = 2", "m5.large"),
        ("gpu_memory_gb = 30.0", "p4d.24xlarge"),
    ],
)
def test_ec2_offers_the_cheapest_that_meets_all(
    ec2_server: Ec2Server, tmp_path: Path, requires: str, expected: str
):
    told: list[str] = []
    pools = {f"aws {REGION}": ec2_server.pool()}
    machine = f"{AWS}[sites.machine.requires]\n{requires}\n"
    assert chosen(tmp_path, machine, pools, told) == expected
    assert expected in told[0]
    assert "cheapest that meets machine.requires" in told[0]


def test_spot_machines_are_compared_by_their_own_prices(
    ec2_server: Ec2Server, tmp_path: Path
):
    """One without a price of its market is no candidate."""
    pools = {f"aws {REGION}": ec2_server.pool()}
    machine = f'{AWS}market = "spot"\n[sites.machine.requires]\ngpus = 1\n'
    assert chosen(tmp_path, machine, pools, []) == "g5.12xlarge"


def test_a_region_without_such_a_machine_is_named(
    ec2_server: Ec2Server, tmp_path: Path
):
    """With what it has, and why that does not do."""
    pools = {f"aws {REGION}": ec2_server.pool()}
    machine = f"{AWS}[sites.machine.requires]\ngpus = 16\n"
    with pytest.raises(JobError, match="machine of aws in us-east-1") as e:
        chosen(tmp_path, machine, pools, [])
    assert e.value.key == "sites[0].machine.requires"
    assert "p4d.24xlarge has 8 GPUs" in str(e.value)


def test_a_machine_that_runs_keeps_its_type(ec2_server: Ec2Server, tmp_path: Path):
    """Although another would do and costs less: it has the site's keys."""
    pool = ec2_server.pool()
    labels = {"crossfed-deployment": "fed", "crossfed-role": "site-site"}
    pool.launch(
        NodeSpec(
            name="site-site",
            labels=labels,
            max_seconds=600,
            machine="g5.12xlarge",
            zones=ZONES,
            image="/aws/service/ami-amazon-linux-latest/"
            "al2023-ami-kernel-default-x86_64",
        ),
        "token",
    )
    told: list[str] = []
    machine = f"{AWS}[sites.machine.requires]\ngpus = 1\n"
    assert chosen(tmp_path, machine, {f"aws {REGION}": pool}, told) == "g5.12xlarge"
    assert not told


@pytest.mark.parametrize("zone", fake_gce.ZONES)
def test_compute_engine_offers_what_the_zones_of_the_site_have(
    gce_server: FakeGce, tmp_path: Path, zone: str
):
    """Another zone of the region may have it: the data is not there."""
    pools = {f"gcp {fake_gce.PROJECT}": gce_server.pool()}
    machine = (
        f'{GCP}zones = ["{zone}"]\n[sites.machine.requires]\ngpu_memory_gb = 20.0\n'
    )
    if zone == fake_gce.ZONES[0]:
        assert chosen(tmp_path, machine, pools, []) == "g2-standard-4"
        return
    with pytest.raises(JobError, match=f"machine of gcp in {zone}"):
        chosen(tmp_path, machine, pools, [])


def test_a_type_and_requirements_are_one_too_many(tmp_path: Path):
    machine = f'{AWS}type = "g5.xlarge"\n[sites.machine.requires]\ngpus = 1\n'
    with pytest.raises(JobError, match="is stated twice: remove type or requires"):
        plan(tmp_path, machine)


def test_requirements_name_what_is_lacking():
    machine = MachineType(name="m", cpus=4, memory_gb=16.0, zones=["a"])
    wanted = RequiresSpec(gpu="H100", cpus=8, memory_gb=64.0)
    assert wanted.lacking(machine) == ["0 GPUs", "4 CPUs", "16 GB of memory"]
    other = MachineType(
        name="n", gpus=1, gpu="nvidia-h100-80gb", cpus=8, memory_gb=64.0, zones=["a"]
    )
    assert RequiresSpec(gpu="H100").lacking(other) == []
    assert RequiresSpec(gpu="A100").lacking(other) == ["GPU nvidia-h100-80gb"]

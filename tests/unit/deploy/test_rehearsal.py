"""A deployment of clouds on this host: nothing of the clouds is left in it."""

from pathlib import Path

from deploy.fleet import placement, spec
from deploy.fleet.machine_spec import LOCAL
from federation.clock import VirtualClock

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


def load(tmp_path: Path) -> spec.DeploymentPlan:
    path = tmp_path / "fed.toml"
    path.write_text(TEXT)
    return spec.load(path)


def test_no_cloud_bucket_or_home_is_touched(tmp_path: Path):
    """Above all no home: the real keys and ledgers of the site are there."""
    plan = spec.on_this_host(load(tmp_path))
    assert {site.provider for site in plan.file.sites} == {LOCAL}
    assert "s3://" not in repr(plan.file)
    assert "s3://" not in repr((plan.settings, plan.exchange))
    assert plan.file.aggregator.address == ""
    assert (plan.file.max_dollars, plan.file.deadline_hours) == (None, None)
    assert plan.file.start.window == ""
    assert placement.with_types(plan, clock=VirtualClock(0.0), tell=print) == plan


def test_sites_keep_what_they_decide(tmp_path: Path):
    """Policy, ranks and the name of the records; a site of this host, its data."""
    plan = spec.on_this_host(load(tmp_path))
    assert plan.settings == {
        "site-a": {
            "compute": {"ranks": 2},
            "policy": {"privacy": "none"},
            "data": {"name": "patients"},
        },
        "site-b": {"data": {"source": "x:y"}},
    }

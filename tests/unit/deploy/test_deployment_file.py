"""Which machines a federation runs on, and what their operators decide."""

import re
import tomllib
from pathlib import Path

import pytest

from deploy.fleet import plan_prices, spec, spending
from federation.errors import JobError

TEXT = """
name = "fed"
job = "job.toml"

[[sites]]
name = "site-a"
[sites.policy]
privacy = "none"
[sites.data]
source = "x:y"
[sites.compute]
ranks = 2
"""

CLUSTER = """
name = "fed"
job = "job.toml"
max_dollars = 10.0
deadline_hours = 1.0

[[sites]]
name = "site-a"
provider = "kubernetes"
dollars_per_hour = 1.5
[sites.machine]
market = "spot"
cluster = { context = "c", namespace = "n" }
[sites.home]
url = "s3://bucket/home"
encryption = { key = "aws-kms:alias/key" }
"""


def test_a_link_means_the_same_deployment(tmp_path: Path):
    """Job and folder are beside the file, and not beside the link."""
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "fed.toml"
    path.write_text(TEXT)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    plan = spec.load(link)
    assert plan.folder == tmp_path / "here" / "deployments" / "fed"
    assert plan.job == tmp_path / "here" / "job.toml"


def test_a_wrong_job_is_named_by_its_file(tmp_path: Path):
    """The deployment's own keys are of another file."""
    path = tmp_path / "fed.toml"
    path.write_text(TEXT)
    plan = spec.load(path)
    with pytest.raises(JobError, match=r"cannot read .*/job\.toml"):
        spec.load_job(plan)
    plan.job.write_text(TEXT)
    with pytest.raises(JobError, match=r"/job\.toml: job: unknown key"):
        spec.load_job(plan)


def test_a_site_in_a_cluster_costs_what_is_stated(tmp_path: Path):
    """No price table is read for it, not even for a budget; and nothing moves it."""
    path = tmp_path / "fed.toml"
    path.write_text(CLUSTER)
    plan = spec.load(path)
    (site,) = plan.file.sites
    assert site.pool == "kubernetes c/n"
    assert plan_prices.place_of(site) == ("", "")
    a_century_later = 4e9
    prices = spending.budget_prices(plan, now=a_century_later)
    assert prices["site-site-a"] == 1.5
    assert not site.is_movable


def test_terraform_prints_what_the_example_needs():
    """Each key of a machine but its type and market; the page shows the same."""
    folder = Path(__file__).parents[3]
    text = (folder / "deploy/terraform/examples/two-clouds/main.tf").read_text()
    example = (folder / "deploy/examples/two-clouds.toml").read_text()
    page = (folder / "docs/howto/two-clouds.md").read_text()
    (shown,) = (
        block
        for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
        if "[[sites]]" in block
    )
    for site, of_page in zip(
        tomllib.loads(example)["sites"], tomllib.loads(shown)["sites"], strict=True
    ):
        pattern = rf'output "{site["provider"]}_machine" \{{.*?value = \{{(.*?)\n  \}}'
        printed = re.findall(
            r"^    (\w+)", re.findall(pattern, text, re.DOTALL)[0], re.MULTILINE
        )
        assert (
            {*printed, "type", "market"} == {*site["machine"]} == {*of_page["machine"]}
        )
        assert {"subnets", "identity"} <= {*printed}

"""Which machines a federation runs on, and what their operators decide."""

from pathlib import Path

import pytest

from deploy.fleet import deployment_file
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


def test_tables_of_a_site_have_one_order(tmp_path: Path):
    """Or a node would be replaced because a file was written in another."""
    path = tmp_path / "fed.toml"
    path.write_text(TEXT)
    plan = deployment_file.load(path)
    assert list(plan.settings["site-a"]) == ["data", "compute", "policy"]
    assert plan.settings["site-a"]["policy"] == {"privacy": "none"}


def test_a_link_means_the_same_deployment(tmp_path: Path):
    """Job and folder are beside the file, and not beside the link."""
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "fed.toml"
    path.write_text(TEXT)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    plan = deployment_file.load(link)
    assert plan.folder == tmp_path / "here" / "deployments" / "fed"
    assert plan.job == tmp_path / "here" / "job.toml"


def test_paths_are_shown_without_detours(tmp_path: Path):
    """But a folder that is a link stays one: what uses it refuses links."""
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "elsewhere")
    path = tmp_path / "here" / "fed.toml"
    words = 'job = "../job.toml"\nfolder = "../runs"'
    path.write_text(TEXT.replace('job = "job.toml"', words))
    plan = deployment_file.load(path)
    assert plan.folder == tmp_path / "runs"
    assert plan.job == tmp_path / "job.toml"


def test_a_wrong_job_is_named_by_its_file(tmp_path: Path):
    """The deployment's own keys are of another file."""
    path = tmp_path / "fed.toml"
    path.write_text(TEXT)
    plan = deployment_file.load(path)
    with pytest.raises(JobError, match=r"cannot read .*/job\.toml"):
        deployment_file.load_job(plan)
    plan.job.write_text(TEXT)
    with pytest.raises(JobError, match=r"/job\.toml: job: unknown key"):
        deployment_file.load_job(plan)

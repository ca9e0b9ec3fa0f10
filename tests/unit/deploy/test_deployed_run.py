"""What keeps a deployed run from beginning, before a site is asked."""

import os
from pathlib import Path

import pytest
from support.agents import consortium
from support.small_jobs import small_job

from deploy import keys, roster_file
from deploy.deployed_run import DeployedRun, Parties
from deploy.run_folder import RunFolder
from federation.clock import SystemClock
from federation.errors import JobError


def test_aggregator_without_sites_says_how_one_is_invited(tmp_path: Path):
    """What it has is no damaged roster but a draft."""
    made = keys.new(
        "aggregator", random_bytes=os.urandom, out=tmp_path / "aggregator.pem"
    )
    roster = tmp_path / "roster.toml"
    roster_file.trust(roster, site=None, organisation="Office", key=made.public_key)
    expected = f"aggregator invite SITE --config {tmp_path}/aggregator.toml"
    with pytest.raises(JobError, match=f"no site is enrolled yet: .*{expected}"):
        Parties.load(tmp_path)
    roster.write_text("serial = 1")
    with pytest.raises(JobError, match=r"roster\.toml: .*restore it from its copy"):
        Parties.load(tmp_path)


def test_code_of_a_user_cannot_end_the_coordinator(tmp_path: Path):
    """Flower would take it for one that is done, and another would be started."""
    run = RunFolder(tmp_path)
    run.write_job(small_job(model={"factory": "support.users_module:leaves"}))
    parties = consortium("site-0").parties
    with pytest.raises(JobError, match=r"ended the program: SystemExit\(0\)"):
        DeployedRun(run, parties, clock=SystemClock())

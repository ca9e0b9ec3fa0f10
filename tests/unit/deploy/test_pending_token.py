"""The token of a site on this host, between its invitation and its enrolment."""

import os
from pathlib import Path

from deploy.fleet import deployment as fleet, deployment_file
from federation.clock import SystemClock

FILE = """
name = "fed"
job = "job.toml"
[[sites]]
name = "plain"
[[sites]]
name = "boxed"
[sites.machine]
isolation = "container"
image = "localhost/x:1"
"""


def test_a_token_is_never_in_a_folder_of_a_container(tmp_path: Path):
    """Its user owns all files there, and no other process reads them as secrets."""
    path = tmp_path / "fed.toml"
    path.write_text(FILE)
    plan = deployment_file.load(path)
    clock = SystemClock()
    with fleet.opened(plan, random_bytes=os.urandom, clock=clock) as deployment:
        plain, boxed = plan.file.sites
        assert deployment.token(plain) == plan.folder / "sites/plain/token"
        assert deployment.token(boxed) == plan.folder / "tokens/boxed"

"""Where sites on this host meet their aggregator."""

import os
from pathlib import Path

import pytest

from deploy.fleet import deployment as fleet, deployment_file
from deploy.fleet.deployment import is_out_of_reach
from federation.clock import SystemClock
from federation.errors import StoreUnavailable

PLAIN = """
name = "fed"
job = "job.toml"
[[sites]]
name = "plain"
"""


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    path = tmp_path / "fed.toml"
    path.write_text(PLAIN.replace("\n[[sites]]", '\nfolder = "/proc/x"\n[[sites]]'))
    plan = deployment_file.load(path)
    with (
        pytest.raises(StoreUnavailable, match=r"make /proc/x: No such file.*; name a"),
        fleet.opened(plan, random_bytes=os.urandom, clock=SystemClock()),
    ):
        pass


@pytest.mark.parametrize(
    ("host", "meeting", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("203.0.113.7", "127.0.0.1", False),
        # Networks of sites have a route to one place alone.
        ("198.18.0.1", "198.18.0.1", False),
        ("127.0.0.1", "198.18.0.1", True),
        ("203.0.113.7", "198.18.0.1", True),
        ("2001:db8::7", "198.18.0.1", True),
        # It may lead there.
        ("fed.example.org", "198.18.0.1", False),
    ],
)
def test_an_address_that_sites_cannot_reach(host: str, meeting: str, *, expected: bool):
    assert is_out_of_reach(host, meeting) is expected

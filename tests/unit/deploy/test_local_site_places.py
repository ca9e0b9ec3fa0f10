"""Where the files of a deployment on this host are."""

import os
from pathlib import Path

import pytest

from deploy.fleet import spec, state
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
    plan = spec.load(path)
    with (
        pytest.raises(StoreUnavailable, match=r"make /proc/x: No such file.*; name a"),
        state.opened(plan, random_bytes=os.urandom, clock=SystemClock()),
    ):
        pass

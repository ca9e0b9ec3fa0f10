"""A site's own page: for its operator, and no other user of the host."""

import socket
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support import agents

from deploy.site_host import run_status, site_page
from deploy.site_host.config import SiteConfig, SitePageSpec
from deploy.site_host.run import runs_folder
from deploy.site_host.run_status import RunStatus
from federation.clock import SystemClock

HOSTILE = "<script>alert(1)</script>"
RUN = RunStatus(
    run_id="20260101-000000-abcdef",
    job=HOSTILE,
    state="begun",
    rounds=9,
    answered=4,
    last_round=4,
    at=0.0,
    data="own data",
    sent=("its update, readable only in a sum", "the number of steps"),
    epsilon_cap=8.0,
    epsilon=3.25,
)


def _config(folder: Path, port: int) -> SiteConfig:
    config = agents.site_config(folder, "site-a")
    file = replace(config.file, monitor=SitePageSpec(port=port))
    return replace(config, file=file)


@pytest.mark.slow
def test_operator_sees_what_left_the_site(tmp_path: Path) -> None:
    """With the token alone; what a job's owner has named is text."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said: list[str] = []
        config = _config(tmp_path, port)
        # A page is no reason not to take part in runs.
        with site_page.served(config, clock=SystemClock(), listener=said.append):
            assert f"port {port}" in said[0]
    folder = runs_folder(config) / RUN.run_id
    folder.mkdir(parents=True)
    run_status.saver(folder)(RUN)
    with site_page.served(config, clock=SystemClock(), listener=said.append):
        address = site_page.address(config)
        assert httpx.get(address.partition("?")[0]).status_code == 403
        with httpx.Client(follow_redirects=True) as browser:
            page = browser.get(address).text
    assert said[1:] == []
    found = run_status.status(config)
    ends = replace(found, certificate_ends=3600.0)
    for is_up in (True, False):
        text = "\n".join(run_status.lines(replace(ends, is_up=is_up), 0.0))
        assert ("that renews it" in text) == (not is_up)
    for words in (*RUN.sent, "4 of 9 rounds", "3.25 of 8", "end not known"):
        assert words in page, words
    assert HOSTILE not in page
    assert (tmp_path / "page.token").stat().st_mode & 0o777 == 0o600

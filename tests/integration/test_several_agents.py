"""Agents of several sites as forks of one process."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deployment import crossfed, descendants, is_alive, wait_for
from support.forked import shared

from deploy.site_host import several
from federation.clock import SystemClock

pytestmark = pytest.mark.slow

NAMES = ("site-a", "site-b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sites that have not enrolled: their agents end immediately, with a reason."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / several.CONFIG).write_text(f'name = "{name}"\n')
    return tmp_path


@pytest.fixture
def agents(folder: Path) -> Iterator[tuple[int, Path]]:
    """The command for both; its process and its log."""
    log = folder / "log"
    process = shared().start(
        *("site", "up", "--config", str(folder)),
        out=log,
        err=log,
        environment=os.environ,
    )
    yield process.pid, log
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_one_that_fails_is_started_again_and_its_log_says_why(
    folder: Path, agents: tuple[int, Path]
):
    """In its own folder, which no other user can read."""
    _, log = agents
    for name in NAMES:
        wait_for(
            lambda name=name: log.read_text().count(f"{name}: agent started") > 1,
            name,
            60,
        )
        own = folder / name / several.LOG
        assert "aggregator" in own.read_text()
        assert own.stat().st_mode & 0o777 == 0o600


def test_folder_without_sites_is_refused(tmp_path: Path):
    """It may be the wrong one."""
    told = crossfed("site", "up", "--config", str(tmp_path), code=2).stderr
    assert "folder with a site.toml" in told


def test_agents_end_with_their_parent(tmp_path: Path):
    """Whatever ends it: an agent that nobody watches would hold its site."""
    reads, writes = os.pipe()
    parent = os.fork()
    if parent == 0:

        def run(_: Path) -> int:
            os.write(writes, b".")
            signal.pause()
            return 0

        config = tmp_path / several.CONFIG
        several.Agents(run, clock=SystemClock(), listener=lambda _: None).serve(
            [config], threading.Event()
        )
        os._exit(0)
    assert os.read(reads, 1) == b"."
    family = descendants(parent)
    assert len(family) == 1
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(lambda: not any(map(is_alive, family)), "the agent ends", 60)

"""`crossfed up --keep`: a node that dies is replaced; the rest is in the unit tests."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.test_fleet import alive, change_job, deployment_file, nodes
from support.deployment import SITES, wait_for
from support.forked import Forked, shared
from support.programs import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("fleet"),
    needs("nginx"),
]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    yield from deployment_file(tmp_path)


def keep(file: Path) -> tuple[Forked, Path]:
    """A command that watches, and what it writes to standard error."""
    err = file.parent / "kept.log"
    words = ("up", str(file), "--keep", "--json")
    out = file.parent / "kept.json"
    return shared().start(*words, out=out, err=err, environment=os.environ), err


def slow_down(file: Path, steps: int) -> None:
    change_job(file, "local_steps = 20", f"local_steps = {steps}")


def pid_of(file: Path, role: str) -> int:
    (node,) = [n for n in nodes(file) if n["node"] == role and n["state"] != "gone"]
    folder = file.parent / "deployments" / "fed" / "nodes" / node["id"]
    pid: int = json.loads((folder / "started.json").read_text())["pid"]
    return pid


@pytest.mark.long
def test_a_node_that_dies_is_replaced_and_the_run_completes(file: Path):
    """And when it has, nothing is left that bills."""
    slow_down(file, 400)
    change_job(file, "rounds = 1", "rounds = 2")
    kept, err = keep(file)
    role = f"site-{SITES[0]}"
    wait_for(lambda: "is submitted" in err.read_text(), "the run is submitted", 60)
    os.kill(pid_of(file, role), signal.SIGKILL)
    wait_for(lambda: f"{role}: gone; to be replaced" in err.read_text(), "seen", 20)
    assert kept.wait(240) == 0, err.read_text()
    result = json.loads((file.parent / "kept.json").read_text())
    assert (result["status"], result["rounds_completed"]) == ("completed", 2)
    assert err.read_text().count(f"{role}: launched") == 2
    assert alive(file) == []

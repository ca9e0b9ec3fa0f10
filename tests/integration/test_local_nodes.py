"""Nodes of this host: what ends them, and what does not."""

import os
import signal
import sys
from pathlib import Path

import pytest
from support.deployment import descendants, is_alive, wait_for

from cloud_adapters.compute.local import LocalPool
from cloud_adapters.compute.local_files import NodeStarted, read
from cloud_adapters.compute.pool import Node, NodeSpec, NodeState, all_gone
from federation.clock import SystemClock
from federation.errors import ComputeError

pytestmark = pytest.mark.slow
WAITS = "import signal; print('it runs', flush=True); signal.pause()"


def launch(pool: LocalPool, program: str = WAITS, number: str = "one") -> Node:
    spec = NodeSpec(
        name="site-a",
        command=[sys.executable, "-c", program],
        labels={"crossfed-deployment": "x"},
        max_seconds=600.0,
    )
    return pool.launch(spec, number)


@pytest.fixture
def pool(tmp_path: Path):
    made = LocalPool(
        folder=tmp_path / "nodes", working_folder=tmp_path, clock=SystemClock()
    )
    yield made
    made.terminate([node.id for node in made.nodes({})])
    wait_for(lambda: all_gone(made.nodes({})), "all nodes end", 60)


def process_of(pool: LocalPool, node: Node) -> int:
    started = read(pool.folder / node.id, NodeStarted)
    assert started is not None
    return started.pid


def test_a_killed_node_takes_its_program_with_it(pool: LocalPool):
    """And stays gone; the reason is told."""
    node = launch(pool)
    pid = process_of(pool, node)
    wait_for(lambda: "it runs" in pool.log(node.id), "its program runs", 60)
    family = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, family)), "its program ends", 60)
    (found,) = pool.nodes({})
    assert found.state is NodeState.GONE
    assert "killed" in found.trouble
    assert launch(pool).state is NodeState.GONE


def test_a_program_that_ends_is_started_again_and_told_of(pool: LocalPool):
    """As a service manager would; the node itself goes on."""
    node = launch(pool, "import sys; print('once more', flush=True); sys.exit(3)")
    wait_for(lambda: pool.log(node.id).count("once more") > 1, "a second start", 60)
    (found,) = pool.nodes({})
    assert found.state is NodeState.RUNNING
    assert "ended with 3" in found.trouble


def test_a_launch_that_was_killed_half_way_is_completed(pool: LocalPool):
    """The folder is there and nothing works in it: the same token starts it."""
    node = launch(pool)
    place = pool.folder / node.id
    os.kill(process_of(pool, node), signal.SIGKILL)
    wait_for(lambda: all_gone(pool.nodes({})), "it is gone", 60)
    (place / "started.json").unlink()
    (found,) = pool.nodes({})
    assert found.state is NodeState.STARTING
    assert launch(pool).state is NodeState.RUNNING
    assert len(pool.nodes({})) == 1


def test_a_node_that_was_ended_before_it_started_never_starts(pool: LocalPool):
    """Whoever launches it late must not bring it back."""
    node = launch(pool)
    place = pool.folder / node.id
    os.kill(process_of(pool, node), signal.SIGKILL)
    wait_for(lambda: all_gone(pool.nodes({})), "it is gone", 60)
    (place / "started.json").unlink()
    pool.terminate([node.id])
    assert launch(pool).state is NodeState.GONE


def test_damaged_file_of_a_node_that_works_is_named(pool: LocalPool):
    """With what to do. One of a node that is gone keeps nobody from the others."""
    node = launch(pool)
    path = pool.folder / node.id / "node.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(ComputeError, match=r"node\.json is damaged"):
        pool.nodes({})
    path.write_bytes(whole)
    pool.terminate([node.id])
    wait_for(lambda: all_gone(pool.nodes({})), "it ends", 60)
    path.write_bytes(whole[:-3])
    assert pool.nodes({}) == []
    path.write_bytes(whole)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_folder_that_another_user_could_write_to_is_refused(pool: LocalPool):
    """What lies in it is run: it could hold a node of theirs."""
    launch(pool)
    for mode, owner in ((0o777, 0), (0o770, 0), (0o700, 65534)):
        pool.folder.chmod(mode)
        os.chown(pool.folder, owner, -1)
        for use in (lambda: launch(pool), lambda: pool.nodes({})):
            with pytest.raises(ComputeError, match=r"could run|so run") as caught:
                use()
            assert str(pool.folder) in str(caught.value)
    os.chown(pool.folder, 0, -1)
    pool.folder.chmod(0o755)
    assert len(pool.nodes({})) == 1


def test_node_is_small(pool: LocalPool):
    """It only waits: numpy or torch in it would cost each node 30 to 200 MiB."""
    node = launch(pool)
    status = Path(f"/proc/{process_of(pool, node)}/status").read_text()
    (line,) = [each for each in status.splitlines() if each.startswith("VmRSS")]
    assert int(line.split()[1]) < 25 * 1024

"""Nodes of this host: what ends them, and what does not."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from faults import disks
from support.deployment import descendants, is_alive, wait_for
from support.programs import needs

from cloud_adapters.compute.local import LocalPool
from cloud_adapters.compute.local_files import LOCK, NodeStarted, read, write
from cloud_adapters.compute.pool import Node, NodeSpec, NodeState, all_gone
from deploy.cli.terminal import tell
from deploy.fleet.machine_spec import LOCAL
from deploy.fleet.spec import DeploymentFile, DeploymentPlan
from deploy.fleet.state import Deployment
from deploy.fleet.supervisor import RunWatch
from deploy.site_host.data import CANNOT_LOAD
from federation.clock import SystemClock
from federation.errors import ComputeError
from federation.folder_lock import hold

pytestmark = pytest.mark.slow
WAITS = "import signal; print('it runs', flush=True); signal.pause()"
# After SIGUSR2; it ends after SIGUSR1.
READY_WHEN_ASKED = """
import os, signal, socket
def on_term(*_):
    raise SystemExit("it cannot go on")
signal.signal(signal.SIGUSR1, on_term)
print("it runs", flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
signal.sigwait([signal.SIGUSR2])
address = os.environ["NOTIFY_SOCKET"]
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
    line.sendto(b"STATUS=x\\nREADY=1", address)
signal.pause()
"""


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


def signalled(pool: LocalPool, node: Node, number: int) -> None:
    for pid in descendants(process_of(pool, node)):
        os.kill(pid, number)


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


def test_a_node_whose_folder_is_deleted_ends(pool: LocalPool):
    """No command would find it again, nor could it read there that it is to end.

    The folder itself may stay, if the node writes while another removes it.
    """
    node = launch(pool)
    pid = process_of(pool, node)
    wait_for(lambda: "it runs" in pool.log(node.id), "its program runs", 60)
    family = [pid, *descendants(pid)]
    for file in (pool.folder / node.id).iterdir():
        file.unlink()
    wait_for(lambda: not any(map(is_alive, family)), "node and program end", 60)


def test_a_program_that_ends_is_started_again_and_told_of(pool: LocalPool):
    """As a service manager would; the node itself continues."""
    node = launch(pool, "import sys; print('once more', flush=True); sys.exit(3)")
    wait_for(lambda: pool.log(node.id).count("once more") > 1, "a second start", 60)
    (found,) = pool.nodes({})
    assert found.state is NodeState.RUNNING
    assert "ended with 3" in found.trouble


def test_a_node_is_ready_as_soon_as_its_program_says_so(pool: LocalPool):
    """And no longer when that has ended; the reason is its last line."""
    node = launch(pool, READY_WHEN_ASKED)
    wait_for(lambda: "it runs" in pool.log(node.id), "its program runs", 60)
    assert [each.ready for each in pool.nodes({})] == [False]
    signalled(pool, node, signal.SIGUSR2)
    wait_for(lambda: bool(pool.nodes({})[0].ready), "it is ready", 60)
    signalled(pool, node, signal.SIGUSR1)
    wait_for(lambda: not pool.nodes({})[0].ready, "it is not ready", 60)
    assert "it cannot go on" in pool.nodes({})[0].trouble


@needs("root", "mount")
def test_a_full_disk_ends_no_node(tmp_path: Path):
    """What it could not write follows; nor does a full disk keep it from its end."""
    disk = tmp_path / "disk"
    with disks.disks([disk], size=1 << 20):
        pool = LocalPool(
            folder=disk / "nodes", working_folder=tmp_path, clock=SystemClock()
        )
        node = launch(pool, READY_WHEN_ASKED)
        pid = process_of(pool, node)
        pids = {pid}
        try:
            wait_for(lambda: "it runs" in pool.log(node.id), "its program runs", 60)
            pids |= {*descendants(pid)}
            _fill_while_it_works(pool, node, disk)
        finally:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
            # Its program has the log open, and ends a moment after it.
            wait_for(lambda: not any(map(is_alive, pids)), "the disk is free", 60)


def _fill_while_it_works(pool: LocalPool, node: Node, disk: Path) -> None:
    disks.fill(disk)
    signalled(pool, node, signal.SIGUSR2)
    why = "ready.json: No space left"
    wait_for(lambda: why in pool.log(node.id), "it cannot note it", 60)
    assert [each.ready for each in pool.nodes({})] == [False]
    disks.clear(disk)
    wait_for(lambda: bool(pool.nodes({})[0].ready), "it is ready", 60)
    disks.fill(disk)
    signalled(pool, node, signal.SIGUSR1)
    wait_for(lambda: not pool.nodes({})[0].ready, "its program ends", 60)
    assert pool.nodes({})[0].state is NodeState.RUNNING
    pool.terminate([node.id])
    wait_for(lambda: all_gone(pool.nodes({})), "it ends", 60)
    assert pool.nodes({})[0].trouble.endswith("or its disk was full")


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


def test_a_launch_waits_for_another_one_that_is_starting_the_node(pool: LocalPool):
    """The other holds the node's lock while it makes its network."""
    node = launch(pool)
    place = pool.folder / node.id
    os.kill(process_of(pool, node), signal.SIGKILL)
    wait_for(lambda: all_gone(pool.nodes({})), "it is gone", 60)
    (place / "started.json").unlink()

    class OtherStarts(SystemClock):
        def sleep(self, _seconds: float) -> None:
            write(place, NodeStarted(at=self.now(), pid=os.getpid()))

    with hold(place / LOCK, "another launch"):
        late = launch(replace(pool, clock=OtherStarts()))
    assert late.state is NodeState.RUNNING


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
    (found,) = pool.nodes({"any": "label"})
    assert (found.id, found.state) == (node.id, NodeState.RUNNING)
    assert "node.json is damaged" in found.trouble
    path.write_bytes(whole)
    pool.terminate([node.id])
    wait_for(lambda: all_gone(pool.nodes({})), "it ends", 60)
    path.write_bytes(whole[:-3])
    assert pool.nodes({}) == []
    path.write_bytes(whole)


@needs("root")
def test_folder_that_another_user_could_write_to_is_refused(pool: LocalPool):
    """What is in it is run: it could hold a node of theirs."""
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


def test_up_tells_why_a_site_cannot_load_its_data(
    pool: LocalPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Each time that it cannot, once; what an earlier command has told is old."""
    go = tmp_path / "go"
    line = f"{CANNOT_LOAD} a: no such scans"
    program = (
        f"import pathlib, signal, time; print({line!r}, flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
        f"print({line!r}, 'again', sep='\\n', flush=True); signal.pause()"
    )
    node = launch(pool, program)
    wait_for(lambda: line in pool.log(node.id), "its program runs", 60)
    file = DeploymentFile(name="x", job="job.toml", sites=())
    plan = DeploymentPlan(
        file=file,
        path=tmp_path,
        folder=tmp_path,
        job=tmp_path,
        settings={},
        exchange={},
    )
    watch = RunWatch(
        Deployment(plan=plan, pools={LOCAL: pool}, clock=SystemClock(), owner=""), tell
    )
    watch.read_logs()
    assert capsys.readouterr().err == ""
    go.touch()
    wait_for(lambda: "again" in pool.log(node.id), "it fails again", 60)
    for _ in range(2):
        watch.read_logs()
    assert capsys.readouterr().err == f"crossfed: site-a: {line}\n"

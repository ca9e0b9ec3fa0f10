"""Programs that must run: started, started again, and ended with their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cloud_adapters.local.child_process import FIRST_WAIT_SECONDS, Child
from federation.clock import SystemClock, VirtualClock

SLEEP = "/bin/sleep"
# Starts a child of its own, says its number and waits to be killed.
PARENT = """
import sys
from pathlib import Path
from cloud_adapters.local.child_process import Child
from federation.clock import SystemClock
child = Child(
    name="sleep",
    command=["/bin/sleep", "600"],
    environment={},
    logs=Path(sys.argv[1]),
    clock=SystemClock(),
    listener=lambda word: None,
)
child.watch()
print(child.pid, flush=True)
sys.stdin.read()
"""


def _child(logs: Path, *command: str, clock: object = None) -> tuple[Child, list[str]]:
    words: list[str] = []
    made = Child(
        name="program",
        command=command,
        environment={"LANG": "C"},
        logs=logs,
        clock=clock or SystemClock(),  # type: ignore[arg-type]
        listener=words.append,
    )
    return made, words


def _wait(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_it_says_is_in_its_log(tmp_path: Path):
    """Of every start."""
    clock = VirtualClock(0.0)
    child, words = _child(tmp_path, "/bin/echo", "hello", clock=clock)
    for _ in range(2):
        child.watch()
        _wait(lambda: not child.is_up)
        child.watch()
        clock.sleep(10.0)
    assert (tmp_path / "program.log").read_text() == "hello\n" * 2
    assert f"program ended with 0; again in {FIRST_WAIT_SECONDS:g} s" in words[1]
    child.stop()


def test_stop_ends_it(tmp_path: Path):
    child, _ = _child(tmp_path, SLEEP, "600")
    child.watch()
    pid = child.pid
    assert child.is_up
    assert pid is not None
    child.stop()
    assert not _runs(pid)


def test_it_ends_with_its_parent(tmp_path: Path):
    """Also with one that was killed and could end nothing."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        _wait(lambda: b"sleep" in _command(pid).partition(b"\0")[0])
        os.kill(parent.pid, signal.SIGKILL)
    _wait(lambda: not _runs(pid))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _runs(pid: int) -> bool:
    """One that nobody has collected has no command."""
    return bool(_command(pid))

"""What tests start ends with them, also by Ctrl-C and when they are killed."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import fork_root, forked
from support.deployment import wait_for

pytestmark = [pytest.mark.slow]

# As a worker of pytest that waits for a site that it has started.
TESTS = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # If it was ignored here.
sys.path.insert(0, sys.argv[1])
from support import forked
out, err = Path("out"), Path("err")
nothing = ()  # To import, which takes longer than all else.
started = forked.shared(nothing).start(
    call="support.forked:wait_for_a_signal", out=out, err=err, environment=os.environ
)
while not out.stat().st_size:
    time.sleep(0.01)
print(started.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.long),  # It ends as it should.
        signal.SIGKILL,
    ],
)
def test_no_process_outlives_its_tests(number: int, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the group that pytest leads."""
    tests = subprocess.Popen(
        [sys.executable, "-c", TESTS, str(Path(forked.__file__).parents[1])],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    with tests:
        assert tests.stdout is not None
        started = os.pidfd_open(int(tests.stdout.readline()))
        os.killpg(tests.pid, number)
        poll = select.poll()
        poll.register(started, select.POLLIN)
        assert poll.poll(60_000), "it is still there"
        os.close(started)


def test_workers_share_a_root_that_ends_with_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a server of its own, which ends when its orders do, as others do not."""
    root = [sys.executable, "-I", "-c", forked._START_FOR_ALL, str(forked._TESTS), ""]
    waits = [sys.executable, "-I", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as owner:
        monkeypatch.setenv(fork_root.VARIABLE, f"{owner.pid} {tmp_path}")
        servers = [fork_root.connect(root, os.environ) for _ in range(3)]
        for ended, server in enumerate(servers, 1):
            assert server is not None
            orders, answers = server
            assert not select.select([answers], [], [], 0)[0]
            orders.close()
            assert os.read(answers, 1) == b"", f"{ended} of them have ended"
            os.close(answers)
        place = tmp_path / "socket"
        assert is_open(place)
    wait_for(lambda: not is_open(place), "the root's end", 60)


def is_open(place: Path) -> bool:
    """Whether a process listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        try:
            asking.connect(str(place))
        except ConnectionRefusedError:
            return False
    return True

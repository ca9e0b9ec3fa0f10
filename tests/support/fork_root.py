"""One process that has imported what forks need, for all workers of a test run.

Importing it takes nine seconds of a core. Each worker's ``forked.Server`` is a fork of
this process: what a worker starts is still its own, and ends with it.
"""

import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Set by `conftest.py` where there are workers: "PROCESS FOLDER", the process that the
# workers are of and a folder that is for its user alone.
VARIABLE = "TESTS_FORK_ROOT"
_LOCK, _SOCKET = "lock", "socket"


def connect(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[socket.socket, int] | None:
    """Have a server forked for this worker.

    Args:
        command: Starts the process that is forked, which calls ``serve``, if this
            worker is the first to need it.
        environment: For that process.

    Returns:
        The server's socket for orders, and the file that its answers are read from;
        nothing if this is no worker.
    """
    told = os.environ.get(VARIABLE, "")
    if not told:
        return None
    owner, _, folder = told.partition(" ")
    place = Path(folder) / _SOCKET
    with (Path(folder) / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            _start(place, os.pidfd_open(int(owner)), command, environment)
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orders.connect(str(place))
    answers, its = os.pipe()
    socket.send_fds(orders, [b"1"], [its, 2])
    os.close(its)
    return orders, answers


def _start(
    place: Path, owner: int, command: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Start the process; others may connect before it has imported anything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place))
        listener.listen()
        process = subprocess.Popen(  # type: ignore[call-overload]
            [*command, str(owner)],
            env=environment,
            stdin=listener.fileno(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[owner],
        )
    os.close(owner)
    process.returncode = 0  # It outlives this worker, which is not to wait for it.


def serve(needed: Sequence[str], owner: int) -> None:
    """Import, then fork for each worker that connects, until the test run has ended.

    Returns in each fork, whose orders are its standard input and whose answers its
    standard output, as in a server that was started for one worker.
    """
    for name in needed:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel collects the forks.
    listener = socket.socket(fileno=0)
    while owner not in select.select([listener, owner], [], [])[0]:
        connection, _ = listener.accept()
        _, files, _, _ = socket.recv_fds(connection, 1, 2)
        if not files:  # It has gone.
            connection.close()
            continue
        is_fork = os.fork() == 0
        if is_fork:
            os.dup2(connection.fileno(), listener.detach())
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
        connection.close()
        for file in files:
            os.close(file)
        if is_fork:
            os.close(owner)
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return
    os._exit(0)  # To free what was imported would take a second.

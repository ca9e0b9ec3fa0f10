"""A ``crossfed`` for a script's PATH, which forks of the worker's server run.

A real one imports for three seconds before it does anything. This one asks the test to
fork, hands signals on, and ends as the fork does; its output is that of the fork.
"""

import contextlib
import json
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from support.forked import Forked, shared

_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
order = [sys.argv[1:], dict(os.environ), os.getcwd()]
line.sendall(json.dumps(order).encode() + b"\\n")
answers = line.makefile()
pid = int(answers.readline())
for number in numbers:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class _Forks:
    """Starts what the programs ask for."""

    def __init__(self, listener: socket.socket, out: Path) -> None:
        self._listener, self._out = listener, out
        self.started: list[Forked] = []

    def serve(self) -> None:
        """Answer every program in a thread, until the socket is closed."""
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._run, args=(line,), daemon=True).start()

    def _run(self, line: socket.socket) -> None:
        with line, line.makefile("rb") as orders:
            arguments, environment, folder = json.loads(orders.readline())
            fork = shared().start(
                *arguments,
                out=self._out,
                err=self._out,
                environment=environment,
                folder=Path(folder),
            )
            self.started.append(fork)
            with contextlib.suppress(OSError):  # The program has been killed.
                line.sendall(f"{fork.pid}\n".encode())
                line.sendall(f"{fork.wait()}\n".encode())


@contextlib.contextmanager
def forked_program(path: Path, out: Path) -> Iterator[None]:
    """Have the program in a file, and end what it has started.

    Args:
        path: Of the program.
        out: File that the output of its forks is appended to.
    """
    with (
        tempfile.TemporaryDirectory() as name,  # Short: a socket's address must be.
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = f"{name}/forks"
        listener.bind(address)
        listener.listen()
        path.write_text(_PROGRAM.format(python=sys.executable, address=address))
        path.chmod(0o755)
        forks = _Forks(listener, out)
        serving = threading.Thread(target=forks.serve)
        serving.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # This alone wakes ``accept``.
            serving.join()
            for fork in forks.started:
                fork.kill()
                fork.wait(60)

"""What a node of this host is: a process that keeps one program running.

Started by ``cloud_adapters.compute.local`` with a folder, which belongs to the node:

``node.json``: what to run. ``lock``: held as long as the node is. ``started.json``:
when that began. ``stop``: its presence asks the node to end. ``ended.json``: when and
why it did. ``ready.json``: when its program said that it is ready. ``trouble.json``:
when its program last ended by itself. ``program.log``: what the program wrote.

The program is started again whenever it ends, as a service manager would. It ends with
the node, whatever ends that.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cloud_adapters.compute.local_files import (
    LOCK,
    LOG,
    NODE,
    PROGRAM,
    STOP,
    LocalNode,
    NodeEnded,
    NodeReady,
    NodeStarted,
    NodeTrouble,
    read,
    remove,
    tail,
    write,
)
from cloud_adapters.local.child_process import Child
from federation import folder_lock
from federation.clock import SystemClock
from federation.errors import FederationError, StoreUnavailable, os_errors

if TYPE_CHECKING:
    from federation.protocols import Clock


VARIABLE = "NOTIFY_SOCKET"
_NAME, _READY, _MOST_BYTES = "notify", b"READY=1", 4096


class Reports:
    """Receives the reports of one program.

    Attributes:
        address: Where the program sends them.
    """

    def __init__(self, handle: int, line: socket.socket) -> None:
        """Receive from a bound socket in a folder that is open."""
        # Through the folder's handle: names of sockets have at most 108 bytes.
        self.address = f"/proc/{os.getpid()}/fd/{handle}/{_NAME}"
        self._line = line

    def is_ready(self) -> bool:
        """Whether the program has said, since the last look, that it is ready."""
        found = False
        while True:
            try:
                said = self._line.recv(_MOST_BYTES)
            except BlockingIOError:
                return found
            found = found or _READY in said.split(b"\n")


@contextmanager
def received(folder: Path) -> Iterator[Reports]:
    """Receive reports through a socket in a folder that only its owner can enter.

    Raises:
        StoreUnavailable: It cannot be made.
    """
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
    with closing(socket.socket(socket.AF_UNIX, kind)) as line, ExitStack() as stack:
        with os_errors(StoreUnavailable, f"make a socket in {folder}"):
            handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            (folder / _NAME).unlink(missing_ok=True)
            line.bind(f"/proc/self/fd/{handle}/{_NAME}")
        stack.callback((folder / _NAME).unlink, missing_ok=True)
        yield Reports(handle, line)


_LOOK_SECONDS = 0.2
# Begins what the node itself writes to its program's log.
_MARK = "node: "
_MOST_CHARS = 300
# What a site needs to say that it leaves, and an aggregator to stop its programs.
_PATIENCE_SECONDS = 30.0


def serve(
    folder: Path,
    clock: "Clock",
    stopped: threading.Event,
    started: Callable[[], None],
) -> None:
    """Be a node until it is asked to end, its time is over or ``stopped`` is set.

    Args:
        folder: Folder of the node.
        clock: Tells time.
        stopped: Set it to end the node.
        started: Called as soon as the node is one, or was before.

    Raises:
        FederationError: Another process is this node already.
    """
    node = read(folder, LocalNode)
    if node is None:
        raise FederationError(f"{folder} holds no node")

    notes = _Notes(folder)

    def tell(text: str) -> None:
        if child.pid is None:
            said = _last_words(folder)
            # In this order: a node that is no longer ready has left the reason.
            notes.put(NodeTrouble(at=clock.now(), text=f"{text}{said}"))
            notes.drop(NodeReady)
        _log(text)

    with (
        folder_lock.hold(folder / LOCK, f"{folder} is at work"),
        received(folder) as reports,
    ):
        # Only the first start counts: a node that has been killed stays gone.
        if read(folder, NodeStarted) is not None:
            started()
            return
        child = Child(
            name=PROGRAM,
            command=node.command,
            environment={
                **os.environ,
                **dict(node.environment),
                VARIABLE: reports.address,
            },
            logs=folder,
            clock=clock,
            listener=tell,
        )
        write(folder, NodeStarted(at=clock.now(), pid=os.getpid()))
        started()
        try:
            why = _keep_running(child, notes, stopped, node.max_seconds, reports)
        finally:
            child.stop(_PATIENCE_SECONDS)
        write(folder, NodeEnded(at=clock.now(), why=why))


class _Notes:
    """What a node says of its program, for those who look.

    The program works without: on a full disk, a note waits until it can be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._due: dict[type, NodeReady | NodeTrouble] = {}
        self._told = ""

    def put(self, note: NodeReady | NodeTrouble) -> None:
        """Write a note, now or as soon as that is possible."""
        self._due[type(note)] = note
        self.retry()

    def drop(self, kind: type[NodeReady]) -> None:
        """Remove a note of this kind.

        Raises:
            StoreUnavailable: The folder cannot be written.
        """
        self._due.pop(kind, None)
        remove(self.folder, kind)

    def retry(self) -> None:
        """Write what is due."""
        for kind, note in [*self._due.items()]:
            try:
                write(self.folder, note)
            except StoreUnavailable as error:
                if str(error) != self._told:
                    self._told = str(error)
                    _log(f"{error}; tried again until it succeeds")
            else:
                del self._due[kind]


def _log(text: str) -> None:
    """Write a line into the node's log."""
    # On a full disk, the line is kept and written before the next one.
    with contextlib.suppress(OSError):
        print(f"{_MARK}{text}", flush=True)  # noqa: T201


def _last_words(folder: Path) -> str:
    """The last line that the program wrote, to show after its state."""
    lines = tail(folder / LOG).splitlines()
    theirs = [line for line in lines if line.strip() and not line.startswith(_MARK)]
    return f": {theirs[-1].strip()[:_MOST_CHARS]}" if theirs else ""


def _keep_running(
    child: Child,
    notes: _Notes,
    stopped: threading.Event,
    seconds: float,
    reports: Reports,
) -> str:
    """Have the program run; return why no longer, empty if someone has asked.

    Raises:
        FederationError: The node's file was deleted, so that nothing finds it.
    """
    folder = notes.folder
    # Not by the time of day, which may be set forward or back meanwhile.
    deadline = child.clock.monotonic() + seconds
    while not (folder / STOP).exists():
        if child.clock.monotonic() >= deadline:
            return f"its {seconds:g} s were over"
        if stopped.is_set():
            return "a signal ended it"
        if not (folder / NODE).exists():
            raise FederationError(f"{folder} was deleted: the node ends")
        child.watch()
        if reports.is_ready():
            notes.put(NodeReady(at=child.clock.now()))
        notes.retry()
        stopped.wait(_LOOK_SECONDS)
    return ""


def main() -> None:
    """Be the node whose folder is named on the command line, in a process apart.

    The one that was started ends as soon as the node is one, so that nobody has to
    wait for a child that outlives him.
    """
    reads, writes = os.pipe()
    if os.fork():
        os.close(writes)
        os._exit(0 if os.read(reads, 1) else 1)
    os.close(reads)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())

    def started() -> None:
        os.write(writes, b".")
        os.close(writes)

    try:
        serve(Path(sys.argv[1]), SystemClock(), stopped, started)
    except FederationError as error:
        sys.exit(f"node: {error}")


if __name__ == "__main__":
    main()

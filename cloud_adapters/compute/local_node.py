"""What a node of this host is: a process that keeps one program running.

Started by ``cloud_adapters.compute.local`` with a folder, which belongs to the node:

``node.json``: what to run. ``lock``: held as long as the node is. ``started.json``:
when that began. ``stop``: its presence asks the node to end. ``ended.json``: when and
why it did. ``trouble.json``: when its program last ended by itself. ``program.log``:
what the program wrote.

The program is started again whenever it ends, as a service manager would. It ends with
the node, whatever ends that.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cloud_adapters.compute.local_files import (
    LOCK,
    PROGRAM,
    STOP,
    LocalNode,
    NodeEnded,
    NodeStarted,
    NodeTrouble,
    read,
    write,
)
from cloud_adapters.local.child_process import Child
from federation import folder_lock
from federation.clock import SystemClock
from federation.errors import FederationError

if TYPE_CHECKING:  # It brings numpy, and a node is to be small.
    from federation.protocols import Clock

_LOOK_SECONDS = 0.2
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
        folder: Of the node.
        clock: Tells time.
        stopped: Set it to end the node.
        started: Called as soon as the node is one, or was before.

    Raises:
        FederationError: Another process is this node already.
    """
    node = read(folder, LocalNode)
    if node is None:
        raise FederationError(f"{folder} holds no node")

    def tell(text: str) -> None:
        print(f"node: {text}", flush=True)  # noqa: T201 -- into its log
        if child.pid is None:
            write(folder, NodeTrouble(at=clock.now(), text=text))

    child = Child(
        name=PROGRAM,
        command=node.command,
        environment={**os.environ, **dict(node.environment)},
        logs=folder,
        clock=clock,
        listener=tell,
    )
    with folder_lock.hold(folder / LOCK, f"{folder} is at work"):
        # Only the first start counts: a node that has been killed stays gone.
        if read(folder, NodeStarted) is not None:
            started()
            return
        write(folder, NodeStarted(at=clock.now(), pid=os.getpid()))
        started()
        try:
            why = _keep_running(child, folder, stopped, node.max_seconds)
        finally:
            child.stop(_PATIENCE_SECONDS)
        write(folder, NodeEnded(at=clock.now(), why=why))


def _keep_running(
    child: Child, folder: Path, stopped: threading.Event, seconds: float
) -> str:
    """Have the program run; return why no longer, empty if someone has asked."""
    # Not by the time of day, which may be set forward or back meanwhile.
    deadline = child.clock.monotonic() + seconds
    while not (folder / STOP).exists():
        if child.clock.monotonic() >= deadline:
            return f"its {seconds:g} s were over"
        if stopped.is_set():
            return "a signal ended it"
        child.watch()
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

"""What the program of a node of this host reports to its supervisor: that it is ready.

The protocol of systemd's ``sd_notify``, of which only ``READY=1`` counts here.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from federation.errors import StoreUnavailable
from federation.os_errors import os_errors

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

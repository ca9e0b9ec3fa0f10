"""A way to a server on loopback that can be closed, and opened again at its old port.

Closed, it is what clients meet while a server restarts: what was open is reset, and
new connections are refused.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

_CHUNK = 64 * 1024


class Gate:
    """Carries bytes to and fro while it is open.

    Attributes:
        url: What clients connect to.
    """

    def __init__(self, target_url: str) -> None:
        parts = urlsplit(target_url)
        self._target = (parts.hostname, parts.port)
        self._lock = threading.Lock()
        self._sides: set[socket.socket] = set()
        self._workers: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._port = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Let connections in."""
        listener = socket.create_server(("127.0.0.1", self._port), backlog=64)
        self._listener, self._port = listener, listener.getsockname()[1]
        self._begin(self._accept, listener)

    def close(self) -> None:
        """Refuse connections, and reset those that are open."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        # close() alone does not wake the thread that waits in accept().
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        with self._lock:
            sides, self._sides = self._sides, set()
        for side in sides:
            with contextlib.suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                side.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Close, and wait for every thread."""
        self.close()
        for worker in self._workers:
            worker.join(timeout=10)

    def _begin(self, act: object, *arguments: object) -> None:
        worker = threading.Thread(target=act, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._workers.append(worker)
        worker.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sides |= {client, server}
            self._begin(self._serve, client, server)

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=self._carry, args=(server, client), daemon=True)
        back.start()
        with client, server:
            self._carry(client, server)
            back.join()
        with self._lock:
            self._sides -= {client, server}

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK):
                target.sendall(chunk)
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def gate(target_url: str) -> Iterator[Gate]:
    """A gate before a server until the end of the block."""
    made = Gate(target_url)
    try:
        yield made
    finally:
        made.join()

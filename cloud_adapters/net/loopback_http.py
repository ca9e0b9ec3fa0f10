"""A threaded HTTP server, on the loopback by default, and bodies of requests.

Subclasses decide what is served, and to whom.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cloud_adapters.net.ports import LOOPBACK, PortTaken

_LOOK_SECONDS = 0.1

_LOG = logging.getLogger(__name__)


class Server(ThreadingHTTPServer):
    """One thread for each connection."""

    daemon_threads = True

    def __init__(
        self,
        port: int,
        request: type["LoopbackHandler"],
        *,
        advice: str,
        host: str = LOOPBACK,
    ) -> None:
        """Take the port; nothing is answered before ``listening``.

        Args:
            port: Where to listen; 0 for any that is free.
            request: Answers what comes.
            advice: What to do if another process has the port, for the message.
            host: Address of this machine to listen at.

        Raises:
            PortTaken: Another process has it, or there is no such port.
        """
        try:
            super().__init__((host, port), request)
        except (OSError, OverflowError) as error:  # OverflowError: none is so large.
            reason = getattr(error, "strerror", error)
            raise PortTaken(
                f"cannot listen on {host}:{port}: {reason}; {advice}"
            ) from error

    @contextmanager
    def listening(self) -> Iterator[int]:
        """Serve until the end of the context; yields the port."""
        thread = threading.Thread(target=self.serve_forever, args=(_LOOK_SECONDS,))
        thread.start()
        try:
            yield int(self.server_address[1])
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def handle_error(self, *_: object) -> None:
        """Log no traceback if a client closes its connection."""
        _LOG.info("a request was interrupted", exc_info=True)


class LoopbackHandler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    def read_body(self, max_bytes: int) -> bytes | None:
        """Read a request's body.

        Returns:
            None if it was refused or broken off; the connection then ends.
        """
        size = self.body_size(max_bytes)
        if size is None:
            return None
        body = self.rfile.read(size)
        if len(body) < size:
            self.close_connection = True  # It has hung up.
            return None
        return body

    def body_size(self, max_bytes: int) -> int | None:
        """How long a request's body is.

        Returns:
            None if it was refused; the connection then ends.
        """
        text = self.headers.get("Content-Length", "0" if self.command == "GET" else "")
        status = 0
        if not (text.isascii() and text.isdigit()):
            status = 411
        # Digits are counted first: `int` refuses some thousands of them.
        elif len(text) > len(str(max_bytes)) or int(text) > max_bytes:
            status = 413
        if status:
            self.close_connection = True
            self.answer(status)
            return None
        return int(text)

    def answer(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """Write a whole answer."""
        self.write_head(status, len(body), headers or {})
        self.wfile.write(body)

    def write_head(self, status: int, size: int, headers: Mapping[str, str]) -> None:
        """Write the head of an answer whose body has so many bytes."""
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing: callers report failures."""

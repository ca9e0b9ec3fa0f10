"""A small HTTP server on the loopback: health and enrolment, behind the proxy.

It reads a short body, calls a function and writes what that returns. TLS, rates and
who may connect are the proxy's business.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deploy.enrolment import MAX_MESSAGE_BYTES
from deploy.ports import LOOPBACK, PortTaken

MAX_REQUESTS = 32  # at a time; more are closed unanswered, which the proxy reports
REQUEST_SECONDS = 10.0
_LOOK_SECONDS = 0.1

_LOG = logging.getLogger(__name__)

# From a body to a status and a body.
Handler = Callable[[bytes], tuple[int, bytes]]


@contextmanager
def serve(handlers: Mapping[str, Handler], port: int = 0) -> Iterator[int]:
    """Serve on the loopback until the end of the context.

    Args:
        handlers: By method and path, for example ``POST /enroll``; all threads call
            them.
        port: Where; 0 for any that is free.

    Yields:
        The port.

    Raises:
        PortTaken: Another process has it.
    """
    try:
        server = _Server((LOOPBACK, port), _Request)
    except OSError as error:
        raise PortTaken(
            f"cannot listen on {LOOPBACK}:{port}: {error.strerror}; stop what listens "
            "there, or set another service_port in aggregator.toml"
        ) from error
    server.handlers = dict(handlers)
    thread = threading.Thread(
        target=server.serve_forever, args=(_LOOK_SECONDS,), name="enrolment"
    )
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    handlers: dict[str, Handler]

    def __init__(self, address: tuple[str, int], request: type["_Request"]) -> None:
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(address, request)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is nothing to write a traceback about."""
        _LOG.info("a request was broken off", exc_info=True)


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS

    def _answer(self) -> None:
        handler = self.server.handlers.get(f"{self.command} {self.path}")
        if handler is None:
            self._write(404, b"")
            return
        length = self._length()
        if length is None:
            self._write(411, b"")
            return
        if length > MAX_MESSAGE_BYTES:
            self._write(413, b"")
            return
        body = self.rfile.read(length)
        if len(body) < length:
            return  # It has hung up.
        try:
            status, answer = handler(body)
        except Exception:  # noqa: BLE001 -- a request never ends the server
            _LOG.exception("%s failed", self.requestline)
            status, answer = 500, b""
        self._write(status, answer)

    do_GET = do_POST = _answer  # noqa: N815 -- the library's names

    def _length(self) -> int | None:
        text = self.headers.get("Content-Length")
        if text is None:
            return 0 if self.command == "GET" else None
        if not (text.isascii() and text.isdigit()):
            return None
        # Digits are counted first: `int` refuses some thousands of them.
        is_long = len(text) > len(str(MAX_MESSAGE_BYTES))
        return MAX_MESSAGE_BYTES + 1 if is_long else int(text)

    def _write(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        kind = "application/json" if body[:1] == b"{" else "text/plain"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: the proxy has a log."""

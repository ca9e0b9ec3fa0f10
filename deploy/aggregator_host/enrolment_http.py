"""A small HTTP server on the loopback: health and enrolment, behind the proxy.

It reads a short body, calls a function and writes what that returns. TLS, rates and
who may connect are the proxy's business.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cloud_adapters.net import loopback_http
from privacy.membership.messages import MAX_MESSAGE_BYTES

MAX_REQUESTS = 32  # at a time; more are closed unanswered, which the proxy reports
REQUEST_SECONDS = 10.0

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
    with _EnrolmentServer(handlers, port).listening() as found:
        yield found


class _EnrolmentServer(loopback_http.Server):
    def __init__(self, handlers: Mapping[str, Handler], port: int) -> None:
        self.handlers = dict(handlers)
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        advice = (
            "stop what listens there, or set another service_port in aggregator.toml"
        )
        super().__init__(port, _Request, advice=advice)

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


class _Request(loopback_http.LoopbackHandler):
    server: _EnrolmentServer
    timeout = REQUEST_SECONDS

    def _serve(self) -> None:
        handler = self.server.handlers.get(f"{self.command} {self.path}")
        if handler is None:
            self.answer(404)
            return
        body = self.read_body(MAX_MESSAGE_BYTES)
        if body is None:
            return
        try:
            status, answer = handler(body)
        except Exception:  # noqa: BLE001 -- a request never ends the server
            _LOG.exception("%s failed", self.requestline)
            status, answer = 500, b""
        kind = "application/json" if answer[:1] == b"{" else "text/plain"
        headers = {"Content-Type": kind, "Cache-Control": "no-store"}
        self.answer(status, answer, headers)

    do_GET = do_POST = _serve  # noqa: N815 -- the library's names

"""A server on loopback with the manners of Google's services.

``GoogleServer`` has connections, the form of errors, access tokens and a record of
requests; what a service does is a function from ``Request`` to ``Answer``. Bad
networks are made by a proxy before it: ``tcp_proxy``.
"""

import contextlib
import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

_RECORDED_BYTES = 1024  # Of each body.


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks.

    Attributes:
        method: Of HTTP.
        path: Still encoded.
        query: Decoded.
        headers: With lower-case names.
        body: What has arrived of it: it may have been cut.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def is_cut(self) -> bool:
        """Whether the connection ended inside the body."""
        return len(self.body) < int(self.headers.get("content-length", 0))


@dataclass(frozen=True, slots=True)
class Answer:
    """What it is told; Content-Length is added."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class GoogleError(Exception):
    """A refusal, in the form that Google's JSON APIs give it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        """Refuse with a status of HTTP and a reason such as ``conditionNotMet``."""
        super().__init__(message)
        self.status = status
        self.reason = reason

    def answer(self) -> Answer:
        """The refusal as an answer."""
        detail = {"message": str(self), "domain": "global", "reason": self.reason}
        return json_answer(
            {"error": {"code": self.status, "message": str(self), "errors": [detail]}},
            self.status,
        )


def json_answer(body: Mapping[str, Any], status: int = 200) -> Answer:
    """Answer with JSON."""
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    return Answer(status, headers, json.dumps(body).encode())


class GoogleServer:
    """Serves one function over HTTP on a free port of loopback.

    Attributes:
        place: Where a kind of server listens.
        requests: What was asked so far, with the beginnings of bodies.
        tokens: Access tokens, and how many requests each is still good for; None
            lets everybody in.
    """

    place = ("127.0.0.1", 0)

    def __init__(self, service: Callable[[Request], Answer]) -> None:
        """Begin to serve."""
        self.requests: list[Request] = []
        self.tokens: dict[str, int] | None = None
        self._service = service
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._server = _Server(self.place, _Handler)
        self._server.owner = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens, without a slash at the end."""
        return f"http://{self.place[0]}:{self._server.server_port}"

    def __enter__(self) -> Self:
        """Serve for a while."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.close()

    def close(self) -> None:
        """End every connection and the server."""
        self._server.shutdown()
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                # close() would not wake the thread that reads from it.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def methods(self) -> Counter[str]:
        """Count the requests so far by HTTP method."""
        return Counter(request.method for request in self.requests)

    def answer(self, request: Request) -> Answer:
        """Answer one request."""
        with self._lock:
            self.requests.append(replace(request, body=request.body[:_RECORDED_BYTES]))
        try:
            self._authorize(request)
            return self._service(request)
        except GoogleError as error:
            return error.answer()

    def _authorize(self, request: Request) -> None:
        # The URL of an upload session and a signed one are permissions by themselves.
        if self.tokens is None or {"upload_id", "X-Goog-Signature"} & set(
            request.query
        ):
            return
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        with self._lock:
            if self.tokens.get(token, 0) <= 0:
                raise GoogleError(401, "authError", "Invalid Credentials")
            self.tokens[token] -= 1

    def opened(self, connection: socket.socket) -> None:
        """Take note of a connection."""
        with self._lock:
            self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        """Forget a connection."""
        with self._lock:
            self._connections.discard(connection)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: GoogleServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away: tests make them do so."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True
    wbufsize = -1  # Head and body leave together.
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.owner.opened(self.connection)

    def finish(self) -> None:
        super().finish()
        self.server.owner.closed(self.connection)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (theirs)
        """Say nothing."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        request = Request(
            self.command,
            parts.path,
            dict(parse_qsl(parts.query, keep_blank_values=True)),
            {name.lower(): value for name, value in self.headers.items()},
            self._body(),
        )
        answer = self.server.owner.answer(request)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

    def _body(self) -> bytes:
        left = int(self.headers.get("Content-Length", 0))
        pieces = []
        # read(n) would lose what came before a reset.
        with contextlib.suppress(OSError):
            while left and (piece := self.rfile.read1(min(left, 1 << 20))):
                pieces.append(piece)
                left -= len(piece)
        return b"".join(pieces)

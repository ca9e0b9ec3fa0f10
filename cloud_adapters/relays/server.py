"""The relay's end of the line: HTTPS with certificates on both sides.

A site shows the certificate that its enrolment gave it, and is who that names::

    POST /next          200 and a question, or 204 if there is none for a while
    POST /alive         204: the site is at work on its question
    POST /answer/NAME   204, or 409 if the question NAME is not open
"""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

from cloud_adapters.net import loopback_http
from cloud_adapters.relays.desk import RelayDesk, RelayQuestion
from federation.errors import JobError
from federation.ids import SiteId

NEXT, ALIVE, ANSWER = "/next", "/alive", "/answer/"
KIND, SECONDS, NAME = "Crossfed-Kind", "Crossfed-Seconds", "Crossfed-Question"
# How long a request for a question waits: a site that is to end waits for it, too.
WAIT_SECONDS = 2.0
_CALL_SECONDS = 60.0
_HANDSHAKE_SECONDS = 10.0


def server_context(authority: bytes) -> ssl.SSLContext:
    """Make a context that takes only sites of one authority; it has no certificate yet.

    Raises:
        JobError: The authority's file holds no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise JobError(
            f"the file holds no certificate: {error}; restore it, or enrol the relay "
            "again",
            key="aggregator.authority",
        ) from error
    return context


class CloudServer(loopback_http.Server):
    """Serves the sites of a desk."""

    def __init__(
        self,
        desk: RelayDesk,
        context: ssl.SSLContext,
        *,
        host: str,
        port: int,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Take the port; see ``loopback_http.Server``.

        Args:
            desk: What sites are asked.
            context: Of TLS, with a certificate.
            host: Address of this machine to listen at.
            port: Where to listen; 0 for any that is free.
            wait_seconds: How long a site's request waits for a question.
        """
        self.desk, self._context, self.wait_seconds = desk, context, wait_seconds
        self._reading: dict[SiteId, socket.socket] = {}
        self._lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        advice = "stop what listens there, or change serve.listen in site.toml"
        super().__init__(port, _CloudRequests, advice=advice, host=host)

    @contextlib.contextmanager
    def reading(self, site: SiteId, connection: socket.socket) -> Iterator[None]:
        """Hold one answer of a site in memory: a newer connection ends the older."""
        with self._lock:
            earlier = self._reading.get(site)
            self._reading[site] = connection
        if earlier is not None:
            with contextlib.suppress(OSError):
                # Not that of the TLS layer, which another thread is using.
                socket.socket.shutdown(earlier, socket.SHUT_RDWR)
        try:
            yield
        finally:
            with self._lock:
                if self._reading.get(site) is connection:
                    del self._reading[site]

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake in the connection's thread, so nothing else waits."""
        request.settimeout(_HANDSHAKE_SECONDS)
        with self._context.wrap_socket(request, server_side=True) as secured:
            secured.settimeout(_CALL_SECONDS)
            super().finish_request(secured, client_address)


class _CloudRequests(loopback_http.LoopbackHandler):
    """The requests of one site."""

    server: CloudServer
    connection: ssl.SSLSocket
    protocol_version = "HTTP/1.1"
    timeout = _CALL_SECONDS

    def do_POST(self) -> None:  # noqa: N802 -- the library's name
        """Answer one request."""
        site = _name_in(self.connection.getpeercert())
        if site not in self.server.desk.sites:
            self.close_connection = True
            self.answer(403)
        elif self.path.startswith(ANSWER):
            self._take(site, self.path.removeprefix(ANSWER))
        elif self.read_body(0) is None:
            return
        elif self.path == NEXT:
            self._give(
                self.server.desk.next(site, wait_seconds=self.server.wait_seconds)
            )
        elif self.path == ALIVE:
            self.server.desk.hear(site)
            self.answer(204)
        else:
            self.answer(404)

    def _give(self, question: RelayQuestion | None) -> None:
        if question is None:
            self.answer(204)
            return
        about = {
            NAME: question.name,
            KIND: question.kind.value,
            SECONDS: repr(question.seconds),
        }
        self.answer(200, question.body, about)

    def _take(self, site: SiteId, name: str) -> None:
        limit = self.server.desk.limit(site, name)
        if limit is None:
            self.close_connection = True  # The answer may be large: it is not read.
            self.answer(409)
            return
        with self.server.reading(site, self.connection):
            body = self.read_body(limit)
        if body is not None:
            self.answer(204 if self.server.desk.answer(site, name, body) else 409)


def _name_in(certificate: Any) -> SiteId:
    """The common name of a verified certificate; empty if it has none."""
    parts = (part for group in certificate["subject"] for part in group)
    return SiteId(next((text for key, text in parts if key == "commonName"), ""))

"""The relay's end of the line: HTTPS with certificates on both sides.

A site shows the certificate that its enrolment gave it, and is who that names::

    POST /next          200 and a question, or 204 if there is none for a while
    POST /alive         204: the site is at work on its question
    POST /answer/NAME   204, 409 if the question NAME is not open, 507 without room
"""

import contextlib
import io
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cloud_adapters.net import loopback_http
from cloud_adapters.net.bodies import cut, take_body
from cloud_adapters.relays.task_queue import RelayQuestion, TaskQueue
from federation.errors import JobError, ProtocolError
from federation.ids import SiteId
from federation.protocols import Clock


class TimedSocket(io.RawIOBase):
    """The bytes of a connection, as far as they come in time.

    ``idle`` waits for a request, whose head then has its own time from the first byte
    on; ``allow`` gives a time to what follows.
    """

    def __init__(
        self,
        connection: socket.socket,
        clock: Clock,
        *,
        idle_seconds: float,
        head_seconds: float,
    ) -> None:
        """Wait for a request.

        Args:
            connection: Read from and written to by nothing else.
            clock: Measures.
            idle_seconds: How long a read may wait.
            head_seconds: How long the head of a request may take.
        """
        self._connection, self._clock = connection, clock
        self._idle, self._head = idle_seconds, head_seconds
        self._end: float | None = None

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there, or wait for it.

        Raises:
            TimeoutError: The time is over.
        """
        self._arm()
        count = self._connection.recv_into(buffer)
        if self._end is None:
            self.allow(self._head)
        return count

    def idle(self) -> None:
        """Wait for a request."""
        self._end = None

    def allow(self, seconds: float) -> None:
        """Give what is read and written from now on so much time together."""
        self._end = self._clock.monotonic() + seconds

    def send(self, piece: memoryview) -> None:
        """Write all of a piece.

        Raises:
            TimeoutError: The time is over.
        """
        self._arm()
        self._connection.sendall(piece)

    def _arm(self) -> None:
        seconds = self._idle
        if self._end is not None:
            seconds = min(seconds, self._end - self._clock.monotonic())
        if seconds <= 0:
            raise TimeoutError("the time of the request is over")
        self._connection.settimeout(seconds)


NEXT, ALIVE, ANSWER = "/next", "/alive", "/answer/"
KIND, SECONDS, NAME = "Crossfed-Kind", "Crossfed-Seconds", "Crossfed-Question"
# How long a request for a question waits: a site that is to end waits for it, too.
WAIT_SECONDS = 2.0

_WORD_SECONDS = 60.0  # Strangers cause one line of the log in so long.

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """What one connection may take, and how many there may be.

    Attributes:
        wait_seconds: How long a request for a question waits.
        handshake_seconds: How long a connection may take to show its certificate.
        max_strangers: Connections that have shown none yet.
        max_connections: Those of one site; it needs two.
        idle_seconds: How long nothing may come, within a request and between two.
        head_seconds: How long the head of a request may take.
        slowest_bytes: How many bytes of a body must pass in a second.
    """

    wait_seconds: float = WAIT_SECONDS
    handshake_seconds: float = 10.0
    max_strangers: int = 64
    max_connections: int = 6
    idle_seconds: float = 60.0
    head_seconds: float = 10.0
    slowest_bytes: int = 1 << 16

    def body_seconds(self, size: int) -> float:
        """How long a body of so many bytes may take."""
        return self.idle_seconds + size / self.slowest_bytes


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
    """Serves the sites of a queue.

    Connections are bounded: those that have shown no certificate yet by their number
    and time, those of a site by their number, where a new one ends the oldest. A site,
    or a stranger, can so take no place from another site.
    """

    def __init__(
        self,
        queue: TaskQueue,
        context: ssl.SSLContext,
        *,
        host: str,
        port: int,
        clock: Clock,
        scratch: Path | None = None,
        limits: LineLimits = LineLimits(),
    ) -> None:
        """Take the port; see ``loopback_http.Server``.

        Args:
            queue: What sites are asked.
            context: TLS context, with a certificate.
            host: Address of this machine to listen at.
            port: Where to listen; 0 for any that is free.
            clock: Measures how long requests take.
            scratch: Folder for long answers, on a disk with room for those of all
                sites; None to hold them in memory.
            limits: Limits of time and connections.
        """
        self.queue, self.limits, self.clock = queue, limits, clock
        self.scratch, self._context = scratch, context
        self._strangers = threading.BoundedSemaphore(limits.max_strangers)
        self._open: dict[SiteId, list[socket.socket]] = {}
        self._reading: dict[SiteId, socket.socket] = {}
        self._lock = threading.Lock()
        self._refused, self._next_word = 0, 0.0
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
            _end(earlier)
        try:
            yield
        finally:
            with self._lock:
                if self._reading.get(site) is connection:
                    del self._reading[site]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a new connection a thread, unless too many are without a certificate."""
        if not self._strangers.acquire(blocking=False):
            self._note_refused(client_address)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # There is no thread for it.
            self._strangers.release()
            raise

    def _note_refused(self, client_address: Any) -> None:
        """Log refused connections, at most once in a while; one thread accepts all."""
        self._refused += 1
        if self.clock.monotonic() < self._next_word:
            return
        _LOG.warning(
            "%d connections without a certificate are refused, the last one from %s: "
            "there are too many",
            self._refused,
            client_address,
        )
        self._refused, self._next_word = 0, self.clock.monotonic() + _WORD_SECONDS

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake in the connection's thread, so nothing else waits."""
        try:
            request.settimeout(self.limits.handshake_seconds)
            secured = self._context.wrap_socket(request, server_side=True)
        finally:
            self._strangers.release()
        with secured, self._counted(_name_in(secured.getpeercert()), secured):
            super().finish_request(secured, client_address)

    @contextlib.contextmanager
    def _counted(self, site: SiteId, connection: socket.socket) -> Iterator[None]:
        """Count a site's connection; end its oldest if there are too many.

        All that have a certificate but are not served count together.
        """
        whose = site if site in self.queue.sites else SiteId("")
        with self._lock:
            mine = self._open.setdefault(whose, [])
            mine.append(connection)
            oldest = mine.pop(0) if len(mine) > self.limits.max_connections else None
        if oldest is not None:
            _end(oldest)
        try:
            yield
        finally:
            with self._lock:
                if connection in mine:
                    mine.remove(connection)


class _CloudRequests(loopback_http.LoopbackHandler):
    """The requests of one site."""

    server: CloudServer
    connection: ssl.SSLSocket
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """Read and write within the time of a request."""
        super().setup()
        self.rfile.close()
        limits = self.server.limits
        self._timed = TimedSocket(
            self.connection,
            self.server.clock,
            idle_seconds=limits.idle_seconds,
            head_seconds=limits.head_seconds,
        )
        self.rfile = io.BufferedReader(self._timed)

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        self._timed.idle()
        super().handle_one_request()

    def do_POST(self) -> None:  # noqa: N802 -- the library's name
        """Answer one request."""
        site = _name_in(self.connection.getpeercert())
        if site not in self.server.queue.sites:
            self.close_connection = True
            self.answer(403)
        elif self.path.startswith(ANSWER):
            self._take(site, self.path.removeprefix(ANSWER))
        elif self.read_body(0) is None:
            return
        elif self.path == NEXT:
            seconds = self.server.limits.wait_seconds
            self._give(site, self.server.queue.next(site, wait_seconds=seconds))
        elif self.path == ALIVE:
            self.server.queue.hear(site)
            self.answer(204)
        else:
            self.answer(404)

    def _give(self, site: SiteId, question: RelayQuestion | None) -> None:
        if question is None:
            self.answer(204)
            return
        about = {
            NAME: question.name,
            KIND: question.kind.value,
            SECONDS: repr(question.seconds),
        }
        size = sum(memoryview(piece).nbytes for piece in question.pieces)
        self._timed.allow(self.server.limits.body_seconds(size))
        self.write_head(200, size, about)
        for piece in cut(question.pieces):
            self._timed.send(piece)
            self.server.queue.hear(site)  # It does not send word while it reads.

    def _take(self, site: SiteId, name: str) -> None:
        limit = self.server.queue.limit(site, name)
        if limit is None:
            self.close_connection = True  # The answer may be large: it is not read.
            self.answer(409)
            return
        with self.server.reading(site, self.connection):
            size = self.body_size(limit)
            if size is None:
                return
            self._timed.allow(self.server.limits.body_seconds(size))
            try:
                body = take_body(partial(self._read, site), size, self.server.scratch)
            except ProtocolError as error:  # There is no room for it.
                _LOG.warning("an answer of site %s is refused: %s", site, error)
                self.close_connection = True
                self.answer(507)
                return
        if body is None:
            self.close_connection = True  # It has hung up.
            return
        self.answer(204 if self.server.queue.answer(site, name, body) else 409)

    def _read(self, site: SiteId, count: int) -> bytes:
        """Read what has come of an answer; it shows that the site is there."""
        found = self.rfile.read1(count)
        self.server.queue.hear(site)
        return found


def _end(connection: socket.socket) -> None:
    """End a connection that another thread is using."""
    with contextlib.suppress(OSError):
        # Not that of the TLS layer.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _name_in(certificate: Any) -> SiteId:
    """The common name of a verified certificate; empty if it has none."""
    parts = (part for group in certificate["subject"] for part in group)
    return SiteId(next((text for key, text in parts if key == "commonName"), ""))

"""The site's end of the line: it asks its relay for questions, and answers them.

See ``server`` for the requests. A lost connection is made again; a question that was
answered before gets the same answer once more.
"""

import http.client
import logging
import math
import random
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cloud_adapters.net.bodies import SMALL_BYTES, cut, take_body
from cloud_adapters.net.tls import client_context, clock_doubt
from cloud_adapters.relays.server import ALIVE, ANSWER, KIND, NAME, NEXT, SECONDS
from cloud_adapters.relays.task_queue import QuestionKind
from federation.addresses import parse_address
from federation.errors import (
    FederationError,
    ProtocolError,
    SiteError,
    outside_of,
)
from federation.protocols import Buffer

ALIVE_SECONDS = 3.0
# More than the relay waits before it reports that there is no question.
CALL_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 5.0
# Of a question; a proposal has at most a megabyte, and a task a model.
MAX_QUESTION_BYTES = 1 << 37
MAX_ANSWER_SECONDS = 1e9

_LOG = logging.getLogger(__name__)
_OK, _NOTHING, _FORBIDDEN, _CLOSED = 200, 204, 403, 409
_COMPARE = (
    "compare relay.address and relay.authority with what the relay's operator says"
)
_NAME = re.compile(r"[0-9a-f]{64}")

Uniform = Callable[[float, float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """What a site answers a relay.

    Attributes:
        body: The answer.
        lasts: Whether the same question would get the same answer.
    """

    body: bytes
    lasts: bool


@dataclass(kw_only=True)
class RelayedNode:
    """A site that reaches the aggregator through a relay.

    Attributes:
        introduce: Answers a sealed proposal; a ``ProtocolError`` if it is forged.
        answer: Answers the frame of a task within a time.
        address: ``HOST:PORT`` of the relay.
        authority: PEM of the only authority that may speak for it.
        certificate: File with the site's certificate and its key, read for every
            connection.
        stopped: Set it to end ``run``.
        last: Set it to end ``run`` after the question that is at work.
        listener: Called with a word about every change of the connection.
        is_replaced: Whether another process may have this site's place.
        uniform: Draws the waits between attempts.
        scratch: Folder for a question that is long; None to hold it in memory.
        heard: Called when the relay has answered: every few seconds.
    """

    introduce: Callable[[bytes], bytes]
    answer: Callable[[Buffer, float], GivenAnswer]
    address: str
    authority: bytes
    certificate: Path | None
    stopped: threading.Event = field(default_factory=threading.Event)
    last: threading.Event = field(default_factory=threading.Event)
    listener: Callable[[str], None] = _LOG.info
    is_replaced: Callable[[], bool] = lambda: False
    uniform: Uniform = random.SystemRandom().uniform
    scratch: Path | None = None
    heard: Callable[[], None] = lambda: None
    _given: tuple[str, bytes] = field(default=("", b""), init=False, repr=False)

    def run(self) -> None:
        """Serve until the site is to end; connect again whenever the line is lost.

        Raises:
            SiteError: There is no use in continuing: the relay's certificate is not
                from the pinned authority, or the relay does not serve this site.
            JobError: A file that TLS needs holds no certificate.
        """
        attempt = 0
        while not self._ends():
            try:
                with self._line() as line:
                    self.listener(f"connected to relay {self.address}")
                    attempt = 0
                    self._serve(line)
            except (OSError, http.client.HTTPException, ProtocolError) as error:
                text = str(error) or type(error).__name__
                if isinstance(error, ssl.SSLCertVerificationError):
                    text = clock_doubt(error)
                    if not text:
                        raise _stranger(self.address, error) from error
                attempt += 1
                longest = min(LONGEST_PAUSE_SECONDS, 0.5 * 2.0 ** min(attempt, 8))
                seconds = self.uniform(0.2, longest)
                self.listener(
                    f"relay {self.address} cannot be reached: {text}; trying again in "
                    f"{seconds:.1f} s"
                )
                self.stopped.wait(seconds)

    def leave(self) -> None:
        """Do nothing: the relay notices when a site is silent."""

    def _ends(self) -> bool:
        return self.stopped.is_set() or self.last.is_set() or self.is_replaced()

    def _line(self) -> AbstractContextManager[http.client.HTTPSConnection]:
        return _connected(self.address, self.authority, self.certificate)

    def _serve(self, line: http.client.HTTPSConnection) -> None:
        while not self._ends():
            status, about, body = _request(
                line, NEXT, limit=MAX_QUESTION_BYTES, scratch=self.scratch
            )
            self.heard()
            if status == _NOTHING:
                continue
            if status != _OK:
                raise ProtocolError(f"HTTP {status}")
            name, answer = self._work(about, body)
            del body  # A model, which is no longer needed.
            status, _, _ = _request(line, ANSWER + name, answer)
            if status not in {_NOTHING, _CLOSED}:
                raise ProtocolError(f"HTTP {status} for an answer")

    def _work(self, about: Mapping[str, str], body: Buffer) -> tuple[str, bytes]:
        """Answer a question; with nothing if it is malformed, forged or fails.

        Raises:
            ProtocolError: It has no name by which it could be answered.
        """
        name = about.get(NAME, "")
        if _NAME.fullmatch(name) is None:  # It becomes part of an address.
            raise ProtocolError(f"a question whose name is {name!a:.80}")
        if name == self._given[0]:
            return self._given
        try:
            with self._alive():
                answer = self._answer(about, body)
        except ProtocolError as error:
            self.listener(f"a question of the relay is refused: {error}")
            return name, b""
        except Exception as error:  # noqa: BLE001 -- a question never ends the site
            # Its text may quote a record, and stays in the site's log.
            _LOG.warning("a question of the relay failed", exc_info=error)
            self.listener(f"a question of the relay failed: {outside_of(error)}")
            return name, b""
        if answer.lasts:
            self._given = name, answer.body
        return name, answer.body

    def _answer(self, about: Mapping[str, str], body: Buffer) -> GivenAnswer:
        kind = about.get(KIND)
        if kind == QuestionKind.INTRODUCE:
            return GivenAnswer(body=self.introduce(bytes(body)), lasts=False)
        if kind != QuestionKind.TASK:
            raise ProtocolError(f"it is about {kind!r:.40}")
        return self.answer(body, _seconds(about.get(SECONDS, "")))

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Send word in a block, over a line of its own."""
        ended = threading.Event()
        thread = threading.Thread(target=self._send_word, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def _send_word(self, ended: threading.Event) -> None:
        while not ended.wait(ALIVE_SECONDS):
            try:
                with self._line() as line:
                    while not ended.is_set():
                        _request(line, ALIVE)
                        self.heard()
                        ended.wait(ALIVE_SECONDS)
            except (OSError, http.client.HTTPException, FederationError) as error:
                _LOG.info("no word to the relay: %s", error)


def knock(address: str, authority: bytes, certificate: Path | None) -> None:
    """Ask a relay whether it serves a site; arguments as for ``RelayedNode``.

    Raises:
        SiteError: It does not, cannot be reached, or is another machine.
        JobError: A file that TLS needs holds no certificate.
    """
    try:
        with _connected(address, authority, certificate) as line:
            _request(line, ALIVE)
    except ssl.SSLCertVerificationError as error:
        raise _stranger(address, error) from error
    except (OSError, http.client.HTTPException, ProtocolError) as error:
        text = str(error) or type(error).__name__
        raise SiteError(f"{address} cannot be reached: {text}") from error


@contextmanager
def _connected(
    address: str, authority: bytes, certificate: Path | None
) -> Iterator[http.client.HTTPSConnection]:
    host, port = parse_address(address, key="relay.address")
    context = client_context(authority, certificate, key="relay.authority")
    line = http.client.HTTPSConnection(
        host, port, timeout=CALL_SECONDS, context=context
    )
    try:
        line.connect()
        yield line
    finally:
        line.close()


def _stranger(address: str, error: ssl.SSLCertVerificationError) -> SiteError:
    return SiteError(
        f"{address} does not prove that it is the relay: "
        + (clock_doubt(error) or f"{error.verify_message}; {_COMPARE}")
    )


def _request(
    line: http.client.HTTPSConnection,
    path: str,
    body: bytes = b"",
    *,
    limit: int = SMALL_BYTES,
    scratch: Path | None = None,
) -> tuple[int, Mapping[str, str], Buffer]:
    """Send one request, and read at most so many bytes: only questions are long."""
    length = {"Content-Length": str(len(body))}
    line.request("POST", path, cut([body]) if body else b"", length if body else {})
    answer = line.getresponse()
    if (answer.length or 0) > limit:
        raise ProtocolError(f"an answer of {answer.length} bytes")
    content = take_body(answer.read1, answer.length or 0, scratch)
    answer.close()  # It is not by itself when the last piece has been read.
    if content is None:
        raise ProtocolError("an answer that is not whole")
    if answer.status == _FORBIDDEN:
        raise SiteError(
            "the relay does not serve this site: add its name to serve.sites in the "
            "relay's site.toml"
        )
    return answer.status, dict(answer.getheaders()), content


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < MAX_ANSWER_SECONDS:
        raise ProtocolError(f"it gives {text!r:.40} seconds for the answer")
    return seconds

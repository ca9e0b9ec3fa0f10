"""A site's node in a Flower federation: one long-lived process.

Flower's own SuperNode starts a process for every message and polls every three
seconds, so that nothing stays warm and no key can be kept (6.6 to 22 s a round). This
node is one process: it activates itself, sends heartbeats, takes messages and answers
them, over the same Fleet API. It runs what is installed here and never a bundle that
it is sent: it does not even fetch them. It works on one message at a time, and tells
meanwhile what becomes of it (``redelivery``).

It, ``flower_connection``, ``flower_envelope``, ``flower_fleet`` and ``flower_runtime``
know Flower's private modules;
``tests/contract/test_flower_node.py`` holds them against a real SuperLink.
"""

import contextlib
import logging
import math
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from cloud_adapters.flower import site as flower_site
from cloud_adapters.flower.connection import Connection
from cloud_adapters.flower.envelope import Envelope
from cloud_adapters.flower.fleet import (
    HEARTBEAT_SECONDS,
    MAX_TURN_SECONDS,
    PASSING,
    FleetCalls,
    KeyInUse,
    NodeGone,
    Uniform,
)
from cloud_adapters.flower.private.http import ProtobufCall, ProtobufRequestContext
from cloud_adapters.flower.private.messages import ErrorCode, Node, TaskIdentity
from cloud_adapters.flower.private.node import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    FleetHttpClient,
    NodeAuthHttpInterceptor,
    RuntimeVersionMetadata,
    SendNodeHeartbeatRequest,
    add_headers,
    public_key_to_bytes,
)
from cloud_adapters.net.tls import client_context
from cloud_adapters.transport.redelivery import Inbox, is_given_up
from federation.errors import (
    FederationError,
    JobError,
    ProtocolError,
    SiteError,
    outside_of,
)
from federation.messages import TaskKind
from federation.protocols import Clock

# We send them more often, so that the aggregator can tell sooner.
BEAT_EVERY_SECONDS = 3.0
# From one look for a message to the next, at the least: our SuperLink holds a look back
# until there is one.
POLL_SECONDS = 0.1
# While it works, for it is asked what became of the task.
BUSY_POLL_SECONDS = 1.0
STOP_POLL_SECONDS = 0.2
# Envelopes that wait for the site to be free; more stay with Flower.
MAX_WAITING = 16
AFTER_DROP_SECONDS = 1.0
CALL_SECONDS = 30.0
LEAVE_SECONDS = 1.0
# Flower loses the answer of a node that has gone before the aggregator looked for it,
# which it does ten times a second.
TAKEN_SECONDS = 0.5
# The same of a node that has time to end: a busy aggregator looks later.
LAST_TAKEN_SECONDS = 5.0
# How long a connection is kept for the next request: less than our proxy keeps it
# (75 s), and less than firewalls remember one.
KEPT_SECONDS = 60.0

_LOG = logging.getLogger(__name__)

# Of messages that an app answers; Flower raises what is no error of ours for others.
_KINDS = frozenset(kind.value for kind in TaskKind) | {"query"}


@dataclass(kw_only=True)
class FlowerNode:
    """A node that runs a ``ClientApp`` in this process, one message at a time.

    Attributes:
        app: Answers messages.
        address: ``HOST:PORT`` of the aggregator.
        root_certificates: PEM of the only authorities that may speak for it; None
            for a connection without TLS, which only a loopback should have.
        key: The node's own, on the curve P-384: it is how Flower knows the node.
        certificate: File with the certificate that the aggregator's proxy asks for,
            and its key; None for none. It is read anew for every connection, so that
            a renewed one is taken up.
        clock: Tells time.
        stopped: Set it to end ``run``.
        last: Set it to end ``run`` after the message that is at work.
        listener: Called with a word about every change of the connection.
        is_replaced: Whether another process may have this node's key and place. This
            one then takes no message, and ends without leaving: Flower would count the
            other as gone until its next heartbeat.
        uniform: Draws the waits between attempts.
        max_runs: Of how many runs the last answer is kept.
        heard: Called when the aggregator has answered: every few seconds.
        node_id: Flower's number for it, once it is active.
    """

    app: ClientApp
    address: str
    root_certificates: bytes | None
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    clock: Clock
    certificate: Path | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    last: threading.Event = field(default_factory=threading.Event)
    listener: Callable[[str], None] = _LOG.info
    is_replaced: Callable[[], bool] = lambda: False
    uniform: Uniform = random.SystemRandom().uniform
    max_runs: int = 1
    heard: Callable[[], None] = lambda: None
    node_id: int | None = None
    _calls: FleetCalls = field(init=False, repr=False)
    _inbox: Inbox[RecordDict] = field(init=False, repr=False)
    _free: threading.Event = field(default_factory=threading.Event, init=False)
    _sent_at: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        """Make what the requests share."""
        self._free.set()
        self._inbox = Inbox(self.max_runs)
        self._calls = FleetCalls(
            address=self.address,
            clock=self.clock,
            stopped=self.stopped,
            listener=self.listener,
            uniform=self.uniform,
        )

    def run(self) -> None:
        """Serve until the node is to end; reconnect whenever the connection is lost.

        Raises:
            SiteError: There is no use in continuing: the aggregator's certificate is
                not from the pinned authority, it does not know this node's key, or
                it runs another version of Flower.
            JobError: A file that TLS needs holds no certificate.
        """
        attempt = 0
        while not self._ends():
            with self._client() as client:
                try:
                    self._activate(client)
                    attempt = 0
                    self._serve(client)
                except NodeGone as error:
                    attempt += 1
                    most = MAX_TURN_SECONDS if isinstance(error, KeyInUse) else math.inf
                    self._calls.pause(error, attempt, most=most)

    def _ends(self) -> bool:
        return self.stopped.is_set() or self.last.is_set()

    def leave(self) -> None:
        """Deactivate this node; from any thread, and within a short time.

        Or the same key would be refused until the last heartbeat is old.
        """
        if self.node_id is None or self.is_replaced():
            return
        request = DeactivateNodeRequest(node_id=self.node_id)
        # A connection of its own: another thread may wait for an answer on the others.
        with (
            contextlib.suppress(httpx.HTTPError, JobError),
            self._client(LEAVE_SECONDS) as client,
        ):
            client.DeactivateNode(request)

    def _client(self, seconds: float = CALL_SECONDS) -> FleetHttpClient:
        tls = None
        if self.root_certificates is not None:
            tls = client_context(self.root_certificates, self.certificate)
        client = FleetHttpClient(
            f"{'http' if tls is None else 'https'}://{self.address}",
            interceptors=[
                _Version(),
                NodeAuthHttpInterceptor(self.key, self.key.public_key()),
            ],
            verify=tls or False,
            timeout=seconds,
        )
        # Its own forgets connections after 5 s, and to make one with TLS takes two
        # round trips more than to ask.
        client._client = httpx.Client(  # noqa: SLF001 -- there is no other way in
            verify=tls or False,
            timeout=seconds,
            limits=httpx.Limits(keepalive_expiry=KEPT_SECONDS),
        )
        return client

    def _activate(self, client: FleetHttpClient) -> None:
        self._calls.begin()
        public_key = public_key_to_bytes(self.key.public_key())
        answer = self._calls.call(
            lambda: client.ActivateNode(
                ActivateNodeRequest(
                    public_key=public_key, heartbeat_interval=HEARTBEAT_SECONDS
                )
            )
        )
        self._calls.succeed()
        self.node_id = answer.node_id
        TaskIdentity.node_id = answer.node_id
        TaskIdentity.task_id = 0
        self.listener(f"connected to {self.address} as node {answer.node_id}")

    def _serve(self, client: FleetHttpClient) -> None:
        node = Node(node_id=self.node_id or 0)
        connection = Connection(client=client, node=node, calls=self._calls)
        letters: queue.Queue[Envelope | Exception] = queue.Queue()
        ended, lost = threading.Event(), threading.Event()
        threads = [
            threading.Thread(
                target=self._beat, args=(client, node, ended, lost), name="heartbeat"
            ),
            threading.Thread(
                target=self._collect, args=(connection, letters, ended), name="collect"
            ),
        ]
        for thread in threads:
            thread.start()
        try:
            while not self._ends():
                if lost.is_set():
                    raise NodeGone(
                        "the aggregator no longer counts this node as active"
                    )
                try:
                    letter = letters.get(timeout=STOP_POLL_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(letter, Exception):
                    raise letter
                self._take_or_drop(connection, letter)
            self._await_taken(letters)
            self.leave()
        finally:
            ended.set()
            for thread in threads:
                thread.join()
            self._forget(letters)

    def _await_taken(self, letters: "queue.Queue[Envelope | Exception]") -> None:
        """Give the aggregator time to take the last answer, or until a new task."""
        while letters.empty() and self._left_of(LAST_TAKEN_SECONDS) > 0:
            if self.stopped.wait(STOP_POLL_SECONDS):
                break
        self.clock.sleep(self._left_of(TAKEN_SECONDS))

    def _left_of(self, seconds: float) -> float:
        """What is left of a time after the last answer."""
        return max(0.0, self._sent_at + seconds - self.clock.monotonic())

    def _beat(
        self,
        client: FleetHttpClient,
        node: Node,
        ended: threading.Event,
        lost: threading.Event,
    ) -> None:
        request = SendNodeHeartbeatRequest(
            node=node, heartbeat_interval=HEARTBEAT_SECONDS
        )
        while not ended.wait(BEAT_EVERY_SECONDS):
            try:
                counted = client.SendNodeHeartbeat(request).success
            except httpx.TransportError:
                continue  # The next one may arrive; the main thread sees it too.
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in PASSING:
                    lost.set()
            else:
                # The main thread may be at work on one message for hours.
                self._calls.hear()
                self.heard()
                if not counted:
                    lost.set()

    def _collect(
        self,
        connection: Connection,
        letters: queue.Queue[Envelope | Exception],
        ended: threading.Event,
    ) -> None:
        """Receive envelopes, also while the main thread works on a message."""
        while not ended.is_set():
            begin = self.clock.monotonic()
            was_free, came = self._free.is_set(), False
            try:
                is_free = letters.qsize() < MAX_WAITING and not self.is_replaced()
                if is_free:
                    came = self._sort(connection, letters)
            except (NodeGone, SiteError) as error:
                if self._free.is_set():
                    letters.put(error)
                    return
                # A node at work keeps sending heartbeats, and an outage may pass.
            except Exception as error:  # noqa: BLE001 -- of many kinds, none ours
                self._drop(error)
            if was_free or not came:  # Else a newer task may be behind that one.
                self._free.wait(BUSY_POLL_SECONDS)  # Until the main thread is free.
            looked = self.clock.monotonic() - begin
            ended.wait(max(0.0, POLL_SECONDS - looked))

    def _sort(
        self, connection: Connection, letters: queue.Queue[Envelope | Exception]
    ) -> bool:
        """Receive one envelope, if there is one, and return whether it has to wait.

        What is replied to immediately is not confirmed: Flower would forget its
        content, which may still be on its way there, and its sender would fail.
        """
        envelope = connection.next()
        if envelope is None:
            return False
        reply = flower_site.reply_at_once(envelope.about, self._inbox)
        if reply is None:
            self._free.clear()  # Nothing is looked for while the site begins.
            given_up = _take_given_up(letters, envelope)
            letters.put(envelope)
            for each in given_up:
                self._skip(connection, each)
        else:
            # A request for the state of a question reads what is whole, and a word in
            # pieces would keep the next task waiting for three round trips.
            is_word = flower_site.read_word(reply.content) is not None
            connection.send(reply, 0.0, whole=is_word)
        return reply is None

    def _skip(self, connection: Connection, envelope: Envelope) -> None:
        """Answer a task that the aggregator has given up, without any work on it.

        Or each of its looks would ask for this answer, too.
        """
        error = Error(
            code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
            reason="skipped: a newer task had come, and this one was given up",
        )
        reply = Message(error, reply_to=envelope.about)
        connection.send(reply, 0.0, whole=envelope.is_whole)
        connection.confirm(envelope)

    def _forget(self, letters: queue.Queue[Envelope | Exception]) -> None:
        """Drop messages not started; the aggregator probes and resends them."""
        self._free.set()
        with contextlib.suppress(queue.Empty):
            while True:
                letter = letters.get_nowait()
                if isinstance(letter, Envelope):
                    self._inbox.forget(letter.name)

    def _drop(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        self.listener(f"a message was dropped: {text}")
        self.stopped.wait(AFTER_DROP_SECONDS)

    def _take_or_drop(self, connection: Connection, envelope: Envelope) -> None:
        """Answer one message; no error in it ends the node."""
        self._free.clear()
        try:
            try:
                self._take(connection, envelope)
            finally:
                self._free.set()
            # The next is fetched meanwhile: a round trip may take long.
            connection.confirm(envelope)
        except (NodeGone, SiteError):
            raise
        except Exception as error:  # noqa: BLE001 -- errors of many kinds, none ours
            self._drop(error)

    def _take(self, connection: Connection, envelope: Envelope) -> None:
        """Answer one message, and keep the answer, which may be lost in transit."""
        try:
            message = connection.open(envelope)
        except BaseException:
            self._inbox.forget(envelope.name)
            raise
        TaskIdentity.run_id = message.metadata.run_id
        begin = self.clock.monotonic()
        reply = self._answer(message)
        del message  # Its model need not be in memory beside the answer's.
        try:
            seconds = self.clock.monotonic() - begin
            connection.send(reply, seconds, whole=envelope.is_whole)
            self._sent_at = self.clock.monotonic()
        finally:
            if envelope.name and reply.has_content():
                run = reply.metadata.run_id
                self._inbox.keep(envelope.name, reply.content, run)

    def _answer(self, message: Message) -> Message:
        """Let the app answer; an error becomes the answer of a failed node."""
        context = Context(
            run_id=TaskIdentity.run_id,
            node_id=TaskIdentity.node_id,
            node_config={},
            state=RecordDict(),
            run_config={},
        )
        try:
            kind = message.metadata.message_type
            if kind not in _KINDS:
                raise ProtocolError(f"unknown message kind {kind!r:.40}")  # noqa: TRY301
            return self.app(message, context)
        except Exception as error:  # noqa: BLE001 -- a message never ends the node
            # What is raised on purpose is worded for both sides; anything else may
            # quote the site's data and stays in its log.
            known = isinstance(error, FederationError)
            _LOG.warning(
                "a message was refused: %s", error, exc_info=None if known else error
            )
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            reason = outside_of(error)[:500]
            return Message(Error(code=code, reason=reason), reply_to=message)


def _take_given_up(
    letters: "queue.Queue[Envelope | Exception]", newer: Envelope
) -> list[Envelope]:
    """Take waiting tasks out that the aggregator had given up before a newer one."""
    waiting: list[Envelope | Exception] = []
    with contextlib.suppress(queue.Empty):
        while True:
            waiting.append(letters.get_nowait())
    run, found = newer.about.metadata.run_id, list[Envelope]()
    for letter in waiting:
        if (
            isinstance(letter, Envelope)
            and letter.about.metadata.run_id == run
            and is_given_up(letter.name, newer.name)
        ):
            found.append(letter)
        else:
            letters.put(letter)
    return found


class _Version:
    """Sends the version of Flower, and ignores the answer's."""

    def __init__(self) -> None:
        self._headers = dict(
            RuntimeVersionMetadata.from_local_component("SuperNode").as_metadata()
        )

    def intercept(
        self, context: ProtobufRequestContext, call_next: ProtobufCall
    ) -> httpx.Response:
        """Add the headers."""
        add_headers(context.request, self._headers)
        return call_next(context)

"""A site's place in a Flower federation: one process that stays.

Flower's own SuperNode starts a process for every message and polls every three
seconds, so that nothing stays warm and no key can be kept (6.6 to 22 s a round). This
node is one process: it activates itself, sends heartbeats, takes messages and answers
them, over the same Fleet API. It runs what is installed here and never a bundle that
it is sent: it does not even fetch them.

The one file that knows Flower's private modules; ``tests/contract/test_flower_node.py``
holds it against a real SuperLink.
"""

import contextlib
import logging
import math
import random
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors.http.utils import add_headers
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from federation.errors import FederationError, SiteError
from federation.protocols import Clock

# The least that a SuperLink accepts; it counts a node as gone after two of these.
HEARTBEAT_SECONDS = 10.0
# We send them more often, so that the aggregator can tell sooner.
BEAT_EVERY_SECONDS = 3.0
POLL_SECONDS = 0.1
# A node that was heard of this recently is still counted as active: it goes on where
# it was, and does not activate itself again, which would be refused.
ACTIVE_SECONDS = 2 * HEARTBEAT_SECONDS
# After so long without a message, and then so far apart.
IDLE_AFTER_SECONDS = 60.0
IDLE_POLL_SECONDS = 0.5
MAX_WAIT_SECONDS = 30.0
NOT_YET_SECONDS = 4.0
# Between attempts to take the place of a node with the same key, and how long to try:
# Flower refuses a key that it does not know with the same words.
MAX_TURN_SECONDS = 4.0
TURN_SECONDS = 3 * ACTIVE_SECONDS
AFTER_DROP_SECONDS = 1.0
CALL_SECONDS = 30.0

_LOG = logging.getLogger(__name__)

# What a proxy or a server that is being restarted says.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_UNAUTHORIZED = 401
_NOT_ACTIVATED = 2004  # ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
_NOT_ACTIVATED = 2004  # ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
_FORBIDDEN = 403  # Said by our proxy alone.
_RAISED = 2  # ErrorCode.CLIENT_APP_RAISED_EXCEPTION

Uniform = Callable[[float, float], float]
Answer = TypeVar("Answer")


class _Lost(Exception):
    """The connection is gone, or the node is no longer active."""


class _NotYet(_Lost):
    """The aggregator does not let the node in, for now."""


class _Passing(_Lost):
    """The aggregator or the way to it is down, perhaps for a moment."""


class _Taken(_Lost):
    """Another node is active under this key, or one that died is still counted."""


class _Dropped(Exception):
    """A message cannot be answered; the next one can."""


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
        listener: Called with a word about every change of the connection.
        uniform: Draws the waits between attempts.
        node_id: Flower's number for it, once it is active.
    """

    app: ClientApp
    address: str
    root_certificates: bytes | None
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    clock: Clock
    certificate: Path | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    listener: Callable[[str], None] = _LOG.info
    uniform: Uniform = random.SystemRandom().uniform
    node_id: int | None = None
    _is_active: bool = field(default=False, init=False)
    _heard: float = field(default=-math.inf, init=False)
    _refused_since: float | None = field(default=None, init=False)

    def run(self) -> None:
        """Serve until ``stopped`` is set; connect again whenever the way is lost.

        Raises:
            SiteError: There is no use in going on: the aggregator's certificate is
                not from the pinned authority, it does not know this node's key, or
                it runs another version of Flower.
        """
        attempt = 0
        while not self.stopped.is_set():
            with self._client() as client:
                try:
                    self._activate(client)
                    attempt = 0
                    self._serve(client)
                except _Lost as error:
                    attempt += 1
                    most = MAX_TURN_SECONDS if isinstance(error, _Taken) else math.inf
                    self._pause(error, attempt, most=most)

    def _client(self) -> FleetHttpClient:
        scheme, verify = "http", False
        context: ssl.SSLContext | bool = verify
        if self.root_certificates is not None:
            scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(cadata=self.root_certificates.decode("ascii"))
            self._show_certificate(context)
        return FleetHttpClient(
            f"{scheme}://{self.address}",
            interceptors=[
                _Version(),
                NodeAuthHttpInterceptor(self.key, self.key.public_key()),
            ],
            verify=context,
            timeout=CALL_SECONDS,
        )

    def _show_certificate(self, context: ssl.SSLContext) -> None:
        if self.certificate is None:
            return
        try:
            context.load_cert_chain(self.certificate)
        except OSError as error:  # An SSLError is one, too.
            raise SiteError(
                f"{self.certificate} holds no certificate with its key: "
                f"{error.strerror or error}; restore it, or enrol the site again"
            ) from error

    def _pause(self, error: _Lost, attempt: int, *, most: float = math.inf) -> None:
        """Full jitter, as in ``cloud_adapters.storage.retry``, and at least a bit."""
        longest = min(MAX_WAIT_SECONDS, most, 0.5 * 2.0 ** min(attempt, 16))
        seconds = self.uniform(0.2, longest)
        self.listener(f"{error}; trying again in {seconds:.1f} s")
        self.stopped.wait(seconds)

    def _activate(self, client: FleetHttpClient) -> None:
        self._is_active, self._heard = False, -math.inf
        public_key = _public_bytes(self.key)
        answer = self._call(
            lambda: client.ActivateNode(
                ActivateNodeRequest(
                    public_key=public_key, heartbeat_interval=HEARTBEAT_SECONDS
                )
            )
        )
        self.node_id, self._is_active = answer.node_id, True
        self._refused_since = None
        TaskIdentity.node_id = answer.node_id
        TaskIdentity.task_id = 0
        self.listener(f"connected to {self.address} as node {answer.node_id}")

    def _serve(self, client: FleetHttpClient) -> None:
        node = Node(node_id=self.node_id or 0)
        ended, lost = threading.Event(), threading.Event()
        beats = threading.Thread(
            target=self._beat, args=(client, node, ended, lost), name="heartbeat"
        )
        beats.start()
        try:
            last = self.clock.monotonic()
            while not self.stopped.is_set():
                if lost.is_set():
                    raise _Lost("the aggregator no longer counts this node as active")
                if self._take_or_drop(client, node):
                    last = self.clock.monotonic()
                    continue
                idle = self.clock.monotonic() - last > IDLE_AFTER_SECONDS
                self.stopped.wait(IDLE_POLL_SECONDS if idle else POLL_SECONDS)
            with contextlib.suppress(_Lost, SiteError):
                # Or the same key would be refused until the last heartbeat is old.
                self._call(
                    lambda: client.DeactivateNode(
                        DeactivateNodeRequest(node_id=node.node_id)
                    )
                )
        finally:
            ended.set()
            beats.join()

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
                if not client.SendNodeHeartbeat(request).success:
                    lost.set()
            except httpx.TransportError:
                continue  # The next one may arrive; the main thread sees it too.
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in _PASSING:
                    lost.set()

    def _take_or_drop(self, client: FleetHttpClient, node: Node) -> bool:
        """Take one message; whatever Flower makes of it, the node lives on."""
        try:
            return self._take(client, node)
        except (_Lost, SiteError):
            raise
        except Exception as error:  # noqa: BLE001 -- errors of many kinds, none ours
            text = str(error) or type(error).__name__
            self.listener(f"a message was dropped: {text}")
            self.stopped.wait(AFTER_DROP_SECONDS)
            return False

    def _take(self, client: FleetHttpClient, node: Node) -> bool:
        """Take one message and answer it; say whether there was one."""
        message = self._receive(client, node)
        if message is None:
            return False
        TaskIdentity.run_id = message.metadata.run_id
        begin = self.clock.monotonic()
        reply = self._answer(message)
        del message  # Its model need not lie beside the answer's.
        self._send(client, node, reply, self.clock.monotonic() - begin)
        return True

    def _receive(self, client: FleetHttpClient, node: Node) -> Message | None:
        """Take one message, if there is one; its pieces are not kept beside it."""
        found = self._call(lambda: client.PullMessages(PullMessagesRequest(node=node)))
        if not found.messages_list:
            return None
        about = message_from_proto(found.messages_list[0])
        tree = found.message_object_trees[0]
        run_id = about.metadata.run_id
        contents = self._call(
            lambda: pull_objects(
                [part.object_id for part in iterate_object_tree(tree)],
                pull_object_fn=make_pull_object_fn_protobuf(
                    client.PullObject, node, run_id
                ),
            )
        )
        confirm = make_confirm_message_received_fn_protobuf(
            client.ConfirmMessageReceived, node, run_id
        )
        self._call(lambda: confirm(tree.object_id))
        with no_object_id_recompute():
            message = inflate_object_from_contents(tree.object_id, contents)
        if not isinstance(message, Message):
            raise _Dropped("the aggregator sent something that is no message")
        message.metadata.__dict__["_message_id"] = about.metadata.message_id
        return message

    def _answer(self, message: Message) -> Message:
        """Have the app answer; an error becomes the answer of a failed node."""
        context = Context(
            run_id=TaskIdentity.run_id,
            node_id=TaskIdentity.node_id,
            node_config={},
            state=RecordDict(),
            run_config={},
        )
        try:
            return self.app(message, context)
        except Exception as error:  # noqa: BLE001 -- a message never ends the node
            # What is raised on purpose is worded for both sides; anything else may
            # quote the site's data and stays in its log.
            known = isinstance(error, FederationError)
            _LOG.warning(
                "a message was refused: %s", error, exc_info=None if known else error
            )
            text = type(error).__name__ + (f": {error}" if known else "")
            return Message(Error(code=_RAISED, reason=text[:500]), reply_to=message)

    def _send(
        self, client: FleetHttpClient, node: Node, reply: Message, seconds: float
    ) -> None:
        run_id = reply.metadata.run_id
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            tree = get_object_tree(reply)
        envelope = remove_content_from_message(reply) if reply.has_content() else reply
        request = PushMessagesRequest(
            node=node,
            messages_list=[message_to_proto(envelope)],
            message_object_trees=[tree],
            clientapp_runtime_list=[seconds],
        )
        taken = self._call(lambda: client.PushMessages(request))
        push = make_push_object_fn_protobuf(
            client.PushObject, node, run_id, taken.session_id
        )
        self._call(
            lambda: push_objects(
                objects,
                push_object_fn=push,
                object_ids_to_push=set(taken.objects_to_push),
            )
        )

    def _call(self, request: Callable[[], Answer]) -> Answer:
        """Make a request, again while the aggregator still counts this node.

        Raises:
            SiteError: There is no use in going on.
            _Lost: The node must activate itself anew.
            _Dropped: The aggregator does not want this, and never will.
        """
        attempt = 0
        while True:
            try:
                answer = request()
            except httpx.TransportError as error:
                problem = self._unreachable(error)
            except httpx.HTTPStatusError as error:
                problem = self._refused(error.response)
            else:
                self._heard = self.clock.monotonic()
                return answer
            attempt += 1
            age = self.clock.monotonic() - self._heard
            over = age > ACTIVE_SECONDS or self.stopped.is_set()
            if over or not isinstance(problem, _Passing):
                raise problem
            self._pause(problem, attempt, most=MAX_TURN_SECONDS)

    def _unreachable(self, error: httpx.TransportError) -> Exception:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return SiteError(
                    f"{self.address} does not prove that it is the aggregator: "
                    f"{cause.verify_message}; compare its address and the certificate "
                    "authority with those that the aggregator's operator gave you"
                )
            cause = cause.__cause__ or cause.__context__
        return _Passing(f"{self.address} cannot be reached: {error}")

    def _refused(self, response: httpx.Response) -> Exception:
        flower = FlowerError.from_json(response.text)
        what = f"HTTP {response.status_code}"
        if flower is not None:
            what += f", Flower error {flower.code}: {flower.message}"
        if response.status_code in _PASSING:
            return _Passing(f"{self.address} refuses: {what}")
        if flower is not None and flower.code == _NOT_ACTIVATED:
            return self._not_activated()
        # Flower's own 403 is about a run, which was stopped perhaps.
        by_proxy = response.status_code == _FORBIDDEN and flower is None
        denied = by_proxy or response.status_code == _UNAUTHORIZED
        if self._is_active and not denied:
            return _Dropped(f"{self.address} refuses: {what}")
        if self._is_active or not denied:
            return _Lost(f"{self.address} refuses: {what}")
        if by_proxy:
            return SiteError(
                f"{self.address} does not let this site in: its certificate is "
                "missing, expired or revoked; ask the aggregator's operator for an "
                "invitation, and enrol the site again"
            )
        return SiteError(
            f"{self.address} does not know this site's key ({what}): enrol the "
            "site, or ask the aggregator's operator whether it was revoked"
        )

    def _not_activated(self) -> Exception:
        now = self.clock.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        if now - self._refused_since < TURN_SECONDS:
            return _Taken(
                f"{self.address} counts another node with this site's key as active, "
                f"or does not know it; a node that died is forgotten after "
                f"{ACTIVE_SECONDS:g} s"
            )
        return SiteError(
            f"{self.address} does not activate this site's key: stop the other agent "
            "that uses it; or enrol the site, or ask the aggregator's operator whether "
            "it was revoked"
        )


class _Version:
    """Says which version of Flower speaks, and goes on whatever is answered."""

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


def _public_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    from flwr.supercore.primitives.asymmetric import (  # noqa: PLC0415
        public_key_to_bytes,
    )

    return public_key_to_bytes(key.public_key())

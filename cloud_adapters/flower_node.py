"""A site's place in a Flower federation: one process that stays.

Flower's own SuperNode starts a process for every message and polls every three
seconds, so that nothing stays warm and no key can be kept (6.6 to 22 s a round). This
node is one process: it activates itself, sends heartbeats, takes messages and answers
them, over the same Fleet API. It runs what is installed here and never a bundle that
it is sent: it does not even fetch them.

It and ``flower_fleet`` know Flower's private modules;
``tests/contract/test_flower_node.py`` holds both against a real SuperLink.
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

from cloud_adapters.flower_fleet import (
    HEARTBEAT_SECONDS,
    MAX_TURN_SECONDS,
    PASSING,
    Dropped,
    FleetCalls,
    Lost,
    Taken,
    Uniform,
)
from federation.errors import FederationError, SiteError
from federation.protocols import Clock

# We send them more often, so that the aggregator can tell sooner.
BEAT_EVERY_SECONDS = 3.0
POLL_SECONDS = 0.1
# After so long without a message, and then so far apart.
IDLE_AFTER_SECONDS = 60.0
IDLE_POLL_SECONDS = 0.5
AFTER_DROP_SECONDS = 1.0
CALL_SECONDS = 30.0

_LOG = logging.getLogger(__name__)

_RAISED = 2  # ErrorCode.CLIENT_APP_RAISED_EXCEPTION


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
    _calls: FleetCalls = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make what the requests share."""
        self._calls = FleetCalls(
            address=self.address,
            clock=self.clock,
            stopped=self.stopped,
            listener=self.listener,
            uniform=self.uniform,
        )

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
                except Lost as error:
                    attempt += 1
                    most = MAX_TURN_SECONDS if isinstance(error, Taken) else math.inf
                    self._calls.pause(error, attempt, most=most)

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

    def _activate(self, client: FleetHttpClient) -> None:
        self._calls.begin()
        public_key = _public_bytes(self.key)
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
        ended, lost = threading.Event(), threading.Event()
        beats = threading.Thread(
            target=self._beat, args=(client, node, ended, lost), name="heartbeat"
        )
        beats.start()
        try:
            last = self.clock.monotonic()
            while not self.stopped.is_set():
                if lost.is_set():
                    raise Lost("the aggregator no longer counts this node as active")
                if self._take_or_drop(client, node):
                    last = self.clock.monotonic()
                    continue
                idle = self.clock.monotonic() - last > IDLE_AFTER_SECONDS
                self.stopped.wait(IDLE_POLL_SECONDS if idle else POLL_SECONDS)
            with contextlib.suppress(Lost, Dropped, SiteError):
                # Or the same key would be refused until the last heartbeat is old.
                self._calls.call(
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
                counted = client.SendNodeHeartbeat(request).success
            except httpx.TransportError:
                continue  # The next one may arrive; the main thread sees it too.
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in PASSING:
                    lost.set()
            else:
                # The main thread may be at work on one message for hours.
                self._calls.hear()
                if not counted:
                    lost.set()

    def _take_or_drop(self, client: FleetHttpClient, node: Node) -> bool:
        """Take one message; whatever Flower makes of it, the node lives on."""
        try:
            return self._take(client, node)
        except (Lost, SiteError):
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
        found = self._calls.call(
            lambda: client.PullMessages(PullMessagesRequest(node=node))
        )
        if not found.messages_list:
            return None
        about = message_from_proto(found.messages_list[0])
        tree = found.message_object_trees[0]
        run_id = about.metadata.run_id
        contents = self._calls.call(
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
        self._calls.call(lambda: confirm(tree.object_id))
        with no_object_id_recompute():
            message = inflate_object_from_contents(tree.object_id, contents)
        if not isinstance(message, Message):
            raise Dropped("the aggregator sent something that is no message")
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
        taken = self._calls.call(lambda: client.PushMessages(request))
        push = make_push_object_fn_protobuf(
            client.PushObject, node, run_id, taken.session_id
        )
        # Each is tried again by itself: what has been pushed is no longer here.
        push_objects(
            objects,
            push_object_fn=lambda name, content: self._calls.call(
                lambda: push(name, content)
            ),
            object_ids_to_push=set(taken.objects_to_push),
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

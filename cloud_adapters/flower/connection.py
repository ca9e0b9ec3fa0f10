"""A node's messages, taken from Flower's Fleet API and answered over it.

A message comes in two parts: an envelope, which a SuperLink hands out once, and a
content in pieces, which it keeps until their arrival is confirmed.
"""

from dataclasses import dataclass

from flwr.app import Message

from cloud_adapters.flower import envelope as flower_envelope
from cloud_adapters.flower.envelope import Envelope
from cloud_adapters.flower.fleet import FleetCalls
from cloud_adapters.flower.private.messages import (
    KEEPS_CONTENT,
    Node,
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
    pull_objects,
    push_objects,
)
from cloud_adapters.flower.private.node import (
    FleetHttpClient,
    PullMessagesRequest,
    PushMessagesRequest,
)

# Between looks for a piece that the aggregator is about to push.
FETCH_SECONDS, MAX_FETCH_SECONDS = 0.05, 1.0


@dataclass(frozen=True, kw_only=True)
class Connection:
    """An active node's way to its messages; several threads may use it.

    Attributes:
        client: Makes requests.
        node: The node, as Flower's protocol has it.
        calls: Makes them again where that is of use.
    """

    client: FleetHttpClient
    node: Node
    calls: FleetCalls

    def next(self) -> Envelope | None:
        """Take the next envelope, if there is one.

        Raises:
            NodeGone, Unanswerable, SiteError: See ``FleetCalls.call``.
        """
        request = PullMessagesRequest(node=self.node)
        found = self.calls.call(lambda: self.client.PullMessages(request))
        if not found.messages_list:
            return None
        envelope = Envelope.of(found.messages_list[0], found.message_object_trees[0])
        if not KEEPS_CONTENT:  # It would come again with each look until then.
            self._fetch(envelope)
            self._confirm(envelope)
        return envelope

    def open(self, envelope: Envelope) -> Message:
        """Fetch the content; its pieces are not kept.

        Raises:
            Exception: Of many kinds if it is no message; and as above.
        """
        self._fetch(envelope)
        return envelope.message()

    def _fetch(self, envelope: Envelope) -> None:
        pull = make_pull_object_fn_protobuf(
            self.client.PullObject, self.node, envelope.about.metadata.run_id
        )

        def fetch(name: str) -> bytes:
            envelope.contents[name] = pull(name)
            return b""  # There need be no second list of them.

        def fetch_missing() -> None:
            pull_objects(
                envelope.missing(),
                pull_object_fn=fetch,
                initial_backoff=FETCH_SECONDS,
                backoff_cap=MAX_FETCH_SECONDS,
            )

        self.calls.call(fetch_missing)

    def confirm(self, envelope: Envelope) -> None:
        """Let Flower forget the content: it has been received, or is not needed.

        A whole message has none of its own: ``gate`` forgets it.
        """
        if KEEPS_CONTENT and not envelope.is_whole:
            self._confirm(envelope)

    def _confirm(self, envelope: Envelope) -> None:
        confirm = make_confirm_message_received_fn_protobuf(
            self.client.ConfirmMessageReceived,
            self.node,
            envelope.about.metadata.run_id,
        )
        self.calls.call(lambda: confirm(envelope.tree.object_id))

    def send(self, reply: Message, seconds: float, *, whole: bool = False) -> None:
        """Send a reply, for which the site has worked so long.

        Whole only if the question came whole: other aggregators do not read that.
        """
        parcel = flower_envelope.pack(reply, whole=whole)
        request = PushMessagesRequest(
            node=self.node,
            messages_list=[parcel.envelope],
            message_object_trees=[parcel.tree],
            clientapp_runtime_list=[seconds],
        )
        taken = self.calls.call(lambda: self.client.PushMessages(request))
        push = make_push_object_fn_protobuf(
            self.client.PushObject,
            self.node,
            reply.metadata.run_id,
            taken.session_id,
        )
        # Each is tried again by itself: what has been pushed is no longer here.
        push_objects(
            parcel.objects,
            push_object_fn=lambda name, content: self.calls.call(
                lambda: push(name, content)
            ),
            object_ids_to_push=set(taken.objects_to_push),
        )

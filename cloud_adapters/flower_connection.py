"""A node's messages, taken from Flower's Fleet API and answered over it.

A message comes in two parts: an envelope, which a SuperLink hands out once, and a
content in pieces, which it keeps until it is told that they have arrived.
"""

from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
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
from flwr.supernode.fleet_http_client import FleetHttpClient

from cloud_adapters.flower_fleet import Dropped, FleetCalls


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A message without its content.

    Attributes:
        about: Its metadata.
        tree: Names of the content's pieces, as Flower's protocol has them.
    """

    about: Message
    tree: Any

    @property
    def name(self) -> str:
        """Name of the question that it is about; empty for none."""
        return self.about.metadata.group_id


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
            Lost: See ``FleetCalls.call``; so for ``SiteError`` and ``Dropped``.
        """
        request = PullMessagesRequest(node=self.node)
        found = self.calls.call(lambda: self.client.PullMessages(request))
        if not found.messages_list:
            return None
        about = message_from_proto(found.messages_list[0])
        return Envelope(about=about, tree=found.message_object_trees[0])

    def open(self, envelope: Envelope) -> Message:
        """Fetch the content; its pieces are not kept beside it.

        Raises:
            Dropped: It is no message; so for ``Lost`` and ``SiteError``, as above.
        """
        tree, run_id = envelope.tree, envelope.about.metadata.run_id
        contents = self.calls.call(
            lambda: pull_objects(
                [part.object_id for part in iterate_object_tree(tree)],
                pull_object_fn=make_pull_object_fn_protobuf(
                    self.client.PullObject, self.node, run_id
                ),
            )
        )
        confirm = make_confirm_message_received_fn_protobuf(
            self.client.ConfirmMessageReceived, self.node, run_id
        )
        self.calls.call(lambda: confirm(tree.object_id))
        with no_object_id_recompute():
            message = inflate_object_from_contents(tree.object_id, contents)
        if not isinstance(message, Message):
            raise Dropped("the aggregator sent something that is no message")
        about = envelope.about.metadata
        message.metadata.__dict__["_message_id"] = about.message_id
        return message

    def send(self, reply: Message, seconds: float) -> None:
        """Send a reply, for which the site has worked so long."""
        run_id = reply.metadata.run_id
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            tree = get_object_tree(reply)
        envelope = remove_content_from_message(reply) if reply.has_content() else reply
        request = PushMessagesRequest(
            node=self.node,
            messages_list=[message_to_proto(envelope)],
            message_object_trees=[tree],
            clientapp_runtime_list=[seconds],
        )
        taken = self.calls.call(lambda: self.client.PushMessages(request))
        push = make_push_object_fn_protobuf(
            self.client.PushObject, self.node, run_id, taken.session_id
        )
        # Each is tried again by itself: what has been pushed is no longer here.
        push_objects(
            objects,
            push_object_fn=lambda name, content: self.calls.call(
                lambda: push(name, content)
            ),
            object_ids_to_push=set(taken.objects_to_push),
        )

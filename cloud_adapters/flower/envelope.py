"""Flower messages in transit: in separate objects, or whole in the envelope.

Flower stores a message as a tree of objects beside its envelope, and every object is a
request to push and one to pull: six for the least message that carries a record, of
about 10 ms of a SuperLink's processor each. The envelope itself has a field for
content, which Flower keeps with the message and gives back, and leaves empty. So a
small message of ours is put there *whole*. Its tree is one object, which stands for the
message, and which is announced, but neither pushed nor pulled.

Only our own nodes look for content there. So only tasks go whole, which no other node
is asked, and a node answers in the form in which it was asked. A SuperLink of Flower
1.43 keeps no content: there, every message travels in objects.
"""

from dataclasses import dataclass

from flwr.app import Error, Message, RecordDict

from cloud_adapters.flower.private.messages import (
    KEEPS_CONTENT,
    ErrorCode,
    InflatableObject,
    Message as MessageProto,
    ObjectTree,
    get_all_nested_objects,
    get_object_tree,
    inflate_object_from_contents,
    iterate_object_tree,
    make_message,
    message_from_proto,
    message_to_proto,
    no_object_id_recompute,
    remove_content_from_message,
)
from federation.errors import ProtocolError

# A SuperLink reads the contents of all tasks that are out whenever it is asked for
# answers.
WHOLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A message as Flower receives it.

    Attributes:
        envelope: Metadata, and the content of a whole message.
        tree: Names of the message's objects.
        objects: These, by their names; pushing takes them out.
    """

    envelope: MessageProto
    tree: ObjectTree
    objects: dict[str, InflatableObject]


def pack(message: Message, *, whole: bool) -> Parcel:
    """Name a message, and divide it into its objects."""
    with no_object_id_recompute():
        whole = whole and KEEPS_CONTENT
        root = _stub(message) if whole else message
        objects = {} if whole else get_all_nested_objects(root)
        message.metadata.__dict__["_message_id"] = root.object_id
        return Parcel(
            envelope=message_to_proto(
                message if whole else remove_content_from_message(message)
            ),
            tree=get_object_tree(root),
            objects=objects,
        )


def _stub(message: Message) -> Message:
    """The placeholder for a whole message among Flower's objects.

    It is not pushed: the reader of the message, who confirms that, might be faster. So
    the SuperLink keeps three short rows about it until the run ends.
    """
    error = Error(code=ErrorCode.UNKNOWN, reason="the content is in the envelope")
    return make_message(metadata=message.metadata, error=error)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message as a SuperLink returns it, and the parts fetched so far.

    Attributes:
        about: The message; its content only if that is whole. The metadata is what
            the SuperLink has checked; the root of the tree says the same once more,
            or something else, and is not read.
        tree: Names of its objects.
        contents: Those of the objects that have been fetched, by their names.
    """

    about: Message
    tree: ObjectTree
    contents: dict[str, bytes]

    @classmethod
    def of(cls, message: MessageProto, tree: ObjectTree) -> "Envelope":
        """Read a SuperLink's answer."""
        return cls(message_from_proto(message), tree, {})

    @property
    def name(self) -> str:
        """Name of the question that it is about; empty for none."""
        return self.about.metadata.group_id

    @property
    def is_whole(self) -> bool:
        """Whether it is complete: content, or an error."""
        return not self.tree.children

    def missing(self) -> list[str]:
        """Names of the objects that are still to be fetched.

        The root is fetched, though not read: to confirm a message that is still being
        pushed would fail its sender.
        """
        if self.is_whole:
            return []
        names = dict.fromkeys(p.object_id for p in iterate_object_tree(self.tree))
        return [name for name in names if name not in self.contents]

    def message(self) -> Message:
        """Put it together, once nothing is missing; the contents are used up.

        Raises:
            Exception: Of many kinds, if the objects are no message.
        """
        if self.is_whole:
            return self.about
        with no_object_id_recompute():
            content = inflate_object_from_contents(
                self.tree.children[0].object_id, self.contents
            )
        if not isinstance(content, RecordDict):
            raise ProtocolError("a Flower message without records")
        return make_message(metadata=self.about.metadata, content=content)

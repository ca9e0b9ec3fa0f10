"""A relay as a node of Flower: it answers for its sites, in one message.

See ``federation.wire.relayed`` for the frames in it.
"""

from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from cloud_adapters.flower import site as flower_site
from cloud_adapters.transport.frame_references import PackedFrame


class Relay(Protocol):
    """What such a node does: ``deploy.site_host.relay_agent``."""

    def introduce(self, sealed: bytes) -> bytes:
        """Pass a proposal on, and answer for all sites."""
        ...

    def answer(self, packed: PackedFrame, *, seconds: float) -> PackedFrame:
        """Pass tasks on, and answer with the sum within a time."""
        ...


def relay_app(relay: Relay) -> ClientApp:
    """Make the app of a relay's node.

    What is malformed or forged gets no answer but an error.
    """
    app = ClientApp()

    def introduce(message: Message, context: Context) -> Message:  # noqa: ARG001
        sealed = flower_site.unpack_bytes(message.content)
        answer = flower_site.pack_bytes(relay.introduce(sealed))
        return Message(answer, reply_to=message)

    def answer(message: Message, context: Context) -> Message:  # noqa: ARG001
        asked = flower_site.unpack_all(message.content)
        seconds = flower_site.deadline_of(message)
        packed = relay.answer(asked, seconds=seconds)
        return Message(flower_site.pack_frame(packed), reply_to=message)

    app.query()(introduce)
    app.train()(answer)
    app.evaluate()(answer)
    return app

"""Flower's grid for a coordinator at a SuperLink, with fewer and shorter waits.

Flower's own takes 18 requests to bring a small task to a site and its answer back, and
a look for answers waits a second, and then longer, if a site is about to push one: a
tenth of the rounds were lost in that. Here small tasks travel whole
(``flower_envelope``), an answer that is not there yet is looked for with the next
ones, and messages are confirmed, which deletes them, when no exchange waits.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import httpx
from flwr.app import Error, Message
from flwr.serverapp import Grid

from cloud_adapters.flower import envelope as flower_envelope, site as flower_site
from cloud_adapters.flower.envelope import Envelope
from cloud_adapters.flower.private.messages import (
    ErrorCode,
    InflatableObject,
    ObjectPullError,
    make_message,
    make_push_object_fn_protobuf,
    pull_objects,
    push_objects,
)
from cloud_adapters.flower.private.runtime import (
    ConfirmMessageReceivedRequest,
    HttpGrid,
    PullObjectRequest,
    PushAppMessagesRequest,
    RuntimeHttpClient,
    pull_request,
)


class _NotYet(Exception):
    """An object has not been pushed yet."""


class SuperLinkFailed(Exception):
    """The SuperLink met an error of its own: another coordinator continues the run."""


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise SuperLinkFailed(
            f"the SuperLink answered HTTP {error.response.status_code}. If the "
            "disk is full, crossfed ps says so; otherwise see logs/superlink.log "
            "beside aggregator.toml"
        ) from error


class RuntimeGrid(HttpGrid):
    """Flower's grid of a run, over its connection."""

    def __init__(self, grid: HttpGrid) -> None:
        """Take over from Flower's, which keeps and closes the connection."""
        self._grid = grid
        self._run_id = grid.run.run_id
        self.node = grid.node
        self._arriving: dict[str, Envelope] = {}
        self._unconfirmed: list[str] = []

    @property
    def _runtime_client(self) -> RuntimeHttpClient:
        return self._grid._runtime_client  # noqa: SLF001 -- there is no other way in

    @_asking()
    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages; their ids, in the same order."""
        parcels = [
            flower_envelope.pack(message, whole=_goes_whole(message))
            for message in messages
        ]
        if not parcels:
            return []
        taken = self._runtime_client.PushMessages(
            PushAppMessagesRequest(
                messages_list=[parcel.envelope for parcel in parcels],
                message_object_trees=[parcel.tree for parcel in parcels],
            )
        )
        objects: dict[str, InflatableObject] = {}
        for parcel in parcels:
            objects |= parcel.objects
        del parcels  # What has been pushed is not to be kept.
        push_objects(
            objects,
            push_object_fn=make_push_object_fn_protobuf(
                self._runtime_client.PushObject,
                self.node,
                self._run_id,
                taken.session_id,
            ),
            object_ids_to_push=set(taken.objects_to_push),
        )
        return list(taken.message_ids)

    @_asking()
    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Answers to messages, as far as they have arrived as a whole."""
        # A SuperLink reports each answer only once.
        asked = [name for name in message_ids if name not in self._arriving]
        if asked:
            found = self._runtime_client.PullMessages(pull_request(asked))
            for message, tree in zip(
                found.messages_list, found.message_object_trees, strict=True
            ):
                envelope = Envelope.of(message, tree)
                self._arriving[envelope.about.metadata.reply_to_message_id] = envelope
        messages = []
        for name, envelope in list(self._arriving.items()):
            message = self._complete(envelope)
            if message is not None:
                del self._arriving[name]
                messages.append(message)
        if not messages:
            self._confirm()
        return messages

    def _complete(self, envelope: Envelope) -> Message | None:
        """Fetch what is missing; None if it is not there yet."""

        def fetch(name: str) -> bytes:
            found = self._runtime_client.PullObject(
                PullObjectRequest(node=self.node, run_id=self._run_id, object_id=name)
            )
            if not found.object_found:
                raise ObjectPullError(name, "the site did not push it in time")
            if not found.object_available:
                raise _NotYet
            envelope.contents[name] = found.object_content
            return b""  # There need be no second list of them.

        try:
            pull_objects(envelope.missing(), pull_object_fn=fetch)
        except _NotYet:
            return None
        except ObjectPullError as error:
            return _failed(envelope, ErrorCode.MESSAGE_UNAVAILABLE, error)
        self._unconfirmed.append(envelope.tree.object_id)
        try:
            return envelope.message()
        except Exception as error:  # noqa: BLE001 -- a site may have pushed anything
            return _failed(envelope, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, error)

    def _confirm(self) -> None:
        while self._unconfirmed:
            self._runtime_client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=self.node,
                    run_id=self._run_id,
                    message_object_id=self._unconfirmed[-1],
                )
            )
            self._unconfirmed.pop()


def over(grid: Grid) -> Grid:
    """Wrap Flower's grid of a SuperLink; any other is returned unchanged."""
    return RuntimeGrid(grid) if isinstance(grid, HttpGrid) else grid


def _goes_whole(message: Message) -> bool:
    frame = flower_site.frame_in_record(message.content)
    return frame is not None and len(frame) <= flower_envelope.WHOLE_BYTES


def _failed(envelope: Envelope, code: int, error: Exception) -> Message:
    text = str(error) or type(error).__name__
    return make_message(
        metadata=envelope.about.metadata, error=Error(code=code, reason=text)
    )

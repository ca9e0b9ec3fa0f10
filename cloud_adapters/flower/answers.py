"""Read and check the answers of sites over Flower.

Flower proves which node sent a reply; that it speaks for the site that was asked is
checked here.
"""

from collections.abc import Sequence

from flwr.app import Message

from cloud_adapters.flower import site as flower_site
from cloud_adapters.flower.questions import Asked, QuestionNote
from cloud_adapters.transport.frame_references import PackedFrame, Reference, Sizes
from cloud_adapters.transport.frames import Frames
from federation.errors import (
    CorruptObject,
    JobError,
    ObjectNotFound,
    ProtocolError,
    StoreError,
)
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    RelayedTasks,
    RoundTask,
    SecureTask,
    SiteMessage,
    Task,
)
from federation.rounds.failures import failure
from federation.wire import frame as wire
from federation.wire.relayed import answers_in

# What a site or relay can cause alone: it must not end the run. A JobError is that it
# refers to a store where the aggregator has none.
_REFUSED = (ProtocolError, CorruptObject, ObjectNotFound, JobError)


class Answers:
    """Reads answers; a bad one becomes its site's failure."""

    def __init__(self, frames: Frames) -> None:
        """Fetch the vectors of large ones as they travel."""
        self._frames = frames
        # Of the run's model: a round may bring only a part or a few bits of it.
        self._num_floats = 0

    def read(self, task: Asked, message: Message) -> tuple[list[SiteMessage], int]:
        """Read what answers a task, and how many bytes it took.

        Returns:
            One message, or all that a relay has sent for its sites.
        """
        if isinstance(task, RelayedTasks):
            return self._of_relay(task, message)
        packed = PackedFrame(frame=b"")
        try:
            packed = flower_site.unpack_all(message.content)
            answer = _of_site(packed, task.site)
            if packed.references:
                answer = self._fetch(task, answer, packed.references)
        except _REFUSED as error:
            answer = failure(task, FailureKind.INVALID, str(error))
        except StoreError as error:
            text = f"cannot fetch its answer: {error}"
            answer = failure(task, FailureKind.UNREACHABLE, text)
        return [answer], packed.num_bytes

    def read_unfetched(
        self, asked: QuestionNote, message: Message
    ) -> tuple[SiteMessage, int]:
        """Read a late answer, whose vectors are not fetched."""
        try:
            packed = flower_site.unpack_all(message.content)
            return _of_site(packed, asked.about.site), packed.num_bytes
        except ProtocolError as error:
            return failure(asked.about, FailureKind.INVALID, str(error)), 0

    def _fetch(
        self, task: Task, head: SiteMessage, references: Sequence[Reference]
    ) -> SiteMessage:
        if not isinstance(task, RoundTask):
            text = f"{task.site} answered a secure step with vectors in the store"
            raise ProtocolError(text)
        if (head.run_id, head.round_index) != (task.run_id, task.round_index):
            return head  # It will not count, whatever its vectors are.
        try:
            return self._frames.receive(head, references, self._sizes(task))
        finally:
            self._frames.discard(head, references)

    def _sizes(self, task: RoundTask) -> Sizes:
        sizes = Sizes.of_task(task).with_floats(self._num_floats)
        self._num_floats = sizes.num_floats
        return sizes

    def _of_relay(
        self, task: RelayedTasks, message: Message
    ) -> tuple[list[SiteMessage], int]:
        """Read the frames of a relay: its sum, and an answer of each site."""
        packed = PackedFrame(frame=b"")
        try:
            packed = flower_site.unpack_all(message.content)
            found = answers_in(packed.frame, limit=1 + len(task.tasks))
            if packed.references:
                found[0] = self._fetch_sum(task, found[0], packed.references)
        except _REFUSED as error:
            found = [failure(task, FailureKind.INVALID, str(error))]
        except StoreError as error:
            text = f"sent a sum that cannot be fetched: {error}"
            found = [failure(task, FailureKind.UNREACHABLE, text)]
        return found, packed.num_bytes

    def _fetch_sum(
        self, task: RelayedTasks, total: SiteMessage, references: Sequence[Reference]
    ) -> SiteMessage:
        """Fetch the vectors of a relay's sum: nothing else of it is in the store.

        Only the relay's own objects are removed afterwards.
        """
        asked = task.tasks[0]
        said = total.site, total.run_id, total.round_index
        if said != (task.site, task.run_id, task.round_index):
            raise ProtocolError(
                f"relay {task.site!r} refers to vectors of {total.site!r} in the store"
            )
        if not isinstance(asked, RoundTask) or any(r.message for r in references):
            raise ProtocolError(
                f"relay {task.site!r} refers to vectors that are not those of its sum"
            )
        try:
            return self._frames.receive(total, references, self._sizes(asked))
        finally:
            self._frames.discard(total, references)


def _of_site(packed: PackedFrame, site: SiteId) -> SiteMessage:
    answer = wire.decode(packed.frame)
    if isinstance(answer, RoundTask | SecureTask) or answer.site != site:
        raise ProtocolError(f"the node of {site} answered for {answer.site!r}")
    return answer

"""The site's side of Flower: a ``ClientApp`` that hands tasks to a site.

A Flower message carries a frame of ``federation.wire.frame``, and beside it the site's
name and the text of the job. A small frame goes into a config record: every object that
Flower stores costs two requests, and an array is three. A large one goes into an array
of bytes, because Flower cuts arrays into chunks, while the cost of a large config
record grows with the square of its size. Vectors of a large message lie
in a store, and references to them stand beside the frame: see ``frames``.

Flower may bring a site's tasks to any of its processes, in any order, and may start
a process for each: a handler is built where the task arrives, and must not depend
on what the same object did in an earlier round.
"""

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cloud_adapters.transport import frame_references
from cloud_adapters.transport.frame_references import (
    PackedFrame,
    Reference,
    Sizes,
    inline,
)
from cloud_adapters.transport.frames import INLINE, Frames
from cloud_adapters.transport.redelivery import Inbox, Word
from cloud_adapters.transport.task_work import Agent, Leaves, noticed, stays, within
from federation.errors import ProtocolError
from federation.ids import SiteId
from federation.messages import (
    RoundTask,
    SecureTask,
    SiteMessage,
    Task,
)
from federation.protocols import SiteHandler
from federation.wire import frame as wire

HandlerFor = Callable[[SiteId, str], SiteHandler]

MAX_HANDLERS = 256  # that a process keeps; the one used longest ago goes first

_ARRAYS, _FRAME, _ABOUT = "frame", "bytes", "about"
_TYPE, _REFERENCES = "type", "references"
SMALL_BYTES = 1 << 18
# Values of a config record, as far as we write them.
_Record = Mapping[str, Any]
_NOTHING: _Record = {}
_STYPE = f"crossfed.wire.v{wire.VERSION}"
_BYTES_STYPE = "crossfed.bytes.v1"
# A message that asks for the state of the question that it names; one that asks for
# the answer once more; and the word that answers the former.
PROBE = "query.question"
AGAIN = "query.answer"
_WORD = "word"

MAX_SECONDS = 1e9
_LOG = logging.getLogger(__name__)

# What this process has built. Module state, because Flower unpickles the app again for
# every message.
_handlers: OrderedDict[tuple[str, SiteId], SiteHandler] = OrderedDict()
_lock = threading.Lock()


def client_app(handler_for: HandlerFor, *, threads: int = 1) -> ClientApp:
    """Make the app that Flower runs at, or for, every site.

    Args:
        handler_for: Builds the handler of a site from its name and the job's text.
            It travels to Flower's processes by pickle: give it a function that can
            be imported by its name.
        threads: Threads that arithmetic in a site may use; their number decides the
            last bits of floating-point sums.
    """
    app = ClientApp()
    answer = partial(_answer, handler_for, threads)
    app.train()(answer)
    app.evaluate()(answer)
    app.query()(_greet)
    return app


def agent_app(
    agent: Agent,
    frames: Frames = INLINE,
    leaves: Leaves = stays,
    leaves_after: Leaves = stays,
) -> ClientApp:
    """Make the app of a node whose process keeps its site.

    A query holds a proposal of a run and is answered with an introduction; what is
    malformed or forged gets no answer but an error. Jobs do not travel with tasks.

    Args:
        agent: The site.
        frames: How large messages travel.
        leaves: Why the site is about to leave; None as long as it is not. Then a task
            that it works on is answered immediately, by a leave notice.
        leaves_after: The same of a site that finishes its task first: the answer then
            contains the notice.
    """
    app = ClientApp()

    def introduce(message: Message, context: Context) -> Message:  # noqa: ARG001
        sealed = unpack_bytes(message.content)
        return Message(pack_bytes(agent.introduce(sealed)), reply_to=message)

    def answer(message: Message, context: Context) -> Message:  # noqa: ARG001
        head = _task(message)
        references = _references(message.content)

        def work() -> PackedFrame:
            task = head
            if references:
                sizes = Sizes.of_layout(agent.layout(head.run_id))
                task = frames.receive(head, references, sizes)
            # By no name: it would be held while it is packed.
            return frames.send(noticed(agent.answer(task), leaves, leaves_after))

        packed = within(deadline_of(message), head, work, leaves)
        return Message(pack_frame(packed), reply_to=message)

    app.query()(introduce)
    app.train()(answer)
    app.evaluate()(answer)
    return app


def pack_bytes(content: bytes) -> RecordDict:
    """Put bytes that are no frame into the content of a Flower message."""
    return _around(content, _BYTES_STYPE, {})


def unpack_bytes(content: RecordDict) -> bytes:
    """Take them out again.

    Raises:
        ProtocolError: There are none.
    """
    return _bytes_of(content, _BYTES_STYPE)


def pack(
    frame: bytes,
    *,
    site: SiteId,
    job_text: str,
    deadline_seconds: float,
    references: tuple[Reference, ...] = (),
) -> RecordDict:
    """Put a task's frame into the content of a Flower message."""
    about: _Record = {
        "site": site,
        "job": job_text,
        "deadline_seconds": deadline_seconds,
    }
    return pack_frame(PackedFrame(frame=frame, references=references), about)


def pack_word(word: Word) -> RecordDict:
    """Put a site's word about a question into the content of a Flower message."""
    return RecordDict({_ABOUT: ConfigRecord({_WORD: word.value})})


def read_word(content: RecordDict) -> Word | None:
    """Read it; None if the content is something else, such as an answer."""
    found = _about_of(content).get(_WORD)
    return next((word for word in Word if word == found), None)


def reply_at_once(about: Message, inbox: Inbox[RecordDict]) -> Message | None:
    """Reply to a message for which the site need not work.

    Args:
        about: The message; its content need not be there.
        inbox: What the site knows of questions.

    Returns:
        A word, or the answer that was given before; None if the message brings a new
        question, or is about none.
    """
    name, kind = about.metadata.group_id, about.metadata.message_type
    run = about.metadata.run_id
    if kind not in {PROBE, AGAIN} and (not name or inbox.admit(name, run)):
        return None
    answer = inbox.answer(name) if kind == AGAIN else None
    content = pack_word(inbox.look(name)) if answer is None else answer
    return Message(content, reply_to=about)


def pack_answer(answer: SiteMessage) -> RecordDict:
    """Put a site's answer into the content of a Flower message."""
    return pack_frame(inline(answer))


def unpack(content: RecordDict) -> bytes:
    """Take the frame out of the content of a Flower message.

    Raises:
        ProtocolError: There is none.
    """
    return _bytes_of(content, _STYPE)


def frame_in_record(content: RecordDict) -> bytes | None:
    """The frame, if it is a small one."""
    about = _about_of(content)
    frame = about.get(_FRAME)
    if isinstance(frame, bytes) and about.get(_TYPE) == _STYPE:
        return frame
    return None


def unpack_all(content: RecordDict) -> PackedFrame:
    """Take out the frame, and the references beside it.

    Raises:
        ProtocolError: There is no frame, or a reference is malformed.
    """
    return PackedFrame(frame=unpack(content), references=_references(content))


def _references(content: RecordDict) -> tuple[Reference, ...]:
    text = _about_of(content).get(_REFERENCES, "")
    if not isinstance(text, str):
        raise ProtocolError("a Flower message whose references are not text")
    return frame_references.read_references(text) if text else ()


def pack_frame(packed: PackedFrame, about: _Record = _NOTHING) -> RecordDict:
    """Put what travels into the content of a Flower message."""
    if packed.references:
        text = frame_references.write_references(packed.references)
        about = {**about, _REFERENCES: text}
    return _around(packed.frame, _STYPE, about)


def _around(content: bytes, stype: str, about: _Record) -> RecordDict:
    """Put bytes and what they are about into as few objects as their size allows."""
    if len(content) <= SMALL_BYTES:
        record = ConfigRecord({**about, _TYPE: stype, _FRAME: content})
        return RecordDict({_ABOUT: record})
    # The bytes as they are; Array(ndarray) would copy them through np.save.
    array = Array("uint8", (len(content),), stype, content)
    found = RecordDict({_ARRAYS: ArrayRecord({_FRAME: array})})
    if about:
        found[_ABOUT] = ConfigRecord({**about})
    return found


def _bytes_of(content: RecordDict, stype: str) -> bytes:
    """Take the bytes out of either place."""
    about = _about_of(content)
    small = about.get(_FRAME)
    if isinstance(small, bytes) and about.get(_TYPE) == stype:
        return small
    record = content.array_records.get(_ARRAYS)
    array = None if record is None else record.get(_FRAME)
    if array is None or array.stype != stype:
        raise ProtocolError(f"a Flower message without a frame of type {stype}")
    return array.data


def _about_of(content: RecordDict) -> ConfigRecord:
    return content.config_records.get(_ABOUT) or ConfigRecord()


def _greet(message: Message, context: Context) -> Message:  # noqa: ARG001
    """Report that this node has imported everything and uses our format."""
    return Message(RecordDict(), reply_to=message)


def _answer(
    handler_for: HandlerFor,
    threads: int,
    message: Message,
    context: Context,  # noqa: ARG001 -- Flower calls with it
) -> Message:
    task = _task(message)
    job_text = str(_about(message)["job"])

    def work() -> PackedFrame:
        handler = _handler(handler_for, job_text, task.site)
        _limit_torch(threads)
        return inline(handler.handle(task))

    packed = within(deadline_of(message), task, work)
    return Message(pack_frame(packed), reply_to=message)


def _about(message: Message) -> ConfigRecord:
    about = message.content.config_records.get(_ABOUT)
    if about is None:
        raise ProtocolError("a Flower message without a subject")
    return about


def _task(message: Message) -> Task:
    site = _about(message).get("site")
    task = wire.decode(unpack(message.content))
    if not isinstance(task, RoundTask | SecureTask) or task.site != site:
        raise ProtocolError(f"a message for {site!r} with another site's task")
    return task


def deadline_of(message: Message) -> float:
    """How many seconds the answer to a message may take.

    Raises:
        ProtocolError: It does not say.
    """
    seconds = _about(message).get("deadline_seconds")
    if not isinstance(seconds, int | float) or not 0 < seconds < MAX_SECONDS:
        raise ProtocolError("a Flower message without a deadline")
    return seconds


def _handler(handler_for: HandlerFor, job_text: str, site: SiteId) -> SiteHandler:
    key = (job_text, site)
    with _lock:
        handler = _handlers.get(key)
        if handler is None:
            handler = _handlers[key] = handler_for(site, job_text)
        _handlers.move_to_end(key)
        while len(_handlers) > MAX_HANDLERS:
            _handlers.popitem(last=False)
        return handler


def _limit_torch(threads: int) -> None:
    torch = sys.modules.get("torch")  # Absent where no model needs it.
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)

"""What travels between a relay and the aggregator: frames, one after another.

Down, tasks of a round share the model: it is in the first frame, and again only where
another site's is a different one. Up, the sum is a frame in the relay's name, and each
site's answer follows without its words. All else travels as it would without a relay.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from federation.errors import ProtocolError
from federation.ids import SiteId
from federation.messages import (
    MaskedUpdate,
    RelayedSum,
    RoundTask,
    SecureTask,
    SiteMessage,
    SiteUpdate,
    Task,
)
from federation.protocols import Buffer
from federation.wire.frame import decode_all, encoded_sizes

# Type of the words, digest of the result, round, fragment.
_Model = tuple[str, str, int, int]


def down_frames(tasks: Sequence[Task]) -> list[Task]:
    """What goes to a relay for these tasks; ``with_models`` undoes it."""
    first: dict[_Model, RoundTask] = {}
    frames: list[Task] = []
    for task in tasks:
        if isinstance(task, RoundTask):
            known = first.setdefault(_model_of(task), task)
            if known is not task and known.weights_d is task.weights_d:
                empty = task.weights_d[:0], task.integers_m[:0]
                frames.append(replace(task, weights_d=empty[0], integers_m=empty[1]))
                continue
        frames.append(task)
    return frames


def down_frames_in(data: Buffer, *, limit: int) -> list[Task]:
    """Read tasks of a relay's sites from their frames; see ``with_models``.

    Raises:
        ProtocolError: There are none, too many, or something else.
    """
    found: list[Task] = []
    for each in decode_all(data, limit=limit):
        if not isinstance(each, RoundTask | SecureTask):
            raise ProtocolError(f"a {type(each).__name__} in place of a task")
        found.append(each)
    if not found:
        raise ProtocolError("a message without a task")
    return found


def answers_in(data: Buffer, *, limit: int) -> list[SiteMessage]:
    """Read what a relay sent from its frames; see ``up_answers``.

    Raises:
        ProtocolError: There is nothing, too much, or a task.
    """
    found: list[SiteMessage] = []
    for each in decode_all(data, limit=limit):
        if isinstance(each, RoundTask | SecureTask):
            raise ProtocolError(f"a {type(each).__name__} in place of an answer")
        found.append(each)
    if not found:
        raise ProtocolError("a message without an answer")
    return found


def with_models(frames: Sequence[Task]) -> list[Task]:
    """Give each task its model again, at the relay."""
    first: dict[_Model, RoundTask] = {}
    tasks: list[Task] = []
    for task in frames:
        if isinstance(task, RoundTask):
            known = first.setdefault(_model_of(task), task)
            if not (task.weights_d.size or task.integers_m.size):
                model = known.weights_d, known.integers_m
                tasks.append(replace(task, weights_d=model[0], integers_m=model[1]))
                continue
        tasks.append(task)
    return tasks


def _model_of(task: RoundTask) -> _Model:
    """What tells the models of two tasks of a round apart."""
    words = task.weights_d.dtype.str
    return words, task.changed_to, task.based_on, task.fragment


def up_frames(
    through: RelayedSum | None, answers: Sequence[SiteMessage]
) -> list[SiteMessage]:
    """What a relay sends for its sites' answers."""
    if through is None:
        return [*answers]
    return [through.update, *(_stripped(each, through) for each in answers)]


def up_answers(
    messages: Sequence[SiteMessage], *, relay: SiteId, sites: Sequence[SiteId]
) -> tuple[RelayedSum | None, list[SiteMessage]]:
    """Read what a relay sent, which ``up_frames`` has made.

    Args:
        messages: What it sent, in order.
        relay: Who sent it.
        sites: Whose answers it must be, in order.

    Returns:
        The sum, if there is one, and the answers, those in it with its words.

    Raises:
        ProtocolError: It is something else.
    """
    total, answers = None, [*messages]
    if messages and messages[0].site == relay:
        total, *answers = messages
    found = [each.site for each in answers]
    if found != [*sites]:
        raise ProtocolError(
            f"relay {relay!r} sent {len(found)} answers of {', '.join(found)}, but was "
            f"asked for those of {', '.join(sites)}"
        )
    if total is None:
        return None, answers
    if not isinstance(total, SiteUpdate | MaskedUpdate):
        raise ProtocolError(f"relay {relay!r} sent a {type(total).__name__} as its sum")
    within = [each for each in answers if _has_no_words(each, type(total))]
    through = RelayedSum(sites=tuple(each.site for each in within), update=total)
    return through, [
        with_words(each, through) if _has_no_words(each, type(total)) else each
        for each in answers
    ]


def _has_no_words(
    answer: SiteMessage, kind: type[SiteUpdate | MaskedUpdate]
) -> TypeGuard[SiteUpdate | MaskedUpdate]:
    if not isinstance(answer, kind):
        return False
    words = answer.delta_d if isinstance(answer, SiteUpdate) else answer.words
    return not words.size


def _stripped(answer: SiteMessage, through: RelayedSum) -> SiteMessage:
    if answer.site not in through.sites:
        return answer
    if isinstance(answer, SiteUpdate):
        return replace(answer, delta_d=answer.delta_d[:0])
    if isinstance(answer, MaskedUpdate):
        return replace(answer, words=answer.words[:0], header_h=answer.header_h[:0])
    return answer


def with_words(
    update: SiteUpdate | MaskedUpdate, through: RelayedSum
) -> SiteUpdate | MaskedUpdate:
    """Give an update the words of the sum that it is in, in place of its own."""
    total = through.update
    if isinstance(update, SiteUpdate) and isinstance(total, SiteUpdate):
        return replace(update, delta_d=total.delta_d)
    if isinstance(update, MaskedUpdate) and isinstance(total, MaskedUpdate):
        return replace(update, words=total.words, header_h=total.header_h)
    raise TypeError(f"a {type(update).__name__} is no part of this sum")


def shares_of(total: int, count: int) -> list[int]:
    """Divide the bytes of one message among its sites; the first bears the rest."""
    share, rest = divmod(total, count)
    return [share + (rest if index == 0 else 0) for index in range(count)]


def down_sizes(tasks: Sequence[Task]) -> list[int]:
    """Bytes of ``down_frames`` that each task accounts for."""
    sizes = encoded_sizes(down_frames(tasks))
    if isinstance(tasks[0], RoundTask):
        return shares_of(sum(sizes), len(tasks))
    return sizes


def up_sizes(through: RelayedSum | None, answers: Sequence[SiteMessage]) -> list[int]:
    """Bytes of ``up_frames`` that each answer accounts for."""
    sizes = encoded_sizes(up_frames(through, answers))
    return sizes if through is None else shares_of(sum(sizes), len(answers))

"""What travels between a relay and the aggregator: frames, one after another.

Down, tasks of a round share the model: it is in the first frame, and again only where
another site's is a different one. Up, the sum is a frame in the relay's name, and each
site's answer follows without its words. All else travels as it would without a relay.
"""

from collections.abc import Sequence
from dataclasses import replace

from federation.messages import (
    MaskedUpdate,
    RelayedSum,
    RoundTask,
    SiteMessage,
    SiteUpdate,
    Task,
)
from federation.wire.frame import encoded_sizes


def down_frames(tasks: Sequence[Task]) -> list[Task]:
    """What goes to a relay for these tasks."""
    sent: set[int] = set()
    frames: list[Task] = []
    for task in tasks:
        if not isinstance(task, RoundTask):
            frames.append(task)
            continue
        if id(task.weights_d) in sent:
            frames.append(
                replace(
                    task,
                    weights_d=task.weights_d[:0],
                    integers_m=task.integers_m[:0],
                )
            )
        else:
            frames.append(task)
        sent.add(id(task.weights_d))
    return frames


def up_frames(
    through: RelayedSum | None, answers: Sequence[SiteMessage]
) -> list[SiteMessage]:
    """What a relay sends for its sites' answers."""
    if through is None:
        return [*answers]
    return [through.update, *(_stripped(each, through) for each in answers)]


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

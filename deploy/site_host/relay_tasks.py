"""What a relay checks of its tasks, and of what its sites answer."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from aggregator.relay import check_book
from federation.errors import AggregatorAtFault, ProtocolError
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    RoundTask,
    SecureTask,
    SiteFailure,
    SiteMessage,
    Task,
)
from federation.protocols import Buffer
from federation.rounds.failures import failure
from federation.wire import frame as wire


def check(tasks: Sequence[Task], own: Collection[SiteId]) -> None:
    """Check that tasks are of one round of a run, each for another of a relay's sites.

    Raises:
        ProtocolError: They are not.
    """
    sites = [task.site for task in tasks]
    rounds = {(task.run_id, task.round_index, type(task)) for task in tasks}
    if len(rounds) != 1 or len({*sites}) != len(sites) or not {*sites} <= {*own}:
        raise ProtocolError(
            f"tasks of {len(rounds)} rounds for {', '.join(sites)}, but this relay's "
            f"sites are {', '.join(own)}"
        )


def refused(
    tasks: Sequence[Task], error: AggregatorAtFault, *, relay: SiteId
) -> list[SiteFailure]:
    """Answer for sites that are not asked, since the question itself is wrong."""
    text = f"was not asked by its relay {relay!r}: {error}"
    return [failure(task, FailureKind.AGGREGATOR, text) for task in tasks]


def kept_book(path: Path, listener: Callable[[str], None]) -> bytes:
    """Read the book that a relay has stored; nothing if there is none, or no longer.

    Then the relay is as one that has missed the setup.
    """
    if not path.exists():
        return b""
    found = path.read_bytes()
    try:
        check_book(found)
    except AggregatorAtFault:
        listener(
            f"{path} is damaged, and is not used: until the next setup, an answer that "
            "the aggregator refuses costs all sites of this relay their round"
        )
        return b""
    return found


def read_answer(task: Task, data: Buffer | None) -> SiteMessage:
    """Read a site's answer; what is none becomes its failure."""
    if data is None:
        text = "is not connected to its relay, or gave it no answer in time"
        return failure(task, FailureKind.UNREACHABLE, text)
    try:
        answer = wire.decode(data)
    except ProtocolError as error:
        return failure(task, FailureKind.INVALID, str(error))
    asked = task.run_id, task.round_index, task.site
    said = answer.run_id, answer.round_index, answer.site
    if isinstance(answer, RoundTask | SecureTask) or said != asked:
        text = "answered its relay for another site, run or round"
        return failure(task, FailureKind.INVALID, text)
    return answer

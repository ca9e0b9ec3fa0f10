"""Answers that came as a relay's sum: they count together, or none of them does."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from federation.messages import (
    FailureKind,
    MaskedUpdate,
    RelayedSum,
    Reply,
    SiteUpdate,
)
from federation.rounds.round_record import RoundRecord

_Answer = TypeVar("_Answer", SiteUpdate, MaskedUpdate)


def whole_sums(
    sound: Iterable[tuple[_Answer, Reply]], record: RoundRecord
) -> Iterator[list[tuple[_Answer, Reply]]]:
    """Yield each answer that came alone, and all answers of each relay's sum.

    One site's words cannot be taken out of a sum. So if one of its answers is not
    sound, the others are refused.

    Args:
        sound: Sound answers, on arrival.
        record: The round, which receives what is refused.

    Yields:
        One answer, or those of one sum in the order of its sites. The receiver clears
        the list, so that an update's memory is free before the next one lands.
    """
    open_sums: dict[RelayedSum, list[tuple[_Answer, Reply]]] = {}
    for answer, reply in sound:
        through = reply.through
        if through is None:
            parts = [(answer, reply)]
        else:
            parts = open_sums.setdefault(through, [])
            parts.append((answer, reply))
            if len(parts) < len(through.sites):
                continue
            del open_sums[through]
        del answer, reply, through
        yield parts
    for left in open_sums.values():
        _refuse_incomplete(left, record)


def _refuse_incomplete(
    parts: Sequence[tuple[SiteUpdate | MaskedUpdate, Reply]], record: RoundRecord
) -> None:
    """Refuse answers of a sum of which another one is not sound."""
    through = parts[0][1].through
    assert through is not None  # noqa: S101 -- it came in a sum
    others = {*through.sites} - {update.site for update, _ in parts}
    text = (
        f"relay {through.update.site!r} added its update to that of "
        f"{', '.join(sorted(others))}, which does not count"
    )
    revoke_all(parts, record, text)


def revoke_all(
    parts: Iterable[tuple[SiteUpdate | MaskedUpdate, Reply]],
    record: RoundRecord,
    reason: str,
    kind: FailureKind = FailureKind.INVALID,
) -> None:
    """Refuse answers that were accepted, for one reason."""
    for _, reply in parts:
        record.revoke(reply, reason, kind)

"""What a page has made of a long log, for the next page: a cache beside the log.

Only the account that writes it reads it; whoever deletes it loses a little time. One of
another release, or that is damaged, or whose log is another one, is left out.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from federation.durable_files import replace_file
from federation.errors import StoreUnavailable
from federation.event_log import from_line, to_line
from federation.events import Event
from federation.typed_json import decode, encode
from monitoring.views.run_fold import FoldState

NAME = ".page.json"
WORTH_BYTES = 16 << 20  # Of events that were read: less is read again in half a second.


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedFold:
    """What the events before an offset came to.

    Attributes:
        offset: Bytes of the log.
        mark: Digest that a log with these bytes has there; see ``EventTail``.
        damaged: Lines of them that are no events.
        damage: Where the first of these is.
        state: What was settled.
        events: The events that were not.
        log: The last lines of the run's log.
    """

    offset: int
    mark: str
    damaged: int
    damage: str
    state: FoldState
    events: Sequence[Event]
    log: Sequence[str]


def write(folder: Path, found: CachedFold) -> None:
    """Write the cache of a run; not at all if the folder cannot be written."""
    content = {
        "release": _release(),
        "offset": found.offset,
        "mark": found.mark,
        "damaged": found.damaged,
        "damage": found.damage,
        "state": encode(found.state),
        "events": [to_line(event) for event in found.events],
        "log": found.log,
    }
    body = json.dumps(content).encode()
    with contextlib.suppress(StoreUnavailable):
        replace_file(folder / NAME, [_seal(body), body])


def read(folder: Path) -> CachedFold | None:
    """Read the cache of a run; None without one that can be used."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        seal, body = (folder / NAME).read_bytes().splitlines(keepends=True)
        if seal != _seal(body):
            return None
        content = json.loads(body)
        if content["release"] != _release():
            return None
        events = (from_line(line) for line in content["events"])
        return CachedFold(
            offset=int(content["offset"]),
            mark=str(content["mark"]),
            damaged=int(content["damaged"]),
            damage=str(content["damage"]),
            state=decode(content["state"], FoldState, where=NAME),
            events=[event for event in events if event is not None],
            log=[str(line) for line in content["log"]],
        )
    return None


def _seal(body: bytes) -> bytes:
    """The first line: a damaged number would be shown as if it were the run's."""
    return hashlib.sha256(body).hexdigest().encode() + b"\n"


def _release() -> str:
    return f"3 {metadata.version('crossfed')}"

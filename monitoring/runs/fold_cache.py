"""What was made of a long log, for whoever reads it next: caches beside the log.

Only the account that writes it reads it; whoever deletes it loses a little time. One of
another release, or that is damaged, or whose log is another one, is left out.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

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
        "offset": found.offset,
        "mark": found.mark,
        "damaged": found.damaged,
        "damage": found.damage,
        "state": encode(found.state),
        "events": [to_line(event) for event in found.events],
        "log": found.log,
    }
    write_sealed(folder / NAME, content)


def read(folder: Path) -> CachedFold | None:
    """Read the cache of a run; None without one that can be used."""
    content = read_sealed(folder / NAME)
    with contextlib.suppress(ValueError):
        if content is None:
            return None
        events = (from_line(line) for line in content["events"])
        return CachedFold(
            offset=content["offset"],
            mark=content["mark"],
            damaged=content["damaged"],
            damage=content["damage"],
            state=decode(content["state"], FoldState, where=NAME),
            events=[event for event in events if event is not None],
            log=content["log"],
        )
    return None


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a cache; not at all if the folder cannot be written."""
    body = json.dumps({"release": _release(), **content}).encode()
    with contextlib.suppress(StoreUnavailable):
        replace_file(path, [_seal(body), body])


def read_sealed(path: Path) -> Mapping[str, Any] | None:
    """Read a cache; None without one that this release has written."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        seal, body = path.read_bytes().splitlines(keepends=True)
        if seal != _seal(body):
            return None
        content: dict[str, Any] = json.loads(body)
        if content["release"] != _release():
            return None
        return content
    return None


def _seal(body: bytes) -> bytes:
    """The first line: a damaged number would be shown as if it were the run's."""
    return hashlib.sha256(body).hexdigest().encode() + b"\n"


def _release() -> str:
    return f"3 {metadata.version('crossfed')}"

"""The events of a run as JSON lines: ``events.jsonl``.

One line is one event: ``{"event": "RoundFinished", "at": ..., ...}``, in ASCII. JSON
has no NaN and no infinity; they are written as the strings ``"NaN"``, ``"Infinity"``
and ``"-Infinity"``, which only a float field converts back.

A file may hold the events of several coordinators of one run, one after another. Each
begins with ``RunStarted``; if a round occurs twice, the later one counts. Readers
ignore kinds of events and fields that a newer version has added; anything else that
does not match is an error. ``monitoring.views.run_fold`` folds events into a view of
the run.
"""

import contextlib
import gc
import json
import os
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import cast, get_args

from federation.errors import CorruptObject, RunNotFound, StoreUnavailable
from federation.events import Event
from federation.protocols import Closing
from federation.typed_json import decode, encode, refuse_constant

KINDS: Mapping[str, type[Event]] = types.MappingProxyType(
    {kind.__name__: kind for kind in get_args(Event)}
)

_DECODER = json.JSONDecoder(parse_constant=refuse_constant)
_ENCODER = json.JSONEncoder(allow_nan=False)
_BLOCK_BYTES = 1 << 16


class EventWriter(Closing):
    """Append events to a file; an ``Emit`` callable and a context manager.

    Each event is handed to the operating system before the call returns, so a
    killed process leaves at most its last line torn; a crash of the machine may
    cost more. One thread writes.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending and remove a torn line at its end.

        Raises:
            StoreUnavailable: The file cannot be opened or written.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _mend_last_line(path)
            # Unbuffered: what could not be written is not tried again on close.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unavailable(path, error) from error

    def __call__(self, event: Event) -> None:
        """Write one line.

        Raises:
            StoreUnavailable: The disk is full, or the file is unreachable.
        """
        rest = memoryview(to_line(event).encode("ascii") + b"\n")
        start = self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            # Half a line must not run into the next one, should there be room then.
            # That this fails as well is not the news.
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise _unavailable(self._path, error) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def to_line(event: Event) -> str:
    """Write an event as one line of JSON, without the line break."""
    record = {"event": type(event).__name__, **encode(event)}
    return _ENCODER.encode(record)


def from_line(line: str | bytes) -> Event | None:
    """Rebuild the event of a line; None if its kind is not known here.

    Raises:
        ValueError: The line is not JSON, or not an event as ``to_line`` writes it.
    """
    text = line if isinstance(line, str) else line.decode()
    record = _DECODER.decode(text)
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise ValueError('not an object with a string "event"')  # noqa: TRY004
    kind = KINDS.get(record["event"])
    if kind is None:
        return None
    return cast("Event", decode(record, kind, where=record["event"]))


def starts_of(kinds: Collection[type[Event]]) -> tuple[bytes, ...]:
    """How the lines of some kinds of events begin."""
    return tuple(b'{"event": "%b"' % kind.__name__.encode() for kind in kinds)


def read_events(
    path: Path,
    *,
    without: Collection[type[Event]] = (),
    only: Collection[type[Event]] = (),
) -> list[Event]:
    """Read a log, in the order in which it was written.

    A torn last line is left out: its writer was killed, or is still writing.

    Args:
        path: The log.
        without: Kinds that are not read, which saves most of the time; but for the
            last line, which says when the log ends.
        only: Kinds that are read, if not all, and the last line.

    Raises:
        RunNotFound: There is no such file.
        CorruptObject: A line is not an event; the message names file and line.
        StoreUnavailable: The file cannot be read.
    """
    if only:
        without = [kind for kind in KINDS.values() if kind not in only]
    skipped = starts_of(without)
    events, place = [], 0
    try:
        with no_collection(), path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            for number, line in enumerate(log, start=1):
                place += len(line)
                if place < size and line.startswith(skipped):
                    continue
                if not line.endswith(b"\n") and not _is_whole(line):
                    break
                event = _event(line, path, number)
                if event is not None:
                    events.append(event)
    except FileNotFoundError as error:
        raise RunNotFound(f"there is no event log {path}") from error
    except OSError as error:
        raise _unavailable(path, error) from error
    return events


def _event(line: bytes, path: Path, number: int) -> Event | None:
    try:
        return from_line(line)
    except ValueError as error:
        raise CorruptObject(
            f"{path}, line {number}: {error}; remove the line to read the rest"
        ) from error


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Look for no cycles: events have none, and it takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unavailable(path: Path, error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"cannot use the event log {path}: {error.strerror}")


def _is_whole(line: bytes) -> bool:
    """Whether a line without line break is complete: an object that closes."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _mend_last_line(path: Path) -> None:
    """Make the file end with a line break: finish a complete line, cut a torn one."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        size, last = file.seek(0, 2), b""
        at = size
        while at and b"\n" not in last:  # From its end: a log may have gigabytes.
            start = max(0, at - _BLOCK_BYTES)
            file.seek(start)
            last, at = file.read(at - start) + last, start
        last = last[last.rfind(b"\n") + 1 :]
        if not last:
            return
        if _is_whole(last):
            file.seek(0, 2)
            file.write(b"\n")
        else:
            file.truncate(size - len(last))

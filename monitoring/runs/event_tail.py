"""The events of a run that are new since the last look."""

import contextlib
import hashlib
import math
from collections.abc import Collection, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO

from federation.event_log import KINDS, from_line, starts_of
from federation.events import Event, RunStarted

BLOCK_BYTES = 1 << 20  # Read at once: many events, or a few long ones.
_MARK_BYTES = 1 << 12
_START = b'{"event": "RunStarted"'
_ROUND = b'\n{"event": "RoundStarted"'


class EventTail:
    """Reads on where it ended before.

    Attributes:
        damaged: Lines that were left out because they are no events.
        damage: File and line of the first of them; empty if there is none.
        is_anew: Whether the last look began with the first event: at the first look,
            and when another file has taken the place of the one before, such as a
            backup. Forget what you know then.
        is_gone: Whether the file was deleted after it was read.
        read: Share of the file that was read, 0 to 1.
    """

    def __init__(self, path: Path, *, only: Collection[type[Event]] = ()) -> None:
        """Begin before the first event of a log.

        Args:
            path: The log.
            only: Kinds that are read, if not all.
        """
        self._path = path
        self._skipped = starts_of([kind for kind in KINDS.values() if kind not in only])
        self._skipped = self._skipped if only else ()
        self._offset = 0
        self._mark = b""  # Of the bytes before the offset.
        self.damaged, self.damage = 0, ""
        self.is_anew = self.is_gone = False
        self.read = 0.0

    @property
    def place(self) -> tuple[int, str]:
        """Where the next look begins, and a digest of what is before it."""
        return self._offset, self._mark.hex()

    def go_to(self, offset: int, mark: str) -> None:
        """Begin at a place; if the file is another one, the next look begins anew."""
        self._offset, self._mark = offset, bytes.fromhex(mark)

    def skip(self) -> None:
        """Go to the end, past lines that somebody else has read.

        Raises:
            OSError: The file cannot be read.
        """
        with self._path.open("rb") as events:
            self._offset, self.read = events.seek(0, 2), 1.0
            self._mark = _mark(events, self._offset)

    def go_to_round(self, at: float) -> None:
        """Begin with the round that went on at a time, if clocks were not set back.

        Args:
            at: Seconds since 1970.

        Raises:
            OSError: The file cannot be read.
        """
        with self._path.open("rb") as events:
            low, high = 0, events.seek(0, 2)
            while high - low > BLOCK_BYTES:
                middle = events.seek((low + high) // 2)
                events.readline()
                place = events.tell()
                is_before = place < high and _at(events.readline()) < at
                low, high = (place, high) if is_before else (low, middle)
            self._offset = 0
            while low > 0 and not self._offset:
                begin = max(0, low - BLOCK_BYTES)
                events.seek(begin)
                found = events.read(low - begin + len(_ROUND)).rfind(_ROUND)
                self._offset = 0 if found < 0 else begin + found + 1
                low = begin
            self._mark = _mark(events, self._offset)

    def news(self) -> Iterator[Event]:
        """Return what was written since; nothing if the run was deleted."""
        return chain(self.block(), self._rest())

    def _rest(self) -> Iterator[Event]:
        while self.read < 1:
            yield from self.block()

    def block(self) -> Iterator[Event]:
        """Return what was written since, at most a block of it.

        There is more as long as ``read`` is below 1; nothing if the run was deleted.
        """
        try:
            with self._path.open("rb") as events:
                if self._mark != _mark(events, self._offset):
                    self._offset, self._mark = 0, b""
                    self.damaged, self.damage = 0, ""
                self.is_anew = not self._offset
                begin, lines = self._offset, self._lines(events)
                self._mark = _mark(events, self._offset)
        except FileNotFoundError:
            self.is_anew, self.is_gone, self.read = False, self._offset > 0, 1.0
            return iter(())
        self.is_gone = False
        return self._events(lines, begin)

    def _lines(self, events: BinaryIO) -> list[bytes]:
        events.seek(self._offset)
        whole, length = b"", BLOCK_BYTES
        while block := events.read(length):
            whole += block
            if b"\n" in block:
                break
            length = len(whole)  # A line that is longer than a block.
        # A torn line goes when its writer was killed and another continues.
        whole = whole.rpartition(b"\n")[0]
        rest = events.seek(0, 2)
        self._offset += len(whole) + 1 if whole else 0
        self.read = self._offset / rest if whole and rest else 1.0
        return whole.split(b"\n") if whole else []

    def _events(self, lines: list[bytes], place: int) -> Iterator[Event]:
        for line in lines:
            place += len(line) + 1
            if line.startswith(self._skipped):
                continue
            try:
                event = from_line(line)
            except ValueError as error:
                self.damaged += 1
                self.damage = self.damage or self._where(place, error)
                continue
            if event is not None:
                yield event

    def _where(self, end: int, error: ValueError) -> str:
        """File and number of the line that ends at a place, and what is wrong."""
        with self._path.open("rb") as events:
            sizes = [*range(0, end, BLOCK_BYTES), end]
            blocks = (events.read(b - a) for a, b in pairwise(sizes))
            number = sum(block.count(b"\n") for block in blocks)
        return f"{self._path}, line {number}: {error}"

    def first_rounds(self) -> list[int]:
        """Find with which round each coordinator begins, in all of the file."""
        with self._path.open("rb") as events:
            starts = [line for line in events if line.startswith(_START)]
        found = list[int]()
        for line in starts:
            with contextlib.suppress(ValueError):  # A look counts what is damaged.
                event = from_line(line)
                found += [event.first_round] if isinstance(event, RunStarted) else []
        return found


def _at(line: bytes) -> float:
    """When the event of a line was; later than any, if it is none."""
    with contextlib.suppress(ValueError):
        event = from_line(line)
        return math.inf if event is None else event.at
    return math.inf


def _mark(events: BinaryIO, offset: int) -> bytes:
    """Digest of the first bytes, and of those before an offset."""
    found = hashlib.sha256()
    for begin in (0, max(0, offset - _MARK_BYTES)):
        events.seek(begin)
        found.update(events.read(min(_MARK_BYTES, offset - begin)))
    return found.digest() if offset else b""

"""Reads a run's events as they are written, and leaves what they came to.

Whoever works on a run, and whoever shows it, leaves ``.page.json`` in its folder (see
``fold_cache``), so the next one begins there instead of at the first event.
"""

import contextlib
import io
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from federation.event_log import from_line, no_collection, to_line
from federation.events import Event, RoundFinished, RunFinished
from federation.typed_json import decode, encode
from monitoring.runs import fold_cache
from monitoring.runs.event_tail import EventTail
from monitoring.terminal.progress import PlainProgress
from monitoring.views import run_fold
from monitoring.views.run_fold import FoldState, RunFold

NAME = ".page.json"
MAX_LOG_LINES = 300
# While many events wait to be read: settling costs as much for few rounds as for many.
_UNSETTLED = 10


class RunReader:
    """Folds the events of a run, from a log or as they happen.

    Attributes:
        fold: What the events so far came to.
        log: The last lines of the run's log.
        tail: Where in the log it is.
    """

    def __init__(self, log: Path | None) -> None:
        """Begin where others were.

        Args:
            log: The run's ``events.jsonl``; None for a run that leaves no files.
        """
        self._path = log
        self.tail = EventTail(log or Path())
        self._known: Sequence[int] = ()  # Rounds with which coordinators begin.
        self._forget()
        if log is not None:
            # What another version of the code has left is read again.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._restore(fold_cache.read(log.with_name(NAME)) or {})
        self._saved = self.tail.place[0]

    def _restore(self, found: Mapping[str, Any]) -> None:
        state = decode(found["state"], FoldState, where=NAME)
        events = [from_line(line) for line in found["events"]]
        place = found["offset"], found["mark"]
        self.tail.damaged, self.tail.damage = found["damaged"], found["damage"]
        self.log.extend(found["log"])
        for event in events:
            if event is not None:
                self._add(event)
        self.fold.restore(state)
        self._text.truncate(self._text.seek(0))
        self.tail.go_to(*place)

    def _forget(self, first_rounds: Sequence[int] = ()) -> None:
        self.fold = RunFold()
        self.fold.expect(first_rounds)
        self._text = io.StringIO()
        self._progress = PlainProgress(self._text)
        self.log: deque[str] = deque(maxlen=MAX_LOG_LINES)

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read now."""
        return self.tail.read < 1

    def look(self, seconds: float = math.inf) -> bool:
        """Read what was written since; whether there was anything.

        Args:
            seconds: For how long at most, about; then ``is_behind`` says so.
        """
        with no_collection():
            has_news, end = self._look(), time.thread_time() + seconds
            while self.is_behind and time.thread_time() < end:
                has_news |= self._look()
            self.fold.settle()
        self._save(self._saved + fold_cache.WORTH_BYTES)
        return has_news

    def take(self, event: Event) -> None:
        """Take an event that its writer has just added to the log.

        After a round, what is known is left for others, if it is worth it.
        """
        self._add(event)
        if self.fold.is_lost:
            self._read_again()
        if isinstance(event, RoundFinished | RunFinished):
            self._drain()
            is_last = isinstance(event, RunFinished)
            least = fold_cache.WORTH_BYTES + (0 if is_last else self._saved)
            # Only a cache: who writes the log says what is wrong with it.
            with contextlib.suppress(OSError):
                if self._path and self._path.stat().st_size >= least:
                    self.fold.settle()
                    self.tail.skip()
                    self._save(0)

    def _look(self) -> bool:
        was_gone, events = self.tail.is_gone, self.tail.block()
        has_news = was_gone != self.tail.is_gone
        if self.tail.is_anew:
            self._forget(self._known)
            self._saved = 0
        for event in events:
            has_news = True
            self._add(event)
        if self.fold.is_lost and self._known != (known := self.tail.first_rounds()):
            self._known = known
            self.tail.go_to(0, "")
            return self._look()
        self.fold.is_lost = False  # Of a log that says no more about it.
        self.fold.settle(_UNSETTLED * run_fold.MAX_REPORTS)
        self._drain()
        return has_news

    def _read_again(self) -> None:
        self._known = self.tail.first_rounds()
        self.tail.go_to(0, "")
        self.look()

    def _drain(self) -> None:
        self.log += self._text.getvalue().splitlines()
        self._text.truncate(self._text.seek(0))

    def _save(self, least: int) -> None:
        """Leave what was read for whoever comes next, if it is so many bytes."""
        offset, mark = self.tail.place
        if offset < least or not self.fold.has_started or not self._path:
            return
        self._saved = offset
        state, events = self.fold.kept()
        found = {
            "offset": offset,
            "mark": mark,
            "damaged": self.tail.damaged,
            "damage": self.tail.damage,
            "state": encode(state),
            "events": [to_line(event) for event in events],
            "log": [*self.log],
        }
        fold_cache.write(self._path.with_name(NAME), found)

    def _add(self, event: Event) -> None:
        self.fold.add(event)
        if self.fold.has_started:
            self._progress(event)

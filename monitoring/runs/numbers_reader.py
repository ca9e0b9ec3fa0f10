"""Reads the numbers of a run for metrics and alerts, and leaves them for the next.

Whoever writes the log leaves ``.metrics.json`` beside it after a round, so that a
monitor that starts reads at most the round in progress, however long the log is.
"""

import contextlib
from pathlib import Path

from federation.event_log import no_collection
from federation.events import Event, RoundFinished, RunFinished
from monitoring.runs import fold_cache
from monitoring.runs.event_tail import EventTail
from monitoring.runs.run_numbers import RunNumbers

NAME = ".metrics.json"
MAX_RUNS = 20  # The newest, which people and a Prometheus look at.
# Of events that were written: less is read again in 2 ms.
ROUND_BYTES = 1 << 16


class NumbersReader:
    """Adds up the events of a run, from a log or as they happen."""

    def __init__(self, log: Path) -> None:
        """Begin where others were.

        Args:
            log: The run's ``events.jsonl``.
        """
        self._log, self._tail, self._numbers = log, EventTail(log), RunNumbers()
        found = fold_cache.read(log.with_name(NAME)) or {}
        # What another version of the code has left is read again.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            self._numbers = RunNumbers.restored(found["numbers"])
            self._tail.go_to(found["offset"], found["mark"])
        self._saved = self._tail.place[0]

    @property
    def is_near_the_end(self) -> bool:
        """Whether what is left to read takes less than a second."""
        unread = self._log.stat().st_size - self._tail.place[0]
        return unread < fold_cache.WORTH_BYTES

    def look(self) -> RunNumbers:
        """Read what was written since; return the numbers."""
        with no_collection():
            events = self._tail.news()
            if self._tail.is_anew:
                self._numbers, self._saved = RunNumbers(), 0
            for event in events:
                self._numbers.add(event)
        self._save(fold_cache.WORTH_BYTES)
        return self._numbers

    def take(self, event: Event) -> None:
        """Take an event that its writer has just added to the log."""
        self._numbers.add(event)
        if isinstance(event, RoundFinished | RunFinished):
            # Only a cache: who writes the log says what is wrong with it.
            with contextlib.suppress(OSError):
                self._tail.skip()
                self._save(ROUND_BYTES)

    def _save(self, worth: int) -> None:
        offset, mark = self._tail.place
        if offset >= self._saved + worth:
            self._saved = offset
            kept = {"offset": offset, "mark": mark, "numbers": self._numbers.kept()}
            fold_cache.write(self._log.with_name(NAME), kept)

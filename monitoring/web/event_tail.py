"""The events of a run that are new since the last look."""

from collections.abc import Iterator

from federation.event_log import from_line
from federation.events import Event
from monitoring.runs.run_folder import RunFolder


class EventTail:
    """Reads on where it ended before.

    Attributes:
        damaged: Lines that were left out because they are no events.
    """

    def __init__(self, run: RunFolder) -> None:
        """Begin before the first event."""
        self._path = run.events
        self._offset = 0
        self.damaged = 0

    def news(self) -> Iterator[Event]:
        """Yield what was written since; nothing if the run was deleted."""
        try:
            with self._path.open("rb") as events:
                events.seek(self._offset)
                # A torn line goes when its writer was killed and another continues.
                whole = events.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return
        if not whole:
            return
        self._offset += len(whole) + 1
        for line in whole.split(b"\n"):
            try:
                event = from_line(line)
            except ValueError:
                self.damaged += 1
                continue
            if event is not None:
                yield event

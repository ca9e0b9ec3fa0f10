"""The events of a run that are new since the last look."""

from collections.abc import Iterator

from federation.event_log import from_line
from federation.events import Event
from monitoring.runs.run_folder import RunFolder


class EventTail:
    """Reads on where it ended before.

    Attributes:
        damaged: Lines that were left out because they are no events.
        is_anew: Whether the last look began with the first event: at the first look,
            and when another file has taken the place of the one before, such as a
            backup. Forget what you know then.
        is_gone: Whether the file was deleted after it was read.
    """

    def __init__(self, run: RunFolder) -> None:
        """Begin before the first event."""
        self._path = run.events
        self._offset = 0
        self._last = b""  # Line before the offset.
        self.damaged = 0
        self.is_anew = self.is_gone = False

    def news(self) -> Iterator[Event]:
        """Return what was written since; nothing if the run was deleted."""
        self.is_anew = not self._offset
        try:
            with self._path.open("rb") as events:
                events.seek(self._offset - len(self._last))
                if events.read(len(self._last)) != self._last:
                    self._offset, self._last, self.damaged = 0, b"", 0
                    self.is_anew = True
                    events.seek(0)
                # A torn line goes when its writer was killed and another continues.
                whole = events.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            self.is_gone = self._offset > 0
            return iter(())
        self.is_gone = False
        if not whole:
            return iter(())
        lines = whole.split(b"\n")
        self._offset += len(whole) + 1
        self._last = lines[-1] + b"\n"
        return self._events(lines)

    def _events(self, lines: list[bytes]) -> Iterator[Event]:
        for line in lines:
            try:
                event = from_line(line)
            except ValueError:
                self.damaged += 1
                continue
            if event is not None:
                yield event

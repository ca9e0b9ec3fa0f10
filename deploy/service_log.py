"""The log of a service: one line a record, with its time."""

import contextlib
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Imports numpy.
    from federation.protocols import Clock


def service_log(clock: "Clock") -> Callable[[str], None]:
    """Give every line of a service's log its time, in UTC.

    Returns:
        What writes a record: one line, and those that its text indents by two spaces.
        What others have sent begins no record.
    """

    class Stamped(_OneLine):
        def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
            return f"{stamp()} crossfed: {super().formatMessage(record)}"

    def stamp() -> str:
        return f"{datetime.fromtimestamp(clock.now(), UTC):%Y-%m-%d %H:%M:%SZ}"

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Stamped())

    def log(text: str) -> None:
        lines = (" ".join(each.splitlines()) for each in text.split("\n  "))
        line = plain(f"{stamp()} crossfed: " + "\n  ".join(lines))
        with contextlib.suppress(OSError):  # Standard error may be closed.
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    return log


class _OneLine(logging.Formatter):
    """Keeps each record of a log in one line that controls no terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- logging's
        return plain(" ".join(super().formatMessage(record).splitlines()))

    def formatException(self, ei: Any) -> str:  # noqa: N802 -- logging's
        return "\n".join(
            f"  {plain(each)}" for each in super().formatException(ei).splitlines()
        )


def keep_records_in_lines() -> None:
    """Have the handler of programs that set up no logging keep records in one line."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_OneLine())


def plain(text: str) -> str:
    """Remove what would control a terminal: names and errors may be of anyone."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else " " for each in text
    )

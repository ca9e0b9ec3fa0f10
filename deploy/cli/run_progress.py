"""A run's progress on standard error, while it is read."""

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from federation.events import Emit, Event
    from federation.protocols import Clock


@contextmanager
def run_progress(clock: "Clock", *, every: int) -> Iterator["Emit"]:
    """Progress that survives the loss of its reader.

    Args:
        clock: Tells time.
        every: The job's ``evaluation.every``.
    """
    with _progress(clock, every) as progress:
        yield _while_read(progress)


@contextmanager
def _progress(clock: "Clock", every: int) -> Iterator["Emit"]:
    """Choose the form of progress: a live view on a terminal, lines in a pipe."""
    from rich.console import Console  # noqa: PLC0415 -- keeps `--help` fast

    from monitoring.terminal.live import LiveProgress  # noqa: PLC0415
    from monitoring.terminal.progress import PlainProgress  # noqa: PLC0415

    console = Console(stderr=True)
    if sys.stderr.isatty() and not console.is_dumb_terminal:
        with LiveProgress(console, clock=clock) as live:
            yield live
    else:
        plain = PlainProgress(sys.stderr, every=every)
        yield plain
        with contextlib.suppress(OSError):
            plain.close()


def _while_read(progress: "Emit") -> "Emit":
    """Continue without progress when its reader is gone."""
    is_read = True

    def listen(event: "Event") -> None:
        nonlocal is_read
        if is_read:
            try:
                progress(event)
            except OSError:
                is_read = False

    return listen

"""Why a signal ended a process, for the record that it leaves."""

import os
import signal
from collections.abc import Callable
from typing import Any


class ProcessEnded(SystemExit):
    """A signal has ended this process.

    Attributes:
        why: What happened, for a person.
    """

    def __init__(self, code: Any, why: str) -> None:
        """End with a code."""
        super().__init__(code)
        self.why = why


def explain(parent: int) -> None:
    """Make the handlers of SIGINT and SIGTERM say why the process exits.

    Args:
        parent: The process that started this one; Flower raises SIGINT when it ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        if callable(before):
            signal.signal(number, _explained(before, parent))


def _explained(
    before: Callable[[int, Any], Any], parent: int
) -> Callable[[int, Any], None]:
    def handle(number: int, frame: Any) -> None:
        why = _why(number, parent)
        try:
            before(number, frame)
        except SystemExit as error:
            raise ProcessEnded(error.code, why) from None

    return handle


def _why(number: int, parent: int) -> str:
    if os.getppid() != parent:
        return (
            f"its SuperExec (process {parent}) ended: it was killed, or the service "
            "was stopped"
        )
    name = signal.Signals(number).name
    return f"{name} ended it: the service was stopped, or someone killed it"

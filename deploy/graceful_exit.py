"""A process that ends within seconds of a request, whatever it is doing.

An agent may be at work on a task for minutes, or wait for an aggregator that hangs.
Nothing is lost if it does not finish: whatever must last is on its disk before it
counts, since a machine may fail at any time. Only what others should know immediately
is said first.
"""

import os
import sys
import threading
from collections.abc import Callable

from deploy.exit_codes import DONE

# Together with the farewell and what a busy machine adds, within three seconds.
GRACE_SECONDS = 1.2
FAREWELL_SECONDS = 0.8


class GracefulExit:
    """Ends a process in time, from its own thread."""

    def __init__(
        self,
        stopped: threading.Event,
        listener: Callable[[str], None],
        code: Callable[[], int] = lambda: DONE,
        finish: Callable[[], None] = lambda: None,
        words: Callable[[], str] = lambda: "ended without waiting",
    ) -> None:
        """Begin to watch.

        Args:
            stopped: Set when the process is to end.
            listener: Called with a word if it has to be ended.
            code: Returns its exit code then.
            finish: Returns when what must be written then is written.
            words: What it is called with.
        """
        self._code = code
        self._stopped = stopped
        self._listener = listener
        self._finish = finish
        self._words = words
        self._farewell: Callable[[], None] = lambda: None
        threading.Thread(target=self._watch, name="end", daemon=True).start()

    def say_before(self, farewell: Callable[[], None]) -> None:
        """Set a message for the case that the process must be ended.

        Args:
            farewell: It is given ``FAREWELL_SECONDS``, and may fail.
        """
        self._farewell = farewell

    def _watch(self) -> None:
        self._stopped.wait()
        self._finish()
        # A process that ends by itself does so meanwhile, and this thread with it.
        threading.Event().wait(GRACE_SECONDS)
        self._listener(self._words())
        speaker = threading.Thread(target=self._farewell, daemon=True)
        speaker.start()
        speaker.join(FAREWELL_SECONDS)
        leave(self._code())


def leave(code: int = DONE) -> None:
    """End the process now, without a cleanup that may take seconds."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)

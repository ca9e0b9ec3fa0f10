"""Time as an argument: the system's clock, and one that tests move by hand."""

import time


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        return time.time()  # noqa: TID251

    def monotonic(self) -> float:
        """Seconds that never go backwards; only differences mean anything."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)  # noqa: TID251


class VirtualClock:
    """A clock that moves only when someone sleeps, which takes no real time."""

    def __init__(self, start: float = 0.0) -> None:
        """Start at ``start`` seconds since the epoch."""
        self._seconds = start

    def now(self) -> float:
        """Seconds since the epoch, as set so far."""
        return self._seconds

    def monotonic(self) -> float:
        """Return the same as ``now``: a virtual clock never goes backwards."""
        return self._seconds

    def wait_until(self, seconds: float) -> None:
        """Move the clock forward to a time; nothing happens if that has passed."""
        self._seconds = max(self._seconds, seconds)

    def sleep(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"cannot sleep {seconds} s: time only moves forward")
        self._seconds += seconds

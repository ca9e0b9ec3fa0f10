"""A connection whose requests have a time: a timeout of each read does not end.

One that sends a byte before every timeout would hold its thread for ever.
"""

import io
import socket
from typing import Any

from federation.protocols import Clock


class TimedSocket(io.RawIOBase):
    """The bytes of a connection, as far as they come in time.

    ``idle`` waits for a request, whose head then has its own time from the first byte
    on; ``allow`` gives a time to what follows.
    """

    def __init__(
        self,
        connection: socket.socket,
        clock: Clock,
        *,
        idle_seconds: float,
        head_seconds: float,
    ) -> None:
        """Wait for a request.

        Args:
            connection: Read from and written to by nothing else.
            clock: Measures.
            idle_seconds: How long a read may wait.
            head_seconds: How long the head of a request may take.
        """
        self._connection, self._clock = connection, clock
        self._idle, self._head = idle_seconds, head_seconds
        self._end: float | None = None

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there, or wait for it.

        Raises:
            TimeoutError: The time is over.
        """
        self._arm()
        count = self._connection.recv_into(buffer)
        if self._end is None:
            self.allow(self._head)
        return count

    def idle(self) -> None:
        """Wait for a request."""
        self._end = None

    def allow(self, seconds: float) -> None:
        """Give what is read and written from now on so much time together."""
        self._end = self._clock.monotonic() + seconds

    def send(self, piece: memoryview) -> None:
        """Write all of a piece.

        Raises:
            TimeoutError: The time is over.
        """
        self._arm()
        self._connection.sendall(piece)

    def _arm(self) -> None:
        seconds = self._idle
        if self._end is not None:
            seconds = min(seconds, self._end - self._clock.monotonic())
        if seconds <= 0:
            raise TimeoutError("the time of the request is over")
        self._connection.settimeout(seconds)

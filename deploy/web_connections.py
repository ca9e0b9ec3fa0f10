"""Connections to a page that ask for nothing give way to those that do."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# For pages that are followed (``monitoring.web.app.MAX_OPEN`` of them at most), for
# requests, and for scrapes.
MAX_CONNECTIONS = 256
REQUEST_SECONDS = 5.0  # For a connection to send the whole head of a request.


class PromptProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Uvicorn's protocol for one connection, which has to ask for something soon.

    Uvicorn limits only the time between two requests, and any byte ends that limit. It
    refuses whoever comes when all connections are taken, also by those that are idle;
    here the oldest idle one is dropped instead.
    """

    made: float
    _timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Make room for it, and wait for its first request."""
        super().connection_made(transport)
        self.made = self.loop.time()
        self._wait()
        idle = [one for one in self.connections if one.is_idle and one is not self]
        if len(self.connections) > MAX_CONNECTIONS and idle:
            min(idle, key=lambda one: one.made).drop()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the first one begins its time."""
        if self.is_idle:
            self._wait()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close it now."""
        self.connections.discard(self)
        self.transport.close()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.is_idle:
            self.drop()

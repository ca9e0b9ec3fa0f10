"""Serve an ASGI application on the loopback interface from a thread."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from federation.errors import FederationError
from federation.protocols import Clock

if TYPE_CHECKING:
    from starlette.types import ASGIApp

STUCK_SECONDS = 30.0  # After which a reader that takes nothing is dropped.
LAST_LOOK_SECONDS = 2.5  # For browsers to get how a run ended.


@contextmanager
def serving(
    make: Callable[[int], "ASGIApp"],
    port: int,
    *,
    clock: Clock,
    last_look_seconds: float = LAST_LOOK_SECONDS,
) -> Iterator[int]:
    """Serve while the context lasts; its value is the port.

    Args:
        make: Returns the application for a port.
        port: 0 takes a free one.
        clock: Tells time.
        last_look_seconds: How long browsers that are connected have to get the end.

    Raises:
        FederationError: The port is taken.
    """
    import uvicorn  # noqa: PLC0415 -- keeps `--help` fast

    from deploy.web_connections import PromptProtocol  # noqa: PLC0415 -- as above

    with _listening(port) as (listener, found):
        server = uvicorn.Server(
            uvicorn.Config(
                make(found),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                http=PromptProtocol,
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(
            target=server.run, args=([listener],), name="web", daemon=True
        )
        thread.start()
        try:
            yield found
        finally:
            if server.server_state.connections:
                clock.sleep(last_look_seconds)
            server.should_exit = True
            thread.join(timeout=5)


@contextmanager
def _listening(port: int) -> Iterator[tuple[socket.socket, int]]:
    """A socket that listens on the loopback interface, and its port; 0: a free one."""
    with contextlib.closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # The kernel drops them: what waits for a reader is in its buffer.
            stuck = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
            listener.setsockopt(*stuck, int(1000 * STUCK_SECONDS))
            listener.bind(("127.0.0.1", port))
            listener.listen()  # A browser may be faster than the server's thread.
        except OSError as error:
            raise FederationError(
                f"cannot serve the live page on port {port}: {error.strerror}; choose "
                "another port, or 0 for a free one"
            ) from error
        yield listener, listener.getsockname()[1]

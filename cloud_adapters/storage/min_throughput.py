"""How slowly the body of an object may arrive before it is requested again.

A server that sends one byte a minute keeps to every timeout of a socket, and would hold
a reader for years. What is too slow is given up soon, and not only when the time for
further attempts is up: the next one continues behind what has arrived, perhaps over a
better connection.
"""

import contextlib
from collections.abc import Generator, Iterator

from federation.errors import StoreUnavailable
from federation.protocols import Clock

# In each window of so many seconds a body must come at least at this speed.
WINDOW_SECONDS = 20.0
BYTES_PER_SECOND = 16 * 1024


def in_time(
    pieces: Generator[bytes, None, None], *, doing: str, clock: Clock
) -> Iterator[bytes]:
    """Yield the pieces of a body as they come, as long as they come fast enough.

    The first always counts, and so does the end: a read that is tried again gets on,
    and one that has all its bytes is done, however slowly they came.

    Args:
        pieces: Pieces of the body, each waited for no longer than the socket's timeout;
            closed at the end.
        doing: For the message: ``read s3://bucket/key``.
        clock: Tells time.

    Raises:
        StoreUnavailable: The body came too slowly, and there was more of it.
    """
    begin, received, is_first = clock.monotonic(), 0, True
    with contextlib.closing(pieces):
        for piece in pieces:
            received += len(piece)
            seconds = clock.monotonic() - begin
            if seconds >= WINDOW_SECONDS:
                if received < BYTES_PER_SECOND * seconds and not is_first:
                    raise StoreUnavailable(
                        f"cannot {doing}: only {received} bytes arrived in "
                        f"{seconds:.0f} s, and less than {BYTES_PER_SECOND // 1024} "
                        "KiB/s counts as a broken connection; check the network",
                        temporary=True,
                    )
                begin, received = clock.monotonic(), 0
            yield piece
            is_first = False

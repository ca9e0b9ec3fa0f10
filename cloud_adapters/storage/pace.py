"""How slowly the body of an object may come before it is given up.

A server that sends one byte a minute keeps to every timeout of a socket, and would hold
a reader for years.
"""

import contextlib
from collections.abc import Generator, Iterator

from federation.errors import StoreUnavailable
from federation.protocols import Clock

# A body may take so long as a whole, and longer only if it comes faster than this.
BODY_SECONDS = 120.0
BODY_BYTES_PER_SECOND = 64 * 1024


def in_time(
    pieces: Generator[bytes, None, None], *, doing: str, clock: Clock
) -> Iterator[bytes]:
    """Yield the pieces of a body as they come, as long as they come fast enough.

    The first always counts, and so does the end: a read that is tried again gets on,
    and one that has all its bytes is done, however slowly they came.

    Args:
        pieces: Of the body, each waited for no longer than the socket's timeout;
            closed at the end.
        doing: For the message: ``read s3://bucket/key``.
        clock: Tells time.

    Raises:
        StoreUnavailable: The body came too slowly, and there is more of it.
    """
    begin, received = clock.monotonic(), 0
    with contextlib.closing(pieces):
        for piece in pieces:
            allowed = BODY_SECONDS + received / BODY_BYTES_PER_SECOND
            if received and clock.monotonic() - begin > allowed:
                raise StoreUnavailable(
                    f"cannot {doing}: only {received} bytes came in {allowed:.0f} s; "
                    "check the network",
                    temporary=True,
                )
            yield piece
            received += len(piece)

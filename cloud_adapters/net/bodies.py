"""Long bodies of HTTP: memory holds one piece of them, a file without a name the rest.

They are read and written in pieces, so that a timeout is one of a piece, and not of a
body that takes minutes over a thin line.
"""

import errno
import mmap
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cloud_adapters.storage.disk.files import write_all
from federation import mapped
from federation.errors import ProtocolError
from federation.protocols import Buffer

PIECE_BYTES = 1 << 20
# A longer body goes to a file.
SMALL_BYTES = 1 << 20
# So much of the disk stays free, for ledgers and keys in the same folder.
RESERVE_BYTES = 256 << 20

Read = Callable[[int], bytes]


def take_body(read: Read, size: int, scratch: Path | None) -> Buffer | None:
    """Read a body whose length is known.

    Args:
        read: Returns at most so many bytes, as soon as there are some; none at the end.
        size: Bytes of the body.
        scratch: Folder for a long one; None to hold every body in memory.

    Returns:
        The body, a view into a file that has no name if it is long; None if it ends
        too early.

    Raises:
        ProtocolError: The folder does not take it, or the disk would be full.
    """
    if scratch is None or size <= SMALL_BYTES:
        content = b"".join(_pieces(read, size))
        return content if len(content) == size else None
    with _writing(size, scratch):
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(scratch).free
        if size + RESERVE_BYTES > free:
            text = f"{free >> 20} MiB are free, of which {RESERVE_BYTES >> 20} stay so"
            raise OSError(errno.ENOSPC, text)
        # Without a name from the start: a killed process leaves nothing.
        file = tempfile.TemporaryFile(dir=scratch, buffering=0)  # noqa: SIM115
    with file:
        for piece in _pieces(read, size):
            with _writing(size, scratch):
                write_all(file.fileno(), piece)
        if file.tell() != size:
            return None
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))


def cut(buffers: Iterable[Buffer]) -> Iterator[memoryview]:
    """Cut buffers into pieces, uncopied; those of a mapped file are given back."""
    for buffer in buffers:
        yield from mapped.pieces(buffer, PIECE_BYTES)


def _pieces(read: Read, size: int) -> Iterator[bytes]:
    left = size
    while left and (piece := read(min(left, PIECE_BYTES))):
        left -= len(piece)
        yield piece


@contextmanager
def _writing(size: int, scratch: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProtocolError(
            f"a message of {size >> 20} MiB cannot be written below {scratch}: "
            f"{error.strerror or error}"
        ) from error

"""Vectors in files, which pass through memory piece by piece.

What came through an object store is a read-only view of a mapped file (see
``cloud_adapters.transport.frames``). The kernel reads a page of it when someone looks
there, and counts it as this process's memory until the whole file is let go. Code
that reads such a vector from begin to end gives back each piece when it has been
read: a model of any size then takes a piece's memory. To look there again is allowed,
and costs what reading from the kernel's cache does.

The same holds for vectors that are written to, if their file is a ``ScratchMap``: the
kernel keeps what was written in the file (``cloud_adapters.storage.disk.scratch``).
"""

import hashlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE_BYTES = 4 << 20
# Linux maps so many bytes around a page that is looked at, from a multiple of them on:
# the first look at a piece maps the end of the one before again.
_FAULT_AROUND_BYTES = 64 << 10


class ScratchMap(mmap.mmap):
    """A file that is mapped for reading and writing, shared: it holds what is written.

    A private map would lose what was written to a page that is given back.
    """


def sha256(vector: NDArray[Any]) -> bytes:
    """Digest of the bytes of a contiguous vector, 32 bytes."""
    digest = hashlib.sha256()
    for piece in pieces(vector.view(np.uint8).data):
        digest.update(piece)
    return digest.digest()


def pieces(
    content: bytes | bytearray | memoryview, size: int = _PIECE_BYTES
) -> Iterator[memoryview]:
    """Cut bytes into pieces, uncopied; those of a mapped file are given back."""
    whole = memoryview(content)
    view = whole.cast("B") if whole.nbytes else whole[:0]
    for start in range(0, whole.nbytes, size):
        piece = view[start : start + size]
        yield piece
        give_back(np.frombuffer(piece, np.uint8))


def give_back(part: NDArray[Any]) -> None:
    """Release the memory of a part that only maps a file; its values stay.

    With it goes what the system has mapped again just before it. Nothing happens to
    arrays in memory, nor where the operating system cannot do it.

    Args:
        part: Contiguous, of any type and shape.
    """
    file = _file_of(part)
    if file is None or part.size == 0:
        return
    first = part.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
    begin = max(0, first - first % mmap.PAGESIZE - _FAULT_AROUND_BYTES)
    file.madvise(mmap.MADV_DONTNEED, begin, first + part.nbytes - begin)


def own(vector: NDArray[Any]) -> NDArray[Any]:
    """Return a vector that may be written to: a copy, unless it is in scratch.

    What is in a ``ScratchMap`` was made for one user, and may be too large for memory.
    """
    is_scratch = isinstance(_file_of(vector), ScratchMap)
    return vector if is_scratch else np.array(vector)


def _file_of(part: NDArray[Any]) -> mmap.mmap | None:
    """The mapped file that an array is a view of, if that holds all its values."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    owner: Any = part
    is_read_only = not part.flags.writeable
    while isinstance(owner, np.ndarray | memoryview):
        if isinstance(owner, memoryview):
            is_read_only &= owner.readonly
            owner = owner.obj
        else:
            owner = owner.base
    if isinstance(owner, ScratchMap):
        return owner
    # A page that was written to may be nowhere else: only a map that was never open
    # for writing shows what the file holds.
    return owner if is_read_only and isinstance(owner, mmap.mmap) else None

"""Checksums of what is stored: CRC32C against accidents, SHA-256 for identity.

SHA-256 has to see a content in order, and takes most of the time: moving large
contents takes it in a thread of its own, or not at all where no store would keep it.
CRC32C may be taken of parts in any order, and joined.
"""

import functools
import hashlib
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import google_crc32c
import numpy as np

from federation.protocols import Buffer

# Below this a second thread costs more than it saves.
_WORTH_A_THREAD_BYTES = 1 << 20
_PIECES_BEHIND = 4
_BYTES_BEHIND = 16 << 20

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reversed: RFC 3720, section 12.1.
_TO_THE_0TH = 1 << 31  # Reversed: the highest bit is that of x^0.
_TO_THE_8TH = 1 << 23


class Crc32c:
    """Only the checksum against accidents: many times as fast as both."""

    def __init__(self) -> None:
        """Begin with the empty content."""
        self._crc = 0
        self.size = 0

    def update(self, piece: Buffer) -> None:
        """Add the next piece."""
        # Of a network come many small ones, and to wrap one takes a while.
        raw = piece if isinstance(piece, bytes) else _bytes_of(piece)
        self._crc = google_crc32c.extend(self._crc, raw)
        self.size += len(raw)

    def join(self, crc32c: str, size: int) -> None:
        """Add the next piece by its own checksum."""
        self._crc = _times(_zeros(size), self._crc) ^ int(crc32c, 16)
        self.size += size

    @property
    def crc32c(self) -> str:
        """CRC32C (Castagnoli) as 8 hexadecimal digits."""
        return f"{self._crc:08x}"


class Checksums:
    """Both checksums of a content, piece by piece."""

    def __init__(self) -> None:
        """Begin with the empty content."""
        self._crc = Crc32c()
        self._sha256 = hashlib.sha256()

    def update(self, piece: Buffer) -> None:
        """Add the next piece."""
        self.update_crc32c(piece)
        self.update_sha256(piece)

    def update_crc32c(self, piece: Buffer) -> None:
        """Add the next piece to CRC32C and size; the other sum needs it as well."""
        self._crc.update(piece)

    def update_sha256(self, piece: Buffer) -> None:
        """Add the next piece to SHA-256; the other sum needs it as well."""
        self._sha256.update(_bytes_of(piece).data)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._crc.size

    @property
    def crc32c(self) -> str:
        """CRC32C (Castagnoli) as 8 hexadecimal digits."""
        return self._crc.crc32c

    @property
    def sha256(self) -> str:
        """SHA-256 as 64 hexadecimal digits."""
        return self._sha256.hexdigest()


def summed(
    data: Iterable[Buffer], checksums: Checksums
) -> Generator[Buffer, None, None]:
    """Pass pieces on and sum them; SHA-256 of large ones in another thread.

    It may lag behind by a few pieces that can no longer change. Of any other a producer
    may use the buffer again, so it is done with before the next is asked for. At the
    end nothing is left to be done; a caller that stops earlier closes the generator.
    """
    behind: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "sha256") as pool:  # Starts its thread when used.
        for piece in data:
            num_bytes = memoryview(piece).nbytes
            if not behind and num_bytes < _WORTH_A_THREAD_BYTES:
                checksums.update_sha256(piece)
            else:
                behind.append(pool.submit(checksums.update_sha256, piece))
            checksums.update_crc32c(piece)
            yield piece
            most = 0
            if isinstance(piece, bytes):
                most = min(_PIECES_BEHIND, _BYTES_BEHIND // max(num_bytes, 1))
            while len(behind) > most:
                behind.popleft().result()
        while behind:
            behind.popleft().result()


def checksums_of(data: Iterable[Buffer]) -> Checksums | None:
    """Sum a content before it is sent; None if it can be gone through only once.

    For services that take an object's metadata before its content: they can keep the
    SHA-256 of this and of nothing else.
    """
    if iter(data) is data:
        return None
    checksums = Checksums()
    for _ in summed(data, checksums):
        pass
    return checksums


def crc32c(content: Buffer) -> str:
    """CRC32C of a content, as 8 hexadecimal digits."""
    return f"{google_crc32c.value(_bytes_of(content)):08x}"


@functools.lru_cache(maxsize=64)
def _zeros(num_bytes: int) -> int:
    """The factor of a checksum for n bytes that follow: x^8 to the n."""
    product, square = _TO_THE_0TH, _TO_THE_8TH
    while num_bytes:
        if num_bytes & 1:
            product = _times(product, square)
        square = _times(square, square)
        num_bytes >>= 1
    return product


def _times(first: int, second: int) -> int:
    """Multiply polynomials over GF(2) modulo Castagnoli's, all of them reversed."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product


def _bytes_of(content: Buffer) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """View a content as the one kind of buffer that google-crc32c takes uncopied."""
    view = memoryview(content)
    # NumPy does not take an empty buffer of every type.
    return np.frombuffer(view if view.nbytes else b"", np.uint8)

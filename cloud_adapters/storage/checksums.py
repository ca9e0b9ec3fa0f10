"""Checksums of what is stored: CRC32C against accidents, SHA-256 for identity."""

import hashlib
from collections.abc import Iterable, Iterator

import google_crc32c
import numpy as np

from federation.protocols import Buffer


class Checksums:
    """Both checksums of a content that is seen in pieces."""

    def __init__(self) -> None:
        """Begin with the empty content."""
        self._crc = 0
        self._sha256 = hashlib.sha256()
        self.size = 0

    def update(self, piece: Buffer) -> None:
        """Take the next piece."""
        view = memoryview(piece)
        if not view.nbytes:
            return
        raw = _bytes_of(view)
        self._crc = google_crc32c.extend(self._crc, raw)
        self._sha256.update(raw.data)
        self.size += view.nbytes

    @property
    def crc32c(self) -> str:
        """CRC32C (Castagnoli) as 8 hexadecimal digits."""
        return f"{self._crc:08x}"

    @property
    def sha256(self) -> str:
        """SHA-256 as 64 hexadecimal digits."""
        return self._sha256.hexdigest()

    def watch(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        """Pass pieces on, and take note of each."""
        for piece in pieces:
            self.update(piece)
            yield piece


class Crc32c:
    """The checksum against accidents alone: many times as fast as both."""

    def __init__(self) -> None:
        """Begin with the empty content."""
        self._crc = 0
        self.size = 0

    def update(self, piece: Buffer) -> None:
        """Take the next piece."""
        raw = _bytes_of(piece)
        self._crc = google_crc32c.extend(self._crc, raw)
        self.size += raw.size

    @property
    def crc32c(self) -> str:
        """CRC32C (Castagnoli) as 8 hexadecimal digits."""
        return f"{self._crc:08x}"


def crc32c(content: Buffer) -> str:
    """CRC32C of a content, as 8 hexadecimal digits."""
    return f"{google_crc32c.value(_bytes_of(content)):08x}"


def _bytes_of(content: Buffer) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """View a content as the one kind of buffer that google-crc32c takes uncopied."""
    view = memoryview(content)
    # NumPy does not take an empty buffer of every type.
    return np.frombuffer(view if view.nbytes else b"", np.uint8)

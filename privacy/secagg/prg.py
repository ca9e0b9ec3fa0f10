"""The masks' keystream: AES-256 in counter mode, added to words of a ring.

Source: section 2.2 of the protocol (``PRG(k)``); the cipher is NIST SP 800-38A
section 6.5. Word ``w`` of ``b`` bits is bits ``[w*b, (w+1)*b)`` of the keystream of
key ``k``, whose first counter block is zero: a key is used for one stream only.
Words are little-endian. A stream may be entered at any word, so the result depends
neither on the size of chunks nor on the number of threads.

Four kinds of array stand for words, told apart by their type: ``uint16``,
``uint32`` and ``uint64`` hold one word of that width per element, ``uint8`` holds
24-bit words packed in three bytes each.

Key derivation and key separation are not here: see ``privacy.secagg.keys``.

Shape suffixes: w words, c words of one chunk.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

Words = NDArray[np.unsignedinteger[Any]]
Bytes = NDArray[np.uint8]
_Scalar = TypeVar("_Scalar", bound=np.generic)

KEY_BYTES = 32
# Keystream, zeros, data and two scratch buffers of 256 KiB stay in a core's
# second-level cache, and the cipher runs at full speed from 64 KiB on.
CHUNK_WORDS = 1 << 16

_BLOCK_BYTES = 16
_CHUNK_BYTES = 4 * CHUNK_WORDS
_LINE_BYTES = 64
_PACKED_BYTES = 3


def aligned(size: int, dtype: type[_Scalar]) -> NDArray[_Scalar]:
    """Make a scratch array that starts on a cache line; NumPy's own often do not.

    Vector loads that straddle two lines cost a tenth of the time of a seal.
    """
    num_bytes = size * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + num_bytes].view(dtype)


_ZEROS = aligned(_CHUNK_BYTES, np.uint8)
_ZEROS.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A keystream that is added to, or taken from, a vector of words.

    Attributes:
        key: 32 bytes, secret, used for this one stream; never shown.
        sign: 1 to add, -1 to subtract.
    """

    key: bytes | bytearray = field(repr=False)
    sign: Literal[1, -1]

    def __post_init__(self) -> None:
        """Check the key's length and the sign."""
        _check_key(self.key)
        if self.sign not in (1, -1):
            raise ValueError(f"a mask's sign is 1 or -1, not {self.sign!r}")


class Keystream:
    """The bytes of one key's stream, read one after another.

    Args:
        key: 32 bytes.
        first_byte: Where to begin.
    """

    def __init__(self, key: bytes | bytearray, *, first_byte: int = 0) -> None:
        """Set the counter; no byte before ``first_byte`` is computed but a few."""
        _check_key(key)
        block, skip = divmod(first_byte, _BLOCK_BYTES)
        mode = modes.CTR(block.to_bytes(_BLOCK_BYTES, "big"))
        self._context = Cipher(algorithms.AES256(key), mode).encryptor()
        self._context.update(bytes(skip))

    def read_into(self, out: Bytes) -> None:
        """Overwrite ``out`` with the next bytes of the stream."""
        for start in range(0, out.size, _CHUNK_BYTES):
            piece = out[start : start + _CHUNK_BYTES]
            self._context.update_into(_ZEROS[: piece.size].data, piece.data)


class MaskStreams:
    """Several masks, applied to a vector chunk by chunk, from its front to its end.

    One cipher context per mask and one buffer for all: a chunk stays in the cache
    while every mask is applied to it. One object serves one thread.

    Args:
        masks: The masks.
        bits: Width of a word in the stream: 16, 24, 32 or 64.
        first_word: Index in the stream of the first word that will be masked.
    """

    def __init__(
        self, masks: Sequence[Mask], *, bits: int, first_word: int = 0
    ) -> None:
        """Set every stream to its first word."""
        self._word_bytes = bits // 8
        first_byte = self._word_bytes * first_word
        self._streams = [
            (
                np.add if mask.sign == 1 else np.subtract,
                Keystream(mask.key, first_byte=first_byte),
            )
            for mask in masks
        ]
        # One byte more: 24-bit words are read as 32 bits whose top byte is idle.
        self._buffer = aligned(self._word_bytes * CHUNK_WORDS + 1, np.uint8)

    def apply_(self, words_c: Words) -> None:
        """Mask the next words of the vector, in place.

        Args:
            words_c: At most ``CHUNK_WORDS`` words, one per element. 24-bit words
                stand in ``uint32``, and only their lower 24 bits mean anything.
        """
        raw = self._buffer[: self._word_bytes * words_c.size]
        stream_c = self._as_words(words_c.size)
        for operation, stream in self._streams:
            stream.read_into(raw)
            operation(words_c, stream_c, out=words_c)

    def _as_words(self, size: int) -> Words:
        if self._word_bytes == _PACKED_BYTES:
            return np.ndarray((size,), "<u4", self._buffer, strides=(_PACKED_BYTES,))
        return np.ndarray((size,), f"<u{self._word_bytes}", self._buffer)


def apply_masks_(
    words_w: Words,
    masks: Sequence[Mask],
    *,
    first_word: int = 0,
    threads: int = 1,
) -> None:
    """Apply masks to words, in place, modulo the width of a word.

    Args:
        words_w: Contiguous ``uint16``, ``uint32`` or ``uint64``, or ``uint8`` with
            24-bit words packed in three bytes each.
        masks: Streams to add and to subtract; their order does not matter.
        first_word: Index in the streams of the first word of ``words_w``.
        threads: Ranges to work on at the same time; the result is the same.

    Raises:
        ValueError: ``words_w`` has another type, form or length.
    """
    bits, size = _format(words_w)

    def apply_range(start: int, stop: int) -> None:
        streams = MaskStreams(masks, bits=bits, first_word=first_word + start)
        scratch_c = np.empty(CHUNK_WORDS if bits == 8 * _PACKED_BYTES else 0, np.uint32)
        for begin in range(start, stop, CHUNK_WORDS):
            end = min(begin + CHUNK_WORDS, stop)
            if scratch_c.size:
                packed = words_w[_PACKED_BYTES * begin : _PACKED_BYTES * end]
                chunk_c = unpack_24(packed, scratch_c[: end - begin])
                streams.apply_(chunk_c)
                pack_24(chunk_c, packed)
            else:
                streams.apply_(words_w[begin:end])

    if masks:
        in_ranges(apply_range, size, threads=threads)


def add_keystream_(
    words_w: Words,
    key: bytes,
    *,
    sign: Literal[1, -1] = 1,
    first_word: int = 0,
    threads: int = 1,
) -> None:
    """Add one keystream to words, or subtract it: see ``apply_masks_``."""
    mask = Mask(key=key, sign=sign)
    apply_masks_(words_w, [mask], first_word=first_word, threads=threads)


def unpack_24(packed: Words, out_c: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Spread words of three bytes over ``uint32``; the top bytes become zero."""
    wide = out_c.view(np.uint8).reshape(-1, 4)
    narrow = packed.reshape(-1, _PACKED_BYTES)
    for k in range(_PACKED_BYTES):  # Column by column is four times as fast.
        wide[:, k] = narrow[:, k]
    wide[:, _PACKED_BYTES] = 0
    return out_c


def pack_24(words_c: NDArray[np.uint32], out: Words) -> None:
    """Write the lower 24 bits of each word as three bytes, little-endian."""
    wide = words_c.view(np.uint8).reshape(-1, 4)
    narrow = out.reshape(-1, _PACKED_BYTES)
    for k in range(_PACKED_BYTES):
        narrow[:, k] = wide[:, k]


def in_ranges(
    work: Callable[[int, int], None], size: int, *, threads: int = 1
) -> list[tuple[int, int]]:
    """Call ``work(start, stop)`` on contiguous ranges that cover ``range(size)``.

    Ranges begin at multiples of ``CHUNK_WORDS``, one range per thread; the first
    error of a range, in their order, is raised once all have ended.

    Returns:
        The ranges, in order.

    Raises:
        ValueError: ``threads`` is not positive.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    num_chunks = -(-size // CHUNK_WORDS)
    step = CHUNK_WORDS * max(1, -(-num_chunks // threads))
    ranges = [(start, min(start + step, size)) for start in range(0, size, step)]
    if len(ranges) <= 1:
        for start, stop in ranges:
            work(start, stop)
        return ranges
    with ThreadPoolExecutor(len(ranges)) as pool:
        for future in [pool.submit(work, *r) for r in ranges]:
            future.result()
    return ranges


def _format(words_w: Words) -> tuple[int, int]:
    """Bits per word and number of words of an array."""
    itemsize = words_w.dtype.itemsize
    if words_w.dtype.kind != "u" or words_w.ndim != 1:
        raise ValueError(
            f"words are a flat unsigned array, not {words_w.dtype}{words_w.shape}"
        )
    if not words_w.flags.c_contiguous or not words_w.flags.writeable:
        raise ValueError("words must be contiguous and writeable")
    if itemsize > 1:
        return 8 * itemsize, words_w.size
    if words_w.size % _PACKED_BYTES:
        raise ValueError(f"{words_w.size} bytes are not packed words of three bytes")
    return 8 * _PACKED_BYTES, words_w.size // _PACKED_BYTES


def _check_key(key: bytes | bytearray) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a keystream's key is {KEY_BYTES} bytes")

"""The masks' keystream: AES-256 in counter mode, added to words of a ring.

Source: section 2.2 of the protocol (``PRG(k)``); the cipher is NIST SP 800-38A
section 6.5. Word ``w`` of ``b`` bits is bits ``[w*b, (w+1)*b)`` of the keystream of
key ``k``, whose counter block is a number of 128 bits, big-endian, and zero at
first: a key is used for one stream only.
Words are little-endian. A stream may be entered at any word, so the result depends
neither on the size of chunks nor on the number of threads.

Four kinds of array stand for words, told apart by their type: ``uint16``,
``uint32`` and ``uint64`` hold one word of that width per element, ``uint8`` holds
24-bit words packed in three bytes each.

Key derivation and key separation are not here: see
``privacy.secagg.protocol.key_schedule``.

Shape suffixes: w words, c words of one chunk.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from federation.mapped import give_back

Words = NDArray[np.unsignedinteger[Any]]
Bytes = NDArray[np.uint8]
# Bytes that nobody can predict, as many as asked for: ``os.urandom`` in
# production, a keyed stream in tests.
RandomBytes = Callable[[int], bytes]
_Scalar = TypeVar("_Scalar", bound=np.generic)

KEY_BYTES = 32
# Keystream, zeros, data and two scratch buffers of 256 KiB stay in a core's
# second-level cache, and the cipher runs at full speed from 64 KiB on.
CHUNK_WORDS = 1 << 16
# `cryptography` asks for this much room behind what it writes in some modes.
SPARE_BYTES = 15

_BLOCK_BYTES = 16
_CHUNK_BYTES = 4 * CHUNK_WORDS
_LINE_BYTES = 64
_PACKED_BYTES = 3
_GCM_NONCE_BYTES = 12
_GCM_SKIPS = 2 * _BLOCK_BYTES
_MAX_GCM_BYTES = _BLOCK_BYTES << 32  # there its counter of 32 bits would wrap
_LONG_BYTES = 1 << 20  # shorter streams are not worth a thought
_TRIALS = 5


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

    def read_into(self, out: Bytes, size: int) -> None:
        """Overwrite the first ``size`` bytes of ``out`` with the next of the stream.

        Args:
            out: At least ``size + SPARE_BYTES`` bytes; the spare ones are left alone.
            size: How many.

        Raises:
            ValueError: ``out`` is too short.
        """
        _check_room(out, size)
        for start in range(0, size, _CHUNK_BYTES):
            here = min(_CHUNK_BYTES, size - start)
            self._context.update_into(_ZEROS[:here].data, out[start:].data)


def uniform_words(keystream: Keystream, count: int) -> NDArray[np.uint64]:
    """Read the next ``count`` words of 64 bits, each uniform."""
    num_bytes = np.dtype(np.uint64).itemsize * count
    raw = aligned(num_bytes + SPARE_BYTES, np.uint8)
    keystream.read_into(raw, num_bytes)
    return raw[:num_bytes].view(np.uint64)


class FrontKeystream(Keystream):
    """The same stream from its first byte on, by the encryption inside AES-GCM.

    GCM with 96-bit nonces encrypts in counter mode, from the block ``nonce, 2`` on
    (NIST SP 800-38D, sections 6.5 and 7.1). With a nonce of zeros and a plaintext of
    zeros its ciphertext is therefore our stream without the first two blocks, bit
    for bit. OpenSSL computes it with vector AES where the processor has it, which
    its plain counter mode does not do: twice as fast, although GCM authenticates
    as well. The tag is never asked for and leaves no trace in the stream. A nonce
    that does not change is safe for the reason that a counter from zero is: a key
    is used for one stream.

    Args:
        key: 32 bytes.
    """

    def __init__(self, key: bytes | bytearray) -> None:
        """Compute the two blocks that GCM uses internally."""
        super().__init__(key)
        self._front = self._context.update(bytes(_GCM_SKIPS))
        gcm = modes.GCM(bytes(_GCM_NONCE_BYTES))
        self._context = Cipher(algorithms.AES256(key), gcm).encryptor()

    def read_into(self, out: Bytes, size: int) -> None:
        """Overwrite bytes as ``Keystream`` does, up to byte 2^36 of the stream."""
        _check_room(out, size)
        front = self._front[:size]
        if front:
            self._front = self._front[len(front) :]
            out[: len(front)] = np.frombuffer(front, np.uint8)
        super().read_into(out[len(front) :], size - len(front))


def open_keystream(
    key: bytes | bytearray, *, first_byte: int = 0, num_bytes: int
) -> Keystream:
    """Open a stream with the fastest implementation here; the bytes are the same.

    Args:
        key: 32 bytes.
        first_byte: Where to begin.
        num_bytes: How many will be read.
    """
    suits_gcm = first_byte == 0 and _LONG_BYTES <= num_bytes <= _MAX_GCM_BYTES
    if suits_gcm and _gcm_is_faster():
        return FrontKeystream(key)
    return Keystream(key, first_byte=first_byte)


class MaskStreams:
    """Several masks, applied to a vector chunk by chunk, from its front to its end.

    One cipher context per mask and one buffer for all: a chunk stays in the cache
    while every mask is applied to it. One object serves one thread.

    Args:
        masks: Each has its own stream; all are applied to a chunk.
        bits: Width of a word in the stream: 16, 24, 32 or 64.
        first_word: Index in the stream of the first word that will be masked.
        num_words: How many will be masked.
    """

    def __init__(
        self,
        masks: Sequence[Mask],
        *,
        bits: int,
        first_word: int = 0,
        num_words: int,
    ) -> None:
        """Set every stream to its first word."""
        self._word_bytes = bits // 8
        self._streams = [
            (
                np.add if mask.sign == 1 else np.subtract,
                open_keystream(
                    mask.key,
                    first_byte=self._word_bytes * first_word,
                    num_bytes=self._word_bytes * num_words,
                ),
            )
            for mask in masks
        ]
        # The spare bytes also serve 24-bit words, which are read as 32 bits whose
        # top byte is idle.
        self._buffer = aligned(self._word_bytes * CHUNK_WORDS + SPARE_BYTES, np.uint8)

    def apply_(self, words_c: Words) -> None:
        """Mask the next words of the vector, in place.

        Args:
            words_c: At most ``CHUNK_WORDS`` words, one per element. 24-bit words
                stand in ``uint32``, and only their lower 24 bits mean anything.
        """
        num_bytes = self._word_bytes * words_c.size
        stream_c = self._as_words(words_c.size)
        for operation, stream in self._streams:
            stream.read_into(self._buffer, num_bytes)
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
        streams = MaskStreams(
            masks, bits=bits, first_word=first_word + start, num_words=stop - start
        )
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
                give_back(words_w[begin:end])

    if masks:
        in_ranges(apply_range, size, threads=threads)


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
            f"words must be a flat unsigned array, not {words_w.dtype}{words_w.shape}"
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


def _check_room(out: Bytes, size: int) -> None:
    if out.size < size + SPARE_BYTES:
        raise ValueError(
            f"{size} bytes of a stream need a buffer of {size + SPARE_BYTES}, "
            f"not {out.size}"
        )


@functools.cache
def _gcm_is_faster() -> bool:
    """Try both ways on a little more than a megabyte each, once per process.

    Nothing but time depends on the outcome, so this reads a clock of its own.
    """
    buffer = aligned(_CHUNK_BYTES + SPARE_BYTES, np.uint8)
    streams: list[Keystream] = [Keystream(bytes(KEY_BYTES))]
    streams.append(FrontKeystream(bytes(KEY_BYTES)))
    best = [math.inf, math.inf]
    for _ in range(_TRIALS):
        for index, stream in enumerate(streams):
            start = time.perf_counter()
            stream.read_into(buffer, _CHUNK_BYTES)
            best[index] = min(best[index], time.perf_counter() - start)
    return best[1] < best[0]

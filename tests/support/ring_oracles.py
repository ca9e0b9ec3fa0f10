"""A second implementation of the ring, slow and plain, that shares no code.

Blocks of the cipher are computed one counter at a time in ECB mode; words are
Python integers; rounding is done on single float32 numbers.
"""

from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


def stream_bytes(key: bytes, num_bytes: int) -> bytes:
    """AES-256 of 0, 1, 2, ..., one block each."""
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update  # noqa: S305
    counters = range(-(-num_bytes // 16))
    return b"".join(block(c.to_bytes(16, "big")) for c in counters)[:num_bytes]


def stream_words(key: bytes, num_words: int, bits: int) -> list[int]:
    """The stream cut into little-endian words."""
    width = bits // 8
    data = stream_bytes(key, width * num_words)
    return [
        int.from_bytes(data[i : i + width], "little")
        for i in range(0, len(data), width)
    ]


def rounded(values: Sequence[float], factor: float, rounding_key: bytes) -> list[int]:
    """``rint(value * factor + v)`` in float32, v an odd multiple of 1/256."""
    result = []
    dither = stream_bytes(rounding_key, len(values))
    for value, byte in zip(values, dither, strict=True):
        odd = byte | 1
        v = np.float32((odd - 256 if odd > 127 else odd) / 256)
        scaled = np.float32(value) * np.float32(factor)
        result.append(round(float(np.float32(scaled + v))))
    return result


def masked(
    integers: Sequence[int], masks: Sequence[tuple[bytes, int]], bits: int
) -> list[int]:
    """``q + sum of sign * PRG(key)`` modulo 2^bits."""
    words = list(integers)
    for key, sign in masks:
        stream = stream_words(key, len(words), bits)
        words = [w + sign * k for w, k in zip(words, stream, strict=True)]
    return [w % (1 << bits) for w in words]


def as_integers(words: np.ndarray, bits: int) -> list[int]:
    """Words on the wire as integers; 24-bit words are three bytes each."""
    if bits != 24:
        return [int(w) for w in words]
    data = words.tobytes()
    return [int.from_bytes(data[i : i + 3], "little") for i in range(0, len(data), 3)]

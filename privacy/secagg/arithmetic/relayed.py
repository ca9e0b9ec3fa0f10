"""Adding masked words as they travel: what a relay does, without any key.

The sum of masked words modulo the size of a word is as long as the words of one site,
and still masked: the masks of these sites against all others have not cancelled.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from privacy.keystream import CHUNK_WORDS, pack_24, unpack_24

Octets = NDArray[np.uint8]

_BITS_PACKED = 24
_LEVEL_BITS = 64


def word_bits(*, ring_bits: int, levels: int) -> int:
    """Bits of a word that wraps: of the ring, or of packed digits."""
    return _LEVEL_BITS if levels else ring_bits


def sum_words(many: Iterable[Octets], *, size: int, bits: int) -> Octets:
    """Add masked words of several sites, each modulo ``2^bits``.

    Args:
        many: One vector for each site, shape ``(size,)``; only read.
        size: Bytes of each.
        bits: 16, 24, 32 or 64.

    Raises:
        ValueError: One has another length.
    """
    total = np.zeros(size, np.uint8)
    for words in many:
        if words.size != size:
            raise ValueError(f"{words.size} bytes of masked words are not {size}")
        if bits == _BITS_PACKED:
            _add_packed_(total, words)
        else:
            dtype = np.dtype(f"<u{bits // 8}")
            into = total.view(dtype)
            np.add(into, np.ascontiguousarray(words).view(dtype), out=into)
    return total


def _add_packed_(total: Octets, words: Octets) -> None:
    one_c, other_c = np.empty((2, CHUNK_WORDS), np.uint32)
    step = 3 * CHUNK_WORDS
    for begin in range(0, total.size, step):
        part = total[begin : begin + step]
        length = part.size // 3
        sum_c = unpack_24(part, one_c[:length])
        sum_c += unpack_24(words[begin : begin + step], other_c[:length])
        pack_24(sum_c, part)

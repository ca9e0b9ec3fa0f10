"""The aggregator's arithmetic: one sum in memory for any number of sites.

Masked updates are added as they arrive. Masks that do not cancel (self masks of
the sites that answered, pairwise masks of those that did not) are removed at the
end, all in one pass. Who must reveal what is for the protocol's state machine.

Shape suffixes: w words as they arrive, c words of one chunk.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.mapped import give_back
from federation.vectors import Allocate, Vector, in_memory, words_from
from privacy.keystream import (
    CHUNK_WORDS,
    Mask,
    MaskStreams,
    Words,
    in_ranges,
    pack_24,
    unpack_24,
)
from privacy.secagg.arithmetic.ring import Inputs, RingSpec, decode_sum_, num_values


class MaskedSum:
    """The sum of masked updates of one round, modulo 2^bits.

    Costs one word per value, of 4 bytes at 32 and 24 bits and 2 at 16, and scratch
    space of less than 1 MiB per thread. Not for several threads at a time.

    Args:
        size: Values in an update, d.
        spec: The ring.
        threads: Ranges to work on at the same time.
        allocate: Makes the vector of the sum, and of the mean if it needs another.
    """

    def __init__(
        self,
        size: int,
        spec: RingSpec,
        *,
        threads: int = 1,
        allocate: Allocate = in_memory,
    ) -> None:
        """Begin with zero."""
        self._spec, self._threads, self._allocate = spec, threads, allocate
        dtype = np.uint16 if spec.bits == 16 else np.uint32  # noqa: PLR2004
        self._sum_d: NDArray[np.unsignedinteger[Any]] = words_from(
            allocate, size, dtype
        )
        self._num_folded = 0
        self._decoded = False

    @property
    def num_bytes(self) -> int:
        """Bytes of an update's words."""
        return self._spec.word_bytes * self._sum_d.size

    def fold_(self, words_w: Words, *, count: int = 1) -> None:
        """Add a masked update, or the sum of ``count`` of them, which is not kept.

        It may be the bytes of its words.

        Raises:
            ValueError: It has another type or length, the sum holds as many
                updates as the ring has room for, or it has been decoded.
        """
        self._check_open()
        if words_w.dtype == np.uint8:
            words_w = words_w.view(self._spec.wire_dtype)
        if num_values(words_w, self._spec) != self._sum_d.size:
            raise ValueError(
                f"a masked update of {num_values(words_w, self._spec)} values cannot "
                f"be added to a sum of {self._sum_d.size}"
            )
        if self._num_folded + count > self._spec.num_sites:
            raise ValueError(f"the sum already holds all {self._num_folded} updates")
        self._num_folded += count
        in_ranges(
            lambda start, stop: self._fold_range(words_w, start, stop),
            self._sum_d.size,
            threads=self._threads,
        )

    def apply_masks_(self, masks: Sequence[Mask]) -> None:
        """Add or remove masks, all in one pass over the sum.

        A mask that a site added is removed with sign -1, and the other way round.
        """
        self._check_open()
        in_ranges(
            lambda start, stop: self._mask_range(masks, start, stop),
            self._sum_d.size if masks else 0,
            threads=self._threads,
        )

    def digest(self) -> bytes:
        """SHA-256 of the sum as little-endian words of its type, modulo 2^bits.

        Words have 2 bytes at 16 bits, otherwise 4.

        Raises:
            ValueError: The sum has been decoded.
        """
        self._check_open()
        found = hashlib.sha256()
        top = self._sum_d.dtype.type((1 << self._spec.bits) - 1)
        little = self._sum_d.dtype.newbyteorder("<")
        for begin in range(0, self._sum_d.size, CHUNK_WORDS):
            chunk_c = self._sum_d[begin : begin + CHUNK_WORDS]
            found.update((chunk_c & top).astype(little, copy=False).data)
            give_back(chunk_c)
        return found.digest()

    def decode(self, *, divisor: float = 1.0, weight: float | None = None) -> Vector:
        """Read the unmasked sum, in its own memory: see ``ring.decode_sum_``.

        Args:
            divisor: What the sum is divided by: the sum of the weights for a mean.
            weight: Sum of the weights of the updates; 1 for each by default.

        Raises:
            SumOutOfRange: A mask is still there, an update was corrupt, or a site
                sent what no honest one sends.
            ValueError: The divisor is not positive, or the sum was decoded before.
        """
        self._check_open()
        self._decoded = True
        total = float(self._num_folded) if weight is None else weight
        return decode_sum_(
            self._sum_d,
            self._spec,
            divisor=divisor,
            held=Inputs(num_updates=self._num_folded, weight=total),
            threads=self._threads,
            allocate=self._allocate,
        )

    def _check_open(self) -> None:
        if self._decoded:
            raise ValueError("the sum has been decoded; use a new sum for each round")

    def _fold_range(self, words_w: Words, start: int, stop: int) -> None:
        if words_w.dtype == self._sum_d.dtype:
            for begin in range(start, stop, CHUNK_WORDS):
                mine_c = self._sum_d[begin : min(begin + CHUNK_WORDS, stop)]
                words_c = words_w[begin : begin + mine_c.size]
                np.add(mine_c, words_c, out=mine_c)
                give_back(words_c)
                give_back(mine_c)
            return
        wide_c = np.empty(CHUNK_WORDS, np.uint32)
        for begin in range(start, stop, CHUNK_WORDS):
            end = min(begin + CHUNK_WORDS, stop)
            packed = words_w[3 * begin : 3 * end]
            chunk_c = self._sum_d[begin:end]
            np.add(chunk_c, unpack_24(packed, wide_c[: end - begin]), out=chunk_c)
            give_back(packed)
            give_back(chunk_c)

    def _mask_range(self, masks: Sequence[Mask], start: int, stop: int) -> None:
        streams = MaskStreams(
            masks, bits=self._spec.bits, first_word=start, num_words=stop - start
        )
        for begin in range(start, stop, CHUNK_WORDS):
            chunk_c = self._sum_d[begin : min(begin + CHUNK_WORDS, stop)]
            streams.apply_(chunk_c)
            give_back(chunk_c)


Octets = NDArray[np.uint8]

_BITS_PACKED = 24


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

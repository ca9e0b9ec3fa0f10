"""Vectors in blocks of values, each of which becomes a record of bytes.

A codec of few bits cuts the vector into blocks, and encodes each separately: its scale,
codes and places lie side by side in one *record*. So words can be written over the
vector from its beginning on, and any part of them can be read without the rest. The
last block may be shorter; its record is, too.

Shape suffixes: d float values of the model, n blocks, w values of a block, r bytes of
a record.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from federation.compression.codec import BeyondCodec, count_fault
from federation.mapped import give_back
from federation.vectors import (
    CHUNK_VALUES,
    ByteVector,
    Values,
    Vector,
    Words,
    chunks,
)

# Scales are bfloat16: in a record they have 2 bytes, little-endian.
SCALE_BYTES = 2
_SCALE = np.dtype("<u2")
_SIGN_OR_INFINITE = 0x7F80  # A scale of these bits or more is negative or not finite.
# A scale is at most 2^-7 larger than need be, and what it stands for stays finite.
LIMIT = float(np.finfo(np.float32).max) * (1 - 2.0**-6)


class RecordKind(Protocol):
    """How a block becomes a record. Implementations: ``blocks``, ``top_k``."""

    def num_bytes(self, width: int) -> int:
        """Bytes of the record of ``width`` values."""
        ...

    def pack(self, values_nw: Vector) -> tuple[ByteVector, Vector]:
        """Encode blocks of finite values.

        Returns:
            Records of shape ``(n, r)``; and what they stand for, shape ``(n, w)``.
        """
        ...

    def unpack(self, records_nr: ByteVector, width: int) -> Vector:
        """Decode records into new memory, shape ``(n, w)``."""
        ...

    def fault(self, records_nr: ByteVector, width: int) -> str:
        """Say what is wrong with records of a stranger; empty if nothing is."""
        ...


@dataclass(frozen=True, slots=True)
class RecordCodec:
    """The codec of a kind of records; see ``federation.compression.codec.Codec``.

    Attributes:
        name: What the job file calls it.
        kind: How a block becomes a record.
        block: Values of a block.
        shares_support: Whether all parties send the same coordinates.
    """

    name: str
    kind: RecordKind
    block: int
    shares_support: bool = True
    dtype: np.dtype[np.generic] = np.dtype(np.uint8)  # noqa: RUF009 -- immutable
    is_linear: bool = False

    def bits_per_value(self) -> float:
        """Bits of a whole block by its values."""
        return 8 * self.kind.num_bytes(self.block) / self.block

    def num_words(self, size: int) -> int:
        """Bytes of all records."""
        whole, rest = divmod(size, self.block)
        last = self.kind.num_bytes(rest) if rest else 0
        return whole * self.kind.num_bytes(self.block) + last

    def check(self, vector_d: Vector) -> None:
        """See ``Codec``."""
        for piece in chunks(vector_d.size):
            self._check(vector_d[piece])

    def encode(
        self,
        vector_d: Vector,
        *,
        out: Words | None = None,
        residual_d: Vector | None = None,
        seed: int = 0,  # noqa: ARG002 -- of the seam
    ) -> Words:
        """Encode block by block; see ``Codec``."""
        words = (
            np.empty(self.num_words(vector_d.size), np.uint8) if out is None else out
        )
        for piece, place, width in self._parts(0, vector_d.size, vector_d.size):
            # Read before anything is written, as the words may share its memory.
            part_c = vector_d[piece]
            if residual_d is not None:
                part_c = part_c + residual_d[piece]
            self._check(part_c)
            records_nr, stands_nw = self.kind.pack(part_c.reshape(-1, width))
            if residual_d is not None:
                np.subtract(part_c, stands_nw.reshape(-1), out=residual_d[piece])
                give_back(residual_d[piece])
            words[place] = records_nr.reshape(-1)
        return words

    def fault(self, words: Words, size: int) -> str:
        """Check the number of bytes, and every scale and place."""
        if fault := count_fault(self, words, size):
            return fault
        for _, place, width in self._parts(0, size, size):
            part = words[place]
            fault = self.kind.fault(part.reshape(-1, self.kind.num_bytes(width)), width)
            give_back(part)
            if fault:
                return f"words of {self.name} with {fault}"
        return ""

    def values(
        self,
        words: Words,
        *,
        size: int | None = None,
        seed: int = 0,  # noqa: ARG002 -- of the seam
    ) -> Values:
        """See ``Codec``."""
        if size is None:
            raise ValueError(f"{self.name} needs the number of values to read words")
        return _RecordValues(words, size, self)

    def _check(self, part_c: Vector) -> None:
        largest = max(float(part_c.max()), -float(part_c.min()))
        if not largest < LIMIT:  # Nor is NaN.
            raise BeyondCodec(
                f"a value of magnitude {largest:g} does not fit into {self.name}: "
                "lower the learning rate"
            )

    def _parts(
        self, first: int, last: int, size: int
    ) -> Iterator[tuple[slice, slice, int]]:
        """Cut whole blocks of a vector, from one that begins at ``first``, into chunks.

        Yields:
            Places of the values, places of their words, and the width of the blocks.
        """
        record = self.kind.num_bytes(self.block)
        step = max(1, CHUNK_VALUES // self.block) * self.block
        end_of_whole = size - size % self.block
        for start in range(first, min(last, end_of_whole), step):
            stop = min(start + step, -(-last // self.block) * self.block, end_of_whole)
            begin, end = start // self.block, stop // self.block
            yield slice(start, stop), slice(begin * record, end * record), self.block
        if last > end_of_whole:
            begin = end_of_whole // self.block * record
            width = size - end_of_whole
            end = begin + self.kind.num_bytes(width)
            yield slice(end_of_whole, size), slice(begin, end), width


@dataclass(frozen=True, slots=True)
class _RecordValues:
    """Float values that are decoded from records when they are read."""

    words: Words
    size: int
    codec: RecordCodec

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(d,)``."""
        return (self.size,)

    def __getitem__(self, piece: slice) -> Vector:
        """Values of a chunk, in new memory."""
        start, stop, _ = piece.indices(self.size)
        codec, out_c = self.codec, np.empty(max(0, stop - start), np.float32)
        first = start - start % codec.block
        for part, place, width in codec._parts(first, stop, self.size):  # noqa: SLF001
            words = self.words[place]
            records_nr = words.reshape(-1, codec.kind.num_bytes(width))
            values = codec.kind.unpack(records_nr, width).reshape(-1)
            begin, end = max(part.start, start), min(part.stop, stop)
            out_c[begin - start : end - start] = values[
                begin - part.start : end - part.start
            ]
            give_back(words)
        return out_c


def scale_bytes(magnitudes_n: Vector, *, up: bool) -> ByteVector:
    """Round magnitudes to scales, shape ``(n, 2)``; ``up``, or to the nearest ones."""
    bits_n = np.abs(magnitudes_n).view(np.uint32)  # Of -0 as of 0.
    rounded_n = (bits_n + np.uint32(0xFFFF if up else 0x8000)) >> np.uint32(16)
    return rounded_n.astype(_SCALE).view(np.uint8).reshape(-1, SCALE_BYTES)


def read_scales(bytes_n2: ByteVector) -> Vector:
    """Scales as float32."""
    bits_n = np.ascontiguousarray(bytes_n2).view(_SCALE).reshape(-1)
    values_n: Vector = np.left_shift(bits_n, 16, dtype=np.uint32).view(np.float32)
    return values_n


def scale_fault(bytes_n2: ByteVector) -> str:
    """Say so if a scale is negative or not finite."""
    bits_n = np.ascontiguousarray(bytes_n2).view(_SCALE)
    is_bad = bool((bits_n >= _SIGN_OR_INFINITE).any())
    return "a scale that is negative or not finite" if is_bad else ""

"""The codec that sends the largest values of each block, in 2 bits and a place each.

As SparseLoCo does (arXiv:2508.15706, Section 3): of each block the ``k`` values of
largest magnitude, by default 64 of 4,096, which takes 0.23 bits for each value of the
vector. A value becomes its sign and one of two magnitudes, both of which its block
chooses: the means of the sent magnitudes below their mean, and of the others. All other
values are left out, and so is most of their energy: error feedback must bring it later.

Each site sends other places: sums of masked words, and rules that compare sites, have
no use for them.

A record, bits from the lowest of a byte on: the smaller magnitude and the larger one,
2 bytes each; ``k`` places in rising order, of as many bits as the last place of a whole
block has, 12 for 4,096; ``k`` codes of 2 bits, of which the first chooses the larger
magnitude and the second the minus sign. Places and codes begin at a byte each.

Shape suffixes: n blocks, w values of a block, k values that are sent, b bits, r bytes
of a record.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.compression.records import (
    SCALE_BYTES,
    RecordCodec,
    read_scales,
    scale_bytes,
    scale_fault,
)
from federation.vectors import ByteVector, Vector

DEFAULT_BLOCK = 4096
DEFAULT_FRACTION = 1 / 64
_CODE_BITS = 2
_SCALES_BYTES = 2 * SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Largest:
    """Records of the largest values.

    Attributes:
        fraction: Share of a block's values that is sent; at least one is.
        place_bits: Bits of an index within a block.
    """

    fraction: float
    place_bits: int

    def count(self, width: int) -> int:
        """Values that are sent of ``width``."""
        return min(width, max(1, round(width * self.fraction)))

    def num_bytes(self, width: int) -> int:
        """Bytes of magnitudes, places and codes."""
        count = self.count(width)
        return (
            _SCALES_BYTES
            + _num_bytes(count * self.place_bits)
            + _num_bytes(count * _CODE_BITS)
        )

    def pack(self, values_nw: Vector) -> tuple[ByteVector, Vector]:
        """See ``RecordKind``."""
        num_blocks, width = values_nw.shape
        places_nk = _largest(np.abs(values_nw), self.count(width))
        sent_nk = np.take_along_axis(values_nw, places_nk, axis=1)
        sizes_nk = np.abs(sent_nk)
        # In float64: the sum of a block's values may have no float32.
        middle_n = sizes_nk.mean(axis=1, dtype=np.float64)
        is_large_nk = sizes_nk >= middle_n[:, None]
        low = scale_bytes(_mean_of(sizes_nk, ~is_large_nk), up=False)
        high = scale_bytes(_mean_of(sizes_nk, is_large_nk), up=False)
        codes_nk = is_large_nk.view(np.uint8) | (np.signbit(sent_nk) << np.uint8(1))
        packed = [
            low,
            high,
            _bits_to_bytes(places_nk, self.place_bits),
            _bits_to_bytes(codes_nk, _CODE_BITS),
        ]
        stands_nw = np.zeros_like(values_nw)
        levels_n4 = _levels(read_scales(low), read_scales(high))
        stands_nk = np.take_along_axis(levels_n4, codes_nk.astype(np.intp), axis=1)
        np.put_along_axis(stands_nw, places_nk, stands_nk, axis=1)
        return np.concatenate(packed, axis=1).reshape(num_blocks, -1), stands_nw

    def unpack(self, records_nr: ByteVector, width: int) -> Vector:
        """See ``RecordKind``."""
        places_nk, codes_nk = (
            self._places(records_nr, width),
            self._codes(records_nr, width),
        )
        low, high = (
            records_nr[:, :SCALE_BYTES],
            records_nr[:, SCALE_BYTES:_SCALES_BYTES],
        )
        levels_n4 = _levels(read_scales(low), read_scales(high))
        values_nw = np.zeros((len(records_nr), width), np.float32)
        stands_nk = np.take_along_axis(levels_n4, codes_nk, axis=1)
        np.put_along_axis(values_nw, places_nk, stands_nk, axis=1)
        return values_nw

    def fault(self, records_nr: ByteVector, width: int) -> str:
        """Look at magnitudes and places; every code has a level."""
        if fault := scale_fault(records_nr[:, :_SCALES_BYTES]):
            return fault
        places_nk = self._places(records_nr, width)
        if (places_nk[:, -1] >= width).any():
            return f"a place outside of its block of {width} values"
        if (np.diff(places_nk, axis=1) <= 0).any():
            return "places that do not rise"
        return ""

    def _places(self, records_nr: ByteVector, width: int) -> NDArray[np.intp]:
        count = self.count(width)
        end = _SCALES_BYTES + _num_bytes(count * self.place_bits)
        return _bytes_to_bits(
            records_nr[:, _SCALES_BYTES:end], self.place_bits, count=count
        )

    def _codes(self, records_nr: ByteVector, width: int) -> NDArray[np.intp]:
        count = self.count(width)
        start = _SCALES_BYTES + _num_bytes(count * self.place_bits)
        return _bytes_to_bits(records_nr[:, start:], _CODE_BITS, count=count)


def top_k_codec(
    block: int = DEFAULT_BLOCK, fraction: float = DEFAULT_FRACTION
) -> RecordCodec:
    """Return ``top_k`` with blocks of a number of values, of which a share is sent."""
    kind = Largest(fraction, max(1, (block - 1).bit_length()))
    return RecordCodec("top_k", kind, block, shares_support=False)


def _largest(sizes_nw: Vector, count: int) -> NDArray[np.intp]:
    """Places of the largest values of each row, rising; of equal ones the first.

    The smallest magnitude that is sent is a value, the same on every processor; which
    of equal values a partition puts where is not.
    """
    width = sizes_nw.shape[1]
    edge_n1 = np.partition(sizes_nw, width - count, axis=1)[:, width - count, None]
    chosen_nw = sizes_nw >= edge_n1
    too_many = np.flatnonzero(np.count_nonzero(chosen_nw, axis=1) > count)
    for row in too_many:
        equal = np.flatnonzero(sizes_nw[row] == edge_n1[row])
        larger = np.count_nonzero(sizes_nw[row] > edge_n1[row])
        chosen_nw[row, equal[count - larger :]] = False
    return np.nonzero(chosen_nw)[1].reshape(-1, count)


def _mean_of(sizes_nk: Vector, chosen_nk: NDArray[np.bool_]) -> Vector:
    """Mean of the chosen magnitudes of each row; 0 where there is none."""
    sums_n = np.where(chosen_nk, sizes_nk, 0).sum(axis=1, dtype=np.float64)
    counts_n = np.maximum(1, np.count_nonzero(chosen_nk, axis=1))
    means_n: Vector = np.divide(sums_n, counts_n).astype(np.float32)
    return means_n


def _levels(low_n: Vector, high_n: Vector) -> Vector:
    """Levels by code, shape ``(n, 4)``."""
    levels_n4 = np.empty((low_n.size, 4), np.float32)
    levels_n4.T[:] = low_n, high_n, -low_n, -high_n
    return levels_n4


def _num_bytes(bits: int) -> int:
    return -(-bits // 8)


def _bits_to_bytes(numbers_nk: NDArray[Any], bits: int) -> ByteVector:
    """Put numbers of a few bits one after another, each row from a byte on."""
    shifts_b = np.arange(bits, dtype=np.uint32)
    single = (numbers_nk.astype(np.uint32)[:, :, None] >> shifts_b) & 1
    flat = single.astype(np.uint8).reshape(len(numbers_nk), -1)
    return np.packbits(flat, axis=1, bitorder="little")


def _bytes_to_bits(packed_nr: ByteVector, bits: int, *, count: int) -> NDArray[np.intp]:
    """Read ``count`` numbers of each row."""
    flat = np.unpackbits(packed_nr, axis=1, bitorder="little", count=count * bits)
    weights_b = np.ldexp(np.float32(1), np.arange(bits))
    # At most 16 bits: exact in float32, whose product of matrices is the fastest.
    found = flat.reshape(len(packed_nr), count, bits).astype(np.float32) @ weights_b
    return found.astype(np.intp)

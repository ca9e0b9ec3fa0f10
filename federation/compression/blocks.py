"""Codecs that round each value to one of a few levels, with a scale for each block.

``int8`` and ``int4`` have equal steps: a value becomes the nearest multiple of its
block's scale, of at most 127 or 7 of them. With values spread over a step, the error
of a value has the variance step^2 / 12. ``fp4`` has a sign and three bits of exponent
(E3M0, Streaming DiLoCo, arXiv:2501.18512, Section 3.3): 0, or the scale times 1, 2, 4
to 64; its error grows with the value. The scale is the block's largest magnitude by
the largest level, rounded up to bfloat16, so that no value is clipped.

A record: the scale, 2 bytes; the codes, one byte each, or two in a byte, the first of
them in its low half.

Shape suffixes: n blocks, w values of a block, r bytes of a record.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from federation.compression.records import (
    SCALE_BYTES,
    RecordCodec,
    read_scales,
    scale_bytes,
    scale_fault,
)
from federation.vectors import ByteVector, Vector

DEFAULT_BLOCK = 128
_HALF_BYTE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Records of a scale and one code for each value.

    Attributes:
        bits: Bits of a code, 8 or 4.
        top: The largest level, in scales.
        nearest: Values by their scale to codes.
        levels: Levels by code, of shape ``(2 ** bits,)``.
    """

    bits: int
    top: float
    nearest: Callable[[Vector], ByteVector]
    levels: Vector

    def num_bytes(self, width: int) -> int:
        """Bytes of scale and codes."""
        return SCALE_BYTES + -(-width * self.bits // 8)

    def pack(self, values_nw: Vector) -> tuple[ByteVector, Vector]:
        """See ``RecordKind``."""
        largest_n: Vector = np.maximum(values_nw.max(axis=1), -values_nw.min(axis=1))
        scales_n2 = scale_bytes((largest_n / self.top).astype(np.float32), up=True)
        scales_n = read_scales(scales_n2)
        # Where the scale is 0, so are all values, or nearly.
        divisors_n = np.where(scales_n == 0, 1, scales_n).astype(np.float32)
        ratios_nw: Vector = np.divide(values_nw, divisors_n[:, None])
        codes_nw = self.nearest(ratios_nw)
        stands_nw = np.take(self.levels, codes_nw)
        stands_nw *= scales_n[:, None]
        packed = codes_nw if self.bits == 8 else _paired(codes_nw)  # noqa: PLR2004
        return np.concatenate([scales_n2, packed], axis=1), stands_nw

    def unpack(self, records_nr: ByteVector, width: int) -> Vector:
        """See ``RecordKind``."""
        codes = records_nr[:, SCALE_BYTES:]
        if self.bits == _HALF_BYTE:
            values_nw = np.take(_PAIRS[self.top], codes, axis=0)
            values_nw = values_nw.reshape(len(codes), -1)[:, :width]
        else:
            values_nw = np.take(self.levels, codes)
        values_nw *= read_scales(records_nr[:, :SCALE_BYTES])[:, None]
        return values_nw

    def fault(self, records_nr: ByteVector, width: int) -> str:  # noqa: ARG002
        """Look at the scales; every code has a level."""
        return scale_fault(records_nr[:, :SCALE_BYTES])


def _paired(codes_nw: ByteVector) -> ByteVector:
    """Two codes in each byte; a single last one has a 0 beside it."""
    if codes_nw.shape[1] % 2:
        codes_nw = np.pad(codes_nw, ((0, 0), (0, 1)))
    packed: ByteVector = codes_nw[:, 0::2] | (codes_nw[:, 1::2] << np.uint8(_HALF_BYTE))
    return packed


def _whole_numbers(bits: int) -> Levels:
    """Levels of equal steps, as two's complement."""
    top, mask = (1 << (bits - 1)) - 1, (1 << bits) - 1
    codes = np.arange(1 << bits)
    levels = np.where(codes > top, codes - (1 << bits), codes).astype(np.float32)

    def nearest(ratios_nw: Vector) -> ByteVector:
        np.rint(ratios_nw, out=ratios_nw)
        np.clip(ratios_nw, -top, top, out=ratios_nw)
        codes_nw: ByteVector = ratios_nw.astype(np.int8).view(np.uint8)
        return codes_nw if bits == 8 else codes_nw & np.uint8(mask)  # noqa: PLR2004

    return Levels(bits, float(top), nearest, levels)


def _powers() -> Levels:
    """E3M0: codes 0 to 7 are 0, 1, 2, 4 to 64; from 8 on they are negative."""
    magnitudes = [0.0, *(2.0**power for power in range(7))]
    levels = np.array([*magnitudes, *(-m for m in magnitudes)], np.float32)

    def nearest(ratios_nw: Vector) -> ByteVector:
        bits_nw = ratios_nw.view(np.int32)
        negative_nw = bits_nw < 0
        bits_nw &= 0x7FFFFFFF
        is_one_nw = ratios_nw > 0.5  # noqa: PLR2004 -- half-way between 0 and 1
        # Half of the mantissa's range carries into the exponent: from 1.5 times a power
        # on, the next one is nearer.
        bits_nw += 0x400000
        bits_nw >>= 23
        bits_nw -= 126
        np.clip(bits_nw, 0, 7, out=bits_nw)
        np.maximum(bits_nw, is_one_nw, out=bits_nw)
        bits_nw += 8 * (negative_nw & (bits_nw > 0))
        return bits_nw.astype(np.uint8)

    return Levels(4, 64.0, nearest, levels)


_INT8, _INT4, _FP4 = _whole_numbers(8), _whole_numbers(4), _powers()
_KINDS = {"int8": _INT8, "int4": _INT4, "fp4": _FP4}
# What the two codes of a byte stand for, by the largest level: shape (256, 2).
_BYTES = np.arange(256)
_PAIRS = {
    kind.top: np.stack([kind.levels[_BYTES & 15], kind.levels[_BYTES >> 4]], axis=1)
    for kind in (_INT4, _FP4)
}


def block_codec(name: str, block: int = DEFAULT_BLOCK) -> RecordCodec:
    """Return ``int8``, ``int4`` or ``fp4`` with blocks of a number of values."""
    return RecordCodec(name, _KINDS[name], block)

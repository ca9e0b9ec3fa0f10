"""Numbers beside the update, masked and summed as well: weights, losses, counts.

Source: section 3 of the protocol. A header is a short vector of 64-bit words, one
per slot. The contract names the slots; no one sees a site's values; the aggregator
sees their sums. Masks continue with ``prg.apply_masks_``, under keys of their
own label.

Fractions are integers in steps of 2^-32, other numbers are integers. Every slot has a
bound per site, and N times the bound stays below 2^63, so sums do not wrap.

Shape suffix: s slots.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from privacy.secagg.arithmetic.ring import (
    A_LIE,
    SumOutOfRange,
    UpdateOutOfRange,
)

HeaderWords = NDArray[np.uint64]

FRACTION_BITS = 32
_LARGEST_WORD = (1 << 63) - 1


class SlotKind(StrEnum):
    """What a slot holds."""

    FRACTION = "fraction"  # float, either sign, in steps of 2^-32
    COUNT = "count"  # int, not negative
    INTEGER = "integer"  # int, either sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One number of the header.

    Attributes:
        name: What the contract calls it.
        kind: Fraction, count or integer.
        bound: Largest absolute value of one site, at least 1.
    """

    name: str
    kind: SlotKind
    bound: int

    @property
    def largest_word(self) -> int:
        """Largest absolute value of one site, in steps."""
        shift = FRACTION_BITS if self.kind is SlotKind.FRACTION else 0
        return self.bound << shift


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderSpec:
    """The slots of a header; part of the contract that every site approves.

    Guarantee:
        ``num_sites * bound * 2^32 < 2^63`` for fractions and ``num_sites * bound <
        2^63`` for whole numbers: sums do not wrap. A sum of fractions is off by at most
        ``num_sites * 2^-33``, a sum of whole numbers by nothing.

    Attributes:
        slots: In their order in the vector.
        num_sites: N, the largest number of headers in one sum.
    """

    slots: tuple[Slot, ...]
    num_sites: int

    def __post_init__(self) -> None:
        """Refuse a slot whose sum could wrap, and two of one name."""
        if len({slot.name for slot in self.slots}) != len(self.slots):
            raise ValueError("two slots of the header have the same name")
        for slot in self.slots:
            if slot.bound < 1:
                raise ValueError(f"the bound of slot {slot.name!r} must be at least 1")
            if self.num_sites * slot.largest_word > _LARGEST_WORD:
                raise ValueError(
                    f"{self.num_sites} sites can make slot {slot.name!r} wrap: a "
                    f"bound of {slot.bound} is too large"
                )


def encode_header(spec: HeaderSpec, values: Mapping[str, float]) -> HeaderWords:
    """Write one site's numbers as words, shape ``(s,)``, not yet masked.

    Args:
        spec: The slots.
        values: One number per slot, by name; whole but for fractions.

    Raises:
        UpdateOutOfRange: A number is not finite or beyond its slot's bound.
        ValueError: A slot has no number, a number has no slot, or one that must be
            whole is not an integer.
    """
    names = {slot.name for slot in spec.slots}
    if names != set(values):
        raise ValueError(
            "every slot needs exactly one number; missing or unknown: "
            f"{sorted(names ^ set(values))}"
        )
    words = [_encode(slot, values[slot.name]) for slot in spec.slots]
    return np.array(words, np.int64).view(np.uint64)


def decode_header(spec: HeaderSpec, words_s: HeaderWords) -> Mapping[str, float]:
    """Read the sums of unmasked headers: floats for fractions, otherwise ints.

    Raises:
        SumOutOfRange: A sum is larger than honest sites together make it.
        ValueError: The vector has another type or length.
    """
    if words_s.dtype != np.uint64 or words_s.shape != (len(spec.slots),):
        raise ValueError(
            f"a header of {len(spec.slots)} slots is a flat uint64 array, not "
            f"{words_s.dtype}{words_s.shape}"
        )
    signed = words_s.view(np.int64).tolist()
    return {
        slot.name: _decode(slot, word, spec.num_sites)
        for slot, word in zip(spec.slots, signed, strict=True)
    }


def _encode(slot: Slot, value: float) -> int:
    # Messages leave the value out: it is what the header hides.
    least = 0 if slot.kind is SlotKind.COUNT else -slot.largest_word
    if slot.kind is not SlotKind.FRACTION:
        if not isinstance(value, int):
            raise ValueError(f"slot {slot.name!r} needs an integer")
        word = value
    else:
        if not math.isfinite(value):
            raise UpdateOutOfRange(f"the value of slot {slot.name!r} is not finite")
        # Exact: scaling by a power of two, then rounding to the nearest integer.
        word = round(math.ldexp(value, FRACTION_BITS))
    if not least <= word <= slot.largest_word:
        raise UpdateOutOfRange(
            f"the value of slot {slot.name!r} is beyond the contract's bound of "
            f"{slot.bound}"
        )
    return word


def _decode(slot: Slot, word: int, num_sites: int) -> float:
    largest = num_sites * slot.largest_word
    least = 0 if slot.kind is SlotKind.COUNT else -largest
    if not least <= word <= largest:
        raise SumOutOfRange(
            f"the sum of slot {slot.name!r} is impossible for {num_sites} honest "
            f"sites: {A_LIE}"
        )
    if slot.kind is not SlotKind.FRACTION:
        return word
    return math.ldexp(word, -FRACTION_BITS)

"""Several small numbers in one word, so that words add up without a carry.

With N sites that send digits from 0 to L - 1, a digit of the sum is at most ``N (L -
1)``. In base ``B = N (L - 1) + 1`` that is still a digit, so that adding words adds
every digit by itself. A word of 64 bits holds k of them, the largest k with ``B^k <=
2^64``: 17 for four sites and four levels, which is 3.76 bits a value. That is within
2 % of ``log2 B``, the least that a masked sum can take: a masked digit is uniform over
all that the sum may be. One word of a mask's stream hides all its digits.

Values are grouped. A group has k blocks of 4,096 values and 4,096 words; word j holds
the values j, j + 4096, ... of the group: digit p is of its block p. The last group is
shorter: of V values in W words, word j holds the values j, j + W, ..., and digits that
have no value are 0.

Shape suffixes: w words of a group, v values of it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from federation.compression.rotation import BLOCK_VALUES, padded
from federation.vectors import Vector
from privacy.secagg.arithmetic.ring import A_LIE, SumOutOfRange

Lanes = NDArray[np.uint64]

WORD_BITS = 64
WORD_BYTES = WORD_BITS // 8
_WORDS_OF_A_GROUP = BLOCK_VALUES
_EXACT = 1 << 24  # Whole numbers up to here are exact in float32.


@dataclass(frozen=True, slots=True)
class WordGroup:
    """Where a group is: values ``[begin, end)``, words ``[first, last)``."""

    begin: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Digits:
    """How digits are packed.

    Guarantee:
        The sum of the words of at most ``num_sites`` sites, each with digits below
        ``levels``, has as digits the sums of the digits, and no word reaches
        ``2^64``: digit sums are at most ``base - 1``, hence every word is at most
        ``base^k - 1 < 2^64``.

    Attributes:
        levels: L, at least 2.
        num_sites: N, the largest number of words in one sum, at least 2.
    """

    levels: int
    num_sites: int

    def __post_init__(self) -> None:
        """Refuse what has no digits."""
        if self.levels < 2 or self.num_sites < 2:  # noqa: PLR2004
            raise ValueError(
                f"{self.num_sites} sites with {self.levels} levels have no sum: use at "
                "least 2 of each"
            )
        if self.base > 1 << WORD_BITS:
            raise ValueError(
                f"{self.levels} levels of {self.num_sites} sites overflow a word of "
                f"{WORD_BITS} bits"
            )

    @cached_property
    def base(self) -> int:
        """B, one more than the largest digit of a sum."""
        return self.num_sites * (self.levels - 1) + 1

    @cached_property
    def per_word(self) -> int:
        """k, digits of a word."""
        return _most_digits(self.base, 1 << WORD_BITS)

    @property
    def bits_per_value(self) -> float:
        """Bits that a value takes in full words."""
        return WORD_BITS / self.per_word

    @cached_property
    def _per_part(self) -> int:
        """Digits whose number is exact in float32; at least 1."""
        return max(1, min(self.per_word, _most_digits(self.base, _EXACT)))

    def num_words(self, size: int) -> int:
        """Words of a vector of ``size`` values, which whole blocks are made of."""
        groups, rest = divmod(padded(size), self.per_word * BLOCK_VALUES)
        return groups * _WORDS_OF_A_GROUP + math.ceil(rest / self.per_word)

    def groups(self, size: int) -> Iterator[WordGroup]:
        """Places of all groups of a vector of ``size`` values."""
        step, total = self.per_word * BLOCK_VALUES, padded(size)
        first = 0
        for begin in range(0, total, step):
            end = min(begin + step, total)
            last = first + math.ceil((end - begin) / self.per_word)
            yield WordGroup(begin, end, first, last)
            first = last

    def pack(self, digits_v: Vector, out_w: Lanes) -> None:
        """Write a group's digits as words.

        Args:
            digits_v: Whole numbers from 0 to ``levels - 1``, as float32.
            out_w: The group's words.
        """
        num_words = out_w.size
        size = self._per_part
        out_w[:] = 0
        for low in reversed(range(0, self.per_word, size)):
            planes = range(low, min(low + size, self.per_word))
            part_w = np.zeros(num_words, np.float32)
            for p in reversed(planes):
                plane = digits_v[p * num_words : (p + 1) * num_words]
                part_w *= self.base
                part_w[: plane.size] += plane
            # The part above moves up by as many digits as this one has.
            out_w *= np.uint64(self.base ** len(planes))
            out_w += part_w.astype(np.uint64)

    def unpack(self, words_w: Lanes, out_v: NDArray[np.floating]) -> None:
        """Read the digits of a group of a sum.

        Args:
            words_w: The group's words; not changed.
            out_v: Where its values go, as whole numbers from 0 to ``base - 1``.

        Raises:
            SumOutOfRange: A word is larger than honest sites make it.
        """
        num_words = words_w.size
        size, rest_w = self._per_part, words_w
        for low in range(0, self.per_word, size):
            planes = range(low, min(low + size, self.per_word))
            power = self.base ** len(planes)
            if power > np.iinfo(np.uint64).max:
                part_w, rest_w = rest_w, np.zeros_like(rest_w)
            else:
                high_w = rest_w // np.uint64(power)
                part_w, rest_w = rest_w - high_w * np.uint64(power), high_w
            if len(planes) > 1:
                part_w = part_w.astype(np.uint32)
            base = part_w.dtype.type(min(self.base, np.iinfo(part_w.dtype).max))
            for p in planes:
                above_w = part_w // base
                digit_w = part_w - above_w * base if len(planes) > 1 else part_w
                plane = out_v[p * num_words : (p + 1) * num_words]
                plane[:] = digit_w[: plane.size]
                if digit_w[plane.size :].any():
                    raise SumOutOfRange(f"digits without a value are not 0: {A_LIE}")
                part_w = above_w
        if rest_w.any():
            raise SumOutOfRange(
                f"a word of the sum is beyond {self.per_word} digits of base "
                f"{self.base}: {A_LIE}"
            )


def finest_levels(num_sites: int, bits: int) -> int:
    """Most levels whose sum over ``num_sites`` sites has ``bits`` bits a value."""
    return ((1 << bits) - 1) // num_sites + 1


def _most_digits(base: int, limit: int) -> int:
    """The largest k with ``base^k <= limit``."""
    k, power = 0, base
    while power <= limit:
        k, power = k + 1, power * base
    return k

"""The aggregator's sum of updates in few levels: as ``accumulator``, of packed digits.

Shape suffixes: w words, b blocks of 4,096 values.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from federation.compression.rotation import Rotation
from federation.mapped import give_back, sha256
from federation.vectors import Allocate, Vector, in_memory, words_from
from privacy.keystream import CHUNK_WORDS, Mask, apply_masks_
from privacy.secagg.arithmetic.digits import WORD_BYTES, Lanes
from privacy.secagg.arithmetic.levels import LevelPlan, largest_sum_norm, open_levels
from privacy.secagg.arithmetic.ring import A_LIE, SumOutOfRange


class LevelSum:
    """The sum of masked words of one round, modulo 2^64.

    Costs a word for each k values; opening it, the mean besides.

    Attributes:
        plan: Levels and steps that the words stand for.

    Args:
        size: Values in an update, d.
        plan: The round's.
        num_sites: N.
        rotation: The run's.
        clip_norm: C, the largest norm of an update, in weight units.
        allocate: Makes the vectors of the sum and of its mean.
    """

    def __init__(
        self,
        size: int,
        plan: LevelPlan,
        *,
        num_sites: int,
        rotation: Rotation,
        clip_norm: float,
        allocate: Allocate = in_memory,
    ) -> None:
        """Begin with zero."""
        self._size, self.plan, self._rotation = size, plan, rotation
        self._clip_norm = clip_norm
        self._digits = plan.digits(num_sites)
        self._allocate = allocate
        self._sum_w: Lanes = words_from(
            allocate, self._digits.num_words(size), np.uint64
        )
        self._num_folded = 0
        self._energies_b: NDArray[np.float64] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of an update's words."""
        return WORD_BYTES * self._sum_w.size

    @property
    def words_w(self) -> Lanes:
        """The sum, once its masks are off: what a site can compute the mean from."""
        return self._sum_w

    @property
    def energies_b(self) -> NDArray[np.float64]:
        """Sum of the squares of each block of the opened sum, in weight units."""
        if self._energies_b is None:
            raise ValueError("the sum has not been opened")
        return self._energies_b

    def fold_(self, words: NDArray[np.uint8], *, count: int = 1) -> None:
        """Add the bytes of a masked update, or of the sum of ``count``; not kept.

        Raises:
            ValueError: They have another length, or the sum is full.
        """
        if words.size != self.num_bytes:
            raise ValueError(f"{words.size} bytes are not {self._sum_w.size} words")
        if self._num_folded + count > self._digits.num_sites:
            raise ValueError(f"the sum already holds all {self._num_folded} updates")
        self._num_folded += count
        for begin in range(0, self._sum_w.size, CHUNK_WORDS):
            part_w = self._sum_w[begin : begin + CHUNK_WORDS]
            first = WORD_BYTES * begin
            masked = words[first : first + WORD_BYTES * part_w.size]
            part_w += masked.view("<u8")
            give_back(masked)
            give_back(part_w)

    def apply_masks_(self, masks: Sequence[Mask]) -> None:
        """Add or remove masks; see ``MaskedSum.apply_masks_``."""
        apply_masks_(self._sum_w, masks)

    def digest(self) -> bytes:
        """SHA-256 of the words, little-endian."""
        return sum_digest(self._sum_w)

    def decode(self, *, divisor: float, weight: float) -> Vector:
        """Read the unmasked sum; see ``levels.open_levels``.

        Raises:
            SumOutOfRange: Honest sites of these weights do not make such a sum.
        """
        opened = open_levels(
            self._sum_w,
            plan=self.plan,
            digits=self._digits,
            rotation=self._rotation,
            size=self._size,
            num_updates=self._num_folded,
            divisor=divisor,
            allocate=self._allocate,
        )
        norm = math.sqrt(float(opened.energies_b.sum()))
        most = largest_sum_norm(
            self.plan,
            num_updates=self._num_folded,
            weight=weight,
            clip_norm=self._clip_norm,
        )
        if not norm <= most:
            raise SumOutOfRange(
                f"the sum of {self._num_folded} updates has a norm of {norm:.4g}, but "
                f"honest sites reach at most {most:.4g}: {A_LIE}"
            )
        self._energies_b = opened.energies_b
        return opened.mean_d


def sum_digest(words_w: Lanes) -> bytes:
    """SHA-256 of a sum's words, as a certificate names it."""
    return sha256(words_w.astype("<u8", copy=False))


def rotation_of(run_id: str) -> Rotation:
    """The rotation that all parties of a run share."""
    return Rotation(run_id.encode())

"""The codec that sends the same share of the blocks of every site, unchanged.

Which blocks follows from the round alone, so that no place is sent, all sites send the
same places, and the words of a sum are the sum of words: the public mask of random
blocks (rand-k; SPARTA, OpenReview stFPf3gzq1) or, in turn, all blocks of the model.
Error feedback brings what is left out in a later round: one in ``1 / fraction``.

Words are float32: values of the chosen blocks, one block after another. The last block
of a model may be shorter; if it is chosen, zeros follow it, so that every round has as
many words.

Shape suffixes: d float values of the model, m blocks that are sent.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.compression.codec import BeyondCodec, count_fault
from federation.mapped import give_back
from federation.vectors import Values, Vector, Words, is_finite

DEFAULT_BLOCK = 256
DEFAULT_FRACTION = 1 / 16
RANDOM, CYCLIC = "random", "cyclic"
_FLOAT32_BITS = 32
# Constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, Figure 17).
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Subset:
    """See ``federation.compression.codec.Codec``.

    Attributes:
        block: Values of a block.
        fraction: Share of the blocks that is sent.
        order: ``random`` for other blocks in each round, ``cyclic`` for all of
            them in turn.
    """

    block: int = DEFAULT_BLOCK
    fraction: float = DEFAULT_FRACTION
    order: str = RANDOM
    name: str = "subset"
    dtype: np.dtype[np.generic] = np.dtype(np.float32)  # noqa: RUF009 -- immutable
    is_linear: bool = True
    shares_support: bool = True

    def bits_per_value(self) -> float:
        """Those of a float32, for the share that is sent."""
        return _FLOAT32_BITS * self.fraction

    def num_words(self, size: int) -> int:
        """Values of the blocks that are sent."""
        num_blocks, count = self._counts(size)
        return size if count == num_blocks else count * self.block

    def check(self, vector_d: Vector) -> None:
        """Take any vector."""

    def encode(
        self,
        vector_d: Vector,
        *,
        out: Words | None = None,
        residual_d: Vector | None = None,
        seed: int = 0,
    ) -> Words:
        """Collect the chosen blocks; see ``Codec``."""
        size = vector_d.size
        words = np.empty(self.num_words(size), np.float32) if out is None else out
        if residual_d is not None:
            residual_d += vector_d
            if not is_finite(residual_d):
                raise BeyondCodec("with what was left out before, a value is infinite")
        source_d = vector_d if residual_d is None else residual_d
        end = 0
        # Blocks rise, so that a word is never written over a value that is still read.
        for index in self.chosen(size, seed):
            part = source_d[index * self.block : (index + 1) * self.block]
            words[end : end + part.size] = part
            end += part.size
            if residual_d is not None:
                part[:] = 0
        words[end:] = 0
        return words

    def fault(self, words: Words, size: int) -> str:
        """Check the number of words."""
        return count_fault(self, words, size)

    def values(self, words: Words, *, size: int | None = None, seed: int = 0) -> Values:
        """See ``Codec``."""
        if size is None:
            raise ValueError("subset needs the number of values to read words")
        return _SubsetValues(words, size, self.block, self.chosen(size, seed))

    def chosen(self, size: int, seed: int) -> NDArray[np.int64]:
        """Numbers of the blocks that a round sends, rising."""
        num_blocks, count = self._counts(size)
        if self.order == CYCLIC:
            first = seed * count % num_blocks
            return np.sort((first + np.arange(count)) % num_blocks)
        # By our own arithmetic: NumPy's generators may change with its version, and
        # then two sites would not mean the same blocks.
        marks = _mixed(np.arange(num_blocks, dtype=np.uint64), seed)
        return np.sort(np.argsort(marks, kind="stable")[:count])

    def _counts(self, size: int) -> tuple[int, int]:
        """Number of blocks, and of those that are sent."""
        num_blocks = -(-size // self.block)
        return num_blocks, min(num_blocks, math.ceil(num_blocks * self.fraction))


@dataclass(frozen=True, slots=True)
class _SubsetValues:
    """Float values of a model of which some blocks were sent; the others are 0."""

    words: Words
    size: int
    block: int
    chosen_m: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(d,)``."""
        return (self.size,)

    def __getitem__(self, piece: slice) -> Vector:
        """Values of a chunk, in new memory."""
        start, stop, _ = piece.indices(self.size)
        out_c, block = np.zeros(max(0, stop - start), np.float32), self.block
        first, last = start // block, -(-stop // block)
        low, high = np.searchsorted(self.chosen_m, (first, last))
        for number in range(low, high):
            offset = int(self.chosen_m[number]) * block
            begin, end = max(offset, start), min(offset + block, stop)
            source = number * block - offset
            part = self.words[source + begin : source + end]
            out_c[begin - start : end - start] = part
        give_back(self.words[low * block : high * block])
        return out_c


def _mixed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Pseudorandom numbers, a different one for each place: SplitMix64 of two seeds."""
    mixed = numbers
    for value in (seed, 1):
        mixed = mixed + np.uint64((value * _GAMMA) % (1 << 64))
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed

"""The model in fragments, of which each round exchanges one.

A fragment is every F-th block of 4,096 values, so that all are nearly as large and
large layers are in each of them. Rounds take them in turn: F rounds exchange the whole
model once, and each has an F-th of its bytes. In between a site keeps its own values of
the other fragments (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512, section
3.1, whose fragments are groups of layers).

Shape suffixes: d values of the model, f values of a fragment, in whole blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from federation.compression.rotation import BLOCK_VALUES, num_blocks
from federation.vectors import Vector


@dataclass(frozen=True, slots=True)
class Fragment:
    """One fragment of a model.

    Attributes:
        index: From 0.
        count: F, how many there are.
    """

    index: int
    count: int

    def num_blocks(self, size: int) -> int:
        """Blocks of this fragment in a model of ``size`` values."""
        return len(range(self.index, num_blocks(size), self.count))

    def size(self, size: int) -> int:
        """Values of this fragment, those that fill up its last block too."""
        return size if self.count == 1 else BLOCK_VALUES * self.num_blocks(size)

    def spans(self, size: int) -> Iterator[slice]:
        """Places of this fragment in a model of ``size`` values."""
        if self.count == 1:
            yield slice(0, size)
            return
        step = BLOCK_VALUES * self.count
        for begin in range(BLOCK_VALUES * self.index, size, step):
            yield slice(begin, min(begin + BLOCK_VALUES, size))

    def take(self, vector_d: Vector) -> Vector:
        """Return the fragment's values, shape ``(f,)``; the vector itself if whole."""
        if self.count == 1:
            return vector_d
        found_f = np.zeros(self.size(vector_d.size), vector_d.dtype)
        for number, span in enumerate(self.spans(vector_d.size)):
            part = vector_d[span]
            begin = number * BLOCK_VALUES
            found_f[begin : begin + part.size] = part
        return found_f

    def put_(self, values_f: Vector, vector_d: Vector) -> Vector:
        """Write the fragment's values into a vector, and return it."""
        if self.count == 1:
            if values_f is not vector_d:
                vector_d[:] = values_f
            return vector_d
        for number, span in enumerate(self.spans(vector_d.size)):
            begin = number * BLOCK_VALUES
            vector_d[span] = values_f[begin : begin + span.stop - span.start]
        return vector_d


WHOLE = Fragment(0, 1)


def fragment_of(round_index: int, count: int) -> Fragment:
    """Return the fragment that a round exchanges."""
    return Fragment((round_index - 1) % count, count)

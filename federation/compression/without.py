"""A codec that leaves out values which no site changes.

Tensors that the aggregator sets by itself travel down with the model. A site's update
of them is zero, so it is not sent.

Shape suffixes: d float values of the model, s values that are sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from federation.compression.codec import count_fault
from federation.vectors import Layout, Role, Values, Vector, Words

_FLOAT32_BITS = 32


def server_spans(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Places of the tensors that the server sets, from where to where; rising."""
    return tuple(
        (spec.offset, spec.offset + spec.size)
        for spec in layout.tensors
        if spec.role is Role.SERVER and spec.size
    )


@dataclass(frozen=True, slots=True)
class Without:
    """Float32 values of all other places; see ``federation.compression.codec.Codec``.

    Attributes:
        spans: Places that are left out, from where to where; rising.
    """

    spans: tuple[tuple[int, int], ...]
    name: str = "identity"
    dtype: np.dtype[np.generic] = np.dtype(np.float32)  # noqa: RUF009 -- immutable
    is_linear: bool = True
    shares_support: bool = True

    def bits_per_value(self) -> float:
        """Bits of a float32: how many are sent depends on the model."""
        return _FLOAT32_BITS

    def num_words(self, size: int) -> int:
        """One for each value that is sent."""
        return size - sum(stop - start for start, stop in self.spans)

    def check(self, vector_d: Vector) -> None:
        """Take any vector."""

    def encode(
        self,
        vector_d: Vector,
        *,
        out: Words | None = None,
        residual_d: Vector | None = None,
        seed: int = 0,  # noqa: ARG002 -- of the seam
    ) -> Words:
        """Move the values that are sent together; see ``Codec``.

        Raises:
            ValueError: There is a residual, which this codec does not leave.
        """
        if residual_d is not None:
            raise ValueError("float32 values leave no residual")
        words = np.empty(self.num_words(vector_d.size), np.float32)
        if out is not None:
            words = out.view(np.float32)
        end = 0
        for start, stop in self._sent(vector_d.size):
            # To the front: where they overlap, NumPy copies first.
            words[end : end + stop - start] = vector_d[start:stop]
            end += stop - start
        return words

    def fault(self, words: Words, size: int) -> str:
        """Check the number of words."""
        return count_fault(self, words, size)

    def values(self, words: Words, *, size: int | None = None, seed: int = 0) -> Values:  # noqa: ARG002 -- of the seam
        """Put zeros in the places that were left out; see ``Codec``."""
        if size is None:
            raise ValueError("the number of values is needed to read words")
        vector_d = np.zeros(size, np.float32)
        end = 0
        for start, stop in self._sent(size):
            vector_d[start:stop] = words[end : end + stop - start]
            end += stop - start
        return vector_d

    def _sent(self, size: int) -> Iterator[tuple[int, int]]:
        """Places of the values that are sent."""
        before = 0
        for start, stop in self.spans:
            yield before, start
            before = stop
        yield before, size

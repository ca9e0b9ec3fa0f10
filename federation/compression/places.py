"""A codec of some values of the model: a site sends no others.

What a site does not train, its update leaves at zero. Both sides know which places
those are from the job, so they are not sent.

Shape suffixes: d float values of the model, s values that are sent.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.compression.codec import Codec, decoded
from federation.vectors import Values, Vector, Words


@dataclass(frozen=True, slots=True, eq=False)
class SomePlaces:
    """See ``federation.compression.codec.Codec``.

    Attributes:
        codec: Encodes the values that are sent, as one vector.
        sent_d: Marks these, shape ``(d,)``.
    """

    codec: Codec
    sent_d: NDArray[np.bool_]

    @property
    def name(self) -> str:
        """That of the codec."""
        return self.codec.name

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """That of the codec."""
        return self.codec.dtype

    @property
    def is_linear(self) -> bool:
        """As the codec is."""
        return self.codec.is_linear

    @property
    def shares_support(self) -> bool:
        """Other sites may send other places."""
        return False

    def bits_per_value(self) -> float:
        """Those of the codec: how many values are sent depends on the model."""
        return self.codec.bits_per_value()

    def num_words(self, size: int) -> int:
        """Words of the values that are sent.

        Raises:
            ValueError: ``size`` is that of another model.
        """
        if size != self.sent_d.size:
            raise ValueError(f"places of {self.sent_d.size} values, not of {size}")
        return self.codec.num_words(self._num_sent())

    def check(self, vector_d: Vector) -> None:
        """See ``Codec``."""
        self.codec.check(vector_d[self.sent_d])

    def encode(
        self,
        vector_d: Vector,
        *,
        out: Words | None = None,
        residual_d: Vector | None = None,
        seed: int = 0,
    ) -> Words:
        """Encode the values that are sent; see ``Codec``."""
        given_s = vector_d[self.sent_d]
        residual_s = None if residual_d is None else residual_d[self.sent_d]
        words = self.codec.encode(given_s, residual_d=residual_s, seed=seed)
        if residual_d is not None:
            residual_d[self.sent_d] = residual_s
        if out is None:
            return words
        out[:] = words
        return out

    def fault(self, words: Words, size: int) -> str:
        """Look for faults as the codec does."""
        self.num_words(size)
        return self.codec.fault(words, self._num_sent())

    def values(self, words: Words, *, size: int | None = None, seed: int = 0) -> Values:
        """Put zeros in all other places; see ``Codec``.

        Raises:
            ValueError: The number of values is missing, or that of another model.
        """
        if size is None:
            raise ValueError("the number of values is needed to read words")
        self.num_words(size)
        vector_d = np.zeros(size, np.float32)
        vector_d[self.sent_d] = decoded(self.codec, words, self._num_sent(), seed=seed)
        return vector_d

    def _num_sent(self) -> int:
        return int(np.count_nonzero(self.sent_d))

"""Codecs: how the float values of a model or of an update are sent.

A codec turns a vector into *words*, which are what a message holds, and reads them
chunk by chunk: folding words into a sum needs no memory for the whole vector. The same
code encodes updates on their way up and the model on its way down. Here, ``identity``
sends float32 as it is; ``fp16`` and ``bf16`` round each value to the nearest one of 16
bits, and to the even one of two that are as near. Codecs of fewer bits are in
``blocks``, ``top_k`` and ``subset``; ``choice`` finds one by its name.

A cast refuses a vector with a value that its 16 bits have no finite number for: what
arrives is never infinite because of the codec.

Shape suffixes: d float values of the model, c values of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from federation.errors import FederationError
from federation.mapped import give_back
from federation.vectors import Values, Vector, Words, chunks

_FLOAT32_BITS = 32


class BeyondCodec(FederationError):
    """A value is too large for the codec, or not a number."""


class Codec(Protocol):
    """A way to send float values. Implementations: below.

    Attributes:
        name: What the job file calls it.
        dtype: Type of a word.
        is_linear: Whether the sum of two vectors' words is the sum's words, which is
            what a masked sum needs.
        shares_support: Whether all parties send the same coordinates.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 -- see above
    @property
    def dtype(self) -> np.dtype[np.generic]: ...  # noqa: D102
    @property
    def is_linear(self) -> bool: ...  # noqa: D102
    @property
    def shares_support(self) -> bool: ...  # noqa: D102

    def bits_per_value(self) -> float:
        """Bits per value of the vector."""
        ...

    def num_words(self, size: int) -> int:
        """Words of a vector of ``size`` values."""
        ...

    def check(self, vector_d: Vector) -> None:
        """Check that a vector can be encoded.

        Raises:
            BeyondCodec: It cannot.
        """
        ...

    def encode(
        self,
        vector_d: Vector,
        *,
        out: Words | None = None,
        residual_d: Vector | None = None,
        seed: int = 0,
    ) -> Words:
        """Turn a vector into words.

        Args:
            vector_d: Only read, unless ``out`` is in it.
            out: Where the words go. May be the beginning of the vector's own memory.
            residual_d: What earlier words of this sender have left out; added before
                encoding. Holds afterwards what these leave out.
            seed: Seed of the round, the same at every party; not secret.

        Raises:
            BeyondCodec: A value cannot be encoded; ``out`` is then of no use.
        """
        ...

    def fault(self, words: Words, size: int) -> str:
        """Say what is wrong with words of a stranger; empty if nothing is.

        Afterwards ``values`` can read them. Values that are not finite need not be
        found here: who folds them looks for these.

        Args:
            words: Words of the codec's type.
            size: Values of the vector that they should stand for.
        """
        ...

    def values(self, words: Words, *, size: int | None = None, seed: int = 0) -> Values:
        """Read words as the float values that they stand for, chunk by chunk.

        Args:
            words: As ``encode`` makes them.
            size: Values of the vector; by default one for each word.
            seed: As in ``encode``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Float32:
    """Float32, unchanged."""

    name: str = "identity"
    dtype: np.dtype[np.generic] = np.dtype(np.float32)  # noqa: RUF009 -- immutable
    is_linear: bool = True
    shares_support: bool = True

    def bits_per_value(self) -> float:
        """Bits of a float32."""
        return _FLOAT32_BITS

    def num_words(self, size: int) -> int:
        """One for each value."""
        return size

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
        """Return the vector itself if possible; see ``Codec``."""
        if residual_d is not None:
            out = vector_d.copy() if out is None else out
            np.add(vector_d, residual_d, out=out)
            residual_d[:] = 0
            return out
        if out is None:
            return vector_d
        np.copyto(out, vector_d)
        return out

    def fault(self, words: Words, size: int) -> str:
        """Check the number of words."""
        return count_fault(self, words, size)

    def values(
        self,
        words: Words,
        *,
        size: int | None = None,  # noqa: ARG002 -- one value for each word
        seed: int = 0,  # noqa: ARG002
    ) -> Values:
        """Return the words, which are the values."""
        return words


@dataclass(frozen=True, slots=True)
class Cast:
    """Each value rounded to 16 bits.

    Attributes:
        limit: The smallest magnitude that would round to infinity.
        narrow: Float32 values to words, without a check.
        widen: Words to float32 values, exactly.
    """

    name: str
    dtype: np.dtype[np.generic]
    limit: float
    narrow: Callable[[Vector], Words]
    widen: Callable[[Words], Vector]
    is_linear: bool = False
    shares_support: bool = True

    def bits_per_value(self) -> float:
        """Bits of a word."""
        return 8 * self.dtype.itemsize

    def num_words(self, size: int) -> int:
        """One for each value."""
        return size

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
        """Round each value; see ``Codec``."""
        words = np.empty(vector_d.size, self.dtype) if out is None else out
        for piece in chunks(vector_d.size):
            # Read before anything is written: the words may be in the same memory,
            # where they are never ahead of what is read.
            part_c = vector_d[piece]
            if residual_d is not None:
                part_c = part_c + residual_d[piece]
            self._check(part_c)
            narrowed_c = self.narrow(part_c)
            if residual_d is not None:
                np.subtract(part_c, self.widen(narrowed_c), out=residual_d[piece])
                give_back(residual_d[piece])
            words[piece] = narrowed_c
        return words

    def fault(self, words: Words, size: int) -> str:
        """Check the number of words."""
        return count_fault(self, words, size)

    def values(
        self,
        words: Words,
        *,
        size: int | None = None,  # noqa: ARG002 -- one value for each word
        seed: int = 0,  # noqa: ARG002
    ) -> Values:
        """See ``Codec``."""
        return _CastValues(words, self.widen)

    def _check(self, part_c: Vector) -> None:
        largest = max(float(part_c.max()), -float(part_c.min()))
        if not largest < self.limit:  # Nor is NaN.
            raise BeyondCodec(
                f"a value of magnitude {largest:g} does not fit into {self.name}, "
                f"which ends below {self.limit:g}: choose another codec, or lower the "
                "learning rate if the model had no such value at the start"
            )


@dataclass(frozen=True, slots=True)
class _CastValues:
    """Float values that are decoded from words when they are read."""

    words: Words
    widen: Callable[[Words], Vector]

    @property
    def size(self) -> int:
        """Number of values."""
        return self.words.size

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(d,)``."""
        return self.words.shape

    def __getitem__(self, piece: slice) -> Vector:
        """Values of a chunk, in new memory."""
        part_c = self.words[piece]
        values_c = self.widen(part_c)
        give_back(part_c)
        return values_c


def _to_fp16(part_c: Vector) -> Words:
    with np.errstate(over="ignore"):  # Checked by callers that must not overflow.
        return part_c.astype(np.float16)


def _to_bf16(part_c: Vector) -> Words:
    """Drop the lower half of each value's bits, rounded to nearest, ties to even."""
    bits_c = np.ascontiguousarray(part_c).view(np.uint32)
    rounded_c = bits_c >> 16
    rounded_c &= 1
    rounded_c += 0x7FFF
    rounded_c += bits_c
    rounded_c >>= 16
    # The carry could make zero or infinity of a NaN.
    np.copyto(rounded_c, 0x7FC0, where=np.isnan(part_c))
    return rounded_c.astype(np.uint16)


def _from_bf16(words_c: Words) -> Vector:
    values_c: Vector = np.left_shift(words_c, 16, dtype=np.uint32).view(np.float32)
    return values_c


IDENTITY = Float32()
FP16 = Cast(
    "fp16",
    np.dtype(np.float16),
    limit=65520.0,
    narrow=_to_fp16,
    widen=lambda words_c: words_c.astype(np.float32),
)
BF16 = Cast(
    "bf16",
    np.dtype(np.uint16),
    limit=float(np.array(0x7F7F8000, np.uint32).view(np.float32)),
    narrow=_to_bf16,
    widen=_from_bf16,
)


@dataclass(frozen=True, slots=True)
class Links:
    """A job's codecs of both directions.

    Attributes:
        up: Codec of updates.
        down: Codec of the model, or of what changed in it.
        changes: Whether sites that have the model before are sent what changed;
            the others are then sent the whole of it in float32.
        sums: Whether sites that have the model before are sent the words of the opened
            sum, and take the server's step themselves.
        feedback: Share of what earlier words of a site have left out that is added to
            its next update; 0 for no error feedback.
        down_feedback: The same of changes of the model, at the aggregator.
    """

    up: Codec = IDENTITY
    down: Codec = IDENTITY
    changes: bool = False
    sums: bool = False
    feedback: float = 0.0
    down_feedback: float = 0.0

    @property
    def whole(self) -> Codec:
        """Codec of a whole model."""
        return IDENTITY if self.changes else self.down


def count_fault(codec: Codec, words: Words, size: int) -> str:
    """Say so if a vector of ``size`` values has another number of words."""
    expected = codec.num_words(size)
    if words.shape == (expected,):
        return ""
    return f"{words.size} words of {codec.name} are not the {expected} of the model"


def decoded(
    codec: Codec, words: Words, size: int | None = None, *, seed: int = 0
) -> Vector:
    """Read all words as one vector, shape ``(d,)``; those of ``identity`` are it."""
    values = codec.values(words, size=size, seed=seed)
    if isinstance(values, np.ndarray):
        return values
    vector_d = np.empty(values.size, np.float32)
    for piece in chunks(values.size):
        vector_d[piece] = values[piece]
    return vector_d


def encoded_over(
    codec: Codec, vector_d: Vector, *, residual_d: Vector | None = None, seed: int = 0
) -> Words:
    """Encode a vector in its own memory, if that has room for the words.

    Args:
        codec: The job's codec for updates.
        vector_d: The vector; of no use afterwards.
        residual_d: As in ``Codec.encode``.
        seed: As there.

    Raises:
        BeyondCodec: A value cannot be encoded.
    """
    if codec is IDENTITY and residual_d is None:
        return vector_d
    num_words, room = codec.num_words(vector_d.size), vector_d.view(codec.dtype)
    out = room[:num_words] if num_words <= room.size else None
    return codec.encode(vector_d, out=out, residual_d=residual_d, seed=seed)

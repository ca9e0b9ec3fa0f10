"""Codecs that treat some values of the model differently from the others.

``Apart`` sends some of them as float32.

Running statistics must arrive as they are: a variance that is rounded by a step of a
coarse grid may become negative, and one that is left out is never trained again. They
are few. So a codec of few bits sees zeros in their place, and they follow its words.

Shape suffixes: d float values of the model, a values that are sent
apart, s values that are sent.

``Without`` leaves out values which no site changes. Tensors that the aggregator sets by
itself travel down with the model. A site's update of them is zero, so it is not sent.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from federation.compression.choice import FOR_MODELS
from federation.compression.codec import Codec, Links, count_fault, decoded
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
            # To the front: NumPy copies first where both share bytes.
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


_FLOAT32 = np.dtype(np.float32)


def fitted(
    links: Links, layout: Layout, sent_d: NDArray[np.bool_] | None = None
) -> Links:
    """Return a job's codecs as they encode updates and changes of a model.

    Args:
        links: The codecs.
        layout: Layout of the model.
        sent_d: Marks the values of the site's updates, shape ``(d,)``; all by default.
    """
    spans = tuple(_spans(layout))
    if sent_d is not None and (not spans or links.up.name in FOR_MODELS):
        links = replace(links, up=SomePlaces(links.up, sent_d))
    elif left_out := server_spans(layout):
        return replace(links, up=Without(left_out))
    if not spans:
        return links

    def fit(codec: Codec) -> Codec:
        return codec if codec.name in FOR_MODELS else Apart(codec, spans)

    return replace(links, up=fit(links.up), down=fit(links.down))


def _spans(layout: Layout) -> Iterator[tuple[int, int]]:
    """Places of all running statistics, from where to where; rising."""
    start = stop = 0
    for spec in layout.tensors:
        if spec.role is Role.BUFFER and spec.size:
            if spec.offset != stop:
                if stop > start:
                    yield start, stop
                start = spec.offset
            stop = spec.offset + spec.size
    if stop > start:
        yield start, stop


@dataclass(frozen=True, slots=True)
class Apart:
    """See ``federation.compression.codec.Codec``.

    Attributes:
        codec: Encodes all other values.
        spans: Places of the values that are sent apart, from where to where; rising.
    """

    codec: Codec
    spans: tuple[tuple[int, int], ...]

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
        """As the codec does."""
        return self.codec.shares_support

    def bits_per_value(self) -> float:
        """Those of the codec: what is sent apart depends on the model."""
        return self.codec.bits_per_value()

    def num_words(self, size: int) -> int:
        """Words of the codec, and of what is sent apart."""
        num_apart = sum(stop - start for start, stop in self.spans)
        more = num_apart * _FLOAT32.itemsize // self.dtype.itemsize
        return self.codec.num_words(size) + more

    def check(self, vector_d: Vector) -> None:
        """See ``Codec``."""
        self.codec.check(vector_d)

    def encode(
        self,
        vector_d: Vector,
        *,
        out: Words | None = None,
        residual_d: Vector | None = None,
        seed: int = 0,
    ) -> Words:
        """Encode all other values, and put these behind; see ``Codec``."""
        words = out
        if words is None:
            words = np.empty(self.num_words(vector_d.size), self.dtype)
        end = self.codec.num_words(vector_d.size)
        if not vector_d.flags.writeable:
            vector_d = vector_d.copy()
        given_a = self._taken_out(vector_d)
        sent_a = given_a
        if residual_d is not None:
            sent_a = given_a + self._taken_out(residual_d)
        self.codec.encode(vector_d, out=words[:end], residual_d=residual_d, seed=seed)
        if not np.may_share_memory(words, vector_d):  # Its owner still reads it.
            for (start, stop), part in zip(self.spans, self._cut(given_a), strict=True):
                vector_d[start:stop] = part
        words[end:] = sent_a.view(self.dtype)
        return words

    def fault(self, words: Words, size: int) -> str:
        """Check the number of words, and those of the codec."""
        if fault := count_fault(self, words, size):
            return fault
        return self.codec.fault(words[: self.codec.num_words(size)], size)

    def values(self, words: Words, *, size: int | None = None, seed: int = 0) -> Values:
        """See ``Codec``."""
        if size is None:
            raise ValueError(f"{self.name} needs the number of values to read words")
        end = self.codec.num_words(size)
        # Words of bytes may begin anywhere: those of float32 are copied.
        given_a = np.frombuffer(words[end:].tobytes(), np.float32)
        most = self.codec.values(words[:end], size=size, seed=seed)
        return _ApartValues(most, self.spans, tuple(self._cut(given_a)))

    def _taken_out(self, vector_d: Vector) -> Vector:
        """Copy what is sent apart, and put zeros in its place."""
        given_a = np.concatenate([vector_d[start:stop] for start, stop in self.spans])
        for start, stop in self.spans:
            vector_d[start:stop] = 0
        return given_a

    def _cut(self, given_a: Vector) -> Iterator[Vector]:
        """Cut what is sent apart at the places that it has in the model."""
        end = 0
        for start, stop in self.spans:
            begin, end = end, end + stop - start
            yield given_a[begin:end]


@dataclass(frozen=True, slots=True)
class _ApartValues:
    """Decoded values, some of which come from elsewhere."""

    most: Values
    spans: tuple[tuple[int, int], ...]
    apart: tuple[Vector, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return self.most.size

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(d,)``."""
        return self.most.shape

    def __getitem__(self, piece: slice) -> Vector:
        """Values of a chunk, in new memory."""
        start, stop, _ = piece.indices(self.size)
        values_c = self.most[piece]
        first = max(0, bisect_right(self.spans, (start, self.size + 1)) - 1)
        for number in range(first, len(self.spans)):
            low, high = self.spans[number]
            if low >= stop:
                break
            begin, end = max(low, start), min(high, stop)
            if begin < end:
                part = self.apart[number][begin - low : end - low]
                values_c[begin - start : end - start] = part
        return values_c

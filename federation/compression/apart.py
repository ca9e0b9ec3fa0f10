"""A codec of few bits that sends some values of the model apart, as float32.

Running statistics must arrive as they are: a variance that is rounded by a step of a
coarse grid may become negative, and one that is left out is never trained again. They
are few. So a codec of few bits sees zeros in their place, and they follow its words.

Shape suffixes: d float values of the model, a values that are sent apart.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from federation.compression.choice import FOR_MODELS
from federation.compression.codec import Codec, Links, count_fault
from federation.compression.places import SomePlaces
from federation.compression.without import Without, server_spans
from federation.vectors import Layout, Role, Values, Vector, Words

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

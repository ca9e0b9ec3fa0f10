"""A model as one flat float32 vector, and a Layout that describes it.

Everything between a site and the aggregator works on these vectors: clipping,
noise, codecs, masks, combining and server optimisers. Integer and boolean
buffers cannot be averaged; they travel beside the vector in a small int64 one. Personal
parts have a float32 vector of their own, which stays at the site.

Shape suffixes: d float values of the model, m integer values of the model, p personal
values of the model.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from federation.errors import LayoutMismatch
from federation.mapped import give_back

Vector = NDArray[np.float32]
# Makes a vector of zeros of a size, shape (d,).
Allocate = Callable[[int], Vector]
Words = NDArray[
    Any
]  # Float values as a codec of ``federation.compression`` sends them.
IntegerVector = NDArray[np.int64]
ByteVector = NDArray[np.uint8]
HeaderVector = NDArray[np.uint64]
Arrays = Mapping[str, NDArray[Any]]

NO_ARRAYS: Arrays = MappingProxyType({})

# 256 KiB of float32: a few such chunks fit in a core's second-level cache.
CHUNK_VALUES = 1 << 16
# Up to so many values BLAS works on one thread. On more it waits for all its threads
# at every call: on busy cores that costs a hundred times the arithmetic.
_SERIAL_VALUES = 1 << 13
# The check for finite values reads 4 MiB at a time, in products of rows of 16 KiB.
_CHECK_VALUES, _ROW_VALUES = 1 << 20, 1 << 12


class Values(Protocol):
    """Float values that are read chunk by chunk: a ``Vector``, or decoded words."""

    @property
    def size(self) -> int:
        """Number of values."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(d,)``."""
        ...

    def __getitem__(self, piece: slice, /) -> Vector:
        """Values of a chunk; not to be written to."""
        ...


class Role(StrEnum):
    """How the federation treats a tensor of the model."""

    PARAMETER = "parameter"  # trained; combined by the job's rule
    BUFFER = "buffer"  # floating-point state; combined, but not stepped
    SERVER = "server"  # floating point: set by the aggregator; travels down only
    MAX = "max"  # integers: the largest value of any site
    FROM_SERVER = "from_server"  # integers: the server's value, at every site
    KEEP = "keep"  # integers: each site keeps its own; they never travel
    FROZEN = "frozen"  # not trained: the same everywhere by digest; never travels
    PERSONAL = "personal"  # trained at each site for itself; never travels


AVERAGED = frozenset({Role.PARAMETER, Role.BUFFER, Role.SERVER})
INTEGERS = frozenset({Role.MAX, Role.FROM_SERVER, Role.KEEP})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a model.

    Attributes:
        name: Its name in the model's state, for example ``blocks.0.norm.weight``.
        shape: Its shape; ``()`` for a scalar.
        dtype: Its type in the model, in NumPy's names, or ``bfloat16``.
        role: What the federation does with it.
        offset: Where it starts: in the float vector for averaged roles, in the
            integer vector for integers, in the personal vector if it is personal; 0 if
            it is frozen and so in none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    offset: int

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each tensor of a model is in the flat vectors.

    Attributes:
        tensors: In the model's own order; offsets follow that order.
        frozen: SHA-256 of the values of all frozen tensors, as 64 hexadecimal digits;
            empty if none is.
    """

    tensors: tuple[TensorSpec, ...]
    frozen: str = ""

    @staticmethod
    def build(
        tensors: list[tuple[str, tuple[int, ...], str, Role]],
    ) -> "Layout":
        """Lay tensors out one after another: ``(name, shape, dtype, role)`` each.

        Raises:
            LayoutMismatch: A name is there twice, or nothing is to train.
        """
        specs, seen = [], set()
        next_float = next_integer = next_personal = 0
        for name, shape, dtype, role in tensors:
            if name in seen:
                raise LayoutMismatch(f"two tensors of the model are called {name!r}")
            seen.add(name)
            offset = 0
            if role in AVERAGED:
                offset = next_float
                next_float += math.prod(shape)
            elif role in INTEGERS:
                offset = next_integer
                next_integer += math.prod(shape)
            elif role is Role.PERSONAL:
                offset = next_personal
                next_personal += math.prod(shape)
            spec = TensorSpec(
                name=name, shape=shape, dtype=dtype, role=role, offset=offset
            )
            specs.append(spec)
        if next_float == 0:
            raise LayoutMismatch("the model has no floating-point tensor to train")
        return Layout(tensors=tuple(specs))

    @cached_property
    def size(self) -> int:
        """Length d of the float vector."""
        return sum(t.size for t in self.tensors if t.role in AVERAGED)

    @cached_property
    def num_integers(self) -> int:
        """Length m of the integer vector."""
        return sum(t.size for t in self.tensors if t.role in INTEGERS)

    @cached_property
    def num_personal(self) -> int:
        """Length p of the personal vector."""
        return sum(t.size for t in self.tensors if t.role is Role.PERSONAL)

    @cached_property
    def frozen_names(self) -> tuple[str, ...]:
        """Names of the tensors that are not trained and never sent."""
        return tuple(t.name for t in self.tensors if t.role is Role.FROZEN)

    @cached_property
    def num_frozen(self) -> int:
        """Number of values that are not trained and never sent."""
        return sum(t.size for t in self.tensors if t.role is Role.FROZEN)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names, shapes, types, roles and frozen values, as 64 digits."""
        rows: list[object]
        rows = [[t.name, list(t.shape), t.dtype, t.role] for t in self.tensors]
        if self.frozen:
            rows.append(self.frozen)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def float_views(self, vector_d: Vector) -> Iterator[tuple[TensorSpec, Vector]]:
        """Yield each averaged tensor with its view into ``vector_d``."""
        for spec in self.tensors:
            if spec.role in AVERAGED:
                piece = vector_d[spec.offset : spec.offset + spec.size]
                yield spec, piece.reshape(spec.shape)

    def integer_views(
        self, vector_m: IntegerVector
    ) -> Iterator[tuple[TensorSpec, IntegerVector]]:
        """Yield each integer tensor with its view into ``vector_m``."""
        for spec in self.tensors:
            if spec.role in INTEGERS:
                piece = vector_m[spec.offset : spec.offset + spec.size]
                yield spec, piece.reshape(spec.shape)

    def personal_views(self, vector_p: Vector) -> Iterator[tuple[TensorSpec, Vector]]:
        """Yield each personal tensor with its view into ``vector_p``."""
        for spec in self.tensors:
            if spec.role is Role.PERSONAL:
                piece = vector_p[spec.offset : spec.offset + spec.size]
                yield spec, piece.reshape(spec.shape)

    def integer_mask(self, role: Role) -> NDArray[np.bool_]:
        """Mark the integer values of one role, shape ``(m,)``."""
        mask_m = np.zeros(self.num_integers, dtype=np.bool_)
        for spec in self.tensors:
            if spec.role is role:
                mask_m[spec.offset : spec.offset + spec.size] = True
        return mask_m

    def check_same(self, other: "Layout", *, whose: str) -> None:
        """Check that ``other`` is the same layout.

        Args:
            other: The layout to compare with.
            whose: Who holds ``other``, for the message.

        Raises:
            LayoutMismatch: They differ; the message names the first difference.
        """
        if self.digest == other.digest:
            return
        mine, theirs = _signatures(self), _signatures(other)
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                raise LayoutMismatch(
                    f"{whose} has a different model: tensor {name!r} is "
                    f"{theirs.get(name, 'missing')} there and "
                    f"{mine.get(name, 'missing')} in this run; give every site the "
                    "same model factory and options"
                )
        if self.frozen != other.frozen:
            raise LayoutMismatch(
                f"the frozen tensors of {whose} differ from this run's, and they are "
                "not sent: have the model factory read them from a file, or, if they "
                "are random, give every site the same release of torch"
            )
        raise LayoutMismatch(
            f"{whose} has a different model: its tensors are in a different order"
        )


def layout_differs(layout: Layout) -> str:
    """Describe what may differ if a site's layout has another digest than the run's."""
    or_frozen = " or has different frozen values" if layout.frozen else ""
    return f"has a model with a different layout than this run's{or_frozen}"


def _signatures(layout: Layout) -> Mapping[str, str]:
    return {
        t.name: f"{t.dtype}{list(t.shape)} ({t.role.value})" for t in layout.tensors
    }


def chunks(size: int, chunk: int = CHUNK_VALUES) -> Iterator[slice]:
    """Cut ``range(size)`` into slices of at most ``chunk`` values."""
    for start in range(0, size, chunk):
        yield slice(start, min(start + chunk, size))


def in_memory(size: int) -> Vector:
    """Allocate a vector of zeros; memory that is not touched takes none."""
    return np.zeros(size, np.float32)


def words_from(allocate: Allocate, size: int, dtype: DTypeLike) -> Words:
    """Allocate words of another type than float32, zeros, shape ``(size,)``."""
    num_floats = -(-size * np.dtype(dtype).itemsize // np.dtype(np.float32).itemsize)
    return allocate(num_floats).view(np.uint8).view(dtype)[:size]


def place(values_d: Vector, allocate: Allocate) -> Vector:
    """Put a vector where an allocator says: itself, if that is in memory."""
    return values_d if allocate is in_memory else copied(values_d, allocate)


def copied(values_d: Vector, allocate: Allocate) -> Vector:
    """Copy a vector into one that an allocator makes, piece by piece."""
    found_d = allocate(values_d.size)
    for piece in chunks(values_d.size):
        found_d[piece] = values_d[piece]
        give_back(values_d[piece])
        give_back(found_d[piece])
    return found_d


def squared_norm(vector_d: Vector) -> float:
    """Sum of squares, accumulated chunk by chunk in float64."""
    total = 0.0
    for piece in chunks(vector_d.size, _SERIAL_VALUES):
        part = vector_d[piece].astype(np.float64)
        total += float(part @ part)
        give_back(vector_d[piece])
    return total


def norm(vector_d: Vector) -> float:
    """Euclidean norm, accumulated in float64; not finite if a value is not."""
    return math.sqrt(squared_norm(vector_d))


def is_finite(vector_d: Values) -> bool:
    """Whether every value is a finite number, checked chunk by chunk."""
    # A product's sum is finite unless a value is not, or finite values overflow; only
    # then is the slower exact test needed.
    if vector_d.size <= _SERIAL_VALUES:
        part = vector_d[:]
        if math.isfinite(np.vdot(part, part)):  # It never warns of an overflow.
            return True
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in chunks(vector_d.size, _CHECK_VALUES):
            part = vector_d[piece]
            if not math.isfinite(_product(part)) and not np.isfinite(part).all():
                return False
            give_back(part)
    return True


def _product(part_c: Vector) -> float:
    """Sum of products, or plain sum, in which every value takes part."""
    if part_c.size <= _SERIAL_VALUES:
        return float(np.vecdot(part_c, part_c))
    if part_c.size % _CHECK_VALUES:
        return float(np.add.reduce(part_c))
    # A core reads two places of memory at once much faster than one.
    first, second = part_c.reshape(2, -1, _ROW_VALUES)
    return float(np.add.reduce(np.vecdot(first, second)))

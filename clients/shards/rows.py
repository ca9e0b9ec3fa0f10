"""Examples of one shard as arrays, and their layout."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Examples of one shard.

    Attributes:
        inputs: Shape ``(n, ...)``.
        targets: Shape ``(n, ...)``; None if there are none, or they are classes.
        classes: Shape ``(n,)``, int64; only seen by writers.
        groups: Shape ``(n,)``, int64; likewise.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any] | None = None
    classes: NDArray[np.int64] | None = None
    groups: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """What a reader must know in advance about a shard's examples.

    Attributes:
        examples: How many.
        first: Number of the first in its split.
        input_shape: Input shape of one example.
        input_type: NumPy's name of the type.
        has_classes: Whether each example has a class.
        target_shape: Target shape of one example.
        target_type: Empty if there are no targets but classes.
    """

    examples: int
    first: int
    input_shape: tuple[int, ...]
    input_type: str
    has_classes: bool
    target_shape: tuple[int, ...] = ()
    target_type: str = ""


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Store integers in the smallest type that holds them; models get int64 again."""
    if values.dtype.kind != "i" or not values.size:
        return values
    low, high = int(values.min()), int(values.max())
    smallest = np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high))
    # A mix of uint64 and negative numbers would become a float.
    return values.astype(smallest) if smallest.kind in "iu" else values

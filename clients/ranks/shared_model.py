"""A model's values in memory that the agent and the ranks of its site share.

The memory has no name: who does not inherit its file descriptor cannot open it, and it
is gone with the last process that holds it. Needs Linux.

Shape suffixes: d float values of the model, m integer values of the model.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np

from federation.vectors import IntegerVector, Layout, Vector


class SharedModel:
    """Room for one vector of weights and one of integers."""

    def __init__(self, layout: Layout, file: int | None = None) -> None:
        """Make the memory, or map what another process has made.

        Args:
            layout: Layout of the model.
            file: File descriptor that was inherited; it is closed with the memory.
        """
        size = max(1, 8 * layout.num_integers + 4 * layout.size)
        self.file = os.memfd_create("model") if file is None else file
        if file is None:
            os.ftruncate(self.file, size)
        self._map = mmap.mmap(self.file, size)
        self._integers_m = np.frombuffer(
            self._map, dtype=np.int64, count=layout.num_integers
        )
        self._weights_d = np.frombuffer(
            self._map,
            dtype=np.float32,
            count=layout.size,
            offset=8 * layout.num_integers,
        )

    def write(self, weights_d: Vector, integers_m: IntegerVector) -> None:
        """Copy values in.

        Raises:
            ValueError: They are not of this model's lengths.
        """
        if (len(weights_d), len(integers_m)) != (
            len(self._weights_d),
            len(self._integers_m),
        ):
            raise ValueError("the vectors do not belong to this model")
        self._weights_d[:] = weights_d
        self._integers_m[:] = integers_m

    def write_part(self, weights_d: Vector, spans: Sequence[tuple[int, int]]) -> None:
        """Copy weights in.

        Args:
            weights_d: Of the whole model, shape ``(d,)``.
            spans: Places ``[start, stop)`` that are copied.
        """
        for start, stop in spans:
            self._weights_d[start:stop] = weights_d[start:stop]

    def write_integers(self, integers_m: IntegerVector) -> None:
        """Copy integers in, shape ``(m,)``."""
        self._integers_m[:] = integers_m

    def view(self) -> tuple[Vector, IntegerVector]:
        """Return the values without a copy."""
        return self._weights_d, self._integers_m

    def read(self) -> tuple[Vector, IntegerVector]:
        """Copy values out: shapes ``(d,)`` and ``(m,)``."""
        return self._weights_d.copy(), self._integers_m.copy()

    def close(self) -> None:
        """Release the memory."""
        del self._weights_d, self._integers_m
        self._map.close()
        os.close(self.file)

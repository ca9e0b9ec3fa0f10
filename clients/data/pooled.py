"""The data of several sites as one dataset, in a simulation that has all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.data.datasets import Batch, Dataset, Indices
from federation.tree import map_tree


@dataclass(frozen=True, slots=True, eq=False)
class PooledDataset:
    """A ``clients.data.Dataset`` of the examples of several, one after another.

    Attributes:
        parts: What it is made of.
        index: Its examples, counted over all parts.
    """

    parts: Sequence[Dataset]
    index: Indices

    @classmethod
    def of(cls, parts: Sequence[Dataset]) -> "PooledDataset":
        """Pool all examples of some datasets."""
        return cls(parts, np.arange(sum(map(len, parts))))

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.index)

    def batch(self, indices: Indices) -> Batch:
        """Read each example from its part, and put them in the order asked for."""
        wanted = self.index[indices]
        ends = np.cumsum([len(part) for part in self.parts])
        owner = np.searchsorted(ends, wanted, side="right")
        read, places = [], []
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(owner == number)
            if len(mine):
                read.append(part.batch(wanted[mine] - (ends[number] - len(part))))
                places.append(mine)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        joined: Batch = map_tree(lambda *some: torch.cat(some)[order], *read)
        return joined

    def labels(self) -> Indices | None:
        """Class of each example."""
        return self._joined(lambda part: part.labels())

    @property
    def groups(self) -> Indices | None:
        """Group of each example; see ``group_names``."""
        return self._joined(lambda part: part.groups)

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups, which the parts of one source share."""
        return self.parts[0].group_names

    @property
    def persons(self) -> NDArray[Any] | None:
        """Whose record each example is."""
        return self._joined(lambda part: part.persons)

    def _joined(
        self, read: Callable[[Dataset], NDArray[Any] | None]
    ) -> NDArray[Any] | None:
        found = [each for part in self.parts if (each := read(part)) is not None]
        if len(found) < len(self.parts):
            return None
        joined: NDArray[Any] = np.concatenate(found)[self.index]
        return joined

    def subset(self, indices: Indices) -> "PooledDataset":
        """A view of some of the examples."""
        return replace(self, index=self.index[indices])

    def apart(self) -> "PooledDataset":
        """A view in which no example depends on the others of its batch."""
        return replace(self, parts=[part.apart() for part in self.parts])

"""Gradients of persons from those of their records.

The gradient of a person is the mean over the person's records in the step ("user-level
sampling", Charles et al. 2024, arXiv:2407.07737, section 3). It is clipped as that of a
record would be, so that a person changes a sum by at most the clip norm, with any
number of records.

Guarantee:
    What a person's gradient is, bit for bit, depends on the records of that person and
    on the most records that any may have, and not on who else is in the batch: records
    are added one after another, and padding is up to that number.

Shape suffixes: B records, P persons, K the most records of a person, T places.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PersonBatch:
    """Whose the records of a batch are; those of one person are side by side.

    Attributes:
        sizes: Records of each person, shape ``(P,)``, each from 1 to ``most``.
        most: K, a constant of the job and never the largest number in the batch.

    Raises:
        ValueError: A person has no record, or more than ``most``.
    """

    sizes: NDArray[np.int64]
    most: int

    def __post_init__(self) -> None:
        """Refuse sizes that would break the bound on one person."""
        fewest = self.sizes.min(initial=self.most)
        largest = self.sizes.max(initial=1)
        if not 1 <= fewest <= largest <= self.most:
            raise ValueError(
                f"persons of a batch have {fewest} to {largest} records, not 1 to "
                f"{self.most}"
            )

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over each person's records, shape ``(P, ...)`` of ``(B, ...)``."""
        starts = torch.from_numpy(np.cumsum(self.sizes) - self.sizes)
        found = values[starts.to(values.device)]
        for place in range(1, int(self.sizes.max(initial=1))):
            has = torch.from_numpy(np.flatnonzero(self.sizes > place))
            found[has.to(values.device)] += values[
                (starts[has] + place).to(values.device)
            ]
        return found / self._divisors(found, self.sizes)

    def divided(self, values: torch.Tensor) -> torch.Tensor:
        """Each record's values over the number of its person's records."""
        return values / self._divisors(values, np.repeat(self.sizes, self.sizes))

    def side_by_side(self, values_bt: torch.Tensor) -> torch.Tensor:
        """A person's places one after another: ``(P, K * T, ...)`` of ``(B, T, ...)``.

        A person with fewer than K records has zeros behind them.
        """
        owners = np.repeat(np.arange(len(self.sizes)), self.sizes)
        first = np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        places = torch.from_numpy(owners * self.most + np.arange(len(owners)) - first)
        found = values_bt.new_zeros((len(self.sizes) * self.most, *values_bt.shape[1:]))
        found[places.to(values_bt.device)] = values_bt
        shape = (len(self.sizes), self.most * values_bt.shape[1], *values_bt.shape[2:])
        return found.reshape(shape)

    @staticmethod
    def _divisors(like: torch.Tensor, counts: NDArray[np.int64]) -> torch.Tensor:
        divisors = torch.from_numpy(counts).to(device=like.device, dtype=like.dtype)
        return divisors.view(-1, *([1] * (like.ndim - 1)))

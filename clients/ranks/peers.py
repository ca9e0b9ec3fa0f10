"""What ranks of one site do together while they train, as seen by one of them.

Gradients are averaged by ``DistributedDataParallel``, or by the sharded model itself
(``placing``); sums are all-reduced. A trainer that is alone calls the same functions,
and they do nothing. Starting processes is not here: see ``group``.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from clients.data.batches import ALONE, Indices, Rank
from clients.randomness import GlobalDraws, Seed, seeded_globally
from federation.job.metrics import Metric
from federation.messages import MetricSums

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks of a site, seen from one of them.

    With more than one rank the process must be in a process group of
    ``torch.distributed``, and all ranks must call the same methods in the same order.

    Attributes:
        rank: Which of them this is.
        device: Where it computes.
        is_sharded: Whether each rank holds only a part of the model.
    """

    rank: Rank = ALONE
    device: torch.device = torch.device("cpu")  # noqa: RUF009 -- immutable
    is_sharded: bool = False

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.rank.world_size

    def part(self, indices: Indices) -> Indices:
        """Return this rank's examples of a batch of the whole site; maybe none."""
        return indices[self.rank.rank :: self.count]

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a module whose gradients are the mean over the ranks."""
        if self.count == 1 or self.is_sharded:
            return module
        on_gpu = self.device.type == "cuda"
        # A parameter that no rank has used keeps no gradient, as with one rank.
        return DistributedDataParallel(
            module,
            device_ids=[self.device.index] if on_gpu else None,
            find_unused_parameters=True,
        )

    def adding(
        self, wrapped: torch.nn.Module, *, last: bool
    ) -> AbstractContextManager[object]:
        """Backward passes in here add to gradients; the ``last`` one averages them.

        Those of a sharded model are averaged after each: whole ones would not fit.
        """
        if isinstance(wrapped, DistributedDataParallel) and not last:
            return wrapped.no_sync()
        return nullcontext()

    def total(self, number: int) -> int:
        """Sum of every rank's number."""
        if self.count == 1:
            return number
        return int(self.sum_(torch.tensor(number, device=self.device)))

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Replace values by their sum over the ranks."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def total_at_first_(self, values: torch.Tensor) -> bool:
        """Sum values at the first rank; at others they are of no use afterwards.

        Returns:
            Whether this is the first rank.
        """
        if self.count > 1:
            distributed.reduce(values, dst=0)
        return self.rank.rank == 0

    def as_at_first_(self, values: torch.Tensor) -> None:
        """Replace values by those of the first rank."""
        if self.count > 1:
            distributed.broadcast(values, src=0)

    def draw(
        self, draws: GlobalDraws, work: Callable[[], _Result], *, kind: str, seed: Seed
    ) -> _Result:
        """Do work that may draw from the global generators; see ``GlobalDraws``."""
        if self.count == 1:
            return draws.run(work, kind=kind, seed=seed)
        # Not there: one rank might do its work twice, and wait for the others forever.
        with seeded_globally(seed, self.device):
            return work()


NO_PEERS = Peers()


class Sums:
    """Adds up losses on the device and reads them once, at the end."""

    def __init__(
        self, device: torch.device, peers: Peers, metrics: Mapping[str, Metric]
    ) -> None:
        """Begin with nothing."""
        self._peers = peers
        self._metrics = metrics
        # The loss, and then the metrics.
        size = 1 + len(metrics)
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)
        self._count = 0

    def add(
        self, loss: torch.Tensor, count: int, metrics: Mapping[str, torch.Tensor]
    ) -> None:
        """Count a batch of this rank; a tensor may hold several metrics in a row."""
        parts = [value.reshape(-1).double() for value in (loss, *metrics.values())]
        self._sums += torch.cat(parts)
        self._count += count

    def so_far(self) -> tuple[NDArray[np.float64], int]:
        """Copy this rank's sums, and the count that goes with them."""
        return self._sums.cpu().numpy().copy(), self._count

    def continue_from(self, sums: NDArray[np.float64], count: int) -> None:
        """Add to such sums in place of zero."""
        self._sums.copy_(torch.tensor(sums))
        self._count = count

    def metrics(self) -> MetricSums:
        """Sums over the batches of all ranks."""
        count = self._peers.total(self._count)
        loss, *values = self._peers.sum_(self._sums).tolist()
        return MetricSums(
            count=count,
            loss_sum=loss,
            metrics={
                name: int(value) if metric.is_whole else value
                for (name, metric), value in zip(
                    self._metrics.items(), values, strict=True
                )
            },
        )

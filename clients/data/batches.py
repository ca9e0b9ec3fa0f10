"""Which examples a site trains on, step by step, as a function of seed and round.

Several processes of one site, its *ranks*, share each epoch among them: each example is
at one of them, and every rank takes the same number of batches. Which rank has what
follows from seed, site and epoch, so nothing is sent between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NotRequired, Protocol, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from clients.randomness import stream
from federation.ids import SiteId

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which of a site's processes reads.

    Attributes:
        rank: From 0.
        world_size: How many there are.

    Raises:
        ValueError: ``rank`` is none of ``world_size``.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} is not possible")

    def share(self, num_examples: int) -> int:
        """Examples that this rank has of an epoch: those of all differ by at most one.

        Raises:
            ValueError: There is not one for each rank.
        """
        if num_examples < self.world_size:
            raise ValueError(
                f"the site has fewer examples than its {self.world_size} ranks: use "
                "fewer ranks, or give the site more data"
            )
        return num_examples // self.world_size + (
            self.rank < num_examples % self.world_size
        )


ALONE = Rank()


class Shuffle(Protocol):
    """An order that the dataset chooses."""

    def __call__(self, rng: np.random.Generator, rank: Rank = ALONE) -> Indices | None:
        """A rank's share of an epoch; None if any order will do."""
        ...


class Ordering(TypedDict):
    """What determines the order of a site's epochs.

    Attributes:
        seed: The job's seed.
        shuffle: An order of the data's own; uniformly random where it gives None.
        rank: Who asks; ``ALONE`` by default. It gets ``rank.share(num_examples)``
            examples of an epoch.
    """

    seed: int
    site: SiteId
    shuffle: NotRequired[Shuffle | None]
    rank: NotRequired[Rank]


def epoch_order(
    num_examples: int, *, epoch: int, **ordering: Unpack[Ordering]
) -> Indices:
    """Order in which a site, or one rank of it, goes through an epoch.

    Args:
        num_examples: Examples that the site holds.
        epoch: Counted over the run.
        ordering: See ``Ordering``.
    """
    rng = stream(ordering["seed"], "epoch", ordering["site"], epoch)
    shuffle, rank = ordering.get("shuffle"), ordering.get("rank", ALONE)
    order = None if shuffle is None else shuffle(rng, rank)
    if order is None:
        order = rng.permutation(num_examples)[rank.rank :: rank.world_size]
    return order


def stepwise(
    num_examples: int,
    *,
    batch_size: int,
    first_batch: int,
    num_batches: int,
    **ordering: Unpack[Ordering],
) -> Iterator[Indices]:
    """Yield batches from an endless walk through the examples, epoch by epoch.

    The walk does not start again with each round: batch k of the run is the same
    whichever round it falls into. Every example is visited once an epoch. Each rank has
    a walk of its own, through its share of every epoch.

    Args:
        num_examples: Examples that the site holds.
        batch_size: Examples of a rank's batch; at most all that it has.
        first_batch: Batches of the walk that are done.
        num_batches: Batches to yield.
        ordering: See ``Ordering``.

    Raises:
        ValueError: There are fewer examples than ranks.
    """
    rank = ordering.get("rank", ALONE)
    share = rank.share(num_examples)
    # The same for all ranks, also where some have an example more.
    size = min(batch_size, num_examples // rank.world_size)
    position = first_batch * size
    epoch, order = -1, np.empty(0, dtype=np.int64)
    for _ in range(num_batches):
        pieces, missing = [], size
        while missing:
            if position // share != epoch:
                epoch = position // share
                order = epoch_order(num_examples, epoch=epoch, **ordering)
            offset = position - epoch * share
            piece = order[offset : offset + missing]
            pieces.append(piece)
            position += len(piece)
            missing -= len(piece)
        yield np.concatenate(pieces)


def epochwise(
    num_examples: int,
    *,
    batch_size: int,
    first_epoch: int,
    num_epochs: int,
    **ordering: Unpack[Ordering],
) -> Iterator[Indices]:
    """Yield the batches of whole epochs; the last of each may be smaller.

    All ranks take as many steps as the one that has most. Where that leaves one without
    an example for the last step, it keeps one back from the step before; with batches
    of one example it has none to keep, and its last batch is empty.

    Raises:
        ValueError: There are fewer examples than ranks.
    """
    rank = ordering.get("rank", ALONE)
    share, most = rank.share(num_examples), -(-num_examples // rank.world_size)
    starts = list(range(0, most, batch_size))
    if starts[-1] == share and batch_size > 1:
        starts[-1] -= 1
    for epoch in range(first_epoch, first_epoch + num_epochs):
        order = epoch_order(num_examples, epoch=epoch, **ordering)
        for start, end in zip(starts, [*starts[1:], share], strict=True):
            yield order[start:end]

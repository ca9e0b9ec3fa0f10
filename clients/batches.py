"""Which examples a site trains on, step by step, as a function of seed and round."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from clients.randomness import stream
from federation.ids import SiteId

Indices = NDArray[np.int64]
Shuffle = Callable[[np.random.Generator], Indices | None]


def epoch_order(
    num_examples: int,
    *,
    seed: int,
    site: SiteId,
    epoch: int,
    shuffle: Shuffle | None = None,
) -> Indices:
    """Order in which a site goes through its examples in one epoch.

    Args:
        num_examples: Examples that the site holds.
        seed: The job's seed.
        site: The site.
        epoch: Counted over the run.
        shuffle: An order of the data's own; uniformly random where it gives None.
    """
    rng = stream(seed, "epoch", site, epoch)
    order = None if shuffle is None else shuffle(rng)
    return rng.permutation(num_examples) if order is None else order


def stepwise(
    num_examples: int,
    *,
    batch_size: int,
    first_batch: int,
    num_batches: int,
    seed: int,
    site: SiteId,
    shuffle: Shuffle | None = None,
) -> Iterator[Indices]:
    """Yield batches out of one endless walk through the examples, epoch by epoch.

    The walk does not start again with each round: batch k of the run is the same
    whichever round it falls into. Every example is visited once an epoch.

    Args:
        num_examples: Examples that the site holds.
        batch_size: Examples of a batch; at most all of them.
        first_batch: Batches of the walk that lie behind.
        num_batches: Batches to yield.
        seed: The job's seed.
        site: The site.
        shuffle: See ``epoch_order``.
    """
    size = min(batch_size, num_examples)
    position = first_batch * size
    epoch, order = -1, np.empty(0, dtype=np.int64)
    for _ in range(num_batches):
        pieces, missing = [], size
        while missing:
            if position // num_examples != epoch:
                epoch = position // num_examples
                order = epoch_order(
                    num_examples, seed=seed, site=site, epoch=epoch, shuffle=shuffle
                )
            offset = position - epoch * num_examples
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
    seed: int,
    site: SiteId,
    shuffle: Shuffle | None = None,
) -> Iterator[Indices]:
    """Yield the batches of whole epochs; the last of each may be smaller."""
    for epoch in range(first_epoch, first_epoch + num_epochs):
        order = epoch_order(
            num_examples, seed=seed, site=site, epoch=epoch, shuffle=shuffle
        )
        for start in range(0, num_examples, batch_size):
            yield order[start : start + batch_size]

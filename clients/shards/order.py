"""In which order a site goes through examples in shards.

A uniformly random order touches every shard all the time. Here the shards are in
random order, and examples are shuffled among those of a window of shards, so that a
site reads each shard once an epoch and holds few of them. Batch k of a run is still a
function of seed, site and k: a resumed run continues in the middle of an epoch and
repeats or loses nothing.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeGuard

import numpy as np

from clients.data.batches import ALONE, Rank
from clients.data.datasets import Indices


class ReadsAhead(Protocol):
    """A dataset that prefers its own order, and to know batches in advance."""

    @property
    def examples_ahead(self) -> int:
        """How many examples it wants to know of in advance."""
        ...

    def epoch_order(
        self, rng: np.random.Generator, rank: Rank = ALONE
    ) -> Indices | None:
        """A rank's share of one epoch, each example once; None if any order will do."""
        ...

    def expect(self, indices: Indices) -> None:
        """Begin to fetch some examples; ``batch`` will ask for them soon."""
        ...


def reads_ahead(data: Any) -> TypeGuard[ReadsAhead]:
    """Whether a dataset is ``ReadsAhead``; each of many sites asks in each round."""
    return hasattr(data, "examples_ahead")


def shard_order(
    shard_of: Indices,
    rng: np.random.Generator,
    *,
    window: int,
    rank: Rank = ALONE,
) -> Indices:
    """Order of an epoch: shards at random, examples at random in a window of shards.

    Ranks share the shards out like cards, so that each shard is read by one of them.
    Those who got more examples than others then give the last ones away, and only the
    shards of those are read twice.

    Args:
        shard_of: Shape ``(n,)``: the shard of each example.
        rng: Where chance comes from; the same for all ranks.
        window: Shards whose examples are shuffled together.
        rank: Which of several readers asks.

    Returns:
        Indices into ``shard_of``, ``rank.share(n)`` of them; over all ranks, each once.

    Raises:
        ValueError: ``window`` is not positive, or there are fewer examples than ranks.
    """
    if window < 1:
        raise ValueError(f"a window of {window} shards is not possible")
    ranks = rank.world_size
    shares = [Rank(rank=r, world_size=ranks).share(len(shard_of)) for r in range(ranks)]
    by_shard = np.argsort(shard_of, kind="stable")
    ends = np.flatnonzero(np.diff(shard_of[by_shard])) + 1
    members = np.split(by_shard, ends)
    order = rng.permutation(len(members))
    dealt: list[list[Indices]] = [[np.empty(0, dtype=np.int64)] for _ in range(ranks)]
    for number, start in enumerate(range(0, len(order), window * ranks)):
        drawn = int(rng.integers(2**62))
        for r, pieces in enumerate(dealt):
            shards = order[start + r : start + window * ranks : ranks]
            if len(shards):
                together = np.concatenate([members[shard] for shard in shards])
                of_window = np.random.default_rng([drawn, number, r])
                pieces.append(of_window.permutation(together))
    return _levelled([np.concatenate(pieces) for pieces in dealt], shares)[rank.rank]


def _levelled(dealt: Sequence[Indices], shares: Sequence[int]) -> list[Indices]:
    """Give each rank its share: ranks with more give from their end."""
    spare = np.concatenate(
        [mine[share:] for mine, share in zip(dealt, shares, strict=True)]
    )
    lacks = np.array(
        [max(0, s - len(mine)) for mine, s in zip(dealt, shares, strict=True)]
    )
    given = np.split(spare, np.cumsum(lacks)[:-1])
    return [
        np.concatenate([mine[:share], more])
        for mine, share, more in zip(dealt, shares, given, strict=True)
    ]


def telling_ahead(
    dataset: object, batches: Iterable[Indices], num_batches: int | None = None
) -> Iterator[Indices]:
    """Pass batches on, and announce the following ones to the dataset.

    The dataset hears of the first ones at once, before any is asked for.

    Args:
        dataset: Batches are announced only to a ``ReadsAhead``.
        batches: What is to be read, and perhaps what comes after.
        num_batches: How many are passed on; all by default.
    """
    source = iter(batches)
    if not reads_ahead(dataset):
        return islice(source, num_batches)
    told: deque[Indices] = deque()
    _tell(dataset, source, told)
    return islice(_passed_on(dataset, source, told), num_batches)


def _passed_on(
    dataset: ReadsAhead, source: Iterator[Indices], told: deque[Indices]
) -> Iterator[Indices]:
    while told:
        yield told.popleft()
        _tell(dataset, source, told)


def _tell(dataset: ReadsAhead, source: Iterator[Indices], told: deque[Indices]) -> None:
    """Announce batches until the next one and enough after it are known."""
    num_told = sum(map(len, told))
    while not told or num_told < dataset.examples_ahead:
        following = next(source, None)
        if following is None:
            return
        dataset.expect(following)
        told.append(following)
        num_told += len(following)

"""In which order examples that lie in shards are read, and what is told ahead."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from support.examples import few

from clients.data.batches import ALONE, Rank, Shuffle, epochwise, stepwise
from clients.data.datasets import Indices
from clients.shards.dataset import ORDERS
from clients.shards.order import shard_order
from federation.ids import SiteId

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def shards_of(sizes: list[int]) -> Indices:
    return np.repeat(np.arange(len(sizes)), sizes)


def of_ranks(number: int) -> list[Rank]:
    return [Rank(rank=rank, world_size=number) for rank in range(number)]


@few(40)
@given(sizes, st.integers(1, 5), st.integers(1, 4))
def test_each_example_once_over_all_ranks(sizes: list[int], window: int, ranks: int):
    """Whatever the window, and no rank has more than one more than another."""
    shard_of = shards_of(sizes)
    assume(len(shard_of) >= ranks)
    orders = [
        shard_order(shard_of, rng(), window=window, rank=rank)
        for rank in of_ranks(ranks)
    ]
    whole = np.concatenate(orders)
    assert sorted(whole.tolist()) == list(range(len(shard_of)))
    assert max(map(len, orders)) - min(map(len, orders)) <= 1


@few(40)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_each_shard_is_read_by_one_rank(each: int, size: int, window: int, ranks: int):
    """Where they can be shared out evenly."""
    shard_of = shards_of([size] * (each * ranks))
    orders = [
        shard_order(shard_of, rng(), window=window, rank=rank)
        for rank in of_ranks(ranks)
    ]
    seen = [set(shard_of[order].tolist()) for order in orders]
    assert [len(shards) for shards in seen] == [each] * ranks
    assert len(set().union(*seen)) == each * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_few_shards_are_read_twice(ranks: int):
    """Only those whose examples make up for the last hand of cards."""
    shard_of = shards_of([10] * 40)
    orders = [
        shard_order(shard_of, rng(), window=2, rank=rank) for rank in of_ranks(ranks)
    ]
    seen = [set(shard_of[order].tolist()) for order in orders]
    assert 40 <= sum(map(len, seen)) <= 40 + 2 * ranks


@given(sizes, st.integers(1, 5))
def test_a_window_is_read_before_the_next(sizes: list[int], window: int):
    """At any moment no more shards are half-read than a window has."""
    shard_of = shards_of(sizes)
    read = shard_of[shard_order(shard_of, rng(), window=window)]
    first = {s: int(np.flatnonzero(read == s)[0]) for s in range(len(sizes))}
    last = {s: int(np.flatnonzero(read == s)[-1]) for s in range(len(sizes))}
    for place in range(len(read)):
        assert sum(first[s] <= place <= last[s] for s in first) <= window


def test_order_follows_the_generator():
    """The same for the same seed; shards and examples move with another."""
    shard_of = shards_of([10] * 8)
    orders = [shard_order(shard_of, rng(seed), window=2) for seed in (1, 1, 2)]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    windows = [set(shard_of[order[:20]].tolist()) for order in orders]
    assert windows[0] != windows[2]
    assert (np.diff(orders[0][:20]) != 1).any()


@few(40)
@given(sizes, st.integers(1, 7), st.integers(0, 40), st.integers(1, 3))
def test_the_middle_of_an_epoch(
    sizes: list[int], batch_size: int, behind: int, ranks: int
):
    """A walk that begins behind some batches is the rest of the whole walk."""
    shard_of = shards_of(sizes)
    assume(len(shard_of) >= ranks)

    def walk(first: int, number: int, rank: Rank) -> list[list[int]]:
        found = stepwise(
            len(shard_of),
            batch_size=batch_size,
            first_batch=first,
            num_batches=number,
            seed=3,
            site=SiteId("a"),
            shuffle=shuffle_of(shard_of),
            rank=rank,
        )
        return [batch.tolist() for batch in found]

    for rank in of_ranks(ranks):
        assert walk(behind, 9, rank) == walk(0, behind + 9, rank)[behind:]


def shuffle_of(shard_of: Indices) -> Shuffle:
    def shuffle(generator: np.random.Generator, rank: Rank = ALONE) -> Indices:
        return shard_order(shard_of, generator, window=2, rank=rank)

    return shuffle


@few(60)
@given(
    sizes,
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(0, 5),
    st.sampled_from(ORDERS),
)
def test_ranks_share_every_epoch(
    sizes: list[int], batch_size: int, ranks: int, epoch: int, order: str
):
    """Over all ranks each example once; as many batches everywhere, none empty."""
    shard_of = shards_of(sizes)
    assume(len(shard_of) >= ranks)

    def walk(rank: Rank, first: int, number: int) -> list[Indices]:
        return list(
            epochwise(
                len(shard_of),
                batch_size=batch_size,
                first_epoch=first,
                num_epochs=number,
                seed=3,
                site=SiteId("a"),
                shuffle=shuffle_of(shard_of) if order == "shards" else None,
                rank=rank,
            )
        )

    walks = [walk(rank, epoch, 1) for rank in of_ranks(ranks)]
    seen = np.concatenate([np.concatenate(batches) for batches in walks])
    assert sorted(seen.tolist()) == list(range(len(shard_of)))
    assert len({len(batches) for batches in walks}) == 1
    lengths = {len(batch) for batches in walks for batch in batches}
    assert max(lengths) <= batch_size
    assert batch_size == 1 or min(lengths) > 0
    for rank, batches in zip(of_ranks(ranks), walks, strict=True):  # A resume.
        later = walk(rank, 0, epoch + 1)[epoch * len(batches) :]
        assert [b.tolist() for b in later] == [b.tolist() for b in batches]


@pytest.mark.slow
@few(40)
@given(sizes, st.integers(1, 7), st.integers(2, 4))
def test_ranks_walk_through_whole_epochs(sizes: list[int], batch_size: int, ranks: int):
    """Step by step too: what all have read after an epoch each is all there is."""
    shard_of = shards_of(sizes)
    assume(len(shard_of) >= ranks)
    read: list[int] = []
    for rank in of_ranks(ranks):
        walk = stepwise(
            len(shard_of),
            batch_size=batch_size,
            first_batch=0,
            num_batches=len(shard_of),
            seed=3,
            site=SiteId("a"),
            shuffle=shuffle_of(shard_of),
            rank=rank,
        )
        mine = np.concatenate(list(walk))
        assert len(mine) == len(shard_of) * min(batch_size, len(shard_of) // ranks)
        read += mine[: rank.share(len(shard_of))].tolist()
    assert sorted(read) == list(range(len(shard_of)))


def batches(number: int) -> Iterator[Indices]:
    for i in range(number):
        yield np.arange(4 * i, 4 * i + 4)

"""In which order examples that lie in shards are read, and what is told ahead."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.batches import stepwise
from clients.datasets import Indices
from clients.shards.order import shard_order, telling_ahead
from federation.ids import SiteId

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def shards_of(sizes: list[int]) -> Indices:
    return np.repeat(np.arange(len(sizes)), sizes)


@settings(max_examples=40)
@given(sizes, st.integers(1, 5), st.integers(1, 4))
def test_each_example_once_over_all_ranks(sizes: list[int], window: int, ranks: int):
    """Whatever the window, and each shard at one rank."""
    shard_of = shards_of(sizes)
    orders = [
        shard_order(shard_of, rng(), window=window, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    whole = np.concatenate(orders)
    assert sorted(whole.tolist()) == list(range(len(shard_of)))
    seen = [set(shard_of[order].tolist()) for order in orders]
    assert sum(map(len, seen)) == len(sizes)


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


def test_a_view_of_scattered_examples():
    """Shards that are not in view do not count."""
    shard_of = np.array([7, 2, 7, 7, 2, 9])
    order = shard_order(shard_of, rng(), window=1)
    assert sorted(order.tolist()) == [0, 1, 2, 3, 4, 5]
    assert len(np.flatnonzero(np.diff(shard_of[order]))) == 2


@pytest.mark.parametrize(
    ("window", "rank", "ranks"), [(0, 0, 1), (1, 1, 1), (1, -1, 2)]
)
def test_wrong_arguments(window: int, rank: int, ranks: int):
    """Each is refused."""
    with pytest.raises(ValueError, match="not possible"):
        shard_order(shards_of([1]), rng(), window=window, rank=rank, ranks=ranks)


@settings(max_examples=40)
@given(sizes, st.integers(1, 7), st.integers(0, 40))
def test_the_middle_of_an_epoch(sizes: list[int], batch_size: int, behind: int):
    """A walk that begins behind some batches is the rest of the whole walk."""
    shard_of = shards_of(sizes)

    def walk(first: int, number: int) -> list[list[int]]:
        found = stepwise(
            len(shard_of),
            batch_size=batch_size,
            first_batch=first,
            num_batches=number,
            seed=3,
            site=SiteId("a"),
            shuffle=lambda generator: shard_order(shard_of, generator, window=2),
        )
        return [batch.tolist() for batch in found]

    assert walk(behind, 9) == walk(0, behind + 9)[behind:]


class Listener:
    """A dataset that notes what it is told."""

    examples_ahead = 10

    def __init__(self) -> None:
        self.told: list[int] = []

    def epoch_order(self, _: np.random.Generator) -> Indices | None:
        return None

    def expect(self, indices: Indices) -> None:
        self.told += indices.tolist()


def batches(number: int) -> Iterator[Indices]:
    for i in range(number):
        yield np.arange(4 * i, 4 * i + 4)


def test_told_ahead_and_beyond_the_end():
    """At least ten examples ahead, and those of the next round too."""
    listener = Listener()
    passed = 0
    for batch in telling_ahead(listener, batches(9), 5):
        assert batch.tolist() == list(range(4 * passed, 4 * passed + 4))
        passed += 1
        assert len(listener.told) >= min(4 * (passed - 1) + 10, 36)
        assert len(listener.told) <= 4 * (passed - 1) + 13
    assert passed == 5
    assert listener.told == list(range(len(listener.told)))


@pytest.mark.parametrize("data", [None, Listener()])
def test_all_batches_pass(data: object):
    """Where no number is given, and where there are fewer."""
    for number in (None, 7):
        assert len(list(telling_ahead(data, batches(3), number))) == 3
    assert len(list(telling_ahead(data, batches(3), 2))) == 2

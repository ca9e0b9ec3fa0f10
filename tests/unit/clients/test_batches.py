"""Which examples a site trains on."""

from collections.abc import Iterable

import numpy as np
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from support.examples import few

from clients.data.batches import epochwise, stepwise
from federation.ids import SiteId

SITE = SiteId("a")
sizes = st.integers(1, 40)


def walk(num_examples: int, batch_size: int, first: int, num: int):
    return list(
        stepwise(
            num_examples,
            batch_size=batch_size,
            first_batch=first,
            num_batches=num,
            seed=3,
            site=SITE,
        )
    )


def epochs(num_examples: int, batch_size: int, first: int, num: int):
    return list(
        epochwise(
            num_examples,
            batch_size=batch_size,
            first_epoch=first,
            num_epochs=num,
            seed=3,
            site=SITE,
        )
    )


def flat(batches: Iterable[NDArray[np.int64]]):
    return [int(i) for batch in batches for i in batch]


@given(sizes, sizes, st.integers(1, 30))
@few(50)
def test_walk_visits_every_example_once_an_epoch(size: int, batch: int, num: int):
    """Cut into pieces of the dataset's size, each whole piece is a permutation."""
    visited = flat(walk(size, batch, 0, num))
    for start in range(0, len(visited) - size + 1, size):
        assert sorted(visited[start : start + size]) == list(range(size))


@given(sizes, sizes, st.lists(st.integers(0, 5), max_size=6))
@few(50)
def test_walk_is_the_same_however_it_is_cut(size: int, batch: int, cuts: list[int]):
    """Rounds of any lengths, one after another, give the one uncut walk."""
    pieces, first = [], 0
    for num in cuts:
        pieces += flat(walk(size, batch, first, num))
        first += num
    assert flat(walk(size, batch, 0, first)) == pieces


@given(sizes, sizes, st.integers(0, 3), st.integers(1, 3))
@few(50)
def test_epochs_visit_every_example_once(size: int, batch: int, first: int, num: int):
    """Whole epochs, in batches of which only the last may be smaller."""
    batches = epochs(size, batch, first, num)
    per_epoch = -(-size // batch)
    assert len(batches) == num * per_epoch
    for start in range(0, len(batches), per_epoch):
        epoch = batches[start : start + per_epoch]
        assert sorted(flat(epoch)) == list(range(size))
        assert all(len(b) == batch for b in epoch[:-1])


def test_epochs_go_on_where_the_round_before_ended():
    """Two rounds of one epoch are one round of two."""
    assert flat(epochs(10, 4, 0, 2)) == flat(
        [*epochs(10, 4, 0, 1), *epochs(10, 4, 1, 1)]
    )

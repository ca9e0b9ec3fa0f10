"""Integers that never leave a site."""

import numpy as np
import pytest
from safetensors.numpy import save

from clients.training.kept_integers import KEEP_ROUNDS, KeptIntegers
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import CorruptObject
from federation.ids import SiteId
from federation.vectors import Layout, Role

LAYOUT = Layout.build(
    [
        ("w", (2,), "float32", Role.PARAMETER),
        ("count", (), "int64", Role.MAX),
        ("mine", (2,), "int64", Role.KEEP),
    ]
)
PLAIN = Layout.build([("w", (2,), "float32", Role.PARAMETER)])


def integers(*values: int):
    array = np.array(values, np.int64)
    array.flags.writeable = False
    return array


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def kept(store: MemoryStore):
    return KeptIntegers(SiteId("a"), LAYOUT, store)


def test_first_round_takes_the_servers(kept: KeptIntegers):
    """Before anything is kept there is only what the server sent."""
    assert kept.restore(integers(1, 2, 3), 1).tolist() == [1, 2, 3]


def test_site_gets_its_own_back(kept: KeptIntegers):
    """Kept values replace the server's; the others are the server's."""
    kept.keep(integers(7, 8, 9), 1)
    assert kept.restore(integers(1, 0, 0), 2).tolist() == [1, 8, 9]


def test_later_rounds_are_not_used(kept: KeptIntegers):
    """A resumed run that does round 2 again sees what round 1 left."""
    kept.keep(integers(0, 1, 1), 1)
    kept.keep(integers(0, 2, 2), 2)
    assert kept.restore(integers(0, 0, 0), 2).tolist() == [0, 1, 1]
    assert kept.restore(integers(0, 0, 0), 3).tolist() == [0, 2, 2]


def test_a_site_that_is_seldom_asked_can_repeat_a_round(kept: KeptIntegers):
    """Long gaps between a site's rounds do not count as age."""
    kept.keep(integers(0, 1, 1), 1)
    kept.keep(integers(0, 2, 2), 100)
    assert kept.restore(integers(0, 0, 0), 100).tolist() == [0, 1, 1]


def test_old_rounds_are_deleted(kept: KeptIntegers, store: MemoryStore):
    """Only the newest few stay; rounds after this one are left alone."""
    for round_index in range(1, 10):
        kept.keep(integers(0, round_index, 0), round_index)
    assert len(list(store.list())) == KEEP_ROUNDS
    kept.keep(integers(0, 0, 0), 6)
    assert kept.restore(integers(0, 0, 0), 10).tolist() == [0, 9, 0]


def test_rounds_sort_as_numbers(kept: KeptIntegers):
    """Round 1,000,000 comes after round 999,999."""
    kept.keep(integers(0, 1, 1), 999_999)
    kept.keep(integers(0, 2, 2), 1_000_000)
    assert kept.restore(integers(0, 0, 0), 1_000_001).tolist() == [0, 2, 2]


def test_sites_do_not_see_each_other(kept: KeptIntegers, store: MemoryStore):
    """Two sites with one store keep apart."""
    kept.keep(integers(0, 1, 1), 1)
    other = KeptIntegers(SiteId("b"), LAYOUT, store)
    assert other.restore(integers(0, 0, 0), 2).tolist() == [0, 0, 0]


def test_kept_values_are_concealed(kept: KeptIntegers):
    """What travels holds zeros in their place."""
    assert kept.conceal(integers(5, 6, 7)).tolist() == [5, 0, 0]


def test_without_kept_buffers_nothing_is_stored(store: MemoryStore):
    """A model without such buffers passes straight through."""
    kept = KeptIntegers(SiteId("a"), PLAIN, store)
    values = integers()
    kept.keep(values, 1)
    assert kept.restore(values, 2) is kept.conceal(values) is values
    assert list(store.list()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"garbage",
        save({"other": np.zeros(3, np.int64)}),
        save({"kept": np.zeros(4, np.int64)}),
        save({"kept": np.zeros(3, np.float32)}),
    ],
)
def test_spoilt_values_are_refused(
    kept: KeptIntegers, store: MemoryStore, content: bytes
):
    """Anything but this model's integers is an error that says what to do."""
    kept.keep(integers(0, 1, 1), 1)
    (info,) = store.list()
    store.put(info.key, [content])
    with pytest.raises(CorruptObject, match="delete it"):
        kept.restore(integers(0, 0, 0), 2)

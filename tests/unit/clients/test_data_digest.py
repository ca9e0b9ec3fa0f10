"""A digest of a site's data: what it notices, and what it costs."""

import numpy as np
import pytest
import torch

from clients.data.datasets import Dataset, Examples, as_dataset
from clients.privacy.dataset_name import SAMPLED_EXAMPLES, digest
from clients.privacy.ledger_memory import note_content
from clients.privacy.site_memory import InMemory
from clients.shards.dataset import open_dataset
from clients.shards.write import write_dataset
from cloud_adapters.storage.memory import MemoryStore

SIZE = 3 * SAMPLED_EXAMPLES


def rows(size: int = SIZE, **changed: float) -> Dataset:
    """Rows of two numbers, and classes; ``at=3`` changes a row."""
    inputs = np.arange(2 * size, dtype=np.float32).reshape(size, 2)
    if changed:
        inputs[int(changed["at"])] += 1
    return as_dataset(Examples(inputs=inputs, targets=np.arange(size) % 3), name="rows")


class Counted:
    """Counts what is read of it; with noise it never is the same twice."""

    def __init__(self, *, noise: float = 0.0) -> None:
        self.num_read = 0
        self._noise = noise

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        self.num_read += 1
        value = float(np.random.default_rng().normal()) * self._noise
        return torch.tensor([place + value]), 0


def test_same_data_have_the_same_digest():
    """Read afresh, as another process does."""
    assert digest(rows(), rows(8)) == digest(rows(), rows(8))


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        (rows(at=0), rows(8)),
        (rows(at=SIZE - 1), rows(8)),
        (rows(SIZE + 1), rows(8)),
        (rows(), rows(8, at=5)),
        (rows(8), rows()),
    ],
)
def test_changes_are_noticed(train: Dataset, held_out: Dataset):
    """Of records in the sample, of the number of examples, of what is held out."""
    assert digest(train, held_out) != digest(rows(), rows(8))


def test_large_data_are_sampled():
    """Twice, to find out whether they are the same when they are read again."""
    items = Counted()
    data = as_dataset(items, name="items")
    before = items.num_read
    digest(data, rows(8))
    assert items.num_read - before == 2 * SAMPLED_EXAMPLES


def test_random_transforms_are_no_change():
    """Only the number of examples counts; torch's generator stays where it was."""

    def fresh() -> Dataset:
        return as_dataset(Counted(noise=1.0), name="items")

    state = torch.get_rng_state()
    assert digest(fresh(), rows(8)) == digest(fresh(), rows(8))
    assert torch.equal(torch.get_rng_state(), state)


def test_shards_are_compared_by_their_own_digests():
    """So a change of any record is noticed, and no shard is read."""

    def written(**changed: float) -> tuple[Dataset, Dataset]:
        store = MemoryStore()
        write_dataset(store, rows(**changed), rows(8), name="rows")
        return open_dataset(store)

    assert digest(*written()) == digest(*written())
    assert digest(*written()) != digest(*written(at=1))
    assert digest(rows(at=1), rows(8)) == digest(rows(), rows(8))


def test_each_content_is_new_once():
    """One name each, whatever the order in which contents come back."""
    memory = InMemory()
    told = [note_content(memory, "a", each) for each in ("x", "x", "y", "x", "y", "z")]
    assert told == [False, False, True, False, False, True]
    assert note_content(memory, "b", "y") is False

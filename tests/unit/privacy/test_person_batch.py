"""Gradients of persons from those of their records."""

import numpy as np
import pytest
import torch

from privacy.dp_sgd.person_batch import PersonBatch

SIZES = np.array([2, 1, 3])


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_the_mean_of_each_person_is_that_of_its_records():
    """For values of any shape, against a mean in float64."""
    batch, found = PersonBatch(sizes=SIZES, most=4), values(6, 5, 2)
    expected = [part.double().mean(0) for part in found.split(SIZES.tolist())]
    torch.testing.assert_close(
        batch.mean(found).double(), torch.stack(expected), atol=1e-6, rtol=0
    )


def test_a_person_is_the_same_bits_in_any_company():
    """Alone, and beside persons with more records."""
    found = values(6, 500)
    together = PersonBatch(sizes=SIZES, most=4).mean(found)
    alone = PersonBatch(sizes=SIZES[:1], most=4).mean(found[:2])
    assert torch.equal(together[:1], alone)
    padded = PersonBatch(sizes=SIZES[:2], most=4).side_by_side(
        found[:3].view(3, 5, 100)
    )
    assert padded.shape == (2, 20, 100)
    wider = PersonBatch(sizes=SIZES, most=4).side_by_side(found.view(6, 5, 100))
    assert torch.equal(wider[:2], padded)


def test_one_record_a_person_changes_nothing():
    """Bit for bit, so that a record is a person."""
    batch, found = PersonBatch(sizes=np.ones(6, np.int64), most=1), values(6, 3, 2)
    assert torch.equal(batch.mean(found), found)
    assert torch.equal(batch.divided(found), found)
    assert torch.equal(batch.side_by_side(found), found)


def test_padded_places_hold_zeros():
    """A person's own first, in order; tokens stay integers."""
    tokens = torch.arange(1, 13).view(6, 2)
    found = PersonBatch(sizes=SIZES, most=3).side_by_side(tokens)
    assert found.dtype == torch.int64
    assert found.tolist() == [
        [1, 2, 3, 4, 0, 0],
        [5, 6, 0, 0, 0, 0],
        [7, 8, 9, 10, 11, 12],
    ]


@pytest.mark.parametrize("sizes", [[1, 0], [1, 5]])
def test_a_person_without_a_record_or_with_too_many_is_refused(sizes: list[int]):
    """Too many would make the padding depend on who else is in a batch."""
    with pytest.raises(ValueError, match="not 1 to 4"):
        PersonBatch(sizes=np.array(sizes), most=4)

"""Numbers of persons against plain comparison of their names, of any integer type."""

import numpy as np
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from support.examples import few

from clients.data.persons import as_persons, numbered_alike

TYPES = (np.int32, np.int64, np.uint8, np.uint64)
# Neighbours that float64 does not tell apart, beside small ones of several types.
NAMES = (0, 1, 200, -1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1)


@st.composite
def parts(draw: st.DrawFn) -> NDArray[np.integer]:
    """Names of one part of a dataset, in a type that holds them."""
    kind = draw(st.sampled_from(TYPES))
    limits = np.iinfo(kind)
    fit = [name for name in NAMES if limits.min <= name <= limits.max]
    return np.array(draw(st.lists(st.sampled_from(fit), max_size=8)), dtype=kind)


@few(30)
@given(st.lists(parts(), min_size=1, max_size=3))
def test_equal_names_and_no_others_have_one_number(given_parts: list[NDArray]):
    """Python compares integers exactly."""
    found = numbered_alike(*given_parts)
    assert [each.shape for each in found] == [part.shape for part in given_parts]
    names = [name for part in given_parts for name in part.tolist()]
    numbers = [number for part in found for number in part.tolist()]
    for name, number in zip(names, numbers, strict=True):
        for other, its in zip(names, numbers, strict=True):
            assert (name == other) == (number == its), (name, other)
    assert set(numbers) == set(range(len(set(names))))


@few(30)
@given(st.lists(st.sampled_from((*NAMES, 2**70)), min_size=1, max_size=8))
def test_python_integers_stay_exact(names: list[int]):
    """A list, as rows of a table give it, or a column of objects."""
    for given_names in (names, np.array(names, dtype=object)):
        read = as_persons(given_names)
        assert [int(name) for name in read.tolist()] == names

"""The model in fragments."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from federation.compression.fragments import WHOLE, Fragment, fragment_of
from federation.compression.rotation import BLOCK_VALUES, num_blocks
from federation.job.spec import ServerOptimizerSpec
from federation.rounds.server_optimizer import server_optimizer, take_step
from federation.vectors import Layout, Role

SIZES = st.integers(1, 5 * BLOCK_VALUES + 7)


def numbers(size: int) -> np.ndarray:
    return np.arange(1, size + 1, dtype=np.float32)


@given(size=SIZES, count=st.integers(1, 5))
def test_fragments_part_a_model(size: int, count: int):
    """Each value is in exactly one of them."""
    seen = np.zeros(size, np.int64)
    for index in range(count):
        for span in Fragment(index, count).spans(size):
            seen[span] += 1
    np.testing.assert_array_equal(seen, 1)
    blocks = [Fragment(index, count).num_blocks(size) for index in range(count)]
    assert sum(blocks) == num_blocks(size)
    assert max(blocks) - min(blocks) <= 1


@given(size=SIZES, count=st.integers(1, 5), data=st.data())
def test_what_is_taken_can_be_put_back(size: int, count: int, data: st.DataObject):
    """And nothing else is written."""
    index = data.draw(st.integers(0, min(count, num_blocks(size)) - 1))
    fragment, vector_d = Fragment(index, count), numbers(size)
    taken_f = fragment.take(vector_d)
    assert taken_f.size == fragment.size(size)
    found_d = fragment.put_(taken_f.copy(), np.zeros(size, np.float32))
    expected_d = np.zeros(size, np.float32)
    for span in fragment.spans(size):
        expected_d[span] = vector_d[span]
    np.testing.assert_array_equal(found_d, expected_d)


def test_rounds_take_fragments_in_turn():
    assert [fragment_of(r, 3).index for r in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]
    assert fragment_of(5, 1) == WHOLE


@pytest.mark.parametrize("name", ["average", "nesterov", "adam"])
def test_only_the_fragment_is_stepped(name: str):
    """As a model of these values alone would be; the others keep their moments."""
    size, fragment = 3 * BLOCK_VALUES - 5, Fragment(1, 3)
    layout = Layout.build([("w", (size,), "float32", Role.PARAMETER)])
    optimizer = server_optimizer(ServerOptimizerSpec(name=name, lr=0.5))
    weights_d, moments = numbers(size), optimizer.init(size)
    for values_d in moments.values():
        values_d[:] = values_d + np.float32(0.25)
    before = {key: values_d.copy() for key, values_d in moments.items()}
    delta_f = np.linspace(-1, 1, fragment.size(size), dtype=np.float32)

    alone = {key: fragment.take(values_d) for key, values_d in before.items()}
    expected_f = delta_f.copy()
    optimizer.step(alone, expected_f)
    expected_f += fragment.take(weights_d)

    found_d = take_step(
        optimizer,
        layout,
        weights_d=weights_d,
        moments=moments,
        delta_f=delta_f,
        fragment=fragment,
    )
    (span,) = fragment.spans(size)
    np.testing.assert_array_equal(found_d[span], expected_f)
    rest = np.ones(size, bool)
    rest[span] = False
    np.testing.assert_array_equal(found_d[rest], weights_d[rest])
    for key, values_d in moments.items():
        np.testing.assert_array_equal(values_d[rest], before[key][rest])
        np.testing.assert_array_equal(values_d[span], alone[key])

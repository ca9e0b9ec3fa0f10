"""From trained weights to an update."""

import numpy as np
import pytest
from numpy.typing import NDArray

from clients.methods.guest import NotFinite
from clients.training.update import prepare
from federation.messages import MetricSums
from federation.protocols import LocalWeights

LARGEST = float(np.finfo(np.float32).max)


def result(weights_d: NDArray[np.float32]):
    return LocalWeights(
        weights_d=weights_d,
        integers_m=np.zeros(0, np.int64),
        num_examples=1,
        num_steps=1,
        training=MetricSums(count=1, loss_sum=1.0, metrics={"correct": 1}),
    )


def test_update_is_local_minus_global():
    """The global weights stay as they are."""
    start = np.array([1, 2, 3], np.float32)
    start.flags.writeable = False
    trained = result(np.array([2, 2, 1], np.float32))
    assert prepare(start, trained).tolist() == [1, 0, -2]
    assert start.tolist() == [1, 2, 3]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, LARGEST])
def test_not_finite_is_refused(value: float):
    """NaN, infinity and an overflowing difference raise without a warning."""
    trained = result(np.array([0, value], np.float32))
    with pytest.raises(NotFinite, match="learning rate"):
        prepare(np.array([0, -LARGEST], np.float32), trained)

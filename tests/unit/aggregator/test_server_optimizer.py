"""Server optimisers against ten-line loops over one weight in float64."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from support import oracles

from aggregator.server_optimizer import server_optimizer
from federation.job.spec import ServerOptimizerSpec
from federation.vectors import CHUNK_VALUES, Vector

NAMES = ["average", "momentum", "nesterov", "adagrad", "adam", "yogi"]
SIZE = CHUNK_VALUES + 3
ROUNDS = 7


def _spec(name: str, **values: Any) -> ServerOptimizerSpec:
    return ServerOptimizerSpec(
        **{"name": name, "lr": 0.3, "momentum": 0.8, "beta1": 0.7, **values}
    )


def _inputs(size: int = SIZE) -> tuple[Vector, Vector]:
    rng = np.random.default_rng(3)
    scale = 10.0 ** rng.integers(-4, 1, (ROUNDS, size))
    updates = (scale * rng.standard_normal((ROUNDS, size))).astype(np.float32)
    return rng.standard_normal(size, dtype=np.float32), updates


@pytest.mark.parametrize("name", NAMES)
def test_matches_float64_loop(name: str):
    """Seven rounds, across a chunk's end."""
    weights_d, updates = _inputs()
    spec = _spec(name)
    watched = [0, 1, CHUNK_VALUES - 1, CHUNK_VALUES, SIZE - 1]
    expected = [
        getattr(oracles, name)(float(weights_d[i]), updates[:, i].astype(float), spec)
        for i in watched
    ]
    optimizer = server_optimizer(spec)
    state = optimizer.init(SIZE)
    for update_d in updates:
        weights_d, state = optimizer.apply(weights_d, state, update_d.copy())
    np.testing.assert_allclose(expected, weights_d[watched], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_writes_over_update_and_state_only(name: str):
    """New weights lie where the update was; the old weights are untouched."""
    weights_d, updates = _inputs()
    before = weights_d.copy()
    weights_d.flags.writeable = False
    optimizer = server_optimizer(_spec(name))
    state = optimizer.init(SIZE)
    new_d, new_state = optimizer.apply(weights_d, state, updates[0])
    np.testing.assert_array_equal(before, weights_d)
    assert np.shares_memory(new_d, updates[0])
    assert all(new_state[key] is state[key] for key in state)
    assert new_d.dtype == np.float32
    assert {v.dtype for v in state.values()} <= {np.dtype(np.float32)}


@pytest.mark.parametrize("name", NAMES)
def test_needs_no_memory_of_size_d(name: str):
    """Three chunks at most, for a model of forty."""
    size = 40 * CHUNK_VALUES
    optimizer = server_optimizer(_spec(name))
    weights_d, update_d = np.zeros(size, np.float32), np.ones(size, np.float32)
    state = optimizer.init(size)
    tracemalloc.start()
    optimizer.apply(weights_d, state, update_d)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 3 * 4 * CHUNK_VALUES


def test_average_at_rate_one_is_exact():
    """FedAvg: the sum of weights and update, rounded once."""
    weights_d, updates = _inputs()
    expected = weights_d + updates[0]
    optimizer = server_optimizer(_spec("average", lr=1.0))
    np.testing.assert_array_equal(
        expected, optimizer.apply(weights_d, optimizer.init(SIZE), updates[0])[0]
    )


@pytest.mark.parametrize("name", ["momentum", "nesterov"])
def test_without_momentum_it_is_average(name: str):
    """A decay of 0 leaves nothing of the velocity."""
    weights_d, updates = _inputs(100)
    results = []
    for spec in (_spec("average"), _spec(name, momentum=0.0)):
        optimizer = server_optimizer(spec)
        state = optimizer.init(100)
        results.append(optimizer.apply(weights_d, state, updates[0].copy())[0])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", ["adagrad", "adam", "yogi"])
def test_second_moment_starts_at_tau_squared(name: str):
    """As Algorithm 2 asks, and the first moment at 0."""
    state = server_optimizer(_spec(name, tau=0.1)).init(4)
    np.testing.assert_array_equal(np.full(4, 0.01, np.float32), state["second_moment"])
    np.testing.assert_array_equal(np.zeros(4), state["first_moment"])

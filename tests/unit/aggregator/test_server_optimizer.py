"""Server optimisers against ten-line loops over one weight in float64."""

from typing import Any

import numpy as np
import pytest
from support import oracles

from federation.job.spec import ServerOptimizerSpec
from federation.protocols import OptimizerState, ServerOptimizer
from federation.rounds.server_optimizer import server_optimizer
from federation.vectors import CHUNK_VALUES, Vector, chunks

NAMES = ["average", "momentum", "nesterov", "adagrad", "adam", "yogi", "running_sum"]
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


def _apply(
    optimizer: ServerOptimizer,
    weights_d: Vector,
    state: OptimizerState,
    update_d: Vector,
) -> Vector:
    """New weights over the update, as the round loop computes them."""
    for piece in chunks(update_d.size):
        state_c = {name: values_d[piece] for name, values_d in state.items()}
        optimizer.step(state_c, update_d[piece])
        update_d[piece] += weights_d[piece]
    return update_d


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
        weights_d = _apply(optimizer, weights_d, state, update_d.copy())
    np.testing.assert_allclose(expected, weights_d[watched], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("period", [2, 3, 7])
def test_velocity_of_buffers_changes_once_a_round(period: int):
    """Algorithm 3 of arXiv:2401.09135."""
    weights_d, updates = _inputs(100)
    spec = _spec("nesterov")
    expected = [
        oracles.delayed_nesterov(
            float(weights_d[i]), updates[:, i].astype(float), spec, period=period
        )
        for i in range(100)
    ]
    optimizer = server_optimizer(spec, period=period)
    state = optimizer.init(100)
    for number, update_d in enumerate(updates, start=1):
        _apply(optimizer.of_model(number), weights_d, state, update_d)
        weights_d = update_d
    np.testing.assert_allclose(expected, weights_d, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_chunks_are_the_step_of_all(name: str):
    """Each value by itself, and the state is written over."""
    _, updates = _inputs()
    optimizer = server_optimizer(_spec(name))
    whole_d, whole, state = updates[0].copy(), *(optimizer.init(SIZE) for _ in "ab")
    optimizer.step(whole, whole_d)
    stepped_d = _apply(optimizer, np.zeros(SIZE, np.float32), state, updates[0])
    np.testing.assert_array_equal(whole_d, stepped_d)
    for key, values_d in state.items():
        np.testing.assert_array_equal(whole[key], values_d)
        assert values_d.dtype == np.float32

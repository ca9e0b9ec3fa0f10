"""How far apart two neighbours are once they are words: what noise must cover."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support import ring_oracles
from support.small_jobs import blobs, small_job

from clients.models.model_pool import ModelPool
from clients.training.private_steps import (
    PrivateGradient,
    PrivateTraining,
    sensitivity_of_sum,
)
from federation.vectors import Vector
from privacy.dp.persons import DrawnRecords
from privacy.secagg.arithmetic.measurement import Measurement, measure_exactly
from privacy.secagg.arithmetic.noise_shares import NoiseShare
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.arithmetic.seal import seal_

pytestmark = pytest.mark.slow

BITS = st.sampled_from([24, 32])
SIZES = st.integers(1, 3000)
EDGE = 1 / (1 + 2.0**-16)  # of the clip norm: where clipping begins


def _words(update_d: Vector, ring: RingSpec, key: bytes) -> np.ndarray:
    """Words as signed integers, without noise; as for joint noise, exactly measured."""
    return _sealed(update_d, ring, key, measure_exactly(update_d))


def _sealed(
    update_d: Vector, ring: RingSpec, key: bytes, measured: Measurement | None
) -> np.ndarray:
    words_w = seal_(
        update_d.copy(),
        ring,
        weight=1.0,
        masks=(),
        rounding_key=key,
        measured=measured,
    ).words_w
    if ring.bits == 32:
        return words_w.view(np.int32).astype(np.int64)
    wide = np.zeros((update_d.size, 4), np.uint8)
    wide[:, 1:] = words_w.reshape(-1, 3)
    return (wide.reshape(-1).view(np.int32) >> 8).astype(np.int64)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return math.sqrt(sum(int(d) ** 2 for d in (one - other).tolist()))


def _allowed(ring: RingSpec, sensitivity: float, size: int) -> float:
    share = NoiseShare(
        multiplier=1.0, sensitivity=sensitivity, size=size, threshold=2, colluding=1
    )
    return share.ring_sensitivity(ring)


def _direction(rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    if kind == "one value":
        found = np.eye(1, size, int(rng.integers(size)))[0]
    elif kind == "all alike":
        found = np.ones(size)
    else:
        found = rng.normal(size=size)
    return found / np.linalg.norm(found)


@given(
    bits=BITS,
    size=SIZES,
    norm=st.sampled_from([0.0, 1e-9, 0.5, EDGE, 1.0, 1 + 1e-6, 1.5, 40.0, 1e20]),
    part=st.sampled_from([1e-6, 1e-3, 0.1, 1.0]),
    kinds=st.tuples(*[st.sampled_from(["one value", "all alike", "any"])] * 2),
)
def test_neighbours_stay_neighbours(
    bits: int, size: int, norm: float, part: float, kinds: tuple[str, str]
):
    """Within the clip norm, beyond it, and one of them on either side."""
    rng = np.random.default_rng([bits, size])
    ring = RingSpec(bits=bits, num_sites=4, clip_norm=1.0)
    one_d = (norm * _direction(rng, size, kinds[0])).astype(np.float32)
    step_d = part * _direction(rng, size, kinds[1])
    other_d = (one_d.astype(np.float64) + step_d).astype(np.float32)
    apart = float(np.linalg.norm(other_d.astype(np.float64) - one_d))
    key = rng.bytes(32)
    found = _distance(_words(one_d, ring, key), _words(other_d, ring, key))
    assert found <= _allowed(ring, apart, size)


@given(
    bits=BITS, size=SIZES, seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-3, 1e9)
)
def test_update_and_nothing_are_a_clip_norm_apart(
    bits: int, size: int, seed: int, scale: float
):
    """The neighbours of a site: its clipped update, or zero, however it is measured."""
    rng = np.random.default_rng(seed)
    ring = RingSpec(bits=bits, num_sites=4, clip_norm=2.5)
    update_d = (rng.normal(size=size) * scale).astype(np.float32)
    key, nothing_d = rng.bytes(32), np.zeros(size, np.float32)
    words = _sealed(update_d, ring, key, None)
    nothing = _sealed(nothing_d, ring, key, None)
    assert not nothing.any()
    assert _distance(words, nothing) <= _allowed(ring, 2.5, size)


def test_bound_is_reached():
    """Who knows the dither finds neighbours that are almost as far apart as it says."""
    size, key = 40_000, bytes(range(32))
    ring = RingSpec(bits=24, num_sites=4, clip_norm=1.0)
    odd = np.frombuffer(ring_oracles.stream_bytes(key, size), np.uint8) | 1
    dither = odd.view(np.int8) / 256
    below, above = (
        ((0.5 - dither + apart) / ring.scale).astype(np.float32)
        for apart in (-0.004, 0.004)
    )
    found = _distance(_words(below, ring, key), _words(above, ring, key))
    exact = float(np.linalg.norm(above.astype(np.float64) - below))
    assert 0.98 < found / _allowed(ring, exact, size) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize(("lr", "room"), [(0.5, 1.0), (30.0, 1.0), (0.5, 0.05)])
def test_record_moves_the_words_of_a_step_by_its_sensitivity(
    bits: int, lr: float, room: float
):
    """All records but one against all; with little room every update is clipped."""
    job = small_job(
        num_sites=2,
        aggregation={"weights": "uniform"},
        training={
            "local_steps": 1,
            "batch_size": 12,
            "optimizer": {"name": "sgd", "lr": lr},
        },
        privacy={
            "secure_aggregation": {"enabled": True, "two_sites_waiver": True},
            "differential_privacy": {"unit": "joint", "target_epsilon": 8.0},
        },
    )
    ring = RingSpec(bits=bits, num_sites=2, clip_norm=room * job.update_clip_norm)
    everybody, size = np.arange(24), 15
    update_d = _update(job, everybody)
    key = np.random.default_rng(4).bytes(32)
    words = _words(update_d, ring, key)
    assert (np.linalg.norm(update_d) > ring.clip_norm) == (room < 1)
    allowed = _allowed(ring, sensitivity_of_sum(job), size)
    distances = [
        _distance(words, _words(_update(job, np.delete(everybody, i)), ring, key))
        for i in everybody
    ]
    assert max(distances) <= allowed
    assert max(distances) > 0.1 * allowed  # Gradients are not far below their norm.


def _update(job, chosen: np.ndarray) -> Vector:  # noqa: ANN001
    """What a site sends of a step over given records, without noise."""
    pool = ModelPool(job)
    data, _ = blobs()
    private = PrivateTraining(
        clip_norm=job.privacy.differential_privacy.clip_norm,
        noise_multiplier=1.0,
        in_sum=True,
    )
    update_d = np.empty(pool.layout.size, np.float32)
    with pool.borrow() as model:
        model.load(*pool.initial_weights())
        gradient = PrivateGradient(model.module, job, private, num_records=60)
        inputs = torch.from_numpy(data.inputs[chosen])
        targets = torch.from_numpy(data.targets[chosen])

        def loss() -> torch.Tensor:
            return torch.nn.functional.cross_entropy(
                model.module(inputs), targets, reduction="sum"
            )

        gradient.add_(loss, DrawnRecords(records=chosen))
        gradient.write_update(
            model.module, pool.layout, lr=job.training.optimizer.lr, out_d=update_d
        )
    return update_d

"""Private steps that draw and clip persons, against plain float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support.examples import few
from support.noise_oracles import known_bytes
from support.small_jobs import blobs, small_job
from torch import nn
from torch.nn import functional

from clients.data.batches import Rank
from clients.data.datasets import Examples, as_dataset
from clients.models.model_pool import ModelPool
from clients.ranks.peers import Peers
from clients.training.private_steps import (
    PrivateGradient,
    PrivateTraining,
    units_at_once,
)
from clients.training.trainer import TorchTrainer
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from privacy.dp.persons import Persons
from privacy.dp_sgd.clipping import MARGIN, ClippedSum, sum_margin
from privacy.dp_sgd.person_batch import PersonBatch

# Imports Opacus, which takes seconds.
pytestmark = pytest.mark.slow

SITE = SiteId("site-0")
INPUTS, CLASSES = 4, 3
CLIP_NORM = 0.5


def private_job(unit: str, most: int = 8, **training: Any) -> JobSpec:
    keys = {"records_per_person": most} if unit == "person" else {}
    private = {"unit": unit, "target_epsilon": 8.0, "clip_norm": CLIP_NORM}
    return small_job(
        training={"optimizer": {"lr": 0.1}, "batch_size": 6, "local_steps": 3}
        | training,
        privacy={"differential_privacy": private | keys},
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
    )


def fit(job: JobSpec, ids: np.ndarray, clipping: str) -> LocalWeights:
    """Train a round with known keys."""
    train, held_out = blobs(len(ids))
    named = Examples(inputs=train.inputs, targets=train.targets, persons=ids)
    pool = ModelPool(job)
    trainer = TorchTrainer(
        job,
        SITE,
        pool=pool,
        train=as_dataset(named, name="train"),
        held_out=as_dataset(held_out, name="held out"),
        private=PrivateTraining(
            clip_norm=CLIP_NORM,
            noise_multiplier=1.0,
            clipping=clipping,
            random_bytes=known_bytes(),
        ),
    )
    result = trainer.fit(*pool.initial_weights(), round_index=1)
    assert isinstance(result, LocalWeights)
    return result


@pytest.mark.parametrize(("clipping", "most"), [("hooks", 8), ("ghost", 1)])
def test_one_record_for_each_person_is_the_record_unit(clipping: str, most: int):
    """Bit for bit: samples, batches, sums, noise and weights."""
    ids = np.arange(60)
    of_persons = fit(private_job("person", most), ids, clipping)
    of_records = fit(private_job("record"), ids, clipping)
    assert np.array_equal(of_persons.weights_d, of_records.weights_d)


def test_a_site_without_a_batch_of_persons_is_refused():
    """However many records they have."""
    with pytest.raises(SiteError, match=r"at most 5 persons, .* samples 6 on average"):
        fit(private_job("person"), np.arange(60) % 5, "hooks")


def test_records_of_a_batch_fit_memory():
    """So many persons at a time that their records are a batch, and at least one."""
    assert units_at_once(private_job("record")) == 6
    assert units_at_once(private_job("person", 2)) == 3
    assert units_at_once(private_job("person", 9)) == 1


def records(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, INPUTS, generator=rng) * 3
    return inputs, torch.randint(0, CLASSES, (size,), generator=rng)


def network() -> nn.Sequential:
    """Layers of both ways: convolutions always take that of hooks."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Unflatten(1, (1, INPUTS)),
        nn.Conv1d(1, 2, 2),
        nn.Flatten(),
        nn.Tanh(),
        nn.Linear(2 * (INPUTS - 1), CLASSES),
    )


def clipped_sum(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    sizes: list[int],
    clipping: str,
) -> np.ndarray:
    total = ClippedSum(model, clip_norm=CLIP_NORM, clipping=clipping, batch_size=8)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(inputs), targets, reduction="sum")

    total.add_(loss, len(inputs), PersonBatch(sizes=np.array(sizes), most=4))
    return total.sum_d.numpy().copy()


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
def test_the_sum_is_that_of_clipped_means(clipping: str):
    """Person by person in float64, with autograd alone."""
    sizes, model = [3, 1, 4], network()
    inputs, targets = records(0, 8)
    found = clipped_sum(model, inputs, targets, sizes, clipping)
    exact = network().double()
    limit = CLIP_NORM * (1 - MARGIN - sum_margin(8))
    expected = np.zeros_like(found)
    for x, y in zip(inputs.double().split(sizes), targets.split(sizes), strict=True):
        mean = functional.cross_entropy(exact(x), y)
        gradients = torch.autograd.grad(mean, list(exact.parameters()))
        g = torch.cat([part.flatten() for part in gradients]).numpy()
        expected += g * min(1.0, limit / np.linalg.norm(g))
    np.testing.assert_allclose(found, expected, atol=3e-5 * CLIP_NORM)


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
@few(10)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    scale=st.sampled_from([0.0, 1.0, 1e6, 1e30, float("inf")]),
)
def test_a_person_with_all_records_changes_a_sum_by_the_clip_norm_at_most(
    clipping: str, seed: int, sizes: list[int], scale: float
):
    """Neighbours differ in one person; the others add the same bits as before."""
    model = network()
    inputs, targets = records(seed % 1000, sum(sizes))
    inputs[-sizes[-1] :] *= scale
    with_it = clipped_sum(model, inputs, targets, sizes, clipping)
    kept = sum(sizes[:-1])
    without = clipped_sum(model, inputs[:kept], targets[:kept], sizes[:-1], clipping)
    assert np.isfinite(with_it).all()
    assert np.linalg.norm(with_it - without) <= CLIP_NORM


def test_ranks_draw_persons_of_their_own():
    """At rate 1 every person is at one rank, with all its records."""
    ids = np.repeat(np.arange(8), 2)
    drawn = []
    for rank in range(3):
        gradient = PrivateGradient(
            nn.Linear(INPUTS, CLASSES),
            private_job("person", batch_size=8),
            PrivateTraining(clip_norm=CLIP_NORM, noise_multiplier=1.0),
            num_records=len(ids),
            persons=Persons.of(ids),
            peers=Peers(rank=Rank(rank=rank, world_size=3)),
        )
        drawn.append(np.concatenate([each.records for each in gradient.draw()]))
    assert [sorted(set(ids[part] % 3)) for part in drawn] == [[0], [1], [2]]
    assert sorted(np.concatenate(drawn)) == list(range(16))


def test_a_step_draws_few_records_of_many_persons():
    """At rate 1 every person is in every step, with other records each time."""
    job = private_job("person", 2, batch_size=4)
    ids = np.repeat(np.arange(4), [1, 2, 6, 11])
    gradient = PrivateGradient(
        nn.Linear(INPUTS, CLASSES),
        job,
        PrivateTraining(
            clip_norm=CLIP_NORM, noise_multiplier=1.0, random_bytes=known_bytes()
        ),
        num_records=len(ids),
        persons=Persons.of(ids),
    )
    seen = []
    for _ in range(30):
        drawn = list(gradient.draw())
        assert [each.sizes.tolist() for each in drawn if each.sizes is not None] == [
            [1, 2],
            [2, 2],
        ]
        chosen = np.concatenate([each.records for each in drawn])
        assert np.bincount(ids[chosen]).tolist() == [1, 2, 2, 2]
        seen.append(tuple(chosen.tolist()))
    assert len(set(seen)) > 20

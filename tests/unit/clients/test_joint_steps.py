"""One step whose noise is added inside the secure sum."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_jobs import noisy_job
from support.small_jobs import blobs
from torch import nn

from clients.data.datasets import Dataset, Examples, as_dataset
from clients.models.model_pool import ModelPool
from clients.training.private_steps import PrivateTraining, sensitivity_of_sum
from clients.training.trainer import TorchTrainer
from clients.training.update import local_weights
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import LocalUpdate
from privacy.counts import coarse

pytestmark = [pytest.mark.slow]  # The first of them waits for Opacus's import.

SITE = SiteId("site-0")
TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
# A batch of as many takes every record into a step.
EVERYBODY = coarse(len(TRAIN))
IN_SUM = PrivateTraining(clip_norm=1.0, noise_multiplier=1.0, in_sum=True)


def _job(**tables: Any) -> JobSpec:
    model = {"options": {"inputs": 4, "classes": 3}}
    return noisy_job("joint", **({"model": model} | tables))


def _fit(
    job: JobSpec, weights: float | None = None, train: Dataset = TRAIN
) -> tuple[LocalUpdate, ModelPool]:
    """Train once, from the initial weights or from one number everywhere."""
    pool = ModelPool(job)
    weights_d, integers_m = pool.initial_weights()
    if weights is not None:
        weights_d[:] = weights
    trainer = TorchTrainer(
        job, SITE, pool=pool, train=train, held_out=HELD_OUT, private=IN_SUM
    )
    return trainer.fit(weights_d, integers_m, round_index=1), pool


def _everybody(job: JobSpec) -> JobSpec:
    """A job that takes every record into the step."""
    return replace(job, training=replace(job.training, batch_size=EVERYBODY))


def test_step_is_the_mean_of_clipped_gradients():
    """Against autograd, one record after another; what is sent is the update."""
    job = _everybody(_job())
    result, pool = _fit(job, weights=0.0)
    assert isinstance(result, LocalUpdate)
    assert result.training is None
    inputs, targets = (
        torch.from_numpy(part) for part in (blobs()[0].inputs, blobs()[0].targets)
    )
    weight = torch.zeros(3, 4, requires_grad=True)
    bias = torch.zeros(3, requires_grad=True)
    expected_d = np.zeros(15)
    for one, target in zip(inputs, targets, strict=True):
        loss = nn.functional.cross_entropy(weight @ one + bias, target)
        parts = torch.autograd.grad(loss, (weight, bias))
        gradient = torch.cat([part.reshape(-1) for part in parts])
        expected_d -= (gradient * min(1.0, 1 / float(gradient.norm()))).numpy()
    expected_d *= job.training.optimizer.lr / EVERYBODY
    names = [spec.name for spec in pool.layout.tensors]
    assert [name.rsplit(".")[-1] for name in names] == ["weight", "bias"]
    np.testing.assert_allclose(result.update_d, expected_d, rtol=2e-3, atol=2e-5)


def test_update_does_not_go_through_the_weights():
    """Where they are large, their last digits are coarser than the whole update."""
    small = as_dataset(
        Examples(inputs=blobs()[0].inputs * 1e-6, targets=blobs()[0].targets),
        name="small",
    )
    result, pool = _fit(_everybody(_job()), weights=1e6, train=small)
    (weights,) = [
        view
        for spec, view in pool.layout.float_views(result.update_d)
        if spec.size == 12
    ]
    assert weights.any()
    assert np.abs(weights).max() < np.spacing(np.float32(1e6)) / 1000


def test_no_seed_decides_who_is_in_a_step():
    """Rounds that are done again, and sites with one seed, draw other records."""
    one, other = (_fit(_job())[0].update_d for _ in range(2))
    assert not np.array_equal(one, other)


def test_one_record_more_is_within_the_sensitivity():
    """``lr C / B``, however many the step took."""
    job = _everybody(_job())
    all_d = _fit(job)[0].update_d.astype(np.float64)
    inputs, targets = blobs()[0].inputs, blobs()[0].targets
    for left_out in range(0, 60, 7):
        # A record whose gradient is zero, in the place of one that is not there.
        changed = inputs.copy()
        changed[left_out] = np.nan
        without = as_dataset(Examples(inputs=changed, targets=targets), name="without")
        other_d = _fit(job, train=without)[0].update_d
        distance = float(np.linalg.norm(all_d - other_d))
        assert 0 < distance <= sensitivity_of_sum(job)


@pytest.mark.parametrize("unit", ["joint", "site"])
def test_spans_are_what_is_trained(unit: str):
    """Noise goes where updates do, to each value once, and its size is their number."""
    pool = ModelPool(
        noisy_job(unit, model={"factory": "support.noisy_jobs:Tied", "options": {}})
    )
    inside = np.zeros(pool.layout.size, int)
    for start, stop in pool.trained_spans:
        inside[start:stop] += 1
    assert inside.max() == 1
    assert inside.sum() == pool.num_trained == 16 + 15
    for spec, view in pool.layout.float_views(inside.astype(np.float32)):
        is_trained = not spec.name.startswith("frozen") and spec.name != "shift"
        assert (view == is_trained).all()


def test_nothing_outside_the_spans_is_changed():
    """There is no noise there to hide it."""
    job = _everybody(_job(model={"factory": "support.noisy_jobs:Tied", "options": {}}))
    result, pool = _fit(job)
    inside = np.zeros(pool.layout.size, bool)
    for start, stop in pool.trained_spans:
        inside[start:stop] = True
    assert not result.update_d[~inside].any()
    assert (result.update_d[inside] != 0).all()


@pytest.mark.parametrize("unit", ["joint", "record"])
def test_noise_of_ranks_that_a_site_does_not_train_stays_out(unit: str):
    """Private steps noise the gradients of all columns; what leaves has some."""
    job = noisy_job(
        unit, model={"factory": "support.task_models:adapted", "options": {}}
    )
    rows = [replace(site, lora_rank=1) for site in job.sites[:1]]
    job = replace(job, sites=(*rows, *job.sites[1:]))
    pool = ModelPool(job)
    start_d, start_m = pool.initial_weights()
    private = replace(IN_SUM, in_sum=unit == "joint")
    trainer = TorchTrainer(
        job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT, private=private
    )
    found = trainer.fit(start_d, start_m, round_index=1)
    change = (local_weights(start_d, found) - start_d).reshape(3, 3)
    assert np.all(change[:, :1] != 0)
    assert not change[:, 1:].any()

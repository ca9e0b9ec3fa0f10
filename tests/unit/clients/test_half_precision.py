"""Training in float16: the loss is scaled, and steps that overflow are skipped."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from torch import nn

from clients.data.datasets import as_dataset
from clients.methods import half_precision
from clients.methods.guest import LocalRound, NotFinite
from clients.methods.half_precision import LossScale
from clients.models import weights
from clients.models.model_pool import ModelPool
from clients.ranks.control import LOSS_SCALE, kept_from
from clients.ranks.ranked_trainer import fit_of
from clients.training import rank
from clients.training.trainer import TorchTrainer
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from federation.vectors import NO_ARRAYS, Arrays

SITE = SiteId("site-0")
TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
OPTIONS = {"inputs": 4, "classes": 3, "hidden": [8]}


def job_of(precision: str = "fp16", **training: Any) -> JobSpec:
    keys = {"batch_size": 8, "optimizer": {"lr": 0.2}, **training}
    if "local_epochs" not in keys:
        keys["local_steps"] = 6
    return small_job(
        model={"factory": "clients.models:mlp", "options": OPTIONS},
        training={"precision": precision, **keys},
    )


def trainer_of(job: JobSpec) -> TorchTrainer:
    pool = ModelPool(job)
    return TorchTrainer(job, SITE, pool=pool, train=TRAIN, held_out=HELD_OUT)


def fit(job: JobSpec, kept: Arrays = NO_ARRAYS) -> LocalWeights:
    trainer = trainer_of(job)
    found = trainer.fit(*trainer.pool.initial_weights(), round_index=1, kept=kept)
    assert isinstance(found, LocalWeights)
    return found


def scale_of(scale: float) -> Arrays:
    """What a site keeps of a round that ended with this scale."""
    return {"loss_scale": np.array([scale, 0, 9])}


def begun(parameter: nn.Parameter) -> LossScale:
    """A round of a model with one parameter."""
    model = nn.ParameterList([parameter])
    start = LocalRound(
        job=job_of(),
        site=SITE,
        round_index=1,
        steps=range(6),
        model=model,
        layout=weights.layout_of(model, {}),
        weights_d=np.zeros(parameter.numel(), np.float32),
        kept=NO_ARRAYS,
    )
    return LossScale(start)


def test_scales_are_those_of_torch(monkeypatch: pytest.MonkeyPatch):
    """Overflows at some steps; growth after three steps without one."""
    monkeypatch.setattr(half_precision, "_GROWTH_STEPS", 3)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = nn.Parameter(torch.zeros(2))
    ours = begun(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    overflows = [True, True, False, False, False, False, True, False, False, False]
    for overflow in overflows:
        scale = theirs.get_scale() if theirs.is_enabled() else 0.0
        theirs.scale(torch.zeros(()))  # It makes its scale when it is first used.
        assert ours.scale == (scale or theirs.get_scale())
        parameter.grad = torch.full((2,), torch.inf if overflow else ours.scale)
        expected = parameter.grad / ours.scale
        gradient = parameter.grad.clone()
        assert ours.gradient_() is not overflow
        assert torch.equal(parameter.grad, expected)
        parameter.grad = gradient
        theirs.step(optimizer)
        theirs.update()
    assert ours.scale == theirs.get_scale()
    assert ours.skipped == 3


def test_float16_trains_like_float32():
    """By rounding alone; small gradients are not lost."""
    full, half = fit(job_of("fp32")), fit(job_of())
    difference_d = np.abs(full.weights_d - half.weights_d)
    assert 0 < difference_d.max() < 2e-3
    assert half.num_steps == 6
    assert half.kept["loss_scale"].tolist() == [2.0**16, 6, 0]
    assert "loss_scale" not in full.kept


def test_steps_that_overflow_are_skipped_and_counted(
    caplog: pytest.LogCaptureFixture,
):
    """The next round begins with the scale that this one has found."""
    with caplog.at_level(logging.WARNING):
        found = fit(job_of(optimizer={"name": "adam", "lr": 0.1}), scale_of(2.0**21))
    scale, since, skipped = found.kept["loss_scale"].tolist()
    assert 0 < skipped < 6
    assert scale == 2 ** (21 - skipped)
    assert 0 < since <= 6 - skipped
    assert found.num_steps == 6 - skipped
    assert f"skipped {skipped:g} of 6 steps of round 1" in caplog.text
    again = fit(job_of(), found.kept)
    assert again.num_steps == 6


def test_ranks_go_on_with_the_scale_of_the_round_before():
    """It travels with each task and reply: other processes may train next."""
    job, kept = job_of(), NO_ARRAYS
    start = ModelPool(job).initial_weights()
    for round_index in (1, 2):
        own = {**kept, "of_the_site": np.zeros(1)}
        task = fit_of(round_index, own, None)
        result = rank.trained(task, trainer_of(job), *start)
        reply = rank.reply_of(result)
        assert kept_from(reply).keys() == {LOSS_SCALE}
        kept = kept_from(reply)
        assert kept[LOSS_SCALE].tolist() == [2.0**16, 6 * round_index, 0]
    task = fit_of(1, scale_of(4.0), None)
    full = rank.trained(task, trainer_of(job_of("fp32")), *start)
    assert kept_from(rank.reply_of(full)) == NO_ARRAYS


def test_a_round_of_skipped_steps_changes_nothing():
    """Also where updates are scaled by the number of steps."""
    job = job_of(local_epochs=1, normalized_steps=4)
    start_d = ModelPool(job).initial_weights()[0]
    found = fit(job, scale_of(2.0**60))
    assert found.num_steps == 0
    np.testing.assert_array_equal(found.weights_d, start_d)


def test_what_no_scale_makes_finite_is_not_skipped_for_ever():
    """Then training is told to be unstable, as in other precisions."""
    parameter = nn.Parameter(torch.zeros(1))
    scale = begun(parameter)
    parameter.grad = torch.full((1,), torch.nan)
    nan = torch.full((1,), torch.nan)
    while not scale.gradient_():
        parameter.grad = nan.clone()
    assert scale.skipped == 30  # From 2^16 to 2^-14.


def test_losses_of_skipped_steps_that_are_not_finite_are_not_reported():
    """A record is finite and too large for float16: no secure sum would take NaN."""
    train, held_out = blobs()
    inputs = train.inputs.copy()
    inputs[7] = 1e6
    job = job_of(local_epochs=1)
    pool = ModelPool(job)
    trainer = TorchTrainer(
        job,
        SITE,
        pool=pool,
        train=as_dataset(replace(train, inputs=inputs), name="blobs"),
        held_out=as_dataset(held_out, name="blobs"),
    )
    found = trainer.fit(*pool.initial_weights(), round_index=1)
    assert isinstance(found, LocalWeights)
    assert found.num_steps == 7  # Of 8.
    assert np.isfinite(found.weights_d).all()
    assert found.training is None


def test_a_record_with_nan_is_named():
    """Its step is skipped, which would hide it as long as the scale can be halved."""
    train, held_out = blobs()
    inputs = train.inputs.copy()
    inputs[7] = np.nan
    broken = as_dataset(replace(train, inputs=inputs), name="blobs")
    job = job_of(local_epochs=1)
    pool = ModelPool(job)
    trainer = TorchTrainer(
        job, SITE, pool=pool, train=broken, held_out=as_dataset(held_out, name="blobs")
    )
    with pytest.raises(NotFinite, match="training record 7 holds NaN"):
        trainer.fit(*pool.initial_weights(), round_index=1)

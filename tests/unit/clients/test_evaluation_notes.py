"""What a site's log says about mistakes that raise nothing."""

import logging

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from torch import nn

from clients.data.datasets import as_dataset
from clients.models.evaluation_notes import PROBABILITIES, are_probabilities
from clients.models.model_pool import ModelPool
from clients.training.trainer import TorchTrainer
from federation.ids import SiteId

TRAIN, HELD_OUT = blobs()
SOFTMAX = {"factory": "support.planted_mistakes:probabilities"}


def evaluated(caplog: pytest.LogCaptureFixture, held_out: object, **tables: object):
    """Warnings of two evaluations at each of two sites of one simulation."""
    job = small_job(num_sites=2, **tables)
    pool = ModelPool(job)
    for site in job.sites:
        trainer = TorchTrainer(
            job,
            SiteId(site.name),
            pool=pool,
            train=as_dataset(TRAIN, name="train"),
            held_out=as_dataset(held_out, name="held out"),
        )
        for round_index in (1, 2):
            trainer.evaluate(*pool.initial_weights(), round_index=round_index)
    assert all(r.levelno == logging.WARNING for r in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_sound_evaluation_is_silent(caplog: pytest.LogCaptureFixture):
    assert evaluated(caplog, HELD_OUT) == []


def test_record_that_makes_the_loss_nan_is_named_once(
    caplog: pytest.LogCaptureFixture,
):
    inputs = HELD_OUT.inputs.copy()
    inputs[5, 1] = np.nan
    first, second = evaluated(caplog, (inputs, HELD_OUT.targets))
    assert "site site-0: the loss is not finite: held-out record 5 holds NaN" in first
    assert "site-1" in second


def test_probabilities_are_named_once_for_all_sites(caplog: pytest.LogCaptureFixture):
    said = evaluated(caplog, HELD_OUT, model=SOFTMAX)
    assert said == [f"model.factory: {PROBABILITIES}"]


def test_logits_are_no_probabilities():
    logits_bk = torch.tensor([[2.0, -1.0], [0.25, 0.75]])
    assert not are_probabilities(logits_bk)
    assert not are_probabilities(logits_bk.abs())
    assert are_probabilities(nn.functional.softmax(logits_bk, 1))


def test_a_look_draws_no_number_of_an_evaluation():
    """A resumed run looks again, and must measure what the first one has measured."""
    noisy = {"factory": "support.users_module:noisy_network"}
    job = small_job(evaluation={"batch_size": 8}, model=noisy)
    pool = ModelPool(job)
    trainer = TorchTrainer(
        job,
        SiteId(job.sites[0].name),
        pool=pool,
        train=as_dataset(TRAIN, name="train"),
        held_out=as_dataset(HELD_OUT, name="held out"),
    )
    weights = pool.initial_weights()
    first, second = (trainer.evaluate(*weights, round_index=i) for i in (1, 2))
    assert first == second

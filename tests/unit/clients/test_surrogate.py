"""The surrogate of training follows the formula that it states."""

import math
from dataclasses import replace

import numpy as np
import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from clients.models.model_pool import ModelPool
from clients.training.surrogate import NOTICE, SurrogateTrainer, draws
from federation.errors import JobError
from federation.events import ModelEvaluated, SiteAnswered, Warned
from federation.ids import SiteId
from federation.job import job_digest

A = SiteId("site-1")
TRAINING = {"local_steps": 3, "batch_size": 4, "optimizer": {"name": "sgd", "lr": 0.2}}
MACHINES = [{"site": f"site-{index}", "examples_per_second": 10.0} for index in (0, 1)]
TABLES = {
    "rounds": 12,
    "training": TRAINING,
    "simulation": {"training": "surrogate", "machines": MACHINES},
}


def test_closed_form_is_that_of_single_steps():
    """Of descent on the quadratic, and of what its noise adds up to on average."""
    job = small_job(num_sites=2, **TABLES)
    layout = ModelPool(job).layout
    trainer = SurrogateTrainer(
        job=job,
        site=A,
        of_layout=layout,
        table=draws(job, layout),
        num_examples=7,
        num_held_out=5,
    )
    start_d = np.zeros(layout.size, np.float32)
    none = np.zeros(layout.num_integers, np.int64)
    best_d, found_d = trainer._best(), start_d
    rng, noise_d = np.random.default_rng(5), np.zeros(100_000)
    for _ in range(5):
        found_d = found_d - 0.2 * (found_d - best_d)
        noise_d -= 0.2 * (noise_d + rng.standard_normal(noise_d.size) / math.sqrt(4))
    fits = [
        trainer.fit(start_d, none, round_index=r, steps=range(5)) for r in range(200)
    ]
    gone_d = np.array([fit.weights_d - found_d for fit in fits])
    assert gone_d.mean() == pytest.approx(0.0, abs=0.01)
    assert gone_d.std() == pytest.approx(noise_d.std(), rel=0.05)
    assert {fit.num_steps for fit in fits} == {5}
    loss = trainer.evaluate(best_d, none, round_index=1)
    assert (loss.count, loss.loss_sum, loss.metrics) == (5, 0.0, {"correct": 5})


def test_run_learns_without_a_step_and_says_so():
    events = []
    job = small_job(num_sites=2, **TABLES)
    simulate(job, engine="virtual", listeners=[events.append])
    assert NOTICE in {e.message for e in events if isinstance(e, Warned)}
    losses = [e.pooled.loss for e in events if isinstance(e, ModelEvaluated)]
    assert losses[-1] < losses[0] / 2
    answers = [e for e in events if isinstance(e, SiteAnswered)]
    assert {e.num_steps for e in answers} == {3}


def test_surrogate_is_refused_where_it_has_no_meaning():
    job = small_job(num_sites=2, **TABLES)
    with pytest.raises(JobError, match="--engine virtual"):
        simulate(job)
    real = replace(job, simulation=replace(job.simulation, training="real"))
    assert job_digest.digest(real) != job_digest.digest(job)
    private = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}
    odd = {
        "nothing is charged": {
            "aggregation": {"weights": "uniform"},
            "privacy": {"differential_privacy": private},
        },
        "keeps nothing": {"training": {**TRAINING, "precision": "fp16"}},
        "set training.local_steps": {"training": {"local_epochs": 1}},
    }
    for text, tables in odd.items():
        with pytest.raises(JobError, match=text):
            small_job(num_sites=2, **{**TABLES, **tables})

"""The example jobs do what their files say."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 -- its usual name

from clients import data, models
from deploy.simulation import RunResult, simulate
from federation import job_file
from federation.job import JobSpec

pytestmark = [pytest.mark.slow]

JOBS = Path(__file__).parents[2] / "jobs"


def load(name: str, *overrides: str) -> JobSpec:
    return job_file.load(JOBS / f"{name}.toml", overrides)


def centralised_accuracy(job: JobSpec) -> float:
    """Train on the pooled data for as many steps as each site takes."""
    assert job.data is not None
    assert job.training.local_steps is not None
    train, held_out = data.load(job.data.source, job.data.options)
    generator = np.random.default_rng(job.seed)
    with torch.random.fork_rng():
        torch.random.manual_seed(job.seed)
        model = models.digits_cnn()
    spec = job.training.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=spec.lr,
        betas=(spec.betas[0], spec.betas[1]),
        weight_decay=spec.weight_decay,
    )
    for _ in range(job.rounds * job.training.local_steps):
        batch = generator.integers(0, len(train), size=job.training.batch_size)
        inputs, targets = train.batch(batch)
        assert targets is not None
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    inputs, targets = held_out.batch(np.arange(len(held_out)))
    with torch.no_grad():
        return float((model(inputs).argmax(1) == targets).float().mean())


def accuracy(outcome: RunResult) -> float:
    assert outcome.status == "completed"
    assert outcome.accuracy is not None
    return outcome.accuracy


def test_quickstart_is_as_good_as_pooling_the_data() -> None:
    """At least 95 %, within 2 points of centralised training, in a minute."""
    job = load("quickstart")
    begin = time.monotonic()
    federated = accuracy(simulate(job))
    seconds = time.monotonic() - begin
    central = centralised_accuracy(job)
    assert federated >= 0.95
    assert federated >= central - 0.02
    assert seconds < 60


def test_trimmed_mean_holds_where_the_mean_fails() -> None:
    """One of five sites sends garbage."""
    held = accuracy(simulate(load("poisoned")))
    mean = ("aggregation.combine=mean", "aggregation.byzantine_sites=0")
    failed = accuracy(simulate(load("poisoned", *mean)))
    assert held >= 0.9
    assert failed < 0.6


def test_gpt_learns_more_than_byte_frequencies() -> None:
    """Half a nat below what no model without context can beat."""
    job = load("text-gpt")
    assert job.data is not None
    _, held_out = data.load(job.data.source, job.data.options)
    unigram = data.unigram_entropy(held_out)
    outcome = simulate(job)
    assert outcome.status == "completed"
    assert outcome.loss is not None
    assert outcome.loss <= unigram - 0.5

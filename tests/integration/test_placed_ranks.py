"""Ranks that hold parts of a model, compute in bfloat16, or compile."""

from typing import Any

import pytest
from support import sharded_jobs
from support.ranked_sites import TESTS, alone, assert_like_one, ranked
from support.small_jobs import small_job

from clients.model_pool import ModelPool
from federation.job import JobSpec

pytestmark = [pytest.mark.slow]

BLOBS = "support.sharded_jobs:measured_blobs"
TOKENS = "support.sharded_jobs:tokens"


def mlp_job(**training: Any) -> JobSpec:
    """Layers whose rows cannot be shared out evenly, and all that a step may do.

    Of two batches one example is left, which the second rank gets nothing of.
    """
    return small_job(
        rounds=3,
        model={
            "factory": "clients.models:mlp",
            "options": {"inputs": 4, "classes": 3, "hidden": [33, 17]},
        },
        training={
            "local_epochs": 2,
            "batch_size": 59,
            "accumulate": 3,
            "proximal_mu": 0.3,
            "clip_grad_norm": 0.5,
            "optimizer": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            **training,
        },
        evaluation={"batch_size": 5},
    )


def gpt_job(**training: Any) -> JobSpec:
    """A transformer whose embedding is its output layer too."""
    return small_job(
        rounds=3,
        model={
            "factory": "clients.models:gpt",
            "options": {
                "vocabulary": sharded_jobs.VOCABULARY,
                "context": sharded_jobs.LENGTH,
                "layers": 3,
                "heads": 2,
                "width": 32,
            },
        },
        training={
            "task": "causal_lm",
            "local_steps": 5,
            "batch_size": 8,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            **training,
        },
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find the tests' own modules."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


@pytest.mark.parametrize(
    ("job", "source"),
    [(mlp_job(), BLOBS), (gpt_job(), TOKENS)],
    ids=["mlp", "gpt"],
)
def test_parts_of_a_model_train_like_the_whole(job: JobSpec, source: str):
    """Same losses and weights, wherever the rows of a parameter lie."""
    pool = ModelPool(job)
    with ranked(job, pool, source, sharding="full") as trainer:
        assert_like_one(trainer, alone(job, pool, source), pool, atol=3e-6)

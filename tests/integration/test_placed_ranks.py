"""Ranks that hold parts of a model, compute in bfloat16, or compile."""

import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import sharded_jobs
from support.programs import needs
from support.ranked_sites import (
    TESTS,
    ForkedRanks,
    alone,
    assert_like_one,
    pids_of,
    ranked,
)
from support.small_jobs import small_job

from clients.models.model_pool import ModelPool
from clients.ranks import group
from federation.job.spec import JobSpec

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
                "context": sharded_jobs.LENGTH - 1,
                "layers": 2,
                "heads": 2,
                "width": 32,
            },
        },
        training={
            "task": "causal_lm",
            "local_steps": 3,
            "batch_size": 8,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            **training,
        },
    )


@pytest.fixture(autouse=True)
def environment(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks find the tests' own modules; those that compile begin as real ones do."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    if "compile" not in request.node.name:
        monkeypatch.setattr(group, "subprocess", ForkedRanks)


@pytest.mark.parametrize(
    ("job", "source"),
    [(mlp_job(), BLOBS), (gpt_job(optimizer={"lr": 0.1}), TOKENS)],
    ids=["mlp", "gpt"],
)
def test_parts_of_a_model_train_like_the_whole(job: JobSpec, source: str):
    """Same losses and weights, wherever the rows of a parameter lie."""
    pool = ModelPool(job)
    with ranked(job, pool, source, sharding="full") as trainer:
        assert_like_one(trainer, alone(job, pool, source), pool, atol=3e-6)


MUON = {"name": "muon", "lr": 1e-3, "momentum": 0.95, "weight_decay": 0.01}


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize(
    ("job", "source"),
    [
        pytest.param(mlp_job(optimizer=MUON), BLOBS, marks=pytest.mark.long, id="mlp"),
        pytest.param(gpt_job(optimizer=MUON), TOKENS, id="gpt"),
    ],
)
def test_muon_over_ranks_is_like_one(job: JobSpec, source: str, sharding: str):
    """Also where each rank holds some rows of a matrix: it orthogonalises the whole.

    A round moves weights by 2e-3 and more. Products of bfloat16 are summed in parts;
    if ranks orthogonalised their own rows, weights would differ by 1e-3.
    """
    pool = ModelPool(job)
    with ranked(job, pool, source, sharding=sharding) as trainer:
        assert_like_one(trainer, alone(job, pool, source), pool, atol=3e-4, rtol=1e-3)


def test_parts_take_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parameters, gradients and the optimiser's state are shared out in equal parts."""
    job = gpt_job()
    pool = ModelPool(job)
    held = {}
    for sharding in ("none", "full"):
        folder = tmp_path / sharding
        folder.mkdir()
        monkeypatch.setenv(sharded_jobs.MEASURED, str(folder))
        with ranked(
            job,
            pool,
            TOKENS,
            sharding=sharding,
            environment=(sharded_jobs.MEASURED,),
        ) as trainer:
            trainer.fit(*pool.initial_weights(), round_index=1)
        held[sharding] = [int(path.read_text()) for path in folder.iterdir()]
    # Weights, gradients, two moments, and a counter of steps for each parameter.
    counters = 4 * len(pool.layout.tensors)
    assert held["none"] == [16 * pool.layout.size + counters] * 2
    assert held["full"] == [8 * pool.layout.size + counters] * 2


def test_a_killed_rank_of_a_sharded_model():
    """Its part is gone; the round is done again and gives the same bits."""
    job = mlp_job()
    pool = ModelPool(job)
    weights = pool.initial_weights()
    with ranked(job, pool, BLOBS, sharding="full") as trainer:
        expected = trainer.fit(*weights, round_index=2)
        before = pids_of(trainer)
        os.kill(before[1], signal.SIGKILL)
        found = trainer.fit(*weights, round_index=2)
        assert not set(before) & set(pids_of(trainer))
    np.testing.assert_array_equal(expected.weights_d, found.weights_d)


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("fp16", marks=pytest.mark.long)]
)
def test_ranks_compute_in_16_bits(sharding: str, precision: str):
    """They differ from one rank by what 16 bits round, which float32 does not."""
    optimizer = {"lr": 0.1}
    job = gpt_job(precision=precision, optimizer=optimizer)
    pool = ModelPool(job)
    weights = pool.initial_weights()
    # One round moves weights by up to 0.03, and the weights as a whole by 0.34.
    with ranked(job, pool, TOKENS, sharding=sharding) as trainer:
        assert_like_one(trainer, alone(job, pool, TOKENS), pool, atol=1e-4, rtol=1e-4)
        found = trainer.fit(*weights, round_index=1)
    exact = alone(gpt_job(optimizer=optimizer), pool, TOKENS)
    expected = exact.fit(*weights, round_index=1)
    # float16 has three digits more; in float32, ranks differ by less than 3e-6.
    least = {"bf16": 2e-5, "fp16": 3e-6}[precision]
    assert np.abs(found.weights_d - expected.weights_d).max() > least


LLAMA = {
    "model_type": "llama",
    "vocab_size": 16,
    "max_position_embeddings": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SFT = "support.hugging_face:examples"
# peft asks transformers by an old name.
OF_TRANSFORMERS = [
    pytest.mark.long,
    pytest.mark.xdist_group("huggingface"),
    pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra huggingface"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


def of_transformers(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that trains a model of transformers."""
    for mark in OF_TRANSFORMERS:
        test = mark(test)
    return test


def llama_job(**options: Any) -> JobSpec:
    """A decoder of transformers, trained on answers to prompts."""
    return small_job(
        rounds=3,
        model={
            "factory": "clients.models:hugging_face",
            "options": {"config": LLAMA, **options},
        },
        data={"source": SFT},
        training={
            "task": "sft",
            "local_steps": 3,
            "batch_size": 8,
            "optimizer": {"lr": 0.1},
        },
    )


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize(
    "options", [{}, {"lora": {"rank": 2}}, {"gradient_checkpointing": True}]
)
@of_transformers
def test_models_of_transformers_over_ranks_are_like_one(
    options: dict[str, Any], sharding: str
):
    """Whole models, adapters beside frozen layers, and activations computed again."""
    job = llama_job(**options)
    pool = ModelPool(job)
    with ranked(job, pool, SFT, sharding=sharding) as trainer:
        one = alone(job, pool, SFT)
        assert_like_one(trainer, one, pool, atol=3e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled code is, and what torch finds out about the CPU."""
    return tmp_path_factory.mktemp("kernels")


# One layer and one size of batches, because g++ takes seconds for each compiled graph.
LAYER = small_job(
    rounds=3,
    training={"local_steps": 2, "batch_size": 8, "optimizer": {"lr": 0.1}},
    evaluation={"batch_size": 8},
)


@pytest.mark.long
@pytest.mark.timeout(900)  # On a busy machine g++ takes minutes.
@needs("g++")
@pytest.mark.parametrize(
    ("job", "source", "sharding"),
    [
        pytest.param(LAYER, BLOBS, "full", id="layer"),
        pytest.param(mlp_job(), BLOBS, "none", id="mlp"),
        pytest.param(gpt_job(optimizer={"lr": 0.1}), TOKENS, "full", id="gpt"),
        pytest.param(llama_job(), SFT, "none", id="llama", marks=OF_TRANSFORMERS),
    ],
)
def test_compiled_ranks_are_like_one(
    job: JobSpec,
    source: str,
    sharding: str,
    kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Same losses and weights, by code for a forward and a backward pass at least."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernels))
    pool = ModelPool(job)
    with ranked(job, pool, source, compile=True, sharding=sharding) as trainer:
        trainer.evaluate(*pool.initial_weights(), round_index=1)
        before = set(kernels.rglob("*.py"))
        rtol = 1e-5 if source == SFT else 1e-6
        one = alone(job, pool, source)
        assert_like_one(trainer, one, pool, atol=3e-6, rtol=rtol)
    assert len(set(kernels.rglob("*.py")) - before) >= 2


@pytest.mark.long
def test_without_a_compiler_ranks_train_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """One line of the log says so, and why."""
    monkeypatch.setenv("CXX", "/not/there/g++")
    job = mlp_job()
    pool = ModelPool(job)
    with ranked(job, pool, BLOBS, ranks=1, compile=True) as trainer:
        assert_like_one(trainer, alone(job, pool, BLOBS), pool, atol=3e-6)
    logged = capfd.readouterr().err.splitlines()
    assert len(logged) == 1
    assert "torch.compile does not work here" in logged[0]
    assert "No working C++ compiler found" in logged[0]

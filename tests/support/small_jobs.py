"""Jobs and data that train in milliseconds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from clients.data.datasets import Examples
from clients.models.tokenizers import note_tokenizer
from clients.preprocessing import preprocessing
from federation.job import job_file
from federation.job.spec import JobSpec

BOUNDS = {"loss": [0.0, 4.0], "absolute_error": [0.0, 2.0]}


def small_job(
    *, num_sites: int = 1, model: Mapping[str, Any] | None = None, **tables: Any
) -> JobSpec:
    """Logistic regression on ``blobs``, with tables and keys replaced by others."""
    document: dict[str, Any] = {
        "name": "small",
        "rounds": 1,
        "model": {
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 4, "classes": 3},
        },
        "data": {"source": "support.small_jobs:blobs"},
        "training": {"local_steps": 1, "optimizer": {"lr": 0.5}},
        "sites": [{"name": f"site-{i}"} for i in range(num_sites)],
    }
    if model is not None:
        document["model"] = model
    return job_file.parse(document | tables)


def regression_job(
    objective: str = "squared_error",
    *,
    metrics: dict[str, list[float]] = BOUNDS,
    num_sites: int = 3,
    **tables: Any,
) -> JobSpec:
    """A linear regression on records of two parts."""
    document: dict[str, Any] = {
        "name": "regression",
        "rounds": 4,
        "seed": 3,
        "model": {"factory": "support.users_module:regression"},
        "data": {"source": "support.users_module:two_parts"},
        "training": {
            "task": f"support.users_module:{objective}",
            "metrics": metrics,
            "local_steps": 3,
            "batch_size": 8,
            "optimizer": {"lr": 0.1},
        },
        "sites": [{"name": f"site-{i}"} for i in range(num_sites)],
    }
    return job_file.parse(document | tables)


def normalised() -> torch.nn.Module:
    """A model of ``blobs`` whose batch normalisation some units replace."""
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    )


@preprocessing("none")
def tokenized(digests: Sequence[str]) -> tuple[Examples, Examples]:
    """``blobs``, as a source that has loaded tokenisers."""
    for digest in digests:
        note_tokenizer(digest)
    return blobs()


@preprocessing("none")
def blobs(num_train: int = 60, num_held_out: int = 12) -> tuple[Examples, Examples]:
    """Three overlapping clouds of points in four dimensions."""
    rng = np.random.default_rng(11)

    def draw(size: int) -> Examples:
        classes = np.arange(size) % 3
        noise = rng.normal(size=(size, 4))
        inputs = (noise + np.eye(4)[classes]).astype(np.float32)
        return Examples(inputs=inputs, targets=classes)

    return draw(num_train), draw(num_held_out)


@preprocessing("none")
def first_or_not(num_train: int = 60, num_held_out: int = 12) -> tuple[Any, Any]:
    """Those of ``blobs``, with target 1 for the first cloud and otherwise 0."""
    train, held_out = (
        Examples(inputs=part.inputs, targets=(part.targets == 0).astype(np.int64))
        for part in blobs(num_train, num_held_out)
    )
    return train, held_out


@preprocessing("none")
def visits(num_persons: int = 60) -> tuple[Examples, Examples]:
    """Four records of each of some persons, and three of each of 20 held-out ones."""

    def part(first: int, persons: int, each: int) -> Examples:
        found, _ = blobs(persons * each)
        ids = np.repeat(np.arange(first, first + persons), each)
        return Examples(inputs=found.inputs, targets=found.targets, persons=ids)

    return part(0, num_persons, 4), part(num_persons, 20, 3)


@preprocessing("none")
def square_blobs() -> tuple[Examples, Examples]:
    """Those of ``blobs``, each as two rows of two."""
    train, held_out = (
        Examples(inputs=part.inputs.reshape(-1, 2, 2), targets=part.targets)
        for part in blobs()
    )
    return train, held_out

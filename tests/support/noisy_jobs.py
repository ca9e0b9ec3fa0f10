"""Jobs whose noise can be seen: most of their weights get no gradient at all."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from support import toy
from support.small_jobs import blobs, small_job
from torch import nn

from clients.data.datasets import Examples
from clients.preprocessing import preprocessing
from federation.job.spec import JobSpec

WIDTH = 4096  # Inputs that are always 0, after four that are not.


@preprocessing("none")
def wide_blobs(
    num_train: int = 448, num_held_out: int = 80
) -> tuple[Examples, Examples]:
    """``blobs`` with inputs that say nothing."""

    def wide(part: Examples) -> Examples:
        nothing = np.zeros((len(part.inputs), WIDTH), np.float32)
        return Examples(
            inputs=np.concatenate([part.inputs, nothing], axis=1), targets=part.targets
        )

    train, held_out = blobs(num_train, num_held_out)
    return wide(train), wide(held_out)


def normalised(inputs: int = 4 + WIDTH, classes: int = 3) -> nn.Sequential:
    """A model with all that keeps statistics of what it sees."""
    return nn.Sequential(
        nn.Linear(inputs, 4),
        nn.BatchNorm1d(4),
        nn.Unflatten(1, (2, 2)),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(4, classes),
    )


def overflowing(inputs: int = 4 + WIDTH, classes: int = 3) -> nn.Sequential:
    """A model whose losses are not finite."""
    model = nn.Sequential(nn.Linear(inputs, classes))
    with torch.no_grad():
        model[0].bias[0] = 3e38
        model[0].bias[1] = -3e38
    return model


@preprocessing("none")
def one_each(num_sites: int, inputs: int) -> tuple[Examples, Examples]:
    """Ten records for each site, of which nothing can be learned."""

    def part(size: int) -> Examples:
        zeros = np.zeros((size, inputs), np.float32)
        return Examples(inputs=zeros, targets=np.arange(size) % 4)

    return part(10 * num_sites), part(num_sites)


class Tied(nn.Module):
    """Two names for one weight, a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.frozen(self.first(x)) + self.shift))


def noisy_job(
    unit: str,
    *,
    num_sites: int = 4,
    threshold: int | None = None,
    private: Mapping[str, Any] | None = None,
    **tables: Any,
) -> JobSpec:
    """Logistic regression on ``wide_blobs`` with noise inside the secure sum."""
    secure: dict[str, Any] = {"enabled": True}
    if threshold is not None:
        secure["threshold"] = threshold
    usual: dict[str, Any] = {
        "rounds": 2,
        "model": {
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 4 + WIDTH, "classes": 3},
        },
        "data": {"source": "support.noisy_jobs:wide_blobs"},
        "training": {
            "local_steps": 1,
            "batch_size": 20,
            "optimizer": {"name": "sgd", "lr": 0.5},
        },
        "aggregation": {"weights": "uniform"},
        "evaluation": {"every": 0},
        "privacy": {
            "secure_aggregation": secure,
            "differential_privacy": {
                "unit": unit,
                "target_epsilon": 8.0,
                **(private or {}),
            },
        },
    }
    if "factory" in tables.get("model", {}):
        usual["model"] = {}
    return small_job(num_sites=num_sites, **toy.merged(usual, tables))

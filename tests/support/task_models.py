"""Small models and data for the built-in tasks, with an optimiser and a schedule."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from federation.job.adapters import Factors

_N, _TRAIN = 120, 90


class Tokens(nn.Module):
    """Logits of each token from its own embedding and the mean before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7)

    def forward(
        self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor | None = None
    ) -> Mapping[str, torch.Tensor]:
        found = self.embedding(input_ids)
        if decoder_input_ids is not None:
            found = self.embedding(decoder_input_ids) + found.mean(1, keepdim=True)
        return {"logits": self.head(found)}


class LowRank(nn.Module):
    """Logits of three classes by a frozen weight and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, 4))
        self.b = nn.Parameter(torch.zeros(3, 2))
        self.exact_factors = (
            Factors(weight="w", a="a", b="b", scale=1.0, refactored=True),
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values @ (self.w + self.b @ self.a).T


class Towers(nn.Module):
    """Two embeddings of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(
        self, left: torch.Tensor, right: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(left), self.right(right)


def low_rank() -> LowRank:
    """An adapter of which the aggregator averages products."""
    return LowRank()


def model(task: str) -> nn.Module:
    if task == "contrastive":
        return Towers()
    if task == "segmentation":
        return nn.Conv2d(3, 2, 3, padding=1)
    if task in {"masked_lm", "sft", "seq2seq_lm"}:
        return Tokens()
    return nn.Linear(3, {"multi_label": 4}.get(task, 1))


def _rows(task: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(_N, 3))
    if task == "regression":
        return x, x @ [0.5, -0.2, 0.1]
    if task == "binary":
        return x, (x.sum(1) > 0).astype(int)
    if task == "multi_label":
        return x, (x @ rng.normal(size=(3, 4)) > 0).astype(int)
    if task == "contrastive":
        return (x, x + 0.01 * rng.normal(size=x.shape)), None
    if task == "ranking":
        low = x - np.abs(rng.normal(size=x.shape))
        return (x, low), None
    images = rng.integers(0, 256, (_N, 3, 5, 5)).astype(np.uint8)
    labels = (images[:, 0] > 127).astype(int)
    labels[:, 0] = 255
    return images, labels


def data(task: str) -> tuple[Any, Any]:
    if task in {"masked_lm", "sft", "seq2seq_lm"}:
        return _tokens(task)
    inputs, targets = _rows(task)
    if not isinstance(inputs, tuple):
        return (inputs[:_TRAIN], targets[:_TRAIN]), (inputs[_TRAIN:], targets[_TRAIN:])
    train = tuple(part[:_TRAIN] for part in inputs)
    return (train, None), (tuple(part[_TRAIN:] for part in inputs), None)


def _tokens(task: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(6)
    rows = []
    for _ in range(_N):
        first, size = (int(number) for number in rng.integers((0, 3), (6, 6)))
        ids = [1 + (first + place) % 6 for place in range(size)]
        row = {"input_ids": ids, "labels": [token % 6 for token in ids]}
        row["labels"][0] = -100
        if task == "seq2seq_lm":
            row["decoder_input_ids"] = ids
        rows.append(row)
    parts = rows[:_TRAIN], rows[_TRAIN:]
    # To one length: a private site's record may not depend on its batch.
    longest = max(len(row["labels"]) for row in rows)
    collate = partial(padded, longest=longest)
    loaders = (DataLoader(part, collate_fn=collate) for part in parts)  # type: ignore[arg-type]
    train, held_out = loaders
    return train, held_out


def padded(
    rows: Sequence[Mapping[str, list[int]]], *, longest: int
) -> dict[str, torch.Tensor]:
    """Pad inputs with token 0 and labels with -100."""
    return {
        name: torch.tensor(
            [
                row[name]
                + [-100 if name == "labels" else 0] * (longest - len(row[name]))
                for row in rows
            ]
        )
        for name in rows[0]
    }


for _function in (model, data):
    _function.preprocessing = "none"  # type: ignore[attr-defined]


def halves(step: int, steps: int, *, after: int) -> float:
    """A schedule: the whole rate, and half of it after some steps."""
    return 1.0 if step < after else 0.5


def two_groups(
    parameters: Sequence[nn.Parameter], lr: float, *, bias_lr: float
) -> torch.optim.Optimizer:
    """An optimiser: biases at a rate of their own."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "lr": lr},
        {"params": [p for p in parameters if p.ndim <= 1], "lr": bias_lr},
    ]
    return torch.optim.SGD(groups)


def half_of_them(
    parameters: Sequence[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """A mistake: some parameters are in no group."""
    return torch.optim.SGD(parameters[:1], lr=lr)


class Adapted(nn.Module):
    """A frozen layer and an adapter beside it, with the names that peft gives."""

    def __init__(self, rank: int, *, trains_a: bool = False) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 3).requires_grad_(requires_grad=False)
        down, up = nn.Linear(4, rank, bias=False), nn.Linear(rank, 3, bias=False)
        nn.init.zeros_(up.weight)
        self.lora_A = nn.ModuleDict({"default": down.requires_grad_(trains_a)})
        self.lora_B = nn.ModuleDict({"default": up})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product = self.lora_B["default"](self.lora_A["default"](inputs))
        found: torch.Tensor = self.base_layer(inputs) + 2 * product
        return found


def adapted(rank: int = 3, *, trains_a: bool = False) -> nn.Module:
    """Logits of three classes, of inputs with four values."""
    return Adapted(rank, trains_a=trains_a)

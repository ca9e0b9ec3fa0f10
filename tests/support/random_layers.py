"""Models and datasets that draw random numbers, each in its own way."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from clients.models.adapters import with_lora

WIDTH = 16  # Of a record.


class _Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x)[0]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class _Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def _of(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: _Apply(function)


# Not RReLU, which draws for negative values alone, and is refused for that; nor what
# draws from NumPy in a model, which the probe cannot repeat, and refuses.
# What a layer gets is of shape (B, 4, 4), or of that in front.
LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "Dropout": ((4, 4), lambda: nn.Dropout(0.5)),
    "Dropout1d": ((4, 4), lambda: nn.Dropout1d(0.5)),
    "Dropout2d": ((4, 2, 2), lambda: nn.Dropout2d(0.5)),
    "Dropout3d": ((4, 1, 2, 2), lambda: nn.Dropout3d(0.5)),
    "AlphaDropout": ((4, 4), lambda: nn.AlphaDropout(0.5)),
    "FeatureAlphaDropout": ((4, 4), lambda: nn.FeatureAlphaDropout(0.5)),
    "dropout as a function": ((4, 4), _of(lambda x: functional.dropout(x, 0.5))),
    "normal": ((4, 4), _of(lambda x: x + torch.randn_like(x))),
    "uniform": ((4, 4), _of(lambda x: x * torch.rand_like(x))),
    "bernoulli": ((4, 4), _of(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)))),
    "gumbel": ((4, 4), _of(lambda x: functional.gumbel_softmax(x, tau=0.5))),
    "depth": ((4, 4), _of(lambda x: x * (torch.rand(len(x), 1, 1) < 0.5))),
    "MultiheadAttention": ((4, 4), _Attention),
    "LSTM": ((4, 4), _Recurrent),
    "TransformerEncoderLayer": (
        (4, 4),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.5),
    ),
    "recomputed": ((4, 4), _Recomputed),
}


def model(layer: str, classes: int = 3) -> nn.Module:
    """A random layer on the record itself, under a linear one."""
    shape, make = LAYERS[layer]
    return nn.Sequential(
        nn.Unflatten(1, shape), make(), nn.Flatten(), nn.Linear(WIDTH, classes)
    )


def adapted(classes: int = 3) -> nn.Module:
    """LoRA adapters with dropout."""
    base = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, classes))
    return with_lora(base, targets=["0", "2"], dropout=0.5)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch": lambda x: x * (torch.rand(()) < 0.5),
    "numpy": lambda x: x * bool(np.random.rand() < 0.5),  # noqa: NPY002
    "random": lambda x: x * bool(random.random() < 0.5),  # noqa: S311
}


class Augmented:
    """Records of which a draw decides whether they are zero."""

    def __init__(self, inputs: Any, targets: Any, kind: str) -> None:
        self.inputs, self.targets, self.kind = torch.tensor(inputs), targets, kind

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return DRAWS[self.kind](self.inputs[index]), int(self.targets[index])


def halved(inputs: int, classes: int = 3) -> nn.Module:
    """A linear model on the part of each record that is drawn."""
    head = nn.Linear(inputs, classes)
    return nn.Sequential(_Apply(lambda x: x * (torch.rand_like(x) < 0.5)), head)

"""Mistakes that users make, one each; a comment marks the lines to be found."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from clients.preprocessing import preprocessing


@preprocessing("none")
def points(size: int = 64):
    """Four features and three classes."""
    rng, classes = np.random.default_rng(0), np.arange(size) % 3
    inputs = (rng.normal(size=(size, 4)) + np.eye(4)[classes]).astype(np.float32)
    cut = size * 3 // 4
    return (inputs[:cut], classes[:cut]), (inputs[cut:], classes[cut:])


class _Model(nn.Module):
    def __init__(self, inputs: int = 4, *, softmax: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 3)
        self.softmax = softmax

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.layer(x)  # here: narrow
        return logits.softmax(1) if self.softmax else logits


class _Misspelt(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layr(x)  # here: misspelt


def model() -> nn.Module:
    """A sound one."""
    return _Model()


def narrow() -> nn.Module:
    """Takes other inputs than the data has."""
    return _Model(5)


def misspelt() -> nn.Module:
    """Uses a layer that it does not have."""
    return _Misspelt()


def probabilities() -> nn.Module:
    """Ends in a softmax, which the loss has already."""
    return _Model(softmax=True)


class _Detached(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


def detached() -> nn.Module:
    """Returns logits that nothing can be learned from."""
    return _Detached()


def lazy() -> nn.Module:
    """Waits for a batch to know its size."""
    return nn.Sequential(nn.LazyLinear(3))


_CALLS = itertools.count(3)


def changing() -> nn.Module:
    """Has another shape in every call."""
    return nn.Linear(4, next(_CALLS))


def convolution() -> nn.Module:
    """A sound one for images of 4 x 4."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def images():
    """Pixels of a type that is not that of images, and not scaled."""
    pixels = np.random.default_rng(0).integers(0, 255, (64, 1, 4, 4), dtype=np.int32)
    classes = np.arange(64) % 3
    return (pixels[:48], classes[:48]), (pixels[48:], classes[48:])


def float_targets():
    """Classes as floating-point numbers."""
    (x, y), (other_x, other_y) = points()
    return (x, y.astype(np.float32)), (other_x, other_y.astype(np.float32))


def far_class():
    """One record of a class that the model does not have."""
    (x, y), held_out = points()
    y[40] = 7
    return (x, y), held_out


def not_a_number():
    """One record without a measurement."""
    (x, y), held_out = points()
    x[17, 2] = np.nan
    return (x, y), held_out


class _Items:
    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Any, int]:
        if self.kind == "lists":
            return [np.ones(2, np.float32), np.ones(2, np.float32)], i % 3
        if self.kind == "gap" and i == 30:
            return {}["file"], i % 3  # here: gap
        return np.ones(4 + (self.kind == "ragged" and i == 5), np.float32), i % 3


def items(kind: str):
    """A map-style dataset with a mistake."""
    return _Items(40, kind), _Items(12, kind)


def no_file():
    """Reads what is not there."""
    return Path("/nowhere/points.csv").read_text()  # here: no_file


def objective(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor):
    """Takes the arg max of the losses, not of the logits."""
    losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    hits = losses.argmax(1) == targets  # here: objective
    return {"loss": losses, "hits": hits.float()}

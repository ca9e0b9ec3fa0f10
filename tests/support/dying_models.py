"""Models of which a process dies."""

import os

import torch
from torch import nn


class _Dying(nn.Linear):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        os._exit(3)


def dying_network() -> nn.Module:
    """A module that ends the process that uses it."""
    return _Dying(4, 3)


def quoting_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor):
    """A loss that fails with words that are the site's alone."""
    raise KeyError("record 17", len(targets))

"""A model that waits at a site as long as a test wants."""

import os
import time
from pathlib import Path

import torch
from torch import nn

HOLD = "TEST_HOLD"  # Names a file; who has the variable waits while it is there.


class _Held(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hold = Path(os.environ.get(HOLD, ""))
        while hold.is_file():
            hold.with_suffix(".reached").touch()
            time.sleep(0.05)
        return super().forward(inputs.flatten(1))


def held_network(inputs: int, classes: int) -> nn.Module:
    """Logistic regression."""
    return _Held(inputs, classes)

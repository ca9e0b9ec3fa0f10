"""A model that takes longer where the environment says so, as on a smaller machine."""

import os
import time

import torch
from torch import nn

SECONDS = "TEST_STEP_SECONDS"


class _Slow(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(float(os.environ.get(SECONDS, "0")))
        return super().forward(inputs.flatten(1))


def slow_network(inputs: int, classes: int) -> nn.Module:
    """One layer, whose values do not depend on how long it takes."""
    return _Slow(inputs, classes)

"""The study's GPT, on a machine that takes a given time for a step.

Sites of a study share two cores, which no site of a federation does. This model waits
before each training step until the step's time is over, so that a step takes its
seconds whatever else the machine does, unless its work alone takes longer.
"""

import time

import torch
from torch import nn

from clients.models import gpt


class Paced(nn.Module):
    """A model whose every training step takes ``seconds``."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        """Wrap a model."""
        super().__init__()
        self.model = model
        self.seconds = seconds
        self._due = 0.0

    def train(self, mode: bool = True) -> "Paced":  # noqa: FBT001, FBT002 -- as torch
        """Begin with a round: no step of it is over."""
        super().train(mode)
        self._due = 0.0
        return self

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        """Logits, when the time of the step is over."""
        if self.training and torch.is_grad_enabled():
            now = time.monotonic()
            begin = max(now - self.seconds, self._due) if self._due else now
            self._due = begin + self.seconds
            time.sleep(max(0.0, self._due - now))
        logits_btv: torch.Tensor = self.model(tokens_bt)
        return logits_btv


def paced_gpt(
    seconds: float, context: int, layers: int, heads: int, width: int
) -> Paced:
    """Make the study's GPT; see ``clients.models.gpt``."""
    model = gpt(context=context, layers=layers, heads=heads, width=width)
    return Paced(model, seconds)

"""Data of ranks that say how much they hold."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.small_jobs import blobs
from torch.optim.optimizer import register_optimizer_step_post_hook

from clients.data.datasets import Examples
from clients.preprocessing import preprocessing

MEASURED = "MEASURED_FOLDER"
VOCABULARY, LENGTH = 64, 17


@preprocessing("none")
def tokens() -> tuple[Examples, Examples]:
    """Windows of tokens that count up, with mistakes; see ``measure``."""
    measure()
    rng = np.random.default_rng(3)

    def draw(size: int) -> Examples:
        first = rng.integers(VOCABULARY, size=(size, 1))
        counted = first + np.arange(LENGTH) + rng.integers(2, size=(size, LENGTH))
        return Examples(inputs=counted % VOCABULARY)

    return draw(41), draw(9)


@preprocessing("none")
def measured_blobs() -> tuple[Examples, Examples]:
    """Those of ``blobs``; see ``measure``."""
    measure()
    return blobs()


def measure() -> None:
    """Let this process write down how many bytes it holds in each optimiser step.

    Those of parameters, gradients and the optimiser's state. It is done if a variable
    of the environment names a folder for it.
    """
    folder = os.environ.get(MEASURED)
    if folder is None:
        return
    path = Path(folder) / str(os.getpid())

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [value for of in optimizer.state.values() for value in of.values()]
        total = sum(map(num_bytes, [*parameters, *gradients, *state]))
        path.write_text(str(total))

    register_optimizer_step_post_hook(note)


def num_bytes(tensor: Any) -> int:
    """Bytes of the part that this process holds."""
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.numel() * held.element_size()

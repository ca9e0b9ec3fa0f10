"""A model whose site waits, as long as a test wants, in a phase of a round.

The site's process is told by its environment where, and by a file how long. Whatever
the phase, nothing is changed but the time that it takes.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from federation.messages import RoundTask, TaskKind

PHASE, HOLD = "TEST_PHASE", "TEST_HOLD"
HANDSHAKE, DOWNLOAD, TRAINING = "handshake", "download", "training"
PHASES = (HANDSHAKE, DOWNLOAD, TRAINING)


def wait_in(phase: str) -> None:
    """Wait, if this is the phase, while the file is there."""
    hold = Path(os.environ.get(HOLD, ""))
    while os.environ.get(PHASE) == phase and hold.is_file():
        hold.with_suffix(".reached").touch()
        time.sleep(0.05)


class _Gated(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            wait_in(TRAINING)
        return super().forward(inputs.flatten(1))


def _make_gates() -> None:
    """Have this process's node wait on the way to its messages."""
    # A test that names phases need not import Flower.
    from cloud_adapters.flower import site as flower_site  # noqa: PLC0415
    from cloud_adapters.flower.connection import Connection  # noqa: PLC0415

    first_open = Connection.open

    def opened(self: Any, envelope: Any) -> Any:
        message = first_open(self, envelope)
        if message.metadata.message_type != "query":
            task = flower_site._task(message)
            if isinstance(task, RoundTask) and task.kind is TaskKind.TRAIN:
                wait_in(DOWNLOAD)
        return message

    Connection.open = opened  # type: ignore[method-assign]


def gated_network(inputs: int, classes: int) -> nn.Module:
    """Logistic regression; the first one in a site's process makes the gates."""
    if os.environ.get(PHASE):
        _make_gates()
        wait_in(HANDSHAKE)
    return _Gated(inputs, classes)

"""A model whose site waits, as long as a test wants, in a phase of a round.

The site's process is told by its environment where, and by a file how long. Whatever
the phase, nothing is changed but the time that it takes.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from federation.messages import (
    MaskedUpdate,
    RoundTask,
    SecureStep,
    SecureTask,
    TaskKind,
)
from federation.wire import frame as wire

PHASE, HOLD = "TEST_PHASE", "TEST_HOLD"
HANDSHAKE, DOWNLOAD, TRAINING = "handshake", "download", "training"
# Masks of sites that have dropped out of a round are removed by those that stay.
UPLOAD, UNMASKING, BETWEEN = "upload", "unmasking", "between rounds"
PHASES = (HANDSHAKE, DOWNLOAD, TRAINING, UPLOAD, UNMASKING, BETWEEN)
_UNMASKS = {SecureStep.SURVIVORS, SecureStep.REVEAL}


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


def _wait_before(task: object) -> None:
    """Wait before a site begins with what it is asked."""
    if isinstance(task, RoundTask) and task.kind is TaskKind.TRAIN:
        wait_in(DOWNLOAD)
    if isinstance(task, SecureTask) and task.step in _UNMASKS:
        wait_in(UNMASKING)


def _is_update(frame: bytes | None) -> bool:
    return frame is not None and isinstance(wire.decode(frame), MaskedUpdate)


def _make_gates() -> None:
    """Have this process's node wait on the way to its messages."""
    # A test that names phases need not import Flower.
    from cloud_adapters.flower import site as flower_site  # noqa: PLC0415
    from cloud_adapters.flower.connection import Connection  # noqa: PLC0415

    first_open, first_send, first_next = (
        Connection.open,
        Connection.send,
        Connection.next,
    )
    is_done = threading.Event()

    def opened(self: Any, envelope: Any) -> Any:
        message = first_open(self, envelope)
        if message.metadata.message_type != "query":
            _wait_before(flower_site._task(message))
        return message

    def sent(self: Any, reply: Any, seconds: float, **options: Any) -> None:
        is_update = _is_update(flower_site.frame_in_record(reply.content))
        if is_update:
            wait_in(UPLOAD)
        first_send(self, reply, seconds, **options)
        if is_update:
            is_done.set()

    def following(self: Any) -> Any:
        # What the site was asked in this round is answered; no more is fetched.
        if is_done.is_set():
            wait_in(BETWEEN)
            is_done.clear()
        return first_next(self)

    Connection.open = opened  # type: ignore[method-assign]
    Connection.send = sent  # type: ignore[method-assign]
    Connection.next = following  # type: ignore[method-assign]


def gated_network(inputs: int, classes: int) -> nn.Module:
    """Logistic regression; the first one in a site's process makes the gates."""
    if os.environ.get(PHASE):
        _make_gates()
        wait_in(HANDSHAKE)
    return _Gated(inputs, classes)

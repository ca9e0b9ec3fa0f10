"""What a site's agent and its ranks say to each other, and the pipe they say it over.

Small typed messages as JSON, each behind its length. Weights are not in here: they are
in memory that both sides see (``shared_model``). Both ends are processes of one
operator on one machine, and of one release.
"""

import dataclasses
import json
import socket
import struct
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clients.data.batches import Rank
from federation.errors import ProtocolError
from federation.messages import MetricSums
from federation.vectors import NO_ARRAYS, Arrays

MAX_BYTES = 16 * 1024 * 1024  # A job with its options is far smaller.

# The one thing that ranks keep between rounds: the agent stores it, and gives it to
# the processes that train next.
LOSS_SCALE = "loss_scale"

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Agent to rank, once: what the run is.

    Attributes:
        job: The job, as TOML.
        site: Name of the site.
        data: ``source`` and ``options`` of the site's own data, as TOML.
        layout: Digest of the model's layout.
        timeout_seconds: How long a rank waits for the others in a step.
        clipping: Of the site's plan of private steps, as the next two; empty if
            gradients are not private.
        clip_norm: Largest norm of a record's gradient.
        noise_multiplier: Noise over the sensitivity.
        sharding: ``none``, or ``full`` if each rank holds a part of the model.
        compile: Whether ``torch.compile`` is used where it works.
        seed: Of the order of examples, as 64 hexadecimal digits; empty for the job's.
        statistics: What records are standardised by, as JSON; empty for nothing.
    """

    job: str
    site: str
    data: str
    layout: str
    timeout_seconds: float
    clipping: str = ""
    clip_norm: float = 0.0
    noise_multiplier: float = 0.0
    sharding: str = "none"
    compile: bool = False
    seed: str = ""
    statistics: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Rank to agent: model and data are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Agent to rank: train from the weights in the shared memory.

    Attributes:
        num_steps: Its local steps; 0 for the job's number.
        first_step: Local steps of the run before, with ``num_steps``.
        loss_scale: What the round before has kept of it; empty for nothing.
    """

    round_index: int
    num_steps: int = 0
    first_step: int = 0
    loss_scale: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Agent to rank: evaluate the weights in the shared memory.

    Attributes:
        max_loss: What the loss of a prediction is clipped to, in nats; 0 for nothing.
    """

    round_index: int
    max_loss: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReply:
    """Rank to agent: training is done, and rank 0 has put the weights in the memory.

    Attributes:
        num_examples: Number of examples of the whole site.
        num_steps: Optimiser steps.
        count: Predictions of all ranks; -1 if the sums are withheld.
        loss_sum: Their losses, in nats.
        metrics: The job's metrics over them.
        loss_scale: What the next round begins with; empty without float16.
    """

    num_examples: int
    num_steps: int
    count: int
    loss_sum: float
    metrics: dict[str, float]
    loss_scale: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReply:
    """Rank to agent: sums over the held-out data of the whole site."""

    count: int
    loss_sum: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """Rank to agent: an error that another attempt would not fix."""

    message: str


Message = Start | Ready | Fit | Evaluate | FitReply | EvaluateReply | ErrorReply

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Start, Ready, Fit, Evaluate, FitReply, EvaluateReply, ErrorReply)
}


def metric_sums(message: FitReply | EvaluateReply) -> MetricSums:
    """Sums that a message tells."""
    return MetricSums(
        count=message.count, loss_sum=message.loss_sum, metrics=message.metrics
    )


def loss_scale_of(kept: Arrays) -> list[float]:
    """The part of what a site keeps between rounds that its ranks need."""
    return kept[LOSS_SCALE].tolist() if LOSS_SCALE in kept else []


def kept_from(message: Fit | FitReply) -> Arrays:
    """What is kept between rounds, by a message; the reverse of ``loss_scale_of``."""
    if not message.loss_scale:
        return NO_ARRAYS
    return {LOSS_SCALE: np.array(message.loss_scale, np.float64)}


class Channel:
    """One end of the pipe between agent and rank."""

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._end = end

    def fileno(self) -> int:
        """File descriptor, to wait for."""
        return self._end.fileno()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: The other side is gone.
        """
        fields = {"kind": type(message).__name__} | dataclasses.asdict(message)
        body = json.dumps(fields).encode()
        self._end.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Message:
        """Wait for a message.

        Raises:
            EOFError: The other side is gone.
            ProtocolError: It is none of this release.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_BYTES:
            raise ProtocolError(f"a rank's message of {length} bytes is too long")
        return _decode(self._exactly(length))

    def close(self) -> None:
        """Hang up."""
        self._end.close()

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self._end.recv(length - len(parts))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def _decode(body: bytes) -> Message:
    try:
        fields: dict[str, Any] = json.loads(body)
        kind = _KINDS[fields.pop("kind")]
        message = kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError("a rank sent something that is not a message") from error
    for each in dataclasses.fields(kind):
        kind_of_field = typing.get_origin(each.type) or each.type
        if type(getattr(message, each.name)) is not kind_of_field:
            raise ProtocolError(f"{each.name} in a rank's message is not valid")
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInputs:
    """What the agent gave a rank when it started it.

    Attributes:
        rank: Which one it is.
        pipe: File descriptor of the pipe to the agent.
        meeting: File descriptor of the memory in which ranks find each other.
        memory: File descriptor of the model's values.
    """

    rank: Rank
    pipe: int
    meeting: int
    memory: int

    def arguments(self) -> list[str]:
        """Command-line arguments that say so."""
        numbers = (self.rank.rank, self.rank.world_size)
        return [str(n) for n in (*numbers, self.pipe, self.meeting, self.memory)]

    @staticmethod
    def of(arguments: Sequence[str]) -> "RankInputs":
        """Read them."""
        rank, world_size, pipe, meeting, memory = map(int, arguments)
        return RankInputs(
            rank=Rank(rank=rank, world_size=world_size),
            pipe=pipe,
            meeting=meeting,
            memory=memory,
        )

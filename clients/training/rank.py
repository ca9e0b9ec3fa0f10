"""What runs in a rank: it trains on request, until the agent is gone.

A rank has no key, no ledger and no connection but to its peers, over the loopback
interface. It must not outlive the agent, however that ends: a thread reads the pipe,
and its end is the end of the process.
"""

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed

from clients.data.batches import Rank
from clients.ranks.checks import check_devices
from clients.ranks.control import (
    Channel,
    ErrorReply,
    Evaluate,
    EvaluateReply,
    Fit,
    FitReply,
    Message,
    RankInputs,
    Ready,
    Start,
    kept_from,
    loss_scale_of,
)
from clients.ranks.peers import Peers
from clients.ranks.shared_model import SharedModel
from clients.training.trainer import TorchTrainer
from federation.errors import FederationError, ProtocolError
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from federation.vectors import IntegerVector, Vector

_LOG = logging.getLogger(__name__)


Build = Callable[[Start, Peers], TorchTrainer]


def device_of(job: JobSpec, rank: Rank) -> torch.device:
    """Device of a rank: each has a GPU of its own, or all compute on the CPU.

    Raises:
        SiteError: There are too few GPUs.
    """
    check_devices(job, rank.world_size)
    if job.training.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", rank.rank)
    return torch.device("cpu")


def serve(
    inherited: RankInputs, *, build: Build, device: Callable[[Start], str]
) -> None:
    """Answer the agent until it hangs up; the process ends in here.

    Args:
        inherited: What the agent gave this process.
        build: Makes the trainer.
        device: Says where it computes, as torch names it.
    """
    channel = Channel(socket.socket(fileno=inherited.pipe))
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, messages), daemon=True).start()
    try:
        _answer(channel, messages, inherited, build=build, device=device)
    except FederationError:  # It has been said.
        os._exit(1)
    except Exception:  # noqa: BLE001 -- the last place of a process
        # Also where a peer has died and a collective with it. The agent sees the end of
        # the pipe; gloo's threads and destructors would wait for the peer.
        _LOG.exception("rank %d ends", inherited.rank.rank)
        os._exit(1)


def _read(channel: Channel, messages: "queue.SimpleQueue[Message]") -> None:
    while True:
        try:
            messages.put(channel.receive())
        except (EOFError, OSError, ProtocolError):
            os._exit(0)


def _answer(
    channel: Channel,
    messages: "queue.SimpleQueue[Message]",
    inherited: RankInputs,
    *,
    build: Build,
    device: Callable[[Start], str],
) -> None:
    start = messages.get()
    try:
        if not isinstance(start, Start):
            raise ProtocolError("the agent did not start with the run")
        peers = Peers(
            rank=inherited.rank,
            device=torch.device(device(start)),
            is_sharded=start.sharding == "full",
        )
        _meet(inherited, start, peers.device)
        trainer = build(start, peers)
        if trainer.layout().digest != start.layout:
            raise ProtocolError("the rank builds a different model than the agent")
    except FederationError as error:
        # In this order: the agent ends this process as soon as it knows.
        _LOG.error("rank %d cannot start: %s", inherited.rank.rank, error)
        channel.send(ErrorReply(message=""))
        raise
    _warm_up(peers)
    memory = SharedModel(trainer.layout(), inherited.memory)
    channel.send(Ready())
    while True:
        channel.send(_tried(messages.get(), trainer, memory, inherited.rank))


def _tried(
    task: Message, trainer: TorchTrainer, memory: SharedModel, rank: Rank
) -> Message:
    try:
        return _work(task, trainer, memory, rank)
    except FederationError as error:
        _LOG.error("rank %d: %s", rank.rank, error)
        return ErrorReply(message=error.outside)


def _work(
    task: Message, trainer: TorchTrainer, memory: SharedModel, rank: Rank
) -> Message:
    weights_d, integers_m = memory.view()
    if isinstance(task, Evaluate):
        sums = trainer.evaluate(
            weights_d,
            integers_m,
            round_index=task.round_index,
            max_loss=task.max_loss or None,
        )
        return EvaluateReply(
            count=sums.count, loss_sum=sums.loss_sum, metrics=dict(sums.metrics)
        )
    if not isinstance(task, Fit):
        raise ProtocolError("the agent sent an unknown request")
    result = trained(task, trainer, weights_d, integers_m)
    distributed.barrier()  # The old weights are no longer read.
    memory.write_part(result.weights_d, trainer.own_spans())
    if rank.rank == 0:
        memory.write_integers(result.integers_m)
    return reply_of(result)


def trained(
    task: Fit, trainer: TorchTrainer, weights_d: Vector, integers_m: IntegerVector
) -> LocalWeights:
    """Do a rank's part of what the agent asks for.

    Raises:
        FederationError: Training failed.
    """
    steps = None
    if task.num_steps:
        steps = range(task.first_step, task.first_step + task.num_steps)
    result = trainer.fit(
        weights_d,
        integers_m,
        round_index=task.round_index,
        kept=kept_from(task),
        steps=steps,
    )
    if not isinstance(result, LocalWeights):
        raise ProtocolError("several ranks have trained to an update")
    return result


def reply_of(result: LocalWeights) -> FitReply:
    """What the agent learns beside the weights, which are in the shared memory."""
    training = result.training
    return FitReply(
        num_examples=result.num_examples,
        num_steps=result.num_steps,
        count=-1 if training is None else training.count,
        loss_sum=0.0 if training is None else training.loss_sum,
        metrics={} if training is None else dict(training.metrics),
        loss_scale=loss_scale_of(result.kept),
    )


def _warm_up(peers: Peers) -> None:
    """Take an empty step: torch's first one spends seconds on imports."""
    module = torch.nn.Linear(1, 1).to(peers.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    wrapped = peers.wrap(module)
    wrapped(torch.zeros(1, 1, device=peers.device)).sum().backward()
    optimizer.step()


def _meet(inherited: RankInputs, start: Start, device: torch.device) -> None:
    """Join the process group.

    The ranks find each other in a memory file without a name: torch's own store would
    listen on every interface, and lets in anyone who connects.
    """
    rank = inherited.rank
    if device.type == "cuda":
        torch.cuda.set_device(device)
    path = f"/proc/self/fd/{inherited.meeting}"
    store = distributed.FileStore(path, rank.world_size)  # type: ignore[attr-defined]
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=start.timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )

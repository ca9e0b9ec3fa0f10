"""What ranks say, what they share, and who trains on what."""

import os
import socket
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job

from clients.data.batches import Rank
from clients.data.datasets import Dataset, as_dataset
from clients.models.model_pool import ModelPool
from clients.ranks import control
from clients.ranks.control import (
    Channel,
    ErrorReply,
    Evaluate,
    EvaluateReply,
    Fit,
    FitReply,
    Message,
    Ready,
    Start,
)
from clients.ranks.peers import Peers, Sums
from clients.ranks.shared_model import SharedModel
from clients.shards.dataset import ReadOptions, open_dataset
from clients.shards.write import write_dataset
from clients.training.trainer import TorchTrainer
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import JobError, ProtocolError
from federation.ids import SiteId
from federation.job.metrics import CORRECT
from federation.vectors import Layout, Role

SITE = SiteId("site-0")
TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
LAYOUT = Layout.build([("w", (2, 3), "float32", Role.PARAMETER)])


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A pipe with a channel at one end."""
    mine, other = socket.socketpair()
    channel = Channel(mine)
    yield channel, other
    channel.close()
    other.close()


def start() -> Start:
    return Start(
        job="name = 'ü'", site="a", data="", layout="00", timeout_seconds=120.0
    )


@pytest.mark.parametrize(
    "message",
    [
        start(),
        Ready(),
        Fit(round_index=3, loss_scale=[2.0**24, 6.0, 0.0]),
        Evaluate(round_index=1),
        FitReply(
            num_examples=1,
            num_steps=2,
            count=3,
            loss_sum=0.1 + 0.2,
            metrics={"correct": 0},
        ),
        EvaluateReply(count=3, loss_sum=float("inf"), metrics={"correct": 0}),
        ErrorReply(message="no"),
    ],
)
def test_messages_arrive_as_they_were_sent(
    ends: tuple[Channel, socket.socket], message: Message
):
    """Every kind, and every bit of a number."""
    channel, other = ends
    Channel(other).send(message)
    assert message == channel.receive()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"kind": "Fit"}',
        b'{"kind": "Fly", "round_index": 1}',
        b'{"kind": "Fit", "round_index": "1"}',
        b'{"kind": "Fit", "round_index": true}',
        b'{"kind": "Fit", "round_index": 1, "more": 1}',
    ],
)
def test_what_is_no_message_is_refused(
    ends: tuple[Channel, socket.socket], body: bytes
):
    """Unknown kinds, missing, unknown and mistyped fields."""
    channel, other = ends
    other.sendall(len(body).to_bytes(4, "big") + body)
    with pytest.raises(ProtocolError):
        channel.receive()


def test_length_is_limited(ends: tuple[Channel, socket.socket]):
    """Nothing is read of a message that is too long."""
    channel, other = ends
    other.sendall((control.MAX_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="too long"):
        channel.receive()


def test_the_end_of_the_other_side(ends: tuple[Channel, socket.socket]):
    """Also in the middle of a message."""
    channel, other = ends
    other.sendall(b"\x00\x00")
    other.close()
    with pytest.raises(EOFError):
        channel.receive()


def test_memory_is_shared_through_its_descriptor():
    """What one side writes is there for the other, integers too."""
    layout = Layout.build(
        [
            ("n", (), "int64", Role.MAX),
            ("w", (2, 3), "float32", Role.PARAMETER),
        ]
    )
    mine = SharedModel(layout)
    other = SharedModel(layout, os.dup(mine.file))
    weights_d = np.arange(6, dtype=np.float32)
    mine.write(weights_d, np.array([2**40 + 1]))
    found_d, found_m = other.read()
    other.close()
    np.testing.assert_array_equal(weights_d, found_d)
    assert found_m.tolist() == [2**40 + 1]
    mine.close()


def test_memory_takes_one_model_only():
    """A vector of another length would lie over its neighbour."""
    memory = SharedModel(LAYOUT)
    with pytest.raises(ValueError, match="this model"):
        memory.write(np.zeros(5, np.float32), np.zeros(0, np.int64))
    memory.close()


@pytest.mark.parametrize("size", [1, 2, 9, 12])
def test_a_batch_is_dealt_out_whole(size: int):
    """Every example is at one rank."""
    batch = np.random.default_rng(1).permutation(100)[:size]
    parts = [Peers(rank=Rank(rank=r, world_size=3)).part(batch) for r in range(3)]
    assert sorted(batch) == sorted(chain(*parts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_alone_nothing_is_summed_or_wrapped():
    """One rank needs no process group."""
    module = torch.nn.Linear(1, 1)
    peers = Peers()
    assert peers.wrap(module) is module
    assert peers.total(5) == 5
    sums = Sums(torch.device("cpu"), peers, CORRECT)
    sums.add(torch.tensor(1.5), 2, {"correct": torch.tensor(1)})
    metrics = sums.metrics()
    assert (metrics.count, metrics.loss_sum, metrics.metrics) == (
        2,
        1.5,
        {"correct": 1},
    )


def walks(train: Dataset, batch_size: int, num_ranks: int) -> list[list[np.ndarray]]:
    """The batches of two epochs, by rank."""
    job = small_job(
        training={
            "local_epochs": 2,
            "batch_size": batch_size,
            "optimizer": {"lr": 0.5},
        }
    )
    pool = ModelPool(job)
    return [
        list(
            TorchTrainer(
                job,
                SITE,
                pool=pool,
                train=train,
                held_out=HELD_OUT,
                peers=Peers(rank=Rank(rank=rank, world_size=num_ranks)),
            )._indices(1, range(0))
        )
        for rank in range(num_ranks)
    ]


def test_ranks_take_the_batches_that_one_would():
    """The same examples in every step, also in the last of an epoch."""
    (one,) = walks(TRAIN, 25, 1)
    dealt = walks(TRAIN, 25, 3)
    assert [len(one)] * 3 == [len(walk) for walk in dealt]
    for batch, parts in zip(one, zip(*dealt, strict=True), strict=True):
        assert sorted(batch) == sorted(np.concatenate(parts))


def test_ranks_read_shards_of_their_own():
    """Data with an order of its own is dealt out by shards: each example once."""
    train, _ = shards()
    dealt = walks(train, 10, 2)
    assert len(dealt[0]) == len(dealt[1]) == 12
    first_epochs = [np.concatenate(walk[:6]) for walk in dealt]
    assert sorted(np.concatenate(first_epochs)) == list(range(60))


def test_a_batch_of_shards_must_be_shared_out_evenly():
    """The message names the key and the ranks."""
    train, _ = shards()
    with pytest.raises(JobError, match=r"training.batch_size: is 25: .* 2 ranks"):
        walks(train, 25, 2)


def shards():
    store = MemoryStore()
    write_dataset(store, TRAIN, HELD_OUT, name="blobs", shard_bytes=2000)
    return open_dataset(store, reading=ReadOptions(order="shards", window=1, threads=0))

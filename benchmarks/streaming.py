"""Training on data in a store that is far away: what waiting costs, and what helps.

The store is 30 ms away and gives 100 MB/s over all requests together. A step takes as
long as an accelerator's would, in which this machine's processor has nothing to do.
Every way reads the same batches in the same order, and starts with nothing read: once
at once, and once as a site does, which names the first batches when its trainer is made
and then waits for its first task and evaluates.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import facts

from clients.data.batches import epochwise
from clients.data.datasets import Dataset, Examples, Indices, as_dataset
from clients.shards.dataset import ReadOptions, ShardedDataset, open_dataset
from clients.shards.order import telling_ahead
from clients.shards.write import write_dataset
from cloud_adapters.storage.cached import ObjectCache
from cloud_adapters.storage.disk.store import LocalStore
from federation.ids import SiteId
from federation.protocols import ObjectStore

LATENCY_SECONDS = 0.030
BYTES_PER_SECOND = 100e6
BATCH, WINDOW, EPOCHS = 64, 2, 2
MIB = 1024 * 1024


class FarStore:
    """A store behind a wire. What its own machine computes is not our time."""

    def __init__(self, store: ObjectStore) -> None:
        self.url = "far"
        self._contents = {info.key: store.read(info.key) for info in store.list()}
        self._wire = threading.Lock()
        self.bytes = 0

    def read(self, key: str) -> bytes:
        time.sleep(LATENCY_SECONDS)
        content = self._contents[key]
        with self._wire:
            time.sleep(len(content) / BYTES_PER_SECOND)
            self.bytes += len(content)
        return content


class InMemory:
    """Examples in memory, read in the order of the sharded ones."""

    def __init__(self, data: Dataset, order_of: ShardedDataset) -> None:
        self.batch = data.batch
        self.epoch_order = order_of.epoch_order
        self.examples_ahead = 1

    def __len__(self) -> int:
        raise NotImplementedError

    def expect(self, indices: Indices) -> None:
        """Everything is there."""


def examples(size: int) -> tuple[Dataset, Dataset]:
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(size, 3, 32, 32)).astype(np.float32)
    train = Examples(inputs=inputs, targets=rng.integers(0, 10, size))
    data = as_dataset(train, name="train")
    return data, data.subset(np.arange(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Seconds of an epoch, and those of them in which the trainer waits for data."""

    seconds: float
    waited: float


def batches(data: Any, size: int, epoch: int) -> Iterator[Indices]:
    """The batches of an epoch; those of the next are told as well."""
    walk = epochwise(
        size,
        batch_size=BATCH,
        first_epoch=epoch,
        num_epochs=EPOCHS - epoch,
        seed=1,
        site=SiteId("a"),
        shuffle=data.epoch_order,
    )
    return telling_ahead(data, walk, -(-size // BATCH))


def train(data: Any, size: int, step_seconds: float, epoch: int) -> Epoch:
    """The wait for the first batch is part of it."""
    began = asked = time.perf_counter()
    waited = 0.0
    for chosen in batches(data, size, epoch):
        data.batch(chosen)
        waited += time.perf_counter() - asked
        time.sleep(step_seconds)
        asked = time.perf_counter()
    return Epoch(seconds=asked - began, waited=waited)


def ways(far: FarStore, near: LocalStore, data: Dataset, folder: Path) -> Iterator[Any]:
    """Name, dataset."""

    def opened(store: Any, threads: int, cache: str = "") -> ShardedDataset:
        reading = ReadOptions(
            order="shards", window=WINDOW, memory_bytes=0, threads=threads
        )
        kept = ObjectCache(folder / cache, 10**12) if cache else None
        return open_dataset(store, cache=kept, reading=reading)[0]

    yield "memory", InMemory(data, opened(near, 0))
    yield "local disk", opened(near, 4)
    yield "store", opened(far, 0)
    yield "store, prefetch", opened(far, 4)
    yield "store, cache", opened(far, 0, "one")
    yield "store, prefetch and cache", opened(far, 4, "two")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=6_000)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--setup-seconds", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    data, held_out = examples(options.examples)
    with tempfile.TemporaryDirectory() as name:
        near = LocalStore(Path(name) / "store")
        index = write_dataset(near, data, held_out, name="x", shard_bytes=8 * MIB)
        settings = {"shards": len(index.train.shards), **vars(options)}
        print(json.dumps(facts("streaming", **settings)), flush=True)
        far = FarStore(near)
        cold: dict[str, list[Epoch]] = {}
        warm: dict[str, list[Epoch]] = {}
        read: dict[str, float] = {}
        # All ways in turn, several times: other work on the machine only adds time.
        for repeat in range(options.repeats):
            folder = Path(name) / str(repeat)
            for way, dataset in ways(far, near, data, folder / "at once"):
                now = [train(dataset, options.examples, options.step_seconds, 0)]
                cold[way] = least(cold.get(way, now), now)
            for way, dataset in ways(far, near, data, folder / "as a site"):
                far.bytes = 0
                batches(dataset, options.examples, 0)
                time.sleep(options.setup_seconds)
                now = [
                    train(dataset, options.examples, options.step_seconds, epoch)
                    for epoch in range(EPOCHS)
                ]
                warm[way] = least(warm.get(way, now), now)
                read[way] = far.bytes / 1e6
    memory = cold["memory"] + warm["memory"]
    steps = -(-options.examples // BATCH) * options.step_seconds
    for way, at_once in cold.items():
        found = at_once + warm[way]
        pairs = list(zip(memory, found, strict=True))
        row = {
            "data": way,
            "best_seconds": [round(epoch.seconds, 3) for epoch in found],
            "waited_seconds": [round(epoch.waited, 3) for epoch in found],
            "speed_of_memory": [round(m.seconds / e.seconds, 4) for m, e in pairs],
            # Steps as long as they were asked to be: a loaded machine wakes up late.
            "speed_by_waits": [
                round((steps + m.waited) / (steps + e.waited), 4) for m, e in pairs
            ],
            "far_mb": round(read[way], 1),
        }
        print(json.dumps(row), flush=True)


def least(before: list[Epoch], now: list[Epoch]) -> list[Epoch]:
    """The quicker one of each epoch."""
    pairs = zip(before, now, strict=True)
    return [min(pair, key=lambda epoch: epoch.seconds) for pair in pairs]


if __name__ == "__main__":
    main()

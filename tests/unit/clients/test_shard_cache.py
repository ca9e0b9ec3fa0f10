"""Shards of a dataset that are open, and those that are on their way."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.faulty_store import FaultyStore
from support.small_jobs import blobs

from clients.data.datasets import as_dataset
from clients.shards.dataset import ReadOptions, ShardedDataset, open_dataset
from clients.shards.write import write_dataset
from cloud_adapters.storage.memory import MemoryStore

# Longer than any of this takes; a test that waits so long has failed.
PATIENCE_SECONDS = 60.0


class Gate(FaultyStore):
    """A store that gives its shards when it is told to."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.asked: list[str] = []
        self.given: list[str] = []
        self.closed: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def read(self, key: str, **options: object) -> bytes:  # type: ignore[override]
        del options
        with self._changed:
            self.asked.append(key)
            self._changed.notify_all()
        if key in self.closed:
            self.closed[key].wait(PATIENCE_SECONDS)
        content = self.store.read(key)
        self.given.append(key)
        return content

    def wait_for(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(reached, PATIENCE_SECONDS)


def opened(*, memory_bytes: int = 10**9) -> tuple[Gate, ShardedDataset, list[str]]:
    """Seven shards, and one thread that fetches in advance."""
    store = MemoryStore()
    train, held_out = (as_dataset(part, name="blobs") for part in blobs())
    index = write_dataset(store, train, held_out, name="x", shard_bytes=10 * 2048)
    gate = Gate(store)
    reading = ReadOptions(window=1, memory_bytes=memory_bytes, threads=1)
    data, _ = open_dataset(gate, reading=reading)
    gate.asked.clear()
    gate.given.clear()
    return gate, data, [shard.key for shard in index.train.shards]


def test_who_needs_a_shard_now_does_not_queue():
    """It fetches one that waits for a thread by itself; each is fetched once."""
    gate, data, keys = opened()
    gate.closed[keys[0]] = threading.Event()
    data.expect(np.arange(60))
    gate.wait_for(lambda: keys[0] in gate.asked)  # The only thread is held up.
    last = np.array([59])
    assert len(data.batch(last)[0]) == 1
    assert gate.given == keys[-1:]
    gate.closed[keys[0]].set()
    data.batch(np.arange(60))
    assert sorted(gate.asked) == sorted(keys)


def test_what_is_not_wanted_any_more_is_not_fetched():
    """Shards that had to make room before a thread came to them."""
    gate, data, keys = opened(memory_bytes=0)  # Room for four.
    gate.closed[keys[0]] = threading.Event()
    data.expect(np.array([0]))
    gate.wait_for(lambda: keys[0] in gate.asked)
    data.expect(np.arange(60))
    gate.closed[keys[0]].set()
    data.batch(np.array([59]))
    data.cache._pool.shutdown()
    assert set(gate.asked) == {keys[0], *keys[-4:]}
    assert len(gate.asked) == 5


@pytest.mark.slow
def test_many_threads_share_a_cache_that_is_too_small():
    """As the sites of a simulation do; each gets what it asks for."""
    _, data, _ = opened(memory_bytes=0)
    expected = data.batch(np.arange(60))[0]

    def read(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            data.expect(rng.permutation(60))
            chosen = rng.integers(0, 60, 5)
            if not torch.equal(data.batch(chosen)[0], expected[chosen]):
                return False
        return True

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # Threads meet at every place where they can.
    try:
        pool = ThreadPoolExecutor(6)
        futures = [pool.submit(read, seed) for seed in range(6)]
        assert all(future.result(PATIENCE_SECONDS) for future in futures)
        pool.shutdown()
    finally:
        sys.setswitchinterval(before)

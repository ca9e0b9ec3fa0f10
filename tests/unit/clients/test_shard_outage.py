"""Training on shards of a store that is out of reach for a while."""

import numpy as np
import pytest
from support.faulty_store import FaultyStore
from support.small_jobs import blobs, small_job

from clients.data.datasets import Dataset, as_dataset
from clients.models.model_pool import ModelPool
from clients.shards.dataset import ReadOptions, ShardedDataset, open_dataset
from clients.shards.shard_cache import PATIENCE
from clients.shards.write import write_dataset
from clients.training.local_federation import Federation
from clients.training.trainer import TorchTrainer
from cloud_adapters.local.inproc_grid import InProcessGrid
from cloud_adapters.storage.memory import MemoryStore
from cloud_adapters.storage.retry import Retry
from deploy.wiring.run import ConnectedSites, Run
from federation.clock import VirtualClock
from federation.errors import CorruptObject, StoreUnavailable
from federation.ids import RunId, SiteId
from federation.protocols import RunState

TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
JOB = small_job(
    rounds=2, training={"local_epochs": 1, "batch_size": 7, "optimizer": {"lr": 0.5}}
)
# Shards of 10 examples, of which two are open at a time.
SHARD_BYTES = 10 * 2048


class Outage:
    """A store that is out of reach for some seconds from one of its reads on."""

    def __init__(self, *, from_read: int, seconds: float) -> None:
        self.clock = VirtualClock()
        self.failed = 0
        self._from_read = from_read
        self._seconds = seconds
        self._over: float | None = None

    def meddle(self, number: int, content: bytes) -> bytes:
        if number >= self._from_read and self._over is None:
            self._over = self.clock.now() + self._seconds
        if self._over is not None and self.clock.now() < self._over:
            self.failed += 1
            raise StoreUnavailable("the network is gone", temporary=True)
        return content


def patience(clock: VirtualClock) -> Retry:
    """The product's own, with the longest waits."""
    return Retry(
        attempts=PATIENCE.attempts,
        base_seconds=PATIENCE.base_seconds,
        cap_seconds=PATIENCE.cap_seconds,
        deadline_seconds=PATIENCE.deadline_seconds,
        clock=clock,
        uniform=lambda _, most: most,
    )


def opened(outage: Outage, *, threads: int) -> tuple[ShardedDataset, ShardedDataset]:
    store = MemoryStore()
    write_dataset(store, TRAIN, HELD_OUT, name="blobs", shard_bytes=SHARD_BYTES)
    return open_dataset(
        FaultyStore(store, outage.meddle),
        reading=ReadOptions(memory_bytes=0, window=1, threads=threads),
        retry=patience(outage.clock),
    )


def trained(train: Dataset, held_out: Dataset) -> list[np.ndarray]:
    pool = ModelPool(JOB)
    trainer = TorchTrainer(
        JOB, SiteId("site-0"), pool=pool, train=train, held_out=held_out
    )
    weights_d, integers_m = pool.initial_weights()
    found = []
    for round_index in (1, 2):
        result = trainer.fit(weights_d, integers_m, round_index=round_index)
        weights_d, integers_m = result.weights_d, result.integers_m
        found.append(weights_d)
    return found


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("from_read", [4, 9, 20])
def test_an_outage_of_a_minute_changes_no_bit(threads: int, from_read: int):
    """Whether shards are fetched in advance or not; no round is lost."""
    outage = Outage(from_read=from_read, seconds=60.0)
    parts = opened(outage, threads=threads)
    assert outage.failed == 0  # Index and labels were read before.
    found = trained(*parts)
    assert outage.failed > 0
    assert 60.0 <= outage.clock.now() < 120.0
    for ours_d, theirs_d in zip(found, trained(TRAIN, HELD_OUT), strict=True):
        np.testing.assert_array_equal(ours_d, theirs_d)


def test_an_outage_that_lasts():
    """It ends with the store's error, and the data can be read afterwards."""
    outage = Outage(from_read=4, seconds=3600.0)
    train, _ = opened(outage, threads=0)
    with pytest.raises(StoreUnavailable, match=r"network is gone \(tried \d+ times"):
        train.batch(np.arange(60))
    assert 300.0 < outage.clock.now() <= 610.0
    outage.clock.sleep(3600.0)
    assert len(train.batch(np.arange(60))[0]) == 60


def test_damage_is_not_waited_out():
    """A shard that is wrong now is wrong in a minute."""
    outage = Outage(from_read=10**9, seconds=0.0)
    train, _ = opened(outage, threads=0)
    store = train.cache.store
    assert isinstance(store, FaultyStore)
    store.store.put(train.split.shards[0].key, [b"x" * train.split.shards[0].bytes])
    with pytest.raises(CorruptObject):
        train.batch(np.array([0]))
    assert outage.clock.now() == 0.0


@pytest.mark.parametrize("threads", [0, 2])
def test_a_run_goes_on_after_an_outage(threads: int):
    """Every round of a whole job is completed, with the weights of data in memory."""
    outage = Outage(from_read=9, seconds=60.0)
    found = rounds_of(opened(outage, threads=threads), outage.clock)
    assert outage.failed > 0
    assert found.rounds_completed == found.round_index == JOB.rounds
    expected = rounds_of((TRAIN, HELD_OUT), VirtualClock())
    np.testing.assert_array_equal(found.weights_d, expected.weights_d)


def rounds_of(data: tuple[Dataset, Dataset], clock: VirtualClock) -> RunState:
    """Run the job with one site."""
    site = SiteId("site-0")
    federation = Federation(job=JOB, pool=ModelPool(JOB), site_data={site: data})
    handler = federation.site(
        site,
        make_trainer=lambda: federation.trainer(site),
        store=MemoryStore(),
        clock=clock,
    )
    with InProcessGrid({site: handler}, clock=clock, workers=1) as grid:
        run = Run(
            federation=federation,
            run_id=RunId("run"),
            clock=clock,
            store=MemoryStore(),
            emit=lambda _: None,
        )
        return run.drive(ConnectedSites(engine="inproc", grid=grid))

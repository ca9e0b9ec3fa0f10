"""Large checkpoints in chunks: only what has changed is sent, and damage is seen."""

import dataclasses
import hashlib
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.examples import few

from aggregator import manifest as manifests
from aggregator.checkpoint import RunCheckpoints
from aggregator.checkpoint_objects import CheckpointObjects
from aggregator.manifest import Blob, Manifest, cut
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import VirtualClock
from federation.errors import RunConflict, StoreUnavailable
from federation.events import CheckpointSkipped, Event
from federation.protocols import Buffer, ObjectInfo, ObjectStore, RunState
from federation.vectors import Layout, Role

pytestmark = pytest.mark.slow

CHUNK = 1_000
SIZE = 25_000  # values: 101 chunks of weights
LAYOUT = Layout.build([("x", (SIZE,), "float32", Role.PARAMETER)])
LARGE = Layout.build([("x", (1 << 20,), "float32", Role.PARAMETER)])


def state_of(round_index: int, layout: Layout = LAYOUT) -> RunState:
    rng = np.random.default_rng(round_index)
    weights_d, moment_d = rng.random((2, layout.size), dtype=np.float32)
    return RunState(
        round_index=round_index,
        weights_d=weights_d,
        integers_m=np.zeros(0, np.int64),
        optimizer={"moment": moment_d},
        rounds_completed=round_index,
        lost_in_a_row=0,
    )


def changed(state: RunState, fraction: float) -> RunState:
    """The next round's state, of which a piece of the weights is another."""
    weights_d = state.weights_d.copy()
    weights_d[: round(fraction * weights_d.size)] += 1
    return dataclasses.replace(
        state, round_index=state.round_index + 1, weights_d=weights_d
    )


def opened(
    store: ObjectStore,
    emit: Callable[[Event], None] = lambda _: None,
    **changes: Any,
) -> RunCheckpoints:
    arguments: dict[str, Any] = {
        "store": store,
        "prefix": "",
        "run_id": "run",
        "job": {},
        "layout": LAYOUT,
        "keep": 3,
        "emit": emit,
        "clock": VirtualClock(5.0),
        "chunk_bytes": CHUNK,
    }
    return RunCheckpoints(**{**arguments, **changes})


def same(mine: RunState | None, other: RunState) -> bool:
    return (
        mine is not None
        and mine.round_index == other.round_index
        and mine.weights_d.tobytes() == other.weights_d.tobytes()
        and mine.optimizer["moment"].tobytes() == other.optimizer["moment"].tobytes()
    )


def manifest_of(store: ObjectStore, round_index: int) -> Manifest:
    key = f"round-{round_index:06d}.json"
    return manifests.decode(key, store.read(key))


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_round_trip(tmp_path: Path, kind: str):
    """A state in a hundred chunks comes back bit by bit."""
    store = MemoryStore() if kind == "memory" else LocalStore(tmp_path)
    opened(store).save(state_of(1))
    assert same(opened(store).load_latest(), state_of(1))
    assert list(store.list("blobs/")) == []
    # 100,000 bytes of values and a header, twice.
    assert len(list(store.list("chunks/"))) == 202


def test_one_per_cent_changed_sends_few_chunks():
    """Of 202 chunks two have changed; the rest is there already."""
    store = MemoryStore()
    checkpoints = opened(store)
    state = state_of(1)
    checkpoints.save(state)
    written = checkpoints.save(changed(state, 0.01))
    of_manifest = store.stat("round-000002.json").size
    assert 0 < written - of_manifest <= 2 * CHUNK
    assert same(opened(store).load_latest(), changed(state, 0.01))


def test_delta_after_resume():
    """A coordinator that has verified a checkpoint sends what differs from it."""
    store = MemoryStore()
    opened(store).save(state_of(1))
    resumed = opened(store)
    state = resumed.load_latest()
    assert state is not None
    written = resumed.save(changed(state, 0.01))
    assert written - store.stat("round-000002.json").size <= 2 * CHUNK


def test_vanished_chunk_is_sent_again():
    """What is known to be whole is not taken for there."""
    store = MemoryStore()
    checkpoints = opened(store)
    checkpoints.save(state_of(1))
    victim = manifest_of(store, 1).weights.objects[50]
    store.delete(victim.key)
    checkpoints.save(dataclasses.replace(state_of(1), round_index=2))
    assert store.stat(victim.key).size == CHUNK
    assert opened(store).load_latest() is not None


def test_old_chunks_go():
    """After retention there is what the kept manifests name, and no more."""
    store = MemoryStore()
    checkpoints = opened(store, keep=2)
    state = state_of(1)
    for _ in range(5):
        checkpoints.save(state)
        state = changed(state, 0.1)
    needed = {
        chunk.key for index in (4, 5) for chunk in manifest_of(store, index).objects
    }
    assert {info.key for info in store.list("chunks/")} == needed


def test_chunk_written_anew_is_not_removed():
    """A chunk that another coordinator has written since it was listed stays."""
    store = MemoryStore()
    seen = store.put("chunks/a", [b"x"])
    store.put("chunks/a", [b"x"])
    gone = dataclasses.replace(seen, key="chunks/b")
    assert CheckpointObjects(store, "").remove([seen, gone]) == 0
    assert store.read("chunks/a") == b"x"


def torn(store: ObjectStore, key: str) -> None:
    store.put(key, [store.read(key)[:-1]])


def flipped(store: ObjectStore, key: str) -> None:
    content = bytearray(store.read(key))
    content[0] ^= 1
    store.put(key, [content])


@pytest.mark.parametrize("harm", [torn, flipped, MemoryStore.delete])
@pytest.mark.parametrize("position", [0, 50, -1])
@pytest.mark.parametrize("blob", ["weights", "optimizer"])
def test_damaged_chunk_falls_back(
    harm: Callable[[MemoryStore, str], None], position: int, blob: str
):
    """The previous checkpoint is loaded, the event names the chunk."""
    store, events = MemoryStore(), list[Event]()
    opened(store).save(state_of(1))
    opened(store).save(state_of(2))
    victim = getattr(manifest_of(store, 2), blob).objects[position]
    harm(store, victim.key)
    checkpoints = opened(store, events.append)
    assert same(checkpoints.load_latest(), state_of(1))
    (event,) = events
    assert isinstance(event, CheckpointSkipped)
    assert victim.key in event.reason
    checkpoints.save(state_of(2))
    assert same(opened(store).load_latest(), state_of(2))


class Flaky(MemoryStore):
    """Fails for good from its n-th change on; counts writes that are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.changes_left = 1 << 30
        self.busy, self.most_busy = 0, 0
        self._count_lock = threading.Lock()

    def _count(self) -> None:
        with self._count_lock:
            self.changes_left -= 1
            if self.changes_left < 0:
                raise StoreUnavailable("the network is gone")
            self.busy += 1
            self.most_busy = max(self.busy, self.most_busy)

    def put(self, key: str, data: Iterable[Buffer], **options: Any) -> ObjectInfo:
        self._count()
        try:
            return super().put(key, data, **options)
        finally:
            with self._count_lock:
                self.busy -= 1

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)
        self.busy -= 1


def test_crash_at_every_change_of_a_save():
    """Wherever a save stops, the run loads whole, and nothing is left over."""
    loaded = []
    for change in range(20):
        store = Flaky()
        checkpoints = opened(store, keep=1, chunk_bytes=30_000)
        for index in (1, 2):
            checkpoints.save(state_of(index))
        store.changes_left = change
        try:
            checkpoints.save(state_of(3))
        except StoreUnavailable:
            store.changes_left = 1 << 30
            checkpoints = opened(store, keep=1, chunk_bytes=30_000)
            state = checkpoints.load_latest()
            assert same(state, state_of(state.round_index if state else 0))
            assert state is not None
            loaded.append(state.round_index)
            for index in (1, 2):
                checkpoints.save(state_of(state.round_index + index))
            assert len(list(store.list())) == 9
    # Eight chunks and the manifest; then a manifest and eight chunks are removed.
    assert loaded == [2] * 9 + [3] * 9


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_sixteen_writers(tmp_path: Path, kind: str):
    """Of many coordinators with one round one wins, and its checkpoint is whole."""
    store = MemoryStore() if kind == "memory" else LocalStore(tmp_path)
    barrier = threading.Barrier(16)

    def save(salt: int) -> int | None:
        state = dataclasses.replace(state_of(1 + salt % 4), round_index=1)
        checkpoints = opened(store, chunk_bytes=30_000)
        barrier.wait()
        try:
            checkpoints.save(state)
        except RunConflict:
            return None
        return salt

    with ThreadPoolExecutor(16) as pool:
        winners = [salt for salt in pool.map(save, range(16)) if salt is not None]
    (winner,) = winners
    expected = dataclasses.replace(state_of(1 + winner % 4), round_index=1)
    assert same(opened(store).load_latest(), expected)


@pytest.mark.slow
def test_no_second_copy_of_the_model(tmp_path: Path):
    """Saving holds no model, and loading the one that it returns."""
    store = LocalStore(tmp_path)
    arguments: dict[str, Any] = {"layout": LARGE, "chunk_bytes": 64 << 10}
    state = state_of(1, LARGE)
    model_bytes = 2 * state.weights_d.nbytes

    def peak_of(act: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            act()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    saving = peak_of(lambda: opened(store, **arguments).save(state))
    loading = peak_of(lambda: opened(store, **arguments).load_latest())
    assert saving < model_bytes // 8
    assert loading < model_bytes * 9 // 8


def split(content: bytes, cuts: Sequence[int]) -> list[bytes]:
    ends = sorted({0, len(content), *(c % (len(content) + 1) for c in cuts)})
    return [content[a:b] for a, b in itertools.pairwise(ends)]


@few(50)
@given(
    st.binary(max_size=200),
    st.lists(st.integers(0, 200), max_size=8),
    st.integers(1, 60),
)
def test_chunks_do_not_depend_on_pieces(
    content: bytes, cuts: list[int], chunk_bytes: int
):
    """However a content comes in pieces, its chunks are the same and add up to it."""
    pieces = split(content, cuts)
    blob = Blob.of(pieces, chunk_bytes)
    assert Blob.of([content], chunk_bytes) == blob
    parts = [b"".join(cut(pieces, c.start, c.size)) for c in blob.objects]
    assert b"".join(parts) == content
    assert [hashlib.sha256(part).hexdigest() for part in parts] == [
        chunk.sha256 for chunk in blob.objects
    ]
    assert all(len(part) == chunk_bytes for part in parts[:-1])
    assert len(parts[-1]) <= chunk_bytes


@few(50)
@given(st.binary(max_size=300), st.integers(1, 60))
def test_manifest_keeps_chunks(content: bytes, chunk_bytes: int):
    """What is written of a blob is what is read of it."""
    manifest = Manifest(
        key="round-000001.json",
        run_id="run",
        round_index=1,
        rounds_completed=1,
        lost_in_a_row=0,
        job={},
        layout=LAYOUT,
        weights=Blob.of([content], chunk_bytes),
        optimizer=None,
        optimizer_names=(),
    )
    assert manifests.decode(manifest.key, manifests.encode(manifest)) == manifest


def test_chunk_size_is_checked():
    """Nonsense is refused when it is said."""
    with pytest.raises(ValueError, match="chunk"):
        opened(MemoryStore(), chunk_bytes=0)

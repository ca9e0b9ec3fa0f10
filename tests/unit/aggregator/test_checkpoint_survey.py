"""Surveys tell what is there and wrong; pruning never removes what is needed."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from aggregator.checkpoint import RunCheckpoints
from aggregator.checkpoint_survey import GRACE_SECONDS, Survey, prune, survey
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import VirtualClock
from federation.errors import StoreUnavailable
from federation.protocols import Buffer, ObjectInfo, ObjectStore, RunState
from federation.vectors import Layout, Role

LAYOUT = Layout.build([("x", (1_000,), "float32", Role.PARAMETER)])
PREFIX = "checkpoints/"
LATER = 1e6


class Dated(MemoryStore):
    """Says when each object was written, and fails from its n-th change on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.times: dict[str, float] = {}
        self.changes_left = 1 << 30

    def put(self, key: str, data: Iterable[Buffer], **options: Any) -> ObjectInfo:
        self.times[key] = self.now
        return super().put(key, data, **options)

    def stat(self, key: str) -> ObjectInfo:
        info = super().stat(key)
        return ObjectInfo(
            key=key, size=info.size, version=info.version, updated=self.times[key]
        )

    def delete(self, key: str) -> None:
        self.changes_left -= 1
        if self.changes_left < 0:
            raise StoreUnavailable("the network is gone")
        super().delete(key)


def opened(store: ObjectStore) -> RunCheckpoints:
    return RunCheckpoints(
        store=store,
        prefix=PREFIX,
        run_id="run",
        job={},
        layout=LAYOUT,
        keep=9,
        emit=lambda _: None,
        clock=VirtualClock(0.0),
        chunk_bytes=1_000,
    )


def state_of(round_index: int) -> RunState:
    """Weights of which one chunk changes from round to round, and the head."""
    weights_d = np.arange(1_000, dtype=np.float32)
    weights_d[0] = -round_index
    return RunState(
        round_index=round_index,
        weights_d=weights_d,
        integers_m=np.zeros(0, np.int64),
        optimizer={},
        rounds_completed=round_index,
        lost_in_a_row=0,
    )


@pytest.fixture
def store() -> Dated:
    """Five checkpoints."""
    store = Dated()
    checkpoints = opened(store)
    for index in range(1, 6):
        checkpoints.save(state_of(index))
    return store


def name(round_index: int) -> str:
    return f"{PREFIX}round-{round_index:06d}.json"


def rounds(found: Survey) -> list[int | None]:
    return [one.round_index for one in found.checkpoints]


def own_chunk(store: ObjectStore) -> str:
    """An object that the last checkpoint alone needs."""
    last = opened(store)
    before = {info.key for info in store.list(f"{PREFIX}chunks/")}
    last.save(state_of(6))
    (new,) = {info.key for info in store.list(f"{PREFIX}chunks/")} - before
    return new


def test_survey_counts_what_is_shared(store: Dated):
    """All but the chunk that changes is shared with the round before."""
    found = survey(store, PREFIX)
    assert rounds(found) == [1, 2, 3, 4, 5]
    first, *others = found.checkpoints
    assert first.shared == 0
    for one in others:
        assert one.size - one.shared == 1_000 + store.stat(one.key).size
    everything = sum(one.size - one.shared for one in found.checkpoints)
    assert sum(info.size for info in store.list()) == everything
    assert not any(one.damage for one in found.checkpoints)
    assert (found.num_unnamed, found.unnamed_bytes) == (0, 0)


@pytest.mark.parametrize("harm", ["torn", "missing", "flipped"])
def test_damage_is_told(store: Dated, harm: str):
    """Sizes tell of what is torn or missing; a flipped bit needs ``verify``."""
    key = own_chunk(store)
    content = store.read(key)
    if harm == "missing":
        store.delete(key)
    else:
        changed = content[:-1] if harm == "torn" else bytes([content[0] ^ 1])
        store.put(key, [changed, content[1:] if harm == "flipped" else b""])
    by_size = [bool(one.damage) for one in survey(store, PREFIX).checkpoints]
    assert by_size == [False] * 5 + [harm != "flipped"]
    found = survey(store, PREFIX, verify=True)
    assert found.verified
    assert [key in one.damage for one in found.checkpoints] == [False] * 5 + [True]


def test_shared_object_is_read_once(store: Dated):
    """Verifying five checkpoints reads each object once."""
    reads = []
    read = store.read

    def counted(key: str, **options: Any) -> bytes:
        reads.append(key)
        return read(key, **options)

    store.read = counted  # type: ignore[method-assign]
    survey(store, PREFIX, verify=True)
    chunks = [key for key in reads if "chunks/" in key]
    assert len(chunks) == len(set(chunks)) == 9


@pytest.mark.parametrize("keep", [1, 2, 5, 6])
def test_prune_keeps_the_newest(store: Dated, keep: int):
    """They stay whole, and nothing stays that they do not need."""
    done = prune(store, PREFIX, keep=keep, now=0.0)
    assert len(done.checkpoints) == max(0, 5 - keep)
    assert done.freed_bytes == 1_000 * max(0, 5 - keep)
    found = survey(store, PREFIX, verify=True)
    assert rounds(found) == [1, 2, 3, 4, 5][-keep:]
    assert not any(one.damage for one in found.checkpoints)
    assert found.num_unnamed == 0
    loaded = opened(store).load_latest()
    assert loaded is not None
    assert loaded.weights_d.tobytes() == state_of(5).weights_d.tobytes()


def test_prune_spares_what_it_cannot_read(store: Dated):
    """While a manifest that stays cannot be read, no object is removed."""
    before = {info.key for info in store.list(f"{PREFIX}chunks/")}
    opened(store).save(state_of(6))
    store.put(name(6), [b"torn"])
    before |= {info.key for info in store.list(f"{PREFIX}chunks/")}
    done = prune(store, PREFIX, keep=1, now=LATER)
    assert done.checkpoints == tuple(name(index) for index in (1, 2, 3, 4))
    assert {info.key for info in store.list(f"{PREFIX}chunks/")} == before


def test_nothing_is_removed_without_a_whole_one(store: Dated):
    """Fewer whole checkpoints than are to be kept: all stay."""
    for index in (1, 2, 3, 4):
        store.put(name(index), [b"torn"])
    assert prune(store, PREFIX, keep=2, now=LATER).checkpoints == ()
    assert len(survey(store, PREFIX).checkpoints) == 5


def test_left_over_objects_have_a_day_of_grace(store: Dated):
    """A young one may be of a checkpoint that is being written."""
    key = f"{PREFIX}chunks/left-over"
    store.now = 1_000.0
    store.put(key, [b"x" * 10])
    found = survey(store, PREFIX)
    assert (found.num_unnamed, found.unnamed_bytes) == (1, 10)
    assert prune(store, PREFIX, keep=1, now=1_000.0 + GRACE_SECONDS).freed_bytes == 4000
    assert store.read(key)
    freed = prune(store, PREFIX, keep=1, now=1_001.0 + GRACE_SECONDS).freed_bytes
    assert freed == 10
    assert survey(store, PREFIX).num_unnamed == 0


@pytest.mark.parametrize("changes", range(9))
def test_prune_cut_short(store: Dated, changes: int):
    """Wherever it stops, every manifest that is left is whole; again, it ends well."""
    store.changes_left = changes
    try:
        prune(store, PREFIX, keep=1, now=0.0)
    except StoreUnavailable:
        found = survey(store, PREFIX, verify=True)
        assert not any(one.damage for one in found.checkpoints)
        assert rounds(found)[-1] == 5
    else:
        assert changes == 8
    store.changes_left = 1 << 30
    prune(store, PREFIX, keep=1, now=LATER)
    found = survey(store, PREFIX, verify=True)
    assert rounds(found) == [5]
    assert found.num_unnamed == 0


def test_at_least_one_is_kept(store: Dated):
    """Nonsense is refused when it is said."""
    with pytest.raises(ValueError, match="at least 1"):
        prune(store, PREFIX, keep=0, now=0.0)

"""Checkpoints: bit-identical or refused, whatever happened to the store."""

import dataclasses
import hashlib
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.faulty_store import FlippingStore

from aggregator.checkpoint import RunCheckpoints
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import VirtualClock
from federation.errors import (
    CheckpointMismatch,
    CorruptObject,
    LayoutMismatch,
    RunConflict,
    StoreUnavailable,
)
from federation.events import CheckpointSkipped, Event
from federation.ids import SiteId
from federation.members import EVERYBODY
from federation.protocols import (
    Buffer,
    ObjectInfo,
    ObjectStore,
    ReadArguments,
    RunState,
    Suspicions,
)
from federation.vectors import Layout, Role

LAYOUT = Layout.build(
    [
        ("body.weight", (2, 3), "float32", Role.PARAMETER),
        ("body.steps", (), "int64", Role.MAX),
        ("empty", (0, 4), "float32", Role.BUFFER),
        ("head.weight", (3,), "bfloat16", Role.PARAMETER),
        ("mask", (2,), "bool", Role.FROM_SERVER),
    ]
)
OPTIMIZER = ("first_moment", "second_moment")
JOB: dict[str, Any] = {
    "name": "test",
    "rounds": 10,
    "training": {"optimizer": {"betas": (0.9, 0.999)}},
    "sites": ({"name": "a"}, {"name": "b"}),
}


def state_of(round_index: int, *, salt: int = 0, optimizer: bool = True) -> RunState:
    rng = np.random.default_rng([round_index, salt])
    vectors = [rng.normal(size=LAYOUT.size).astype(np.float32) for _ in range(3)]
    return RunState(
        round_index=round_index,
        weights_d=vectors[0],
        integers_m=rng.integers(0, 1 << 62, LAYOUT.num_integers, dtype=np.int64),
        optimizer=dict(zip(OPTIMIZER, vectors[1:], strict=True)) if optimizer else {},
        rounds_completed=round_index - 1,
        lost_in_a_row=1,
    )


def same(mine: RunState | None, other: RunState) -> bool:
    if mine is None or list(mine.optimizer) != list(other.optimizer):
        return False
    pairs = [(mine.weights_d, other.weights_d), (mine.integers_m, other.integers_m)]
    pairs += [(mine.optimizer[n], other.optimizer[n]) for n in other.optimizer]
    bits = all(a.tobytes() == b.tobytes() and a.dtype == b.dtype for a, b in pairs)  # type: ignore[attr-defined]
    counts = ("round_index", "rounds_completed", "lost_in_a_row")
    return bits and all(getattr(mine, n) == getattr(other, n) for n in counts)


class Run:
    """A run's checkpoints with the events that they emit."""

    def __init__(self, store: ObjectStore | None = None, **changes: Any) -> None:
        self.store = MemoryStore() if store is None else store
        self.events: list[Event] = []
        self.changes = changes

    def open(self, **changes: Any) -> RunCheckpoints:
        """What a coordinator that starts now would use."""
        arguments: dict[str, Any] = {
            "store": self.store,
            "prefix": "checkpoints/",
            "run_id": "run-1",
            "job": JOB,
            "layout": LAYOUT,
            "keep": 3,
            "emit": self.events.append,
            "clock": VirtualClock(5.0),
        }
        return RunCheckpoints(**{**arguments, **self.changes, **changes})

    def names(self, prefix: str = "") -> list[str]:
        start = "checkpoints/"
        return [
            info.key.removeprefix(start) for info in self.store.list(start + prefix)
        ]

    def blobs_of(self, round_index: int) -> dict[str, str]:
        """Keys of a round's blobs by what they hold."""
        content = self.store.read(f"checkpoints/round-{round_index:06d}.json")
        blobs = json.loads(content)["blobs"]
        return {name: "checkpoints/" + blob["key"] for name, blob in blobs.items()}


def saved(*rounds: int, **changes: Any) -> Run:
    run = Run(**changes)
    checkpoints = run.open()
    for round_index in rounds:
        checkpoints.save(state_of(round_index))
    return run


def test_new_run_has_no_state():
    """Before the first save there is nothing to resume."""
    assert Run().open().load_latest() is None


def test_checkpoints_that_the_record_tells_of_are_missed():
    """The run does not begin again as if nothing had been trained."""
    for newest in (0, 7):
        with pytest.raises(CorruptObject, match=f"run saved round {newest}: "):
            Run().open(newest_saved=newest).load_latest()
    state = saved(7).open(newest_saved=7).load_latest()
    assert state is not None
    assert state.round_index == 7


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("prefix", ["", "checkpoints/"])
def test_round_trip(tmp_path: Path, prefix: str, *, optimizer: bool):
    """The newest state comes back bit by bit, in writable arrays of its own."""
    run = Run(LocalStore(tmp_path), prefix=prefix)
    run.open().save(state_of(1, optimizer=optimizer))
    run.open().save(state_of(2, optimizer=optimizer))
    found = run.open().load_latest()
    assert same(found, state_of(2, optimizer=optimizer))
    assert found is not None
    for array in (found.weights_d, found.integers_m, *found.optimizer.values()):
        assert array.flags.writeable  # type: ignore[attr-defined]
        assert array.flags.owndata  # type: ignore[attr-defined]
        assert array.flags.c_contiguous  # type: ignore[attr-defined]
    assert run.events == []


def test_special_values_survive():
    """NaN payloads, infinities and signed zeros are bits like any others."""
    bits = np.array([0x7FC00001, 0xFF800000, 0x80000000] * 3, dtype=np.uint32)
    state = dataclasses.replace(state_of(1), weights_d=bits.view(np.float32))
    run = Run()
    run.open().save(state)
    assert same(run.open().load_latest(), state)


def test_save_counts_its_bytes():
    """The answer is what the store has grown by."""
    run = Run()
    written = run.open().save(state_of(1))
    assert written == sum(info.size for info in run.store.list())


def test_unchanged_weights_are_written_once():
    """A round without result costs a manifest, not a model."""
    run = saved(1)
    checkpoints = run.open()
    state = checkpoints.load_latest()
    assert state is not None
    written = checkpoints.save(dataclasses.replace(state, round_index=2))
    assert written == run.store.stat("checkpoints/round-000002.json").size
    assert len(run.names("blobs/")) == 2
    assert same(
        run.open().load_latest(), dataclasses.replace(state_of(1), round_index=2)
    )


def test_saving_copies_no_model(tmp_path: Path):
    """Memory of a save does not grow with the model."""
    size = 1 << 20
    layout = Layout.build([("x", (size,), "float32", Role.PARAMETER)])
    state = dataclasses.replace(
        state_of(1, optimizer=False),
        weights_d=np.zeros(size, np.float32),
        integers_m=np.zeros(0, np.int64),
    )
    checkpoints = Run(LocalStore(tmp_path), layout=layout).open()
    tracemalloc.start()
    try:
        checkpoints.save(state)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * size // 8


@pytest.mark.parametrize("change", [{"keep": 0}, {"prefix": "no-slash"}])
def test_arguments_are_checked(change: dict[str, Any]):
    """Nonsense is refused when it is said."""
    with pytest.raises(ValueError, match=r"keep|slash"):
        Run().open(**change)


def test_second_coordinator_conflicts():
    """Of two coordinators the later one is told; the first one's round stays."""
    run = Run()
    first, second = run.open(), run.open()
    first.save(state_of(1))
    with pytest.raises(RunConflict, match=r"another coordinator .* run-1"):
        second.save(state_of(1, salt=1))
    assert same(run.open().load_latest(), state_of(1))


def test_late_coordinator_conflicts():
    """One that was asleep while its round was retired does not win either."""
    run = Run(keep=1)
    first, sleeper = run.open(), run.open()
    for round_index in (1, 2, 3):
        first.save(state_of(round_index))
    with pytest.raises(RunConflict, match=r"round-000003"):
        sleeper.save(state_of(1, salt=1))
    assert same(run.open().load_latest(), state_of(3))


def test_retention():
    """The last k checkpoints stay, with their blobs and no others."""
    run = saved(1, 2, 3, 4, 5)
    rounds = [3, 4, 5]
    assert run.names("round-") == [f"round-{r:06d}.json" for r in rounds]
    needed = {key for r in rounds for key in run.blobs_of(r).values()}
    assert {"checkpoints/" + key for key in run.names("blobs/")} == needed


def test_retention_reads_no_manifest_of_its_own():
    """What a coordinator has written it need not fetch; what it has not, it must."""

    class Reads(MemoryStore):
        keys: ClassVar[list[str]] = []

        def read(self, key: str, **options: Unpack[ReadArguments]) -> bytes:
            self.keys.append(key)
            return super().read(key, **options)

    run = Run(Reads())
    first = run.open()
    for round_index in (1, 2, 3, 4):
        first.save(state_of(round_index))
    assert Reads.keys == []
    run.open().save(state_of(5))
    assert Reads.keys == [f"checkpoints/round-{r:06d}.json" for r in (3, 4, 2)]


def test_retention_keeps_what_a_replaced_manifest_names():
    """Another coordinator wrote a round anew: the blobs of that one are needed."""
    run = Run(keep=5)
    first = run.open()
    first.save(state_of(1))
    first.save(state_of(2))
    run.store.delete("checkpoints/round-000002.json")
    run.open().save(state_of(2, salt=1))
    for round_index in (3, 4, 5):
        first.save(state_of(round_index))
    kept = {"checkpoints/" + name for name in run.names("blobs/")}
    assert set(run.blobs_of(2).values()) <= kept


def test_shared_blob_outlives_its_first_manifest():
    """A blob that a kept manifest names is not removed with an older one."""
    run = Run(keep=1)
    checkpoints = run.open()
    checkpoints.save(state_of(1))
    checkpoints.save(dataclasses.replace(state_of(1), round_index=2))
    assert run.names("round-") == ["round-000002.json"]
    assert run.open().load_latest() is not None


def test_retention_spares_what_it_cannot_read():
    """While a kept manifest cannot be read, no blob and no manifest is removed."""
    run = saved(1, 2, 3)
    before = set(run.names())
    tear(run, "checkpoints/round-000003.json", 10)
    run.open().save(state_of(4))
    assert before <= set(run.names())


def test_retention_removes_old_torn_manifest():
    """A torn manifest that is older than the last k goes like any other."""
    run = saved(1, 2, 3)
    tear(run, "checkpoints/round-000001.json", 10)
    checkpoints = run.open()
    checkpoints.save(state_of(4))
    checkpoints.save(state_of(5))
    assert run.names("round-") == [f"round-{r:06d}.json" for r in (3, 4, 5)]
    assert len(run.names("blobs/")) == 6


def test_other_job_is_refused_with_every_difference():
    """Each differing key is named with both values; nothing is moved."""
    run = saved(1)
    before = run.names()
    job = {**JOB, "rounds": 12, "sites": ({"name": "a"}, {"name": "c"}), "seed": 3}
    with pytest.raises(CheckpointMismatch) as caught:
        run.open(job=job).load_latest()
    message = str(caught.value)
    for part in ("rounds", "12", "10", "sites", "'c'", "'b'", "seed", "not set"):
        assert part in message
    assert run.names() == before


def test_other_job_is_refused_before_anything_is_moved():
    """A damaged newest checkpoint stays where it is when the job differs."""
    run = saved(1, 2)
    tear(run, "checkpoints/round-000002.json", 10)
    before = run.names()
    with pytest.raises(CheckpointMismatch, match="rounds"):
        run.open(job={**JOB, "rounds": 12}).load_latest()
    assert (run.names(), run.events) == (before, [])


def test_other_run_is_refused():
    """A folder of another run is not taken over."""
    with pytest.raises(CheckpointMismatch, match="'run-1', not to 'run-2'"):
        saved(1).open(run_id="run-2").load_latest()


def test_other_layout_is_refused():
    """The message names the tensor that differs."""
    layout = Layout.build([("body.weight", (9,), "float32", Role.PARAMETER)])
    with pytest.raises(LayoutMismatch, match=r"body\.weight"):
        saved(1).open(layout=layout).load_latest()


def rewrite(run: Run, **changes: Any) -> str:
    """Make a whole manifest with other members of round 1, and return its key."""
    key = "checkpoints/round-000001.json"
    document = json.loads(run.store.read(key))
    del document["sha256"]
    document |= changes

    def canonical(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    document["sha256"] = hashlib.sha256(canonical(document)).hexdigest()
    run.store.put(key, [canonical(document)])
    return key


def test_other_format_is_refused():
    """A manifest of another version is neither read nor moved aside."""
    run = saved(1)
    key = rewrite(run, format=5)
    with pytest.raises(CheckpointMismatch, match="format 5"):
        run.open().load_latest()
    assert key.removeprefix("checkpoints/") in run.names()


def tear(run: Run, key: str, length: int) -> None:
    run.store.put(key, [run.store.read(key, length=length)])


def flip(run: Run, key: str, bit: int) -> None:
    content = bytearray(run.store.read(key))
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    run.store.put(key, [content])


def check_falls_back(run: Run) -> None:
    """After damage to round 2: round 1 loads, and round 2 can be saved again."""
    checkpoints = run.open()
    assert same(checkpoints.load_latest(), state_of(1))
    (event,) = run.events
    assert isinstance(event, CheckpointSkipped)
    assert (event.at, event.key) == (5.0, "checkpoints/round-000002.json")
    assert event.reason
    assert "quarantine/round-000002.json.1" in run.names()
    checkpoints.save(state_of(2))
    assert same(run.open().load_latest(), state_of(2))


@pytest.mark.slow
def test_manifest_torn_anywhere():
    """A manifest that was cut at its start, in between or before its end is skipped."""
    run = saved(1, 2)
    key = "checkpoints/round-000002.json"
    whole = run.store.read(key)
    for length in (*range(0, len(whole), 7), len(whole) - 1):
        run = saved(1)
        run.store.put(key, [whole[:length]])
        assert same(run.open().load_latest(), state_of(1))
        assert len(run.events) == 1


@pytest.mark.parametrize("blob", ["weights", "optimizer"])
@pytest.mark.parametrize("cut", ["0", "1", "7", "8", "9", "half", "-9", "-8", "-1"])
def test_blob_torn(blob: str, cut: str):
    """A blob that was cut in its length, header or values is skipped and moved."""
    run = saved(1, 2)
    key = run.blobs_of(2)[blob]
    size = run.store.stat(key).size
    tear(run, key, size // 2 if cut == "half" else int(cut) % size)
    check_falls_back(run)
    assert f"quarantine/{key.rpartition('/')[2]}.1" in run.names()


@pytest.mark.parametrize("what", ["manifest", "weights", "optimizer"])
def test_appended_byte_is_found(what: str):
    """Even a blank after the end, which a parser would pass over, is damage."""
    run = saved(1, 2)
    keys = {"manifest": "checkpoints/round-000002.json", **run.blobs_of(2)}
    run.store.put(keys[what], [run.store.read(keys[what]), b" "])
    check_falls_back(run)


@pytest.mark.slow
@settings(deadline=None)  # Other work may share the machine.
@given(
    st.sampled_from(["manifest", "weights", "optimizer"]),
    st.integers(min_value=0, max_value=1 << 20),
)
def test_any_flipped_bit_is_found(what: str, bit: int):
    """One changed bit anywhere in a checkpoint and it is not used."""
    run = saved(1, 2)
    keys = {"manifest": "checkpoints/round-000002.json", **run.blobs_of(2)}
    flip(run, keys[what], bit)
    check_falls_back(run)


@pytest.mark.parametrize("what", ["manifest", "weights", "optimizer"])
@pytest.mark.parametrize("times", [1, 2])
def test_bit_that_flips_on_its_way_is_found(what: str, times: int):
    """Once it is read again; twice the object counts as damaged."""
    run = saved(1, 2)
    keys = {"manifest": "checkpoints/round-000002.json", **run.blobs_of(2)}
    run.store = FlippingStore(run.store, 5, times=times, key=keys[what])
    expected = state_of(2) if times == 1 else state_of(1)
    assert same(run.open().load_latest(), expected)
    assert [type(event) for event in run.events] == [CheckpointSkipped] * (times - 1)


@settings(deadline=None)  # Other work may share the machine.
@given(st.binary(max_size=200))
def test_junk_manifest_is_skipped(junk: bytes):
    """Any bytes in the place of a manifest are skipped."""
    run = saved(1)
    run.store.put("checkpoints/round-000002.json", [junk])
    assert same(run.open().load_latest(), state_of(1))


@pytest.mark.parametrize(
    "junk", [b"{}", b"[]", b"1", b'{"sha256":1}\n', b"[" * 100_000, b"\xff", b"null"]
)
def test_well_formed_junk_is_skipped(junk: bytes):
    """JSON that is no manifest, or too deep for a parser, is skipped."""
    run = saved(1)
    run.store.put("checkpoints/round-000002.json", [junk])
    assert same(run.open().load_latest(), state_of(1))


def test_renamed_manifest_is_skipped():
    """A whole manifest under another round's name is not that round."""
    run = saved(1)
    content = run.store.read("checkpoints/round-000001.json")
    run.store.put("checkpoints/round-000002.json", [content])
    assert same(run.open().load_latest(), state_of(1))
    assert len(run.events) == 1


def test_two_damaged_checkpoints_share_a_blob():
    """Both are skipped, and the blob is moved once."""
    run = saved(1)
    checkpoints = run.open()
    checkpoints.save(state_of(2))
    checkpoints.save(dataclasses.replace(state_of(2), round_index=3))
    flip(run, run.blobs_of(3)["weights"], 1000)
    assert same(run.open().load_latest(), state_of(1))
    assert len(run.events) == 2
    assert len(run.names("quarantine/")) == 3


def test_quarantine_keeps_every_copy():
    """What is damaged twice is there twice."""
    run = saved(1)
    for _ in range(2):
        run.open().save(state_of(2))
        tear(run, "checkpoints/round-000002.json", 10)
        run.open().load_latest()
    names = ["round-000002.json.1", "round-000002.json.2"]
    assert run.names("quarantine/") == [f"quarantine/{name}" for name in names]


def test_corrupt_blob_of_unread_manifest_is_rewritten():
    """A blob is not trusted for its name and size: the next save writes it anew."""
    run = saved(1, 2)
    flip(run, run.blobs_of(2)["weights"], 1000)
    run.store.delete("checkpoints/round-000002.json")
    checkpoints = run.open()
    checkpoints.load_latest()
    checkpoints.save(state_of(2))
    assert same(run.open().load_latest(), state_of(2))


def test_no_whole_checkpoint():
    """If none can be used the run stops and everything stays for a person."""
    run = saved(1, 2)
    tear(run, "checkpoints/round-000002.json", 10)
    flip(run, run.blobs_of(1)["weights"], 1000)
    before = run.names()
    with pytest.raises(CorruptObject, match=r"none of the run's 2 .*restore") as caught:
        run.open().load_latest()
    assert "round-000002.json" in str(caught.value)
    assert (run.names(), run.events) == (before, [])


class CrashingStore(MemoryStore):
    """Fails for good from its n-th change on, as a lost network does."""

    changes_left = 1 << 30

    def _count(self) -> None:
        self.changes_left -= 1
        if self.changes_left < 0:
            raise StoreUnavailable("the network is gone")

    def put(self, key: str, data: Iterable[Buffer], **conditions: Any) -> ObjectInfo:
        self._count()
        return super().put(key, data, **conditions)

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)


def test_crash_while_moving_aside():
    """A load that was cut short while it moved damage aside can be repeated."""
    for change in range(4):
        store = CrashingStore()
        run = Run(store)
        for round_index in (1, 2):
            run.open().save(state_of(round_index))
        flip(run, run.blobs_of(2)["weights"], 1000)
        store.changes_left = change
        with pytest.raises(StoreUnavailable):
            run.open().load_latest()
        store.changes_left = 1 << 30
        checkpoints = run.open()
        assert same(checkpoints.load_latest(), state_of(1))
        checkpoints.save(state_of(2))
        assert same(run.open().load_latest(), state_of(2))


def test_what_rounds_have_shown_of_sites_is_kept():
    """A coordinator that resumes leaves out the same sites."""
    one, two = SiteId("one"), SiteId("two")
    known = Suspicions(
        faults={one: "lied"}, disputes=((one, two), (two, one)), silences={two: 3}
    )
    run = Run()
    run.open().save(dataclasses.replace(state_of(1), suspicions=known))
    found = run.open().load_latest()
    assert found is not None
    assert found.suspicions == known


def test_members_are_kept():
    """A coordinator that resumes asks nobody who is gone."""
    sites = map(SiteId, ("one", "two", "three", "four"))
    one, two, three, four = sites
    members = EVERYBODY.leave(one, "spot").replaced([one]).leave(two, "sigterm")
    members = members.leave_out({three: "lied"}).leave(four, "spot", finishes=True)
    run = Run()
    run.open().save(dataclasses.replace(state_of(1), members=members))
    found = run.open().load_latest()
    assert found is not None
    assert found.members == members


@pytest.mark.parametrize(
    "damage",
    [
        ["gone", 7, 0],
        ["gone", None, 0],
        ["gone", "spot", "1"],
        ["gone", "spot", 1.5],
        ["gone", "spot", True],
        ["gone", "spot", -1],
        ["away", "spot", 0],
        [["gone"], "spot", 0],
        ["gone", "spot"],
        7,
    ],
    ids=str,
)
def test_damaged_member_is_refused(damage: Any):
    """Whole bytes that say what no release has written: the checkpoint is no use."""
    run = Run()
    run.open().save(state_of(1))
    rewrite(run, members={"one": damage})
    with pytest.raises(CorruptObject, match="none of the run's"):
        run.open().load_latest()

"""Large vectors through a store: whole, checked, once for all, and nothing left."""

import errno
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import toy
from support.faulty_store import FaultyStore

from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.retry import Retry
from cloud_adapters.transport import frames as frames_module
from cloud_adapters.transport.frame_references import (
    PackedFrame,
    Reference,
    Sizes,
    read_references,
    write_references,
)
from cloud_adapters.transport.frames import Frames
from federation.clock import VirtualClock
from federation.compression.codec import BF16, FP16
from federation.errors import (
    CorruptObject,
    JobError,
    ObjectNotFound,
    ProtocolError,
    StoreUnavailable,
)
from federation.ids import RunId, SiteId
from federation.messages import MaskedUpdate, RoundTask, SiteUpdate, TaskKind
from federation.protocols import ObjectInfo, ObjectStore
from federation.wire import frame as wire
from federation.wire.frame import WireMessage

D, M = 1000, 300
SIZES = Sizes(num_floats=D, num_integers=M)
SITES = [SiteId("a"), SiteId("b"), SiteId("c")]
RUN = RunId("run-1")


def task(site: str = "a", **changes: Any) -> RoundTask:
    """A task with a model of D floats and M integers."""
    fields = {"weights_d": WEIGHTS_D, "integers_m": INTEGERS_M, "secure": b"for you"}
    return toy.task(SiteId(site), **{"run_id": RUN, **fields, **changes})


def update(site: str = "a", **changes: Any) -> SiteUpdate:
    """An answer to it."""
    fields = {"delta_d": WEIGHTS_D[::-1], "integers_m": INTEGERS_M}
    return toy.update(SiteId(site), run_id=RUN, **{**fields, **changes})


def masked(**changes: Any) -> MaskedUpdate:
    """An answer under secure aggregation."""
    words = np.arange(3 * D, dtype=np.uint64).astype(np.uint8)
    return toy.masked(SITES[0], run_id=RUN, **{"words": words, **changes})


WEIGHTS_D = np.linspace(-1.0, 1.0, D, dtype=np.float32)
INTEGERS_M = np.arange(M, dtype=np.int64)
MESSAGES = [
    task(),
    task(kind=TaskKind.EVALUATE),
    update(),
    masked(),
    task(weights_d=BF16.encode(WEIGHTS_D)),
    update(delta_d=FP16.encode(WEIGHTS_D)),
]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """What both sides reach."""
    return LocalStore(tmp_path / "store")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Where vectors that are in use lie."""
    return tmp_path / "scratch"


def open_frames(
    store: ObjectStore | None, scratch: Path, clock: VirtualClock | None = None
) -> Frames:
    """Send everything but the smallest messages through the store."""
    retry = replace(frames_module.RETRY, clock=clock or VirtualClock())
    return Frames(store=store, scratch=scratch, threshold_bytes=1000, retry=retry)


@pytest.fixture
def frames(store: LocalStore, scratch: Path) -> Frames:
    """One side, or both."""
    return open_frames(store, scratch)


def unpack(frames: Frames, packed: PackedFrame, sizes: Sizes = SIZES) -> WireMessage:
    """Read what the other side has packed."""
    return frames.receive(wire.decode(packed.frame), packed.references, sizes)


def keys(store: ObjectStore) -> list[str]:
    """Of all objects."""
    return [info.key for info in store.list()]


@pytest.mark.parametrize("message", MESSAGES)
def test_message_arrives_as_it_was_sent(
    frames: Frames, scratch: Path, message: WireMessage
):
    """Byte for byte; and the file that it is a view of has no name any more."""
    packed = frames.send(message)
    assert packed.references
    assert len(packed.frame) < 1000
    found = unpack(frames, packed)
    assert wire.encode_bytes(found) == wire.encode_bytes(message)
    assert packed.num_bytes > wire.encoded_size(message) - 100
    assert list(scratch.iterdir()) == []


def test_vectors_that_arrive_cannot_be_written(frames: Frames):
    """As those of a frame."""
    found = unpack(frames, frames.send(task()))
    assert isinstance(found, RoundTask)
    with pytest.raises(ValueError, match="read-only"):
        found.weights_d[0] = 1.0


def test_small_message_needs_no_store(frames: Frames, store: LocalStore):
    """It goes in one piece."""
    small = task(weights_d=WEIGHTS_D[:10], integers_m=INTEGERS_M[:1])
    packed = frames.send(small)
    assert packed == PackedFrame(frame=wire.encode_bytes(small))
    assert unpack(frames, packed).site == "a"
    assert keys(store) == []


def test_small_vectors_stay_in_the_frame(store: LocalStore, scratch: Path):
    """A request for each of them would cost more."""
    packed = open_frames(store, scratch).send(task(integers_m=INTEGERS_M[:100]))
    assert [each.field for each in packed.references] == ["weights_d"]
    sizes = Sizes(num_floats=D, num_integers=100)
    assert unpack(open_frames(store, scratch), packed, sizes).site == "a"


def test_one_copy_serves_all_sites(frames: Frames, store: LocalStore):
    """Only the frames differ, which name the site and hold what is for it alone."""
    tasks = [task(site, secure=site.encode()) for site in SITES]
    found = [unpack(frames, frames.send(each)) for each in tasks]
    assert [wire.encode_bytes(f) for f in found] == [
        wire.encode_bytes(t) for t in tasks
    ]
    assert len(keys(store)) == 2  # Weights and integers.
    assert all(key.startswith("model/run-1/1/") for key in keys(store))


def test_next_round_has_a_copy_of_its_own(frames: Frames, store: LocalStore):
    """The same array may hold other values by then."""
    weights_d = WEIGHTS_D.copy()
    frames.send(task(weights_d=weights_d))
    weights_d += 1.0
    found = unpack(frames, frames.send(task(weights_d=weights_d, round_index=2)))
    assert isinstance(found, RoundTask)
    np.testing.assert_array_equal(found.weights_d, weights_d)
    assert len(keys(store)) == 4


def test_another_array_in_the_same_place_is_another_model(frames: Frames):
    """Python gives the number of an array that is gone to a new one."""
    for value in range(20):
        weights_d = np.full(D, value, dtype=np.float32)
        found = unpack(frames, frames.send(task(weights_d=weights_d)))
        assert isinstance(found, RoundTask)
        assert found.weights_d[0] == value
        del weights_d


def test_sites_write_below_their_own_names(frames: Frames, store: LocalStore):
    """So that a site's credentials need no other place."""
    for site in SITES:
        frames.send(update(site))
    places = {key.rsplit("/", 1)[0] for key in keys(store)}
    assert places == {f"sites/{site}/run-1/1" for site in SITES}


def test_large_message_without_a_store_says_what_to_set(scratch: Path):
    """On both sides."""
    lone = open_frames(None, scratch)
    with pytest.raises(JobError, match=r"exchange\.url.*aggregator\.toml"):
        lone.send(task())
    reference = Reference(field="weights_d", name="0" * 32, size=4 * D, sha256="0" * 64)
    with pytest.raises(JobError, match=r"exchange\.url"):
        lone.receive(task(weights_d=WEIGHTS_D[:0]), [reference], SIZES)


def test_messages_of_a_relay_share_one_copy_of_the_model(
    frames: Frames, store: LocalStore
):
    """With other relays and sites; integers, which a relay cannot check, stay."""
    other = task("c", weights_d=WEIGHTS_D[:-1], changed_to="11" * 32)
    packed = frames.send_whole([task("a"), other])
    again = frames.send_whole([task("b")])
    assert len(keys(store)) == 2
    assert [(each.field, each.message) for each in packed.references] == [
        ("weights_d", 0),
        ("weights_d", 1),
    ]
    assert again.references[0].name == packed.references[0].name
    heads = wire.decode_all(packed.frame, limit=2)
    found = frames.receive_whole(heads, packed.references, SIZES)
    for mine, wanted in zip(found, [task("a"), other], strict=True):
        assert wire.encode_bytes(mine) == wire.encode_bytes(wanted)
    stray = replace(packed.references[0], message=2)
    with pytest.raises(ProtocolError, match="to none of 2 messages"):
        frames.receive_whole(heads, [stray], SIZES)


GOOD = Reference(field="weights_d", name="ab" * 16, size=4 * D, sha256="cd" * 32)
HEAD = task(weights_d=WEIGHTS_D[:0])


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        (HEAD, {"field": "secure"}),
        (HEAD, {"field": "delta_d"}),
        (HEAD, {"field": "__class__"}),
        (HEAD, {"name": "../../other-run/1/" + "a" * 14}),
        (HEAD, {"name": "ab" * 16 + "\n"}),
        (HEAD, {"name": ""}),
        (HEAD, {"sha256": "CD" * 32}),
        (HEAD, {"size": 4 * D - 2}),
        (HEAD, {"size": 4 * D + 4}),
        (HEAD, {"size": 1 << 50}),
        (HEAD, {"field": "integers_m"}),  # It is in the frame.
        (task(), {}),  # So is the model.
        (toy.secure_task(), {}),
        (masked(words=np.zeros(0, np.uint8)), {"field": "words", "size": 5 * D}),
    ],
)
def test_hostile_reference_is_refused_before_a_request(
    scratch: Path, head: WireMessage, changes: dict[str, Any]
):
    """Whatever it asks for."""
    with pytest.raises(ProtocolError):
        open_frames(Untouchable(), scratch).receive(
            head, [replace(GOOD, **changes)], SIZES
        )


def test_two_references_to_one_vector_are_refused(scratch: Path):
    """Or a site could have everything fetched many times."""
    with pytest.raises(ProtocolError, match="same vector"):
        open_frames(Untouchable(), scratch).receive(HEAD, [GOOD, GOOD], SIZES)


class Untouchable:
    """A store that must not be asked for anything."""

    url = "untouchable://"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        "[1]",
        '[{"field": "weights_d"}]',
        "[" * 4000,
        write_references([GOOD]).replace("4000", "NaN"),
        write_references([GOOD]).replace("4000", "4000.0"),
        write_references([GOOD]).replace("4000", "-4000"),
        write_references([GOOD]).replace("4000", "0"),
        write_references([GOOD]).replace("4000", "1" + "0" * 30),
        write_references([GOOD]).replace("4000", "true"),
        write_references([GOOD] * 40),
    ],
)
def test_malformed_references_are_refused(text: str):
    """They come from the network."""
    with pytest.raises(ProtocolError):
        read_references(text)


def test_references_are_read_as_written():
    """None, one and two."""
    for references in ([], [GOOD], [GOOD, replace(GOOD, field="integers_m")]):
        assert list(read_references(write_references(references))) == references


def spoilt(store: LocalStore, content: bytes) -> None:
    """Put something else in the place of every object, past the store."""
    for key in keys(store):
        store.put(key, [content])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"x" * 4 * D, "digest"), (b"x" * (4 * D - 1), "3999 bytes"), (b"", "0 bytes")],
)
def test_object_that_is_another_is_refused(
    frames: Frames, store: LocalStore, scratch: Path, content: bytes, complaint: str
):
    """Somebody has written over it, or it was torn."""
    packed = frames.send(update(integers_m=INTEGERS_M[:1]))
    spoilt(store, content)
    with pytest.raises(CorruptObject, match=complaint):
        unpack(frames, packed, Sizes(num_floats=D, num_integers=1))
    assert not scratch.exists() or list(scratch.iterdir()) == []


def test_deleted_object_is_not_found(frames: Frames, store: LocalStore):
    """Its round was over, perhaps."""
    packed = frames.send(update())
    frames.discard(update(), packed.references)
    assert keys(store) == []
    with pytest.raises(ObjectNotFound):
        unpack(frames, packed)


@pytest.mark.parametrize(
    "other", [{"run_id": RunId("run-2")}, {"round_index": 2}, {"site": SITES[1]}]
)
def test_object_of_another_run_round_or_site_is_not_found(
    frames: Frames, other: dict[str, Any]
):
    """A reference cannot name it: it is looked for where the frame belongs."""
    packed = frames.send(update())
    head = replace(wire.decode(packed.frame), **other)
    with pytest.raises(ObjectNotFound):
        frames.receive(head, packed.references, SIZES)


class Outage(FaultyStore):
    """A store that is out of reach until a time, or for ever."""

    def __init__(self, store: ObjectStore, clock: VirtualClock, until: float) -> None:
        super().__init__(store, self._fail)
        self.clock, self.until, self.num_refused = clock, until, 0

    def put(self, *args: Any, **options: Any) -> ObjectInfo:
        self._fail()
        return super().put(*args, **options)

    def stat(self, key: str) -> ObjectInfo:
        self._fail()
        return super().stat(key)

    def list(self, prefix: str = "", **options: Any) -> Any:
        self._fail()
        return super().list(prefix, **options)

    def delete(self, key: str) -> None:
        self._fail()
        super().delete(key)

    def _fail(self, _: int = 0, content: bytes = b"") -> bytes:
        if self.clock.monotonic() < self.until:
            self.num_refused += 1
            raise StoreUnavailable("the network is gone", temporary=True)
        return content


def at_most(low: float, high: float) -> float:
    """Wait as long as may be."""
    return high


def test_outage_of_a_minute_is_waited_for(store: LocalStore, scratch: Path):
    """While sending, and while receiving."""
    clock = VirtualClock()
    retry = replace(frames_module.RETRY, clock=clock, uniform=at_most)
    faulty = Outage(store, clock, until=60.0)
    frames = Frames(store=faulty, scratch=scratch, threshold_bytes=1000, retry=retry)
    packed = frames.send(task())
    faulty.until = clock.monotonic() + 60.0
    assert wire.encode_bytes(unpack(frames, packed)) == wire.encode_bytes(task())
    assert faulty.num_refused > 4
    assert 120.0 <= clock.monotonic() < 240.0


def test_outage_for_good_ends_and_is_remembered(store: LocalStore, scratch: Path):
    """The tasks of other sites in the round need not wait for it again."""
    clock = VirtualClock()
    faulty = Outage(store, clock, until=1e9)
    frames = open_frames(faulty, scratch, clock)
    with pytest.raises(StoreUnavailable, match="tried 8 times"):
        frames.send(task("a"))
    num_refused = faulty.num_refused
    with pytest.raises(StoreUnavailable):
        frames.send(task("b"))
    assert faulty.num_refused == num_refused
    faulty.until = 0.0
    assert frames.send(task("a", round_index=2)).references


def test_tidying_waits_for_no_store(store: LocalStore, scratch: Path):
    """What is left then goes later, or by the bucket's own rule."""
    clock = VirtualClock()
    faulty = Outage(store, clock, until=0.0)
    frames = open_frames(faulty, scratch, clock)
    packed = frames.send(task())
    faulty.until = 1e9
    frames.end_rounds(RUN, SITES, before=2)
    frames.discard(task(), packed.references)
    assert clock.monotonic() == 0.0
    faulty.until = 0.0
    frames.end_rounds(RUN, SITES, before=2)
    assert keys(store) == []


def test_full_disk_is_an_error_that_names_the_folder(
    frames: Frames, scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    """And leaves nothing on it."""

    def write_all(file: int, piece: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    packed = frames.send(task())
    monkeypatch.setattr(frames_module, "write_all", write_all)
    with pytest.raises(StoreUnavailable, match=r"scratch.*full"):
        unpack(frames, packed)
    assert list(scratch.iterdir()) == []


def test_finished_rounds_are_removed(frames: Frames, store: LocalStore):
    """Those of this run; a late site's among them."""
    for index in (1, 2, 10):
        frames.send(task(round_index=index))
        frames.send(update("b", round_index=index))
    frames.send(task(run_id=RunId("run-2")))
    frames.end_rounds(RUN, SITES, before=10)
    rounds = {tuple(key.split("/")[-3:-1]) for key in keys(store)}
    assert rounds == {("run-1", "10"), ("run-2", "1")}
    frames.end_run(RUN, SITES)
    assert {key.split("/")[1] for key in keys(store)} == {"run-2"}


def test_unused_store_is_not_tidied(scratch: Path):
    """Small models cost no requests."""
    frames = open_frames(Untouchable(), scratch)
    frames.send(task(weights_d=WEIGHTS_D[:1], integers_m=INTEGERS_M[:1]))
    frames.end_rounds(RUN, SITES, before=2)


def test_store_needs_a_scratch_folder(store: LocalStore):
    """There is no good default."""
    with pytest.raises(ValueError, match="scratch"):
        Frames(store=store)


@pytest.mark.slow
def test_memory_holds_a_few_parts(store: LocalStore, scratch: Path):
    """Not the model, on neither side."""
    weights_d = np.zeros(32 << 20, dtype=np.float32)  # 128 MiB, of one page.
    frames = Frames(store=store, scratch=scratch, retry=Retry())
    sizes = Sizes(num_floats=weights_d.size, num_integers=0)
    tracemalloc.start()
    try:
        large = task(weights_d=weights_d, integers_m=INTEGERS_M[:0])
        found = unpack(frames, frames.send(large), sizes)
        assert isinstance(found, RoundTask)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.weights_d.size == weights_d.size
    assert peak_bytes < 64 << 20

"""What every ObjectStore promises; one suite, run on each implementation.

A new store is one more entry of ``STORES``.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cloud_adapters.storage.local import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import ObjectExists, ObjectNotFound
from federation.protocols import Buffer, ObjectStore

STORES: Mapping[str, Callable[[Path], ObjectStore]] = {
    "local": lambda folder: LocalStore(folder / "store"),
    "memory": lambda _: MemoryStore(),
}

BAD_KEYS = [
    "",
    "/absolute",
    "folder/",
    "double//slash",
    ".",
    "..",
    "../outside",
    "a/../b",
    "a/./b",
    "nul\0",
    "line\nbreak",
    "delete\x7f",
    "next-line\x85",
    "half-a-pair\ud800",
    "long/" + "x" * 1020,
    "\N{LATIN SMALL LETTER E WITH ACUTE}/" + "x" * 1022,
]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return STORES[request.param](tmp_path)


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_read_returns_what_was_put(store: ObjectStore):
    """Bytes come back as they went in, under a key with folders."""
    store.put("a/b/c.bin", [b"hello"])
    assert store.read("a/b/c.bin") == b"hello"


def test_put_joins_pieces_of_any_buffer_type(store: ObjectStore):
    """Content may come lazily, as bytes, bytearrays and typed memoryviews."""
    numbers = np.arange(3, dtype=np.int32)

    def pieces() -> Iterator[Buffer]:
        yield b"ab"
        yield memoryview(b"")
        yield bytearray(b"c")
        yield numbers.data

    info = store.put("key", pieces())
    assert store.read("key") == b"abc" + numbers.tobytes()
    assert info.size == 15


def test_put_copies_what_it_is_given(store: ObjectStore):
    """A buffer may be used again after the call."""
    buffer = bytearray(b"before")
    store.put("key", [buffer])
    buffer[:] = b"after!"
    assert store.read("key") == b"before"


@pytest.mark.parametrize("pieces", [[], [b""], [memoryview(b""), b""]])
def test_objects_may_be_empty(store: ObjectStore, pieces: list[Buffer]):
    """An object of no bytes is still an object."""
    assert store.put("empty", pieces).size == 0
    assert (store.read("empty"), store.stat("empty").size) == (b"", 0)
    assert keys(store) == ["empty"]


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, None, b"0123456789"),
        (3, None, b"3456789"),
        (3, 4, b"3456"),
        (0, 0, b""),
        (9, 1, b"9"),
        (8, 5, b"89"),
        (10, None, b""),
        (99, 5, b""),
    ],
)
def test_read_range(store: ObjectStore, start: int, length: int, expected: bytes):
    """A range ends with the object."""
    store.put("digits", [b"0123456789"])
    assert expected == store.read("digits", start=start, length=length)


@pytest.mark.parametrize(("start", "length"), [(-1, None), (0, -1)])
def test_read_refuses_negative_range(store: ObjectStore, start: int, length: int):
    """Counting from the end is not offered."""
    store.put("digits", [b"0123456789"])
    with pytest.raises(ValueError, match="negative"):
        store.read("digits", start=start, length=length)


def test_put_overwrites(store: ObjectStore):
    """The last write counts, and changes the version."""
    first = store.put("key", [b"first"])
    second = store.put("key", [b"other"])
    assert store.read("key") == b"other"
    assert first.version != second.version
    assert store.stat("key").version == second.version


def test_put_if_absent_keeps_the_first(store: ObjectStore):
    """A create-only write fails on a taken key and changes nothing."""
    first = store.put("key", [b"first"], if_absent=True)
    with pytest.raises(ObjectExists, match="'key'"):
        store.put("key", [b"second"], if_absent=True)
    assert store.read("key") == b"first"
    assert store.stat("key").version == first.version


def test_put_if_absent_after_delete(store: ObjectStore):
    """A deleted key is free again."""
    store.put("key", [b"first"], if_absent=True)
    store.delete("key")
    store.put("key", [b"second"], if_absent=True)
    assert store.read("key") == b"second"


def test_one_of_many_racers_wins(store: ObjectStore):
    """Of 16 create-only writers one wins, and its content is what stays."""
    barrier = threading.Barrier(16)

    def race(racer: int) -> bool:
        barrier.wait()
        try:
            store.put("prize", [b"%02d" % racer] * 1000, if_absent=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            won = list(pool.map(race, range(16)))
            assert sum(won) == 1
            assert store.read("prize") == b"%02d" % won.index(True) * 1000
            assert keys(store) == ["prize"]
            store.delete("prize")


def test_readers_never_see_half_an_object(store: ObjectStore):
    """While one thread overwrites, others read one whole content or the other."""
    store.put("key", [b"a" * 5000])
    done = threading.Event()

    def write() -> None:
        for turn in range(30):
            store.put("key", [b"ab"[turn % 2 :][:1] * 2500] * 2)
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        while not done.is_set() and not writer.done():
            assert store.read("key") in {b"a" * 5000, b"b" * 5000}
        writer.result()


def test_failing_source_leaves_nothing(store: ObjectStore):
    """If the content cannot be produced, the object before it stays."""
    store.put("old", [b"old"])

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise LookupError

    for key in ("old", "new"):
        with pytest.raises(LookupError):
            store.put(key, broken())
    assert store.read("old") == b"old"
    assert keys(store) == ["old"]


def test_list_is_in_order_of_keys(store: ObjectStore):
    """Order is that of the keys' code points, whatever the folders are."""
    names = ["b", "a/z", "a-b", "a/b/c", "a0", "B", "a.b", "a/b-c", "\N{SNOWMAN}", "~"]
    for name in names:
        store.put(name, [b""])
    assert keys(store) == sorted(names)


def test_list_by_prefix(store: ObjectStore):
    """A prefix may end inside a name or at a slash."""
    for name in ("round-1", "round-2", "rounds/3", "blobs/x", "round/4"):
        store.put(name, [b"12"])
    assert keys(store, "round-") == ["round-1", "round-2"]
    assert keys(store, "rounds/") == ["rounds/3"]
    assert keys(store, "round") == ["round-1", "round-2", "round/4", "rounds/3"]
    assert keys(store, "none") == []
    assert keys(store, "../") == []


def test_list_tells_size_and_version(store: ObjectStore):
    """A listing says what stat says."""
    store.put("a/b", [b"123"])
    assert list(store.list()) == [store.stat("a/b")]


def test_objects_may_go_while_listing(store: ObjectStore):
    """Deleting what a listing yields is how folders are emptied."""
    for name in ("a", "b/c", "b/d", "e"):
        store.put(name, [b""])
    for info in store.list():
        store.delete(info.key)
    assert keys(store) == []


def test_empty_store(store: ObjectStore):
    """Before the first write there is nothing, and that is no error."""
    assert keys(store) == []
    store.delete("nothing")


def test_delete(store: ObjectStore):
    """A deleted object is gone; deleting twice does nothing."""
    store.put("a/b", [b"x"])
    store.delete("a/b")
    store.delete("a/b")
    store.delete("a/b/c")
    store.delete("a")
    with pytest.raises(ObjectNotFound):
        store.stat("a/b")


@pytest.mark.parametrize("key", ["missing", "a/missing", "a", "a/b/c", "x" * 300])
def test_missing_objects(store: ObjectStore, key: str):
    """Neither a folder nor a path through an object is an object."""
    store.put("a/b", [b"x"])
    with pytest.raises(ObjectNotFound, match=key):
        store.read(key)
    with pytest.raises(ObjectNotFound, match=key):
        store.stat(key)


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys(store: ObjectStore, key: str):
    """Every verb that takes a key refuses one that some store could not hold."""
    for verb in (store.read, store.stat, store.delete, lambda k: store.put(k, [b""])):
        with pytest.raises(ValueError, match="key"):
            verb(key)
    assert keys(store) == []


def test_longest_key(store: ObjectStore):
    """1024 bytes are allowed."""
    key = "/".join(["x" * 127] * 8) + "y"
    assert len(key) == 1024
    store.put(key, [b"x"])
    assert keys(store) == [key]

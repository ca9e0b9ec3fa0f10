"""What every ObjectStore promises; one suite, run on each implementation.

A new store is one more name in ``STORES`` and a fixture ``NAME_store``, which gives
an empty store.
"""

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from cloud_adapters.keys.key_file import KeyFile, add_key
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.encrypted import EncryptedStore
from cloud_adapters.storage.memory import MemoryStore
from cloud_adapters.storage.metered import Meter, MeteredStore
from federation.clock import SystemClock
from federation.errors import ObjectChanged, ObjectExists, ObjectNotFound
from federation.protocols import Buffer, ObjectInfo, ObjectStore

STORES = ("encrypted", "gcs", "local", "memory", "metered", "s3")

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


@pytest.fixture
def local_store(tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def memory_store() -> ObjectStore:
    return MemoryStore()


@pytest.fixture
def encrypted_store(tmp_path: Path) -> ObjectStore:
    add_key(tmp_path / "keys.toml")
    # Segments of few bytes: the suite's objects have many.
    keys = KeyFile(tmp_path / "keys.toml")
    return EncryptedStore(MemoryStore(), keys, segment_bytes=5)


@pytest.fixture
def metered_store() -> ObjectStore:
    return MeteredStore(MemoryStore(), Meter(), SystemClock())


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    store: ObjectStore = request.getfixturevalue(f"{request.param}_store")
    yield store
    store.close()


def keys(store: ObjectStore, prefix: str = "", **options: str) -> list[str]:
    return [info.key for info in store.list(prefix, **options)]


def known(info: ObjectInfo) -> dict[str, Any]:
    """What every store knows of a small object, and says the same at each call."""
    names = ("key", "size", "version", "crc32c", "sha256", "metadata")
    return {name: getattr(info, name) for name in names}


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


@st.composite
def ranges(draw: st.DrawFn) -> tuple[bytes, int, int | None]:
    """A content of up to six segments of the encrypted store, and a range of it."""
    content = bytes(range(draw(st.integers(0, 30))))
    places = st.integers(0, len(content) + 2)
    return content, draw(places), draw(st.none() | places)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=ranges())
def test_any_range_is_a_slice(store: ObjectStore, asked: tuple[bytes, int, int | None]):
    """Also where it begins behind the end, or has no bytes."""
    content, start, length = asked
    version = store.put("key", [content]).version
    end = None if length is None else start + length
    found = store.read("key", start=start, length=length, if_version=version)
    assert content[start:end] == found


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
    assert known(store.stat("key")) == known(second)


def test_put_if_absent_keeps_the_first(store: ObjectStore):
    """A create-only write fails on a taken key and changes nothing."""
    first = store.put("key", [b"first"], if_absent=True)
    with pytest.raises(ObjectExists, match="'key'"):
        store.put("key", [b"second"], if_absent=True)
    assert store.read("key") == b"first"
    assert known(store.stat("key")) == known(first)


def test_put_if_absent_after_delete(store: ObjectStore):
    """A deleted key is free again."""
    store.put("key", [b"first"], if_absent=True)
    store.delete("key")
    store.put("key", [b"second"], if_absent=True)
    assert store.read("key") == b"second"


@pytest.mark.parametrize("content", [b"", b"123456789", bytes(100_000)])
def test_checksums(store: ObjectStore, content: bytes):
    """Writer and reader are told both checksums of a small object."""
    info = store.put("key", [content[:4], content[4:]])
    assert info.sha256 == hashlib.sha256(content).hexdigest()
    assert info.crc32c is not None
    if content == b"123456789":  # The check value in RFC 3720's catalogue entry.
        assert info.crc32c == "e3069283"
    assert known(store.stat("key")) == known(info)


def test_metadata(store: ObjectStore):
    """What a writer says of an object stays with it until the next write."""
    kept = {"round": "3", "content-of": 'a b;c="d" %41', "empty": ""}
    info = store.put("key", [b"x"], metadata=kept)
    assert (info.metadata, store.stat("key").metadata) == (kept, kept)
    store.put("key", [b"y"])
    assert store.stat("key").metadata == {}


@pytest.mark.parametrize(
    "metadata",
    [
        {"Round": "3"},
        {"": "3"},
        {"a_b": "3"},
        {"a": " 3"},
        {"a": "3\n"},
        {"a": "\N{SNOWMAN}"},
        {"a": "x" * 1500},
    ],
)
def test_bad_metadata(store: ObjectStore, metadata: dict[str, str]):
    """What some store could not keep is refused by all."""
    with pytest.raises(ValueError, match="metadata"):
        store.put("key", [b"x"], metadata=metadata)
    assert keys(store) == []


def test_time_of_the_write(store: ObjectStore):
    """If a store knows when an object was written, it is about now."""
    store.put("key", [b"x"])
    updated = store.stat("key").updated
    assert updated is None or abs(updated - time.time()) < 3600


def test_put_if_version(store: ObjectStore):
    """A write on condition replaces the version that was named and no other."""
    first = store.put("key", [b"first"])
    second = store.put("key", [b"second"], if_version=first.version)
    with pytest.raises(ObjectChanged, match="key"):
        store.put("key", [b"third"], if_version=first.version)
    assert store.read("key") == b"second"
    assert known(store.stat("key")) == known(second)
    store.delete("key")
    with pytest.raises(ObjectChanged, match="key"):
        store.put("key", [b"third"], if_version=second.version)
    assert keys(store) == []


def test_conditions_exclude_each_other(store: ObjectStore):
    """An object that is absent has no version."""
    with pytest.raises(ValueError, match="both"):
        store.put("key", [b"x"], if_absent=True, if_version="1")


def test_read_if_version(store: ObjectStore):
    """A read of a version never gives bytes of another."""
    first = store.put("key", [b"first"])
    version = first.version
    assert store.read("key", if_version=version) == b"first"
    assert store.read("key", start=1, length=2, if_version=version) == b"ir"
    store.put("key", [b"other"])
    with pytest.raises(ObjectChanged, match="key"):
        store.read("key", if_version=version)
    with pytest.raises(ObjectChanged, match="key"):
        store.read("key", start=1, length=2, if_version=version)
    store.delete("key")
    with pytest.raises(ObjectNotFound, match="key"):
        store.read("key", if_version=version)


def test_one_of_many_replaces_a_version(store: ObjectStore):
    """Of 16 writers that replace the same version one wins."""
    barrier = threading.Barrier(16)
    before = store.put("prize", [b"nobody"])

    def race(racer: int) -> bool:
        barrier.wait()
        try:
            store.put("prize", [b"%02d" % racer] * 9, if_version=before.version)
        except ObjectChanged:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(race, range(16)))
    assert sum(won) == 1
    assert store.read("prize") == b"%02d" % won.index(True) * 9


def test_one_of_many_racers_wins(store: ObjectStore):
    """Of 16 create-only writers one wins, and its content is what stays."""
    barrier = threading.Barrier(16)

    def race(racer: int) -> bool:
        barrier.wait()
        try:
            store.put("prize", [b"%02d" % racer] * 50, if_absent=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            won = list(pool.map(race, range(16)))
            assert sum(won) == 1
            assert store.read("prize") == b"%02d" % won.index(True) * 50
            assert keys(store) == ["prize"]
            store.delete("prize")


def test_readers_never_see_half_an_object(store: ObjectStore):
    """While one thread overwrites, others read one whole content or the other."""
    store.put("key", [b"a" * 5000])
    done = threading.Event()

    def write() -> None:
        for turn in range(10):
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
    (listed,) = store.list()
    stat = store.stat("a/b")
    assert (listed.key, listed.size, listed.version) == ("a/b", 3, stat.version)


def test_list_starts_after_a_key(store: ObjectStore):
    """The key itself is left out, whether it exists or not."""
    names = ["a/b", "a/c", "a-b", "b", "\N{SNOWMAN}"]
    for name in names:
        store.put(name, [b""])
    for after in ("a", "a/b", "a/bb", "a0", "zz", "\N{SNOWMAN}"):
        expected = sorted(name for name in names if name > after)
        assert keys(store, start_after=after) == expected
    assert keys(store, "a/", start_after="a/b") == ["a/c"]
    assert keys(store, "a/", start_after="b") == []
    assert keys(store, "a/", start_after="a") == ["a/b", "a/c"]


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


@pytest.mark.parametrize(
    "key",
    [
        "a b",
        "a+b",
        "100%",
        "%41",
        "a?b#c",
        "a&b=c",
        "~a'b\"c",
        "a:b@c",
        "*",
        "\\",
        "\N{SNOWMAN}/\N{OGHAM SPACE MARK}.-_",
    ],
)
def test_keys_of_odd_characters(store: ObjectStore, key: str):
    """No character of a key means anything but itself to any verb."""
    store.put(key, [b"x"])
    assert (store.read(key), store.stat(key).key, keys(store)) == (b"x", key, [key])
    assert keys(store, key) == [key]
    store.delete(key)
    assert keys(store) == []


def test_stores_name_themselves(store: ObjectStore):
    """The URL is for messages: it has a scheme."""
    assert "://" in store.url

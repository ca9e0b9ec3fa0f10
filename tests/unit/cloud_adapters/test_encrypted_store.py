"""What encryption adds to a store: what is hidden, and which changes are found."""

import hashlib
import itertools
import json
import struct
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloud_adapters.keys.key_file import KeyFile, add_key
from cloud_adapters.storage.encrypted import EncryptedStore
from cloud_adapters.storage.encrypted_format import HEADER_BYTES, content_bytes
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import CorruptObject, KeyRefused, ObjectChanged, ObjectNotFound
from federation.protocols import DataKey

CONTENT = bytes(range(40))
SEGMENT = 16
# Of CONTENT: two full segments, one of 8 bytes, and a tag behind each.
SIZES = (16 + 16, 16 + 16, 8 + 16, 44 + 32 + 16)


class Counting:
    """A key service that counts what it is asked."""

    def __init__(self, keys: KeyFile) -> None:
        self._keys = keys
        self.asked: list[str] = []
        self.closed = False

    name = "file:counting"

    def generate(self, context: Mapping[str, str]) -> DataKey:
        self.asked.append("generate")
        return self._keys.generate(context)

    def wrap(self, plaintext: bytes, context: Mapping[str, str]) -> bytes:
        self.asked.append("wrap")
        return self._keys.wrap(plaintext, context)

    def unwrap(self, wrapped: bytes, context: Mapping[str, str]) -> bytes:
        self.asked.append("unwrap")
        return self._keys.unwrap(wrapped, context)

    def close(self) -> None:
        self.closed = True


class Watched(MemoryStore):
    """A store that notes the ranges that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int | None]] = []

    def read(self, key: str, **options: Any) -> bytes:
        self.ranges.append((options.get("start", 0), options.get("length")))
        return super().read(key, **options)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    add_key(tmp_path / "keys.toml")
    return KeyFile(tmp_path / "keys.toml")


@pytest.fixture
def inner() -> Watched:
    return Watched()


@pytest.fixture
def store(inner: Watched, keys: KeyFile) -> EncryptedStore:
    store = EncryptedStore(inner, keys, segment_bytes=SEGMENT)
    store.put("a/b", [CONTENT], metadata={"round": "3"})
    return store


def reopened(inner: MemoryStore, keys: Any) -> EncryptedStore:
    """A store that remembers nothing of the objects."""
    return EncryptedStore(inner, keys, segment_bytes=SEGMENT)


def change(inner: MemoryStore, stored: bytes, key: str = "a/b") -> None:
    inner.put(key, [stored], metadata=inner.stat("a/b").metadata)


def parts(stored: bytes) -> list[bytes]:
    """Header, segments and trailer of CONTENT."""
    cuts = [0, HEADER_BYTES]
    for size in SIZES:
        cuts.append(cuts[-1] + size)
    assert cuts[-1] == len(stored)
    return [stored[a:b] for a, b in itertools.pairwise(cuts)]


def assert_found(inner: MemoryStore, keys: Any, key: str = "a/b") -> None:
    """Every way to read an object finds that it was changed."""
    with pytest.raises(CorruptObject, match=key):
        reopened(inner, keys).read(key)
    with pytest.raises(CorruptObject, match=key):
        reopened(inner, keys).read(key, start=1)


def test_bytes_are_as_documented(store: EncryptedStore, inner: Watched, keys: KeyFile):
    """A second reader, written from the documentation alone, reads them."""
    header, *segments, trailer = parts(inner.read("a/b"))
    magic, version, segment_bytes, length = struct.unpack(">8sBIH", header[:15])
    assert (magic, version, segment_bytes) == (b"crossfed", 1, SEGMENT)
    assert header[15 + length :] == bytes(1024 - 15 - length)
    cipher = AESGCM(
        keys.unwrap(header[15 : 15 + length], {"crossfed": "object", "key": "a/b"})
    )
    associated = struct.pack(">8sBIH", magic, version, segment_bytes, 0) + b"a/b"
    content = b"".join(
        cipher.decrypt(bytes(4) + at.to_bytes(7, "big") + b"\0", part, associated)
        for at, part in enumerate(segments)
    )
    assert content == CONTENT
    nonce = bytes(10) + b"\x03\x01"
    size, crc, digest, about = struct.unpack(
        ">QI32s32s", cipher.decrypt(nonce, trailer, associated)
    )
    assert (size, f"{crc:08x}") == (40, store.stat("a/b").crc32c)
    assert digest == hashlib.sha256(CONTENT).digest()
    expected = json.dumps({"round": "3"}, separators=(",", ":")).encode()
    assert about == hashlib.sha256(expected).digest()


def test_content_is_hidden(store: EncryptedStore, inner: Watched):
    """Neither bytes nor digests of the content are in the store below."""
    info = store.stat("a/b")
    below = inner.stat("a/b")
    assert info.sha256 == hashlib.sha256(CONTENT).hexdigest() != below.sha256
    assert CONTENT[:8] not in inner.read("a/b")
    assert below.metadata == {"round": "3"}


def test_same_content_looks_different(store: EncryptedStore, inner: Watched):
    """Every write has a data key of its own."""
    before = inner.read("a/b")
    store.put("a/b", [CONTENT], metadata={"round": "3"})
    after = inner.read("a/b")
    assert all(
        one != other for one, other in zip(parts(before), parts(after), strict=True)
    )


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 33, 48])
def test_all_ranges_of_all_sizes(inner: Watched, keys: KeyFile, size: int):
    """A range is what it is of the content, wherever segments end."""
    store = reopened(inner, keys)
    store.put(
        "key",
        [CONTENT[:9], (CONTENT + CONTENT)[9:size]] if size > 9 else [CONTENT[:size]],
    )
    content = (CONTENT + CONTENT)[:size]
    for start in range(size + 2):
        for length in (*range(size + 3 - start), None):
            stop = None if length is None else start + length
            assert store.read("key", start=start, length=length) == content[start:stop]
    assert content_bytes(inner.stat("key").size, SEGMENT) == size


def test_range_reads_what_it_touches(store: EncryptedStore, inner: Watched):
    """One segment for a byte of it, and the trailer where the end is reached."""
    version = store.stat("a/b").version
    inner.ranges.clear()
    store.read("a/b", start=17, length=3, if_version=version)
    store.read("a/b", start=35, length=9, if_version=version)
    second, third = HEADER_BYTES + 32, HEADER_BYTES + 64
    assert inner.ranges == [(second, 32), (third, SIZES[2] + SIZES[3])]


def test_data_keys_are_unwrapped_once(inner: Watched, keys: KeyFile):
    """Ranges of an object that was written or opened here ask no service."""
    counting = Counting(keys)
    store = reopened(inner, counting)
    version = store.put("key", [CONTENT]).version
    for start in range(8):
        store.read("key", start=start, length=4, if_version=version)
    assert counting.asked == ["generate"]
    other = reopened(inner, counting)
    for start in range(8):
        other.read("key", start=start, length=4)
    assert counting.asked == ["generate", "unwrap"]
    store.close()
    assert counting.closed


def by_ranges(store: EncryptedStore) -> bytes:
    """Read as a resuming stream does."""
    info = store.stat("a/b")
    return store.read("a/b", start=0, length=info.size, if_version=info.version)


def test_every_changed_byte_is_found(
    store: EncryptedStore, inner: Watched, keys: KeyFile
):
    """Of header, segments and trailer, by whole reads and by stat with ranges."""
    stored = inner.read("a/b")
    for at in range(len(stored)):
        changed = bytearray(stored)
        changed[at] ^= 1
        change(inner, bytes(changed))
        with pytest.raises((CorruptObject, KeyRefused)):
            reopened(inner, keys).read("a/b")
        with pytest.raises((CorruptObject, KeyRefused)):
            by_ranges(reopened(inner, keys))


def test_every_truncation_is_found(
    store: EncryptedStore, inner: Watched, keys: KeyFile
):
    """Whatever is missing at the end, as well as what is too much."""
    stored = inner.read("a/b")
    for length in range(len(stored)):
        change(inner, stored[:length])
        assert_found(inner, keys)
        with pytest.raises(CorruptObject):
            reopened(inner, keys).stat("a/b")
        # Not even a range behind the cut is said to be empty.
        with pytest.raises(CorruptObject):
            reopened(inner, keys).read("a/b", start=39, length=1)
    for extra in (1, 16, 17, 32, 92):
        change(inner, stored + bytes(extra))
        assert_found(inner, keys)


def test_moved_segments_are_found(store: EncryptedStore, inner: Watched, keys: KeyFile):
    """Swapped, repeated, left out, or cut off with the trailer kept."""
    header, first, second, third, trailer = parts(inner.read("a/b"))
    for middle in (
        [second, first, third],
        [first, first, third],
        [first, second],
        [first, third],
        [first, second, second, third],
        [],
    ):
        change(inner, b"".join([header, *middle, trailer]))
        assert_found(inner, keys)


def test_objects_cannot_take_each_others_place(
    store: EncryptedStore, inner: Watched, keys: KeyFile
):
    """Neither whole nor by header or segment, even after a copy."""
    store.put("c", [CONTENT[::-1]], metadata={"round": "3"})
    ours, theirs = inner.read("a/b"), inner.read("c")
    change(inner, theirs)
    assert_found(inner, keys)
    change(inner, theirs[:HEADER_BYTES] + ours[HEADER_BYTES:])
    assert_found(inner, keys)
    change(inner, ours[: HEADER_BYTES + 32] + theirs[HEADER_BYTES + 32 :])
    assert_found(inner, keys)
    change(inner, ours)
    store.put("d", [CONTENT])
    change(inner, inner.read("d"))
    assert_found(inner, keys)


def test_changed_metadata_are_found(
    store: EncryptedStore, inner: Watched, keys: KeyFile
):
    """They are in clear, and what they say is authenticated."""
    inner.put("a/b", [inner.read("a/b")], metadata={"round": "4"})
    with pytest.raises(CorruptObject, match="metadata"):
        reopened(inner, keys).stat("a/b")


def test_plain_objects_are_named(inner: Watched, keys: KeyFile):
    """A run that began without encryption does not continue with it."""
    inner.put("key", [b"plain"])
    for verb in (inner, reopened(inner, keys)):
        assert [info.key for info in verb.list()] == ["key"]
    with pytest.raises(CorruptObject, match="not encrypted"):
        reopened(inner, keys).read("key")
    with pytest.raises(CorruptObject, match="not encrypted"):
        reopened(inner, keys).stat("key")


def test_greedy_headers_are_refused(
    store: EncryptedStore, inner: Watched, keys: KeyFile
):
    """Before anything is allocated for them; other versions are named."""
    stored = inner.read("a/b")
    for segment_bytes in (0, (64 << 20) + 1, 2**32 - 1):
        change(inner, stored[:9] + segment_bytes.to_bytes(4, "big") + stored[13:])
        with pytest.raises(CorruptObject, match="header"):
            reopened(inner, keys).read("a/b")
    change(inner, stored[:8] + b"\x02" + stored[9:])
    with pytest.raises(CorruptObject, match="version 2"):
        reopened(inner, keys).read("a/b")


def test_wrong_key_writes_and_deletes_nothing(
    store: EncryptedStore, inner: Watched, tmp_path: Path
):
    """And it is not mistaken for damage."""
    before = inner.read("a/b")
    add_key(tmp_path / "other.toml")
    other = reopened(inner, KeyFile(tmp_path / "other.toml"))
    for verb in (other.read, other.stat, other.rewrap):
        with pytest.raises(KeyRefused, match=r"other\.toml"):
            verb("a/b")
    assert inner.read("a/b") == before
    assert [info.key for info in inner.list()] == ["a/b"]


class Disabled(Counting):
    """A key service whose key is disabled."""

    def generate(self, context: Mapping[str, str]) -> DataKey:
        raise KeyRefused(f"the key is disabled for {context}")

    def wrap(self, plaintext: bytes, context: Mapping[str, str]) -> bytes:
        raise KeyRefused(f"the key is disabled for {context}, {len(plaintext)} bytes")


def test_disabled_key_writes_nothing(
    store: EncryptedStore, inner: Watched, keys: KeyFile
):
    """Data are not even asked for."""
    before = inner.stat("a/b").version

    def never() -> Iterator[bytes]:
        raise AssertionError
        yield b""

    with pytest.raises(KeyRefused, match="disabled"):
        reopened(inner, Disabled(keys)).put("a/b", never())
    with pytest.raises(KeyRefused, match="disabled"):
        store.rewrap("a/b", keys=Disabled(keys))
    assert inner.stat("a/b").version == before


def test_rewrap_after_rotation(store: EncryptedStore, inner: Watched, tmp_path: Path):
    """The old wrapping key is not needed any more, and no content is touched."""
    before = inner.read("a/b")
    path = tmp_path / "keys.toml"
    add_key(path)
    rotated = reopened(inner, KeyFile(path))
    assert rotated.read("a/b") == CONTENT
    info = rotated.rewrap("a/b")
    assert (info.size, info.metadata) == (40, {"round": "3"})
    assert inner.read("a/b")[HEADER_BYTES:] == before[HEADER_BYTES:]
    head, _, newest = path.read_text().rpartition("[[keys]]")
    path.write_text(head.partition("[[keys]]")[0] + "[[keys]]" + newest)
    assert reopened(inner, KeyFile(path)).read("a/b") == CONTENT
    change(inner, before)
    with pytest.raises(KeyRefused):
        reopened(inner, KeyFile(path)).read("a/b")


def test_rewrap_gives_way(store: EncryptedStore, inner: Watched, keys: KeyFile):
    """To a write that comes in between."""

    class Interrupting(Counting):
        def wrap(self, plaintext: bytes, context: Mapping[str, str]) -> bytes:
            store.put("a/b", [b"newer"])
            return super().wrap(plaintext, context)

    with pytest.raises(ObjectChanged):
        reopened(inner, keys).rewrap("a/b", keys=Interrupting(keys))
    assert store.read("a/b") == b"newer"
    with pytest.raises(ObjectNotFound):
        store.rewrap("none")


def test_ranges_while_the_object_changes(inner: Watched, keys: KeyFile):
    """A range is of one content, and stat of one version."""
    store = reopened(inner, keys)
    store.put("key", [b"a" * 50])
    done = threading.Event()

    def write() -> None:
        for turn in range(60):
            store.put("key", [b"ab"[turn % 2 :][:1] * (50 + turn % 7)])
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        while not done.is_set() and not writer.done():
            try:
                assert len(set(store.read("key", start=10, length=30))) == 1
                assert store.stat("key").size >= 50
            except ObjectChanged:
                continue  # Eight times in a row: the seam allows it.
        writer.result()


def test_memory_is_bounded(keys: KeyFile):
    """A large content passes through in pieces of a segment."""

    class Draining(MemoryStore):
        def put(self, key: str, data: Any, **options: Any) -> Any:
            for piece in data:
                assert len(piece) <= (1 << 20) + 16
            return super().put(key, [b""], **options)

    store = EncryptedStore(Draining(), keys, segment_bytes=1 << 20)
    piece = np.zeros(3 << 17, np.float32).data
    tracemalloc.start()
    try:
        info = store.put("key", (piece for _ in range(40)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert info.size == 40 * (3 << 19)
    assert peak_bytes < 6 << 20


def test_secrets_are_in_no_repr(store: EncryptedStore, keys: KeyFile):
    """Of a data key, an opened object or a key file."""
    made = keys.generate({})
    opened = next(iter(store._opened.values()))
    secret = next(iter(keys._keys.values())).secret
    for value in (made, opened, keys, store, keys._keys):
        for hidden in (made.plaintext, opened.cipher.data_key, secret):
            assert repr(hidden)[2:-1] not in repr(value)


@pytest.mark.parametrize("segment_bytes", [0, -1, (64 << 20) + 1])
def test_segments_have_a_size(keys: KeyFile, segment_bytes: int):
    """That its reader can hold."""
    with pytest.raises(ValueError, match="segments"):
        EncryptedStore(MemoryStore(), keys, segment_bytes=segment_bytes)

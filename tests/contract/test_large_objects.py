"""Contents that go in many parts: what every store with services' limits promises."""

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloud_adapters.storage.checksums import crc32c
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.disk.transfer import upload
from cloud_adapters.storage.probe import check_conditions_kept
from federation.errors import (
    CorruptObject,
    ObjectChanged,
    ObjectExists,
    StoreUnavailable,
)
from federation.protocols import ObjectStore

pytestmark = pytest.mark.slow

CONTENT = bytes(range(251)) * 35_000  # More than 8 MiB.


@pytest.fixture
def local_store(tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture(params=["gcs", "local", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    store: ObjectStore = request.getfixturevalue(f"{request.param}_store")
    yield store
    store.close()


def test_files_keep_their_digest(store: ObjectStore, tmp_path: Path):
    """A file can be read twice, so the service is told its SHA-256 beforehand."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    info = upload(store, "key", path)
    assert info.sha256 == hashlib.sha256(CONTENT).hexdigest()
    found = store.stat("key")
    assert (found.sha256, found.crc32c) == (info.sha256, info.crc32c)
    assert store.read("key") == CONTENT


def test_streams_are_read_once(store: ObjectStore):
    """They have a CRC32C, and the SHA-256 that the store keeps of them or none."""
    pieces = (CONTENT[at : at + 100_000] for at in range(0, len(CONTENT), 100_000))
    info, found = store.put("key", pieces), store.stat("key")
    assert (info.crc32c, info.sha256) == (found.crc32c, found.sha256)
    assert info.crc32c == crc32c(CONTENT)
    assert info.sha256 in {None, hashlib.sha256(CONTENT).hexdigest()}
    assert store.read("key") == CONTENT


def test_content_that_differs_when_it_is_read_again(store: ObjectStore):
    """No object has the digest of another content."""

    class Changing:
        times = 0

        def __iter__(self) -> Iterator[bytes]:
            self.times += 1
            last = bytes([self.times])
            yield CONTENT
            yield last

    content = Changing()
    if isinstance(store, LocalStore):  # It reads once.
        digest = hashlib.sha256(CONTENT + b"\1").hexdigest()
        assert store.put("key", content).sha256 == digest
        return
    with pytest.raises((StoreUnavailable, CorruptObject), match=r"write .*key"):
        store.put("key", content)
    assert list(store.list()) == []


def test_conditions_hold_for_many_parts(store: ObjectStore):
    """Create-only, and change of a version: decided at the last request."""
    first = store.put("key", [CONTENT], if_absent=True)
    with pytest.raises(ObjectExists):
        store.put("key", [CONTENT, b"second"], if_absent=True)
    second = store.put("key", [CONTENT, b"third"], if_version=first.version)
    with pytest.raises(ObjectChanged):
        store.put("key", [CONTENT, b"fourth"], if_version=first.version)
    found = store.stat("key")
    assert (found.version, found.size) == (second.version, len(CONTENT) + 5)
    store.delete("key")
    with pytest.raises(ObjectChanged):
        store.put("key", [CONTENT], if_version=second.version)
    assert list(store.list()) == []


def test_one_of_many_creates_many_parts(store: ObjectStore):
    """Others that complete the same object at the same time are refused."""
    racers = 4
    together = threading.Barrier(racers)

    def create(number: int) -> bool:
        together.wait(timeout=60)
        try:
            store.put("key", [CONTENT, bytes([number])], if_absent=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(racers) as pool:
        made = list(pool.map(create, range(racers)))
    assert made.count(True) == 1
    assert store.read("key")[-1] == made.index(True)


def test_a_store_may_be_relied_on(store: ObjectStore):
    """What a run tries before its first round."""
    check_conditions_kept(store)
    assert list(store.list()) == []

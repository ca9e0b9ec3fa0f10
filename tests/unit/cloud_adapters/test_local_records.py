"""What a folder's store knows of its objects, and when it is on the disk."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cloud_adapters.storage.disk import files as local_files
from cloud_adapters.storage.disk.records import RECORD_FOLDER
from cloud_adapters.storage.disk.store import PARTIAL_FOLDER, LocalStore
from federation.errors import (
    CorruptObject,
    ObjectChanged,
    ObjectExists,
    StoreUnavailable,
)


def records(root: Path) -> list[Path]:
    return [path for path in (root / RECORD_FOLDER).glob("?/*") if path.name != "lock"]


def test_records_go_with_their_objects(tmp_path: Path):
    """One record for each object, however often it was written."""
    store = LocalStore(tmp_path)
    for name in ("a", "b", "c"):
        for content in (b"1", b"2"):
            store.put(name, [content])
    with pytest.raises(ObjectExists):
        store.put("a", [b"3"], if_absent=True)
    with pytest.raises(ObjectChanged):
        store.put("a", [b"3"], if_version="0-0-0")
    assert len(records(tmp_path)) == 3
    for name in ("a", "b", "c"):
        store.delete(name)
    assert records(tmp_path) == []


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o600), (0o002, 0o660), (0o000, 0o666)]
)
def test_only_writers_may_hold_a_lock(tmp_path: Path, umask: int, mode: int):
    """Whoever may open it could make all others wait for ever."""
    before = os.umask(umask)
    try:
        LocalStore(tmp_path / "store").put("key", [b"content"])
    finally:
        os.umask(before)
    (lock,) = (tmp_path / "store").rglob("lock")
    assert stat.S_IMODE(lock.stat().st_mode) == mode


@pytest.mark.parametrize(
    "record", [b"{}", b'{"key": "object", "size": 1}', b"[" * 20_000 + b"}", b"[{}}"]
)
def test_a_damaged_record_is_found(tmp_path: Path, record: bytes):
    """It does not pass for an object of which nothing is known."""
    store = LocalStore(tmp_path)
    store.put("object", [b"x"])
    (path,) = records(tmp_path)
    path.write_bytes(record)
    with pytest.raises(CorruptObject, match="'object'"):
        store.stat("object")
    store.put("object", [b"y"])
    assert store.read("object") == b"y"


@pytest.mark.parametrize(
    "kept", [lambda r: r[:0], lambda r: r[:9], lambda r: bytes(len(r))]
)
def test_a_torn_record_counts_as_none(tmp_path: Path, kept: Callable[[bytes], bytes]):
    """What a power cut leaves of it hides no object, and holds up no condition."""
    store = LocalStore(tmp_path)
    version = store.put("object", [b"x"]).version
    (path,) = records(tmp_path)
    path.write_bytes(kept(path.read_bytes()))
    info = store.stat("object")
    assert (info.version, info.crc32c, info.sha256) == (version, None, None)
    assert store.read("object") == b"x"
    with pytest.raises(ObjectExists):
        store.put("object", [b"y"], if_absent=True)
    store.put("object", [b"y"], if_version=version)
    assert store.stat("object").crc32c is not None


@pytest.mark.parametrize(
    ("metadata", "flushed"),
    [({}, ["content", "folder"]), ({"a": "b"}, ["content", "record", ".", "folder"])],
)
def test_what_is_flushed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metadata: dict[str, str],
    flushed: list[str],
):
    """The content before it gets its name, the name before the call returns.

    Metadata cannot be had again, so it is there before the object; checksums can.
    """
    store = LocalStore(tmp_path)
    store.put("folder/object", [b"before"])
    done, fsync = [], os.fsync

    def watched(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        parent = path.parent.name
        names = {PARTIAL_FOLDER: "content", RECORD_FOLDER: "."}
        is_record = path.parent.parent.name == RECORD_FOLDER
        done.append("record" if is_record else names.get(parent, path.name))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    store.put("folder/object", [b"after"], metadata=metadata)
    assert done == flushed


def test_a_disk_that_fails_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the flushes of a large file meet is not lost: the system tells it once."""
    store = LocalStore(tmp_path)
    store.put("before", [b"x"])
    monkeypatch.setattr(local_files, "FLUSH_BYTES", 2 << 20)
    fsync, todo = os.fsync, [OSError(errno.EIO, "the disk")]

    def failing_once(file: int) -> None:
        if todo:
            raise todo.pop()
        fsync(file)

    monkeypatch.setattr(os, "fsync", failing_once)
    with pytest.raises(StoreUnavailable, match="disk reports an error"):
        store.put("object", [bytes(1 << 20)] * 5)
    assert [info.key for info in store.list()] == ["before"]

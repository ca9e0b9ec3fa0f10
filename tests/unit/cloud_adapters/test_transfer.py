"""Large objects in parts, over stores that fail on the way."""

import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from support.faulty_store import FaultyStore, outage

from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.disk.transfer import (
    FilePieces,
    download,
    stream,
    upload,
)
from cloud_adapters.storage.memory import MemoryStore
from cloud_adapters.storage.retry import Retry
from federation.clock import VirtualClock
from federation.errors import (
    CorruptObject,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreUnavailable,
)
from federation.protocols import ObjectStore

CONTENT = bytes(range(256)) * 40
PATIENT = Retry(attempts=3, clock=VirtualClock())

# Reads two parts and is killed in the third.
KILLED = """
import os, signal, sys
from pathlib import Path
from support.faulty_store import FaultyStore
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.disk.transfer import download

def meddle(number, content):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return content

store = FaultyStore(LocalStore(sys.argv[1]), meddle)
download(store, "key", Path(sys.argv[2]), workers=1, part_bytes=4096)
"""


def filled() -> MemoryStore:
    store = MemoryStore()
    store.put("key", [CONTENT])
    return store


def by_stream(store: ObjectStore, path: Path) -> bytes:
    return b"".join(stream(store, "key", part_bytes=1000, retry=PATIENT))


def by_download(store: ObjectStore, path: Path) -> bytes:
    download(store, "key", path, part_bytes=1000, retry=PATIENT)
    return path.read_bytes()


WAYS = pytest.mark.parametrize("get", [by_stream, by_download])
Get = Callable[[ObjectStore, Path], bytes]


@settings(max_examples=25)
@given(size=st.integers(0, 300), part=st.integers(1, 320), workers=st.integers(1, 5))
def test_parts_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, size: int, part: int, workers: int
):
    """Whatever the parts are, and however many are on their way at once."""
    store, content = MemoryStore(), CONTENT[:size]
    store.put("key", [content])
    path = tmp_path_factory.mktemp("parts") / "file"
    info = download(store, "key", path, part_bytes=part, workers=workers)
    assert (path.read_bytes(), info) == (content, store.stat("key"))
    assert list(path.parent.iterdir()) == [path]
    pieces = list(stream(store, "key", part_bytes=part, ahead=workers))
    assert b"".join(pieces) == content
    assert all(0 < len(piece) <= part for piece in pieces)


@WAYS
def test_an_outage_is_waited_for(get: Get, tmp_path: Path):
    """Nothing but the part that failed is asked for again."""
    store = FaultyStore(filled(), outage(3, 4))
    assert get(store, tmp_path / "file") == CONTENT
    assert len(store.ranges) == 11 + 2
    assert len(set(store.ranges)) == 11


@WAYS
def test_an_outage_that_lasts(get: Get, tmp_path: Path):
    """We give up after the attempts that were allowed, and leave no file."""
    store = FaultyStore(filled(), outage(*range(3, 999)))
    with pytest.raises(StoreUnavailable, match="tried 3 times"):
        get(store, tmp_path / "file")
    assert not (tmp_path / "file").exists()


@WAYS
def test_content_is_of_one_version(get: Get, tmp_path: Path):
    """An object that is replaced on the way is not mixed with what came before."""
    below = filled()
    replaced = threading.Event()

    def replace(number: int, content: bytes) -> bytes:
        if number == 2:
            below.put("key", [bytes(len(CONTENT))])
            replaced.set()
        elif number > 2:  # Or 8 workers may have read all 11 parts before it.
            assert replaced.wait(60)
        return content

    with pytest.raises(ObjectChanged, match="'key'"):
        get(FaultyStore(below, replace), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@WAYS
def test_a_flipped_bit_on_the_way(get: Get, tmp_path: Path):
    """Ranges have no checksum of their own: the whole has."""
    store = FaultyStore(filled(), lambda n, part: b"x" + part[1:] if n == 5 else part)
    with pytest.raises(CorruptObject, match="instead of 10240 with"):
        get(store, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@WAYS
def test_short_parts_are_asked_for_again(get: Get, tmp_path: Path):
    """An answer that ends early is no part."""
    store = FaultyStore(filled(), lambda n, part: part[:-1] if n == 5 else part)
    assert get(store, tmp_path / "file") == CONTENT


@WAYS
def test_missing_objects(get: Get, tmp_path: Path):
    """They are that, and leave no file."""
    with pytest.raises(ObjectNotFound):
        get(MemoryStore(), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_version_may_be_named(tmp_path: Path):
    """Another is refused before the first byte."""
    store = filled()
    old = store.stat("key").version
    store.put("key", [b"new"])
    with pytest.raises(ObjectChanged):
        download(store, "key", tmp_path / "file", if_version=old)
    with pytest.raises(ObjectChanged):
        next(stream(store, "key", if_version=old))


@pytest.mark.parametrize("wrong", [{"part_bytes": 0}, {"workers": 0}])
def test_numbers_are_checked(tmp_path: Path, wrong: dict[str, int]):
    """No part and no worker is a mistake."""
    with pytest.raises(ValueError, match=r"part|workers"):
        download(filled(), "key", tmp_path / "file", **wrong)


def kill(tmp_path: Path) -> tuple[FaultyStore, Path]:
    """Kill a download that has two parts of three."""
    LocalStore(tmp_path / "store").put("key", [CONTENT])
    target = tmp_path / "target" / "file"
    target.parent.mkdir()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(target)]
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(command, check=False, env={"PYTHONPATH": tests})
    assert done.returncode == -9
    assert not target.exists()
    return FaultyStore(LocalStore(tmp_path / "store")), target


def again(store: FaultyStore, target: Path) -> None:
    download(store, "key", target, part_bytes=4096)
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.slow
def test_a_killed_download_goes_on(tmp_path: Path):
    """Only the parts that had not arrived are fetched."""
    store, target = kill(tmp_path)
    again(store, target)
    assert store.ranges == [(8192, 2048)]


def test_parts_that_the_disk_has_lost(tmp_path: Path):
    """After a power cut a part may be noted that is not there: all come again."""
    store, target = kill(tmp_path)
    (partial,) = target.parent.glob(".*.partial")
    partial.write_bytes(bytes(len(CONTENT)))
    again(store, target)
    assert len(store.ranges) == 1 + 3


@pytest.mark.slow
def test_what_is_left_of_an_old_version_goes(tmp_path: Path):
    """Nobody will want it again; other files' parts stay."""
    store, target = kill(tmp_path)
    other = target.with_name(".file.v2.0123456789abcdef.partial")
    other.touch()
    store.put("key", [b"new"])
    download(store, "key", target)
    assert target.read_bytes() == b"new"
    assert set(target.parent.iterdir()) == {target, other}


def test_two_downloads_to_one_file(tmp_path: Path):
    """The second is told of the first, which continues."""

    def second(number: int, content: bytes) -> bytes:
        if number == 1:
            with pytest.raises(StoreUnavailable, match="another process"):
                by_download(store, tmp_path / "file")
        return content

    store = FaultyStore(filled(), second)
    assert by_download(store, tmp_path / "file") == CONTENT


def test_files_that_cannot_be_written(tmp_path: Path):
    """The message names the file and says what to do."""
    with pytest.raises(StoreUnavailable, match=r"cannot write .*missing"):
        by_download(filled(), tmp_path / "missing" / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreUnavailable, match="folder is in the"):
        by_download(filled(), tmp_path / "folder")


def test_memory_is_bounded(tmp_path: Path):
    """A few parts, and not the object."""
    store = LocalStore(tmp_path / "store")
    (tmp_path / "file").write_bytes(bytes(8 << 20))
    size = 1 << 16
    tracemalloc.start()
    try:
        store.put("key", FilePieces(tmp_path / "file", size))
        download(store, "key", tmp_path / "copy", workers=3, part_bytes=size)
        for _ in stream(store, "key", part_bytes=size, ahead=3):
            pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20 * size


def test_upload(tmp_path: Path):
    """A file becomes an object, with conditions and metadata."""
    (tmp_path / "file").write_bytes(CONTENT)
    store = MemoryStore()
    info = upload(
        store, "key", tmp_path / "file", if_absent=True, metadata={"round": "3"}
    )
    assert (store.read("key"), info.metadata) == (CONTENT, {"round": "3"})
    with pytest.raises(ObjectExists):
        upload(store, "key", tmp_path / "file", if_absent=True)
    with pytest.raises(ObjectChanged):
        upload(store, "key", tmp_path / "file", if_version="0")


def test_files_that_change_are_not_uploaded(tmp_path: Path):
    """A store may read twice, and must not see two contents."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    pieces = FilePieces(path, 1000)
    assert b"".join(pieces) == b"".join(pieces) == CONTENT
    path.write_bytes(CONTENT + b"more")
    with pytest.raises(StoreUnavailable, match="changed while"):
        MemoryStore().put("key", pieces)

"""What is special about objects that are files of this machine."""

import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from cloud_adapters.storage.disk.records import RECORD_FOLDER
from cloud_adapters.storage.disk.store import PARTIAL_FOLDER, LocalStore
from federation.errors import (
    CorruptObject,
    ObjectChanged,
    ObjectNotFound,
    StoreUnavailable,
)

MEGABYTE = 1 << 20

# Run in a process of its own: the limits must not reach the test runner.
PUT_TWO_MEGABYTES = """
import resource, sys
from cloud_adapters.storage.disk.store import LocalStore
from federation.errors import StoreUnavailable

if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
store = LocalStore(sys.argv[1])
store.put("small", [b"fits"])
try:
    store.put("a/large", [bytes(1 << 18)] * 8)
except StoreUnavailable as error:
    print(type(error.__cause__).__name__, error)
print(*[info.key for info in store.list()])
"""

# Writes a piece, says so, and waits to be killed or told to end.
HALF_A_PUT = """
import sys
from cloud_adapters.storage.disk.store import LocalStore

def pieces():
    yield b"half"
    print("half", flush=True)
    sys.stdin.readline()
    yield b" and half"

LocalStore(sys.argv[1]).put("object", pieces())
"""


def start_half_a_put(root: Path) -> "subprocess.Popen[str]":
    writer = subprocess.Popen(
        [sys.executable, "-c", HALF_A_PUT, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    return writer


def partial_files(root: Path) -> list[Path]:
    return list((root / PARTIAL_FOLDER).iterdir())


def records(root: Path) -> list[Path]:
    return [path for path in (root / RECORD_FOLDER).glob("?/*") if path.name != "lock"]


def test_objects_are_plain_files(tmp_path: Path):
    """A person finds each object under its key, and nothing else beside it."""
    LocalStore(tmp_path / "deep" / "root").put("a/b.txt", [b"text"])
    assert (tmp_path / "deep" / "root" / "a" / "b.txt").read_bytes() == b"text"
    assert partial_files(tmp_path / "deep" / "root") == []


@pytest.mark.slow
def test_live_writer_is_left_alone(tmp_path: Path):
    """Cleaning up never takes the file that another process is writing."""
    with start_half_a_put(tmp_path) as writer:
        store = LocalStore(tmp_path)
        store.put("other", [b"x"])
        assert len(partial_files(tmp_path)) == 1
        writer.communicate("\n")
    assert store.read("object") == b"half and half"
    assert partial_files(tmp_path) == []


def damage(path: Path) -> None:
    """Change a bit as a bad disk does: without a trace in size or time."""
    content, found = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_a_flipped_bit_is_found(tmp_path: Path):
    """By a whole read, however it is asked for."""
    store = LocalStore(tmp_path)
    store.put("a/object", [b"0123456789"])
    damage(tmp_path / "a" / "object")
    with pytest.raises(CorruptObject, match=r"'a/object' in the folder .* is damaged"):
        store.read("a/object")
    with pytest.raises(CorruptObject, match="restore it"):
        store.read("a/object", start=0, length=10)
    assert [info.key for info in store.list()] == ["a/object"]
    assert store.read("a/object", start=0, length=3) == b"012"


def test_files_of_others_have_no_checksum(tmp_path: Path):
    """They are read as they are, until they are written through the store."""
    store = LocalStore(tmp_path)
    store.put("changed", [b"before"], metadata={"a": "b"})
    (tmp_path / "changed").write_bytes(b"after")
    (tmp_path / "new").write_bytes(b"new")
    for name, content in (("changed", b"after"), ("new", b"new")):
        info = store.stat(name)
        assert (info.crc32c, info.sha256, dict(info.metadata)) == (None, None, {})
        assert store.read(name) == content
    store.delete("new")
    assert [info.key for info in store.list()] == ["changed"]


def test_two_stores_replace_a_version(tmp_path: Path):
    """Writes on condition also exclude each other between store objects."""
    before = LocalStore(tmp_path).put("key", [b"0"])
    LocalStore(tmp_path).put("key", [b"1"], if_version=before.version)
    with pytest.raises(ObjectChanged):
        LocalStore(tmp_path).put("key", [b"2"], if_version=before.version)


@pytest.mark.parametrize("hidden", [PARTIAL_FOLDER, RECORD_FOLDER])
def test_hidden_folders_have_no_keys(tmp_path: Path, hidden: str):
    """They cannot be reached by a key; below another folder the name is free."""
    with pytest.raises(ValueError, match="partial"):
        LocalStore(tmp_path).put(f"{hidden}/x", [b"x"])
    LocalStore(tmp_path).put(f"a/{hidden}/x", [b"x"])


@pytest.mark.slow
def test_file_size_limit(tmp_path: Path):
    """A write that the process is not allowed to finish leaves no trace."""
    command = [sys.executable, "-c", PUT_TWO_MEGABYTES, str(tmp_path), str(MEGABYTE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    error, listing = done.stdout.splitlines()
    assert error.startswith("OSError cannot write 'a/large' in the folder")
    assert "ulimit" in error
    assert listing == "small"
    assert partial_files(tmp_path) == []


@pytest.mark.slow
def test_full_disk(tmp_path: Path):
    """On a full disk the message says so, and earlier objects stay."""
    mount = f"mount -t tmpfs -o size={MEGABYTE} none {tmp_path}"
    inside = ["unshare", "--mount", "sh", "-c", mount + ' && exec "$@"', "sh"]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system is not allowed here")
    command = [*inside, sys.executable, "-c", PUT_TWO_MEGABYTES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    error, listing = done.stdout.splitlines()
    assert error.startswith("OSError cannot write 'a/large' in the folder")
    assert "the disk is full" in error
    assert listing == "small"


def test_protected_folder(tmp_path: Path):
    """A folder that nobody may write to is StoreUnavailable, with the cause."""
    store = LocalStore(tmp_path)
    store.put("folder/first", [b"x"])
    chattr = shutil.which("chattr") or "chattr"
    try:
        protect = [chattr, "+i", tmp_path / "folder"]
        subprocess.run(protect, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this file system has no immutable folders")
    try:
        with pytest.raises(StoreUnavailable, match="'folder/second'") as caught:
            store.put("folder/second", [b"x"])
        with pytest.raises(StoreUnavailable, match="cannot delete 'folder/first'"):
            store.delete("folder/first")
    finally:
        subprocess.run([chattr, "-i", tmp_path / "folder"], check=True)
    assert isinstance(caught.value.__cause__, PermissionError)
    assert partial_files(tmp_path) == []


def test_root_is_a_file(tmp_path: Path):
    """A file in the place of the store's folder is named as the fault."""
    (tmp_path / "root").write_text("not a folder")
    store = LocalStore(tmp_path / "root")
    with pytest.raises(StoreUnavailable, match="way of a folder"):
        store.put("key", [b"x"])
    with pytest.raises(StoreUnavailable, match="cannot list"):
        list(store.list())


@pytest.mark.parametrize("if_absent", [False, True])
def test_key_and_folder_of_one_name(tmp_path: Path, *, if_absent: bool):
    """A file system cannot hold a and a/b; neither write damages the other."""
    store = LocalStore(tmp_path)
    store.put("a/b", [b"x"])
    store.put("c", [b"x"])
    with pytest.raises(StoreUnavailable, match=r"a folder .*in the way"):
        store.put("a", [b"y"], if_absent=if_absent)
    with pytest.raises(StoreUnavailable, match="way of a folder"):
        store.put("c/d", [b"y"], if_absent=if_absent)
    assert [info.key for info in store.list()] == ["a/b", "c"]
    assert partial_files(tmp_path) == []


def test_linked_folder_leads_nowhere(tmp_path: Path):
    """A symbolic link to a folder outside is neither read, listed nor written."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    LocalStore(outside).put("secret", [b"secret"])
    store = LocalStore(root)
    store.put("key", [b"x"])
    (root / "link").symlink_to(outside)
    with pytest.raises(ObjectNotFound):
        store.read("link/secret")
    with pytest.raises(StoreUnavailable, match="symbolic link"):
        store.put("link/new", [b"x"])
    store.delete("link/secret")
    assert [info.key for info in store.list()] == ["key"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (outside / "new").exists()


def test_linked_file_leads_nowhere(tmp_path: Path):
    """A symbolic link to a file outside is not read, and not written through."""
    secret, root = tmp_path / "secret", tmp_path / "root"
    secret.write_bytes(b"secret")
    root.mkdir()
    (root / "link").symlink_to(secret)
    store = LocalStore(root)
    with pytest.raises(ObjectNotFound):
        store.read("link")
    with pytest.raises(StoreUnavailable):
        store.put("link", [b"new"], if_absent=True)
    store.put("link", [b"new"])
    assert (store.read("link"), secret.read_bytes()) == (b"new", b"secret")


def test_linked_partial_folder_leads_nowhere(tmp_path: Path):
    """Cleaning up does not follow a link out of the root."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    root.mkdir()
    (root / PARTIAL_FOLDER).symlink_to(outside)
    with pytest.raises(StoreUnavailable, match="symbolic link"):
        LocalStore(root).put("key", [b"x"])
    assert (outside / "precious").exists()


def test_strange_files_are_no_objects(tmp_path: Path):
    """Pipes, and names that are no keys, are passed over."""
    store = LocalStore(tmp_path)
    store.put("key", [b"x"])
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "line\nbreak").touch()
    assert [info.key for info in store.list()] == ["key"]
    with pytest.raises(ObjectNotFound):
        store.read("pipe")


def test_put_needs_no_second_copy(tmp_path: Path):
    """Writing a large object from views takes next to no memory of its own."""
    piece = memoryview(bytes(MEGABYTE))
    store = LocalStore(tmp_path)
    tracemalloc.start()
    try:
        store.put("large", (piece for _ in range(32)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MEGABYTE

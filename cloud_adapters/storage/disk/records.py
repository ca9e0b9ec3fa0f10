"""What a folder's store knows about its objects besides their bytes.

A record holds an object's checksums and metadata. It is in a hidden folder under a
name made of the object's key and version, and it is written before the object gets its
name: a crash leaves a record of nothing, and never an object with the record of
another. The next write of the key removes records of nothing.

A record with metadata is on the disk before the object gets its name. One of checksums
alone is not flushed, which would double the time of a small write: after a power cut
it may be missing or torn. A torn one counts as none, and the object, which was
flushed, is read without a check until it is written again.

Keys are spread over a few folders, each with a lock. To give an object its
name, or take it away, a writer holds the lock of its folder: that makes writes on
condition atomic.
A file that another program put in the store, or changed, has no record.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace

from cloud_adapters.storage.disk.files import READ_FLAGS, read_range, write_all
from cloud_adapters.storage.object_keys import (
    MAX_KEY_BYTES,
    MAX_METADATA_BYTES,
    check_metadata,
)
from federation.errors import CorruptObject
from federation.protocols import ObjectInfo

# Holds the records; no object's key starts with it.
RECORD_FOLDER = ".about"

_LOCK = "lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_RECORD_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_CRC32C = re.compile("[0-9a-f]{8}")
_SHA256 = re.compile("[0-9a-f]{64}")
# In JSON a character takes at most six times its byte.
_MAX_RECORD_BYTES = 6 * (MAX_KEY_BYTES + 2 * MAX_METADATA_BYTES) + 1024


def version_of(found: os.stat_result) -> str:
    """Version of an object: that of its file.

    Every write makes a new inode, which stays taken as long as its object does, and
    sets the time of change to the nanosecond.
    """
    return f"{found.st_mtime_ns}-{found.st_ino}-{found.st_size}"


def folder_of(key: str) -> list[str]:
    """Folder of a key's record and lock, below the store's root."""
    return [RECORD_FOLDER, _digest(key)[0]]


def _writers(mode: int) -> int:
    """Let a group, and all others, read and write what they may write."""
    group = (mode & stat.S_IWGRP) * 3  # Writing is 2 of the 6 of both.
    return group | (mode & stat.S_IWOTH) * 3


@contextlib.contextmanager
def locked(folder: int) -> Iterator[None]:
    """Hold the lock of a folder of records, against threads and processes.

    Only those who may write in the folder may open the lock. Anybody else who could
    read it could hold it, and every writer would wait for ever.
    """
    mode = os.fstat(folder).st_mode
    lock = os.open(_LOCK, _LOCK_FLAGS, 0o600 | _writers(mode), dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def recorded(folder: int, info: ObjectInfo) -> Iterator[None]:
    """Write an object's record; it is removed if the object is not named.

    Under the lock of the folder. At the end no other record of the key is left.
    It is flushed if it holds metadata, which nothing could restore.

    Raises:
        OSError: The disk is full, for example.
    """
    name = _name(info)
    try:
        file = os.open(name, _RECORD_FLAGS, 0o666, dir_fd=folder)
        try:
            write_all(file, _encode(info))
            if info.metadata:
                os.fsync(file)
        finally:
            os.close(file)
        if info.metadata:
            os.fsync(folder)
        yield
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        raise
    forget(folder, info.key, keep=name)


def forget(folder: int, key: str, *, keep: str = "") -> None:
    """Remove the records of a key, under the lock of the folder."""
    digest = _digest(key)
    for name in os.listdir(folder):
        if name.startswith(digest) and name != keep:
            with contextlib.suppress(OSError):  # It will be tried again.
                os.unlink(name, dir_fd=folder)


def with_record(folder: int, info: ObjectInfo) -> ObjectInfo:
    """Combine an object's record with its file's information.

    Raises:
        FileNotFoundError: It has no record, or no longer, or one that a power cut has
            torn.
        CorruptObject: The record is damaged.
    """
    file = os.open(_name(info), READ_FLAGS, dir_fd=folder)
    try:
        content = read_range(file, 0, _MAX_RECORD_BYTES + 1)
    finally:
        os.close(file)
    if _is_torn(content):
        raise FileNotFoundError(errno.ENOENT, "torn", _name(info))
    try:
        return _decode(content, info)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptObject(
            f"the record of {info.key!r} is damaged: write the object again"
        ) from error


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _name(info: ObjectInfo) -> str:
    return f"{_digest(info.key)}.{info.version}"


def _encode(info: ObjectInfo) -> bytes:
    record = {
        "key": info.key,
        "size": info.size,
        "crc32c": info.crc32c,
        "sha256": info.sha256,
        "metadata": dict(info.metadata),
    }
    return json.dumps(record).encode()


def _is_torn(content: bytes) -> bool:
    """Whether a record did not get to the disk whole: what did not reads as zeros."""
    return not content.endswith(b"}") or b"\0" in content


def _decode(content: bytes, info: ObjectInfo) -> ObjectInfo:
    record = json.loads(content)
    if (record["key"], record["size"]) != (info.key, info.size):
        raise ValueError("the record belongs to another object")
    crc32c, sha256 = record["crc32c"], record["sha256"]
    if not (_CRC32C.fullmatch(crc32c) and _SHA256.fullmatch(sha256)):
        raise ValueError("a checksum is malformed")
    metadata = check_metadata(record["metadata"])
    return replace(info, crc32c=crc32c, sha256=sha256, metadata=metadata)

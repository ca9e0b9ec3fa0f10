"""Files and folders by descriptor, room for them, and what the system's errors mean.

No path is resolved twice, and no link followed.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cloud_adapters.storage.checksums import Checksums, summed
from federation.protocols import Buffer

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe that is in the tree must not wait for its writer.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

FLUSH_BYTES = 64 << 20  # What a disk takes in a moment.

# Reading a path that is not the store's finds nothing.
NOTHING_THERE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG}
)

ADVICE: Mapping[int, str] = {
    errno.ENOSPC: "the disk is full; free some space and resume the run if it has "
    "ended",
    errno.EDQUOT: "the disk quota is used up; free some space and resume the run if "
    "it has ended",
    errno.EFBIG: "the file would be larger than the process or the file system "
    "allows; raise the limit (ulimit -f) or use another disk",
    errno.EACCES: "permission is denied; make the folder writable for this user or "
    "choose another storage.url",
    errno.EPERM: "the operation is not permitted; the folder is protected, or its "
    "file system has no hard links: choose another storage.url",
    errno.EROFS: "the file system is read-only; mount it writable or choose another "
    "storage.url",
    errno.ELOOP: (
        "a symbolic link is in the way of a folder; move it or choose another "
        "storage.url"
    ),
    errno.ENOTDIR: (
        "a file or a symbolic link is in the way of a folder; move it or choose "
        "another storage.url"
    ),
    errno.EISDIR: "a folder is in the way; move it",
    errno.ENOENT: (
        "its folder was removed while it was being written; do not change the store's "
        "folder during a run"
    ),
    errno.EXDEV: "a folder of the store is on another file system; keep the whole "
    "store on one",
    errno.ENAMETOOLONG: "a part of it is longer than the file system allows; choose "
    "shorter names",
    errno.EMFILE: "this process has too many open files; raise the limit (ulimit -n)",
    errno.EIO: "the disk reports an error; check its health before you continue",
}


def open_inner(folder: int, name: str, *, create: bool) -> int:
    """Open a folder in a folder.

    Raises:
        OSError: It is a link or a file, or it is not there and not to be created.
    """
    flags = FOLDER_FLAGS | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
        os.fsync(folder)
    return os.open(name, flags, dir_fd=folder)


def make_root(root: Path) -> None:
    """Make a folder and those above it, durably."""
    if root.is_dir():
        return
    if root != root.parent:
        make_root(root.parent)
    with contextlib.suppress(FileExistsError):
        root.mkdir()
        parent = os.open(root.parent, FOLDER_FLAGS)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


@contextlib.contextmanager
def partial_file(partial_folder: int) -> Iterator[tuple[str, int]]:
    """Create a locked partial file; its name is always removed at the end."""
    name, file = _create_locked(partial_folder)
    try:
        yield name, file
    finally:
        # Unlinked while still locked: a sweeper never sees it as a dead one's.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=partial_folder)
        os.close(file)


def _create_locked(partial_folder: int) -> tuple[str, int]:
    while True:
        name = secrets.token_hex(16)
        file = os.open(name, CREATE_FLAGS, 0o666, dir_fd=partial_folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return name, file
        except BaseException:
            os.close(file)
            raise
        # A sweeper took it for a dead one's between the two calls: try again.
        os.close(file)


def remove_if_dead(name: str, partial_folder: int) -> None:
    """Remove a partial file whose writer is gone: its lock is free.

    Raises:
        OSError: Its writer lives (BlockingIOError), or it is gone.
    """
    file = os.open(name, READ_FLAGS, dir_fd=partial_folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=partial_folder)
    finally:
        os.close(file)


def write_all(file: int, piece: Buffer) -> None:
    """Write a piece to its last byte.

    Raises:
        OSError: The disk is full, for example.
    """
    view = memoryview(piece)
    if view.nbytes == 0:
        return
    left = view.cast("B")
    while left:
        left = left[os.write(file, left) :]


class Flushes:
    """Decides when to flush a large file during writing, so that its end is quick.

    Several threads may write to it.
    """

    def __init__(self) -> None:
        """Begin with nothing written."""
        self._lock = threading.Lock()
        self._unflushed_bytes = 0

    def are_due(self, num_bytes: int) -> bool:
        """Whether to flush now that so many bytes have been written."""
        with self._lock:
            self._unflushed_bytes += num_bytes
            is_due = self._unflushed_bytes >= FLUSH_BYTES
            if is_due:
                self._unflushed_bytes = 0
        return is_due


def write_and_sum(file: int, data: Iterable[Buffer]) -> Checksums:
    """Write pieces; meanwhile one thread takes SHA-256, and one flushes to the disk.

    Raises:
        OSError: The disk is full, for example.
    """
    checksums, flushes = Checksums(), Flushes()
    flushed: Future[None] | None = None
    with (
        contextlib.closing(summed(data, checksums)) as pieces,
        ThreadPoolExecutor(1, "flush") as flushing,  # Its thread starts when used.
    ):
        for piece in pieces:
            write_all(file, piece)
            if flushes.are_due(memoryview(piece).nbytes):
                if flushed is not None:
                    flushed.result()
                flushed = flushing.submit(os.fsync, file)
        if flushed is not None:
            flushed.result()
    return checksums


def read_range(file: int, start: int, length: int) -> bytes:
    """Bytes of an open file, which may end before.

    Raises:
        OSError: The disk reports an error.
    """
    parts = []
    while length and (part := os.pread(file, length, start)):
        parts.append(part)
        start += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def allocate(file: int, size: int) -> None:
    """Give a file at least a size, if the disk has room for all of it.

    Linux reserves it. Where Python has no ``posix_fallocate``, as on macOS, the free
    space is compared, and the file gets its size without blocks of its own: then
    another file may still take the space.

    Args:
        file: An open file.
        size: In bytes, above 0.

    Raises:
        OSError: The disk is full: ``errno.ENOSPC``.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    there = os.fstat(file).st_size
    if size <= there:
        return
    disk = os.fstatvfs(file)
    if size - there > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(file, size)


def reserve(file: int, size: int) -> None:
    """Take blocks of the disk for an empty file, so that no other file has them.

    Args:
        file: An open file of no bytes.
        size: In bytes, above 0.

    Raises:
        OSError: The disk is full: ``errno.ENOSPC``.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    piece = bytes(1 << 20)
    for start in range(0, size, len(piece)):
        os.pwrite(file, piece[: size - start], start)
    os.fsync(file)

"""Objects as files under one folder of this machine, durable and atomic.

An object is written to a partial file, flushed to the disk and only then given
its name, so that a killed process or a power cut leaves the whole object or none.
Every folder on the way is opened by descriptor without following symbolic links:
no key leads out of the root, not even while somebody else changes the tree.

Not here: locks between coordinators. ``put(..., if_absent=True)`` is the only
promise between processes, and a hard link keeps it.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cloud_adapters.storage.checksums import Checksums
from cloud_adapters.storage.keys import (
    check_conditions,
    check_key,
    check_metadata,
    check_range,
)
from federation.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from federation.protocols import Buffer, ObjectInfo

# Holds the files that are being written; no object's key starts with it.
PARTIAL_FOLDER = ".partial"

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe that lies in the tree must not wait for its writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# Reading through a path that is not one of ours finds nothing.
_NOTHING_THERE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG}
)

_ADVICE: Mapping[int, str] = {
    errno.ENOSPC: "the disk is full; free some space and resume the run",
    errno.EDQUOT: "the disk quota is used up; free some space and resume the run",
    errno.EFBIG: "the file would be larger than the process or the file system "
    "allows; raise the limit (ulimit -f) or use another disk",
    errno.EACCES: "permission is denied; make the folder writable for this user or "
    "choose another storage.url",
    errno.EPERM: "the operation is not permitted; the folder is protected, or its "
    "file system has no hard links: choose another storage.url",
    errno.EROFS: "the file system is read-only; mount it writable or choose another "
    "storage.url",
    errno.ELOOP: "a symbolic link is where a folder must be; move it away or choose "
    "another storage.url",
    errno.ENOTDIR: "a file or a symbolic link is where a folder must be; move it "
    "away or choose another storage.url",
    errno.EISDIR: "a folder is in its place; move it away",
    errno.ENOENT: "its folder was removed while it was being written; leave the "
    "store's folder to the run",
    errno.EXDEV: "a folder of the store lies on another file system; keep the whole "
    "store on one",
    errno.ENAMETOOLONG: "a part of it is longer than the file system allows; choose "
    "shorter names",
    errno.EMFILE: "this process has too many open files; raise the limit (ulimit -n)",
    errno.EIO: "the disk reports an error; check its health before going on",
}


class LocalStore:
    """A ``federation.protocols.ObjectStore`` over a folder of this machine.

    It may be used by several threads and processes at once. Unlike other stores
    it cannot hold ``a`` and ``a/b`` at the same time.
    """

    def __init__(self, root: Path | str) -> None:
        """Use the folder ``root``; the first write creates it."""
        self._root = Path(root)
        self._swept = False

    @property
    def url(self) -> str:
        """Where it is."""
        return f"file://{self._root}"

    def put(
        self,
        key: str,
        data: Iterable[Buffer],
        *,
        if_absent: bool = False,
        if_version: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``.

        1. Write the pieces to a partial file and flush it to the disk.
        2. Give it its name: a hard link fails if the name is taken, a rename
           replaces what was there.
        3. Flush the folder, so that the name survives a power cut.
        """
        *folders, name = self._segments(key)
        check_conditions(if_absent=if_absent, if_version=if_version)
        kept = check_metadata(metadata)
        checksums = Checksums()
        with (
            self._errors("write", key),
            self._folder([PARTIAL_FOLDER], create=True) as partial_folder,
            self._folder(folders, create=True) as folder,
        ):
            self._sweep_once(partial_folder)
            with _partial_file(partial_folder) as (partial, file):
                _write(file, checksums.watch(data))  # 1.
                os.fsync(file)
                info = replace(
                    _info(key, os.fstat(file)),
                    crc32c=checksums.crc32c,
                    sha256=checksums.sha256,
                    metadata=kept,
                )
                if if_version is not None and not self._is(key, if_version):
                    raise ObjectChanged(
                        f"{key!r} in the folder {str(self._root)!r} has changed"
                    )
                if if_absent:  # 2.
                    self._link(key, partial, partial_folder, folder)
                else:
                    os.replace(
                        partial, name, src_dir_fd=partial_folder, dst_dir_fd=folder
                    )
            os.fsync(folder)  # 3.
        return info

    def read(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        if_version: str | None = None,
    ) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``."""
        check_range(start, length)
        with self._errors("read", key), self._open(key) as file:
            info = _info(key, os.fstat(file))
            if if_version not in {None, info.version}:
                raise ObjectChanged(
                    f"{key!r} in the folder {str(self._root)!r} has changed"
                )
            left = max(0, info.size - start)
            if length is not None:
                left = min(left, length)
            parts = []
            while left and (part := os.pread(file, left, start)):
                parts.append(part)
                start += len(part)
                left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stat(self, key: str) -> ObjectInfo:
        """Size and version of an object; see ``ObjectStore.stat``."""
        with self._errors("read", key), self._open(key) as file:
            return _info(key, os.fstat(file))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in the order of their keys."""
        with self._errors("list", prefix):
            yield from (i for i in self._walk([], prefix) if i.key > start_after)

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        *folders, name = self._segments(key)
        with (
            contextlib.suppress(ObjectNotFound),
            self._errors("delete", key, missing=_NOTHING_THERE),
            self._folder(folders) as folder,
        ):
            os.unlink(name, dir_fd=folder)
            os.fsync(folder)

    def copy(self, source: str, target: str, *, if_absent: bool = False) -> ObjectInfo:
        """Copy an object; see ``ObjectStore.copy``."""
        return self.put(target, [self.read(source)], if_absent=if_absent)

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _is(self, key: str, version: str) -> bool:
        try:
            return self.stat(key).version == version
        except ObjectNotFound:
            return False

    def _segments(self, key: str) -> Sequence[str]:
        segments = check_key(key).split("/")
        if segments[0] == PARTIAL_FOLDER:
            raise ValueError(
                f"{key[:80]!r} cannot be an object's key: a local store keeps its "
                f"partial files under {PARTIAL_FOLDER}/"
            )
        return segments

    @contextlib.contextmanager
    def _errors(
        self, verb: str, key: str, *, missing: frozenset[int] = frozenset()
    ) -> Iterator[None]:
        """Turn the system's errors into ours, with the cause kept."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            where = f"{key!r} in the folder {str(self._root)!r}"
            if error.errno in missing:
                raise ObjectNotFound(f"there is no {where}") from error
            advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
            raise StoreUnavailable(f"cannot {verb} {where}: {advice}") from error

    @contextlib.contextmanager
    def _folder(
        self, segments: Sequence[str], *, create: bool = False
    ) -> Iterator[int]:
        """Open a folder under the root, one segment after the other."""
        if create:
            _make_root(self._root)
        folder = os.open(self._root, _FOLDER_FLAGS)
        try:
            for segment in segments:
                inner = _open_inner(folder, segment, create=create)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[int]:
        *folders, name = self._segments(key)
        with (
            self._errors("read", key, missing=_NOTHING_THERE),
            self._folder(folders) as folder,
        ):
            file = os.open(name, _READ_FLAGS, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ObjectNotFound(
                    f"there is no {key!r} in the folder {str(self._root)!r}"
                )
            yield file
        finally:
            os.close(file)

    def _link(self, key: str, partial: str, partial_folder: int, folder: int) -> None:
        name = key.rpartition("/")[2]
        try:
            os.link(partial, name, src_dir_fd=partial_folder, dst_dir_fd=folder)
        except FileExistsError as error:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, "not a file", name) from error
            raise ObjectExists(
                f"{key!r} exists already in the folder {str(self._root)!r}"
            ) from error

    def _walk(self, folders: Sequence[str], prefix: str) -> Iterator[ObjectInfo]:
        path = "".join(f"{segment}/" for segment in folders)
        for name, found in self._entries(folders):
            key = path + name
            if stat.S_ISDIR(found.st_mode):
                # A folder sorts among its neighbours as its keys do, with a slash.
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk([*folders, name.removesuffix("/")], prefix)
            elif stat.S_ISREG(found.st_mode) and key.startswith(prefix):
                yield _info(key, found)

    def _entries(self, folders: Sequence[str]) -> Sequence[tuple[str, os.stat_result]]:
        """Names and states in a folder, with a slash after the name of a folder."""
        entries = []
        try:
            with self._folder(folders) as folder:
                for name in os.listdir(folder):  # noqa: PTH208 (a descriptor)
                    with contextlib.suppress(FileNotFoundError, ValueError):
                        # ValueError: a name that no key can have.
                        self._segments("/".join([*folders, name]))
                        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        slash = "/" if stat.S_ISDIR(found.st_mode) else ""
                        entries.append((name + slash, found))
        except FileNotFoundError:
            return []
        return sorted(entries, key=lambda entry: entry[0])

    def _sweep_once(self, partial_folder: int) -> None:
        """Remove what killed writers left behind, before our first write."""
        if self._swept:
            return
        self._swept = True
        for name in os.listdir(partial_folder):
            with contextlib.suppress(OSError):  # In use, or swept by another.
                _remove_if_dead(name, partial_folder)


def _remove_if_dead(name: str, partial_folder: int) -> None:
    """Remove a partial file whose writer is gone: nobody holds its lock.

    Raises:
        OSError: Its writer lives (BlockingIOError), or it is gone.
    """
    file = os.open(name, _READ_FLAGS, dir_fd=partial_folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=partial_folder)
    finally:
        os.close(file)


@contextlib.contextmanager
def _partial_file(partial_folder: int) -> Iterator[tuple[str, int]]:
    """Create a locked partial file; its name is gone at the end, come what may."""
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
        file = os.open(name, _CREATE_FLAGS, 0o666, dir_fd=partial_folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return name, file
        except BaseException:
            os.close(file)
            raise
        # A sweeper took it for a dead one's between the two calls: try again.
        os.close(file)


def _write(file: int, data: Iterable[Buffer]) -> None:
    for piece in data:
        view = memoryview(piece)
        if view.nbytes == 0:
            continue
        left = view.cast("B")
        while left:
            left = left[os.write(file, left) :]


def _open_inner(folder: int, name: str, *, create: bool) -> int:
    flags = _FOLDER_FLAGS | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
        os.fsync(folder)
    return os.open(name, flags, dir_fd=folder)


def _make_root(root: Path) -> None:
    if root.is_dir():
        return
    if root != root.parent:
        _make_root(root.parent)
    with contextlib.suppress(FileExistsError):
        root.mkdir()
        parent = os.open(root.parent, _FOLDER_FLAGS)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    # Every write makes a new inode, which stays taken as long as its object does.
    version = f"{found.st_mtime_ns}-{found.st_ino}-{found.st_size}"
    return ObjectInfo(
        key=key, size=found.st_size, version=version, updated=found.st_mtime
    )

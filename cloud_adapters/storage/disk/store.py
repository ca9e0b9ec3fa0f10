"""Objects as files under one folder of this machine, durable and atomic.

An object is written to a partial file, flushed to the disk and only then given
its name, so that a killed process or a power cut leaves the whole object or none.
Every folder on the way is opened by descriptor without following symbolic links:
no key leads out of the root, not even while someone else changes the tree.

Checksums and metadata are in records beside the objects; see ``local_records``. Not
here: locks that last longer than a call. ``put`` on condition is the only promise
between processes.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from cloud_adapters.storage.checksums import crc32c
from cloud_adapters.storage.disk import records as local_records
from cloud_adapters.storage.disk.files import (
    ADVICE,
    FOLDER_FLAGS,
    NOTHING_THERE,
    READ_FLAGS,
    make_root,
    open_inner,
    partial_file,
    read_range,
    remove_if_dead,
    write_and_sum,
)
from cloud_adapters.storage.object_keys import CheckedPut, CheckedRead, check_key
from federation.errors import (
    CorruptObject,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from federation.protocols import Buffer, ObjectInfo, PutArguments, ReadArguments

# Holds the files that are being written; no object's key starts with it.
PARTIAL_FOLDER = ".partial"

_SCHEME = "file://"
_HIDDEN = frozenset({PARTIAL_FOLDER, local_records.RECORD_FOLDER})


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
        """URL of the folder."""
        return f"file://{self._root}"

    def put(
        self, key: str, data: Iterable[Buffer], **options: Unpack[PutArguments]
    ) -> ObjectInfo:
        """Write an object whole or not at all; see ``ObjectStore.put``.

        1. Write the pieces to a partial file and flush it to the disk.
        2. Under the lock of its key write its record, and flush it if it holds
           metadata.
        3. Give it its name: a hard link fails if the name is taken, a rename
           replaces what was there.
        4. Flush the folder, so that the name survives a power cut.
        """
        put = CheckedPut(**options)
        about = ObjectInfo(key=key, size=0, version="", metadata=put.kept)
        return self._put(about, data, put)

    def read(self, key: str, **options: Unpack[ReadArguments]) -> bytes:
        """Bytes of an object; see ``ObjectStore.read``."""
        part = CheckedRead(**options)
        known = not part.start
        with self._errors("read", key), self._object(key, known=known) as (file, info):
            if part.if_version not in {None, info.version}:
                raise ObjectChanged(f"{self._where(key)} has changed")
            left = max(0, info.size - part.start)
            length = left if part.length is None else min(left, part.length)
            content = read_range(file, part.start, length)
        if info.crc32c is not None and len(content) == info.size:
            self._verify(key, info.crc32c, crc32c(content))
        return content

    def stat(self, key: str) -> ObjectInfo:
        """All that is known of an object; see ``ObjectStore.stat``."""
        with self._errors("read", key), self._object(key) as (_, info):
            return info

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in the order of their keys."""
        with self._errors("list", prefix):
            yield from self._walk([], prefix, start_after)

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        *folders, name = self._segments(key)
        with (
            contextlib.suppress(ObjectNotFound),
            self._errors("delete", key, missing=NOTHING_THERE),
            self._folder(folders) as folder,
        ):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            with self._record_folder(key) as records:
                os.unlink(name, dir_fd=folder)
                os.fsync(folder)
                local_records.forget(records, key)

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _put(
        self, about: ObjectInfo, data: Iterable[Buffer], put: CheckedPut
    ) -> ObjectInfo:
        """Write an object with its metadata.

        The numbers are those of ``put``.
        """
        key = about.key
        *folders, name = self._segments(key)
        with (
            self._errors("write", key),
            self._folder([PARTIAL_FOLDER], create=True) as partials,
            self._folder(folders, create=True) as folder,
        ):
            self._sweep_once(partials)
            with partial_file(partials) as (partial, file):
                info = _write(file, about, data)  # 1.
                with self._record_folder(key) as records:
                    self._check(key, folder, put)
                    with local_records.recorded(records, info):  # 2.
                        name_it = os.link if put.if_absent else os.replace  # 3.
                        name_it(partial, name, src_dir_fd=partials, dst_dir_fd=folder)
            os.fsync(folder)  # 4.
        return info

    def _segments(self, key: str) -> Sequence[str]:
        segments = check_key(key).split("/")
        if segments[0] in _HIDDEN:
            raise ValueError(
                f"{key[:80]!r} cannot be an object's key: a local store keeps its "
                f"partial files and records under {segments[0]}/"
            )
        return segments

    def _where(self, key: str) -> str:
        return f"{key!r} in the folder {str(self._root)!r}"

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
            if error.errno == errno.EEXIST:
                raise ObjectExists(f"{self._where(key)} already exists") from error
            if error.errno in missing:
                raise ObjectNotFound(f"there is no {self._where(key)}") from error
            advice = ADVICE.get(error.errno or 0, error.strerror or str(error))
            raise StoreUnavailable(
                f"cannot {verb} {self._where(key)}: {advice}"
            ) from error

    @contextlib.contextmanager
    def _folder(
        self, segments: Sequence[str], *, create: bool = False
    ) -> Iterator[int]:
        """Open a folder under the root, one segment after the other."""
        if create:
            make_root(self._root)
        folder = os.open(self._root, FOLDER_FLAGS)
        try:
            for segment in segments:
                inner = open_inner(folder, segment, create=create)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _record_folder(self, key: str) -> Iterator[int]:
        """Open and lock the folder of a key's records."""
        with (
            self._folder(local_records.folder_of(key), create=True) as records,
            local_records.locked(records),
        ):
            yield records

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[int]:
        *folders, name = self._segments(key)
        with (
            self._errors("read", key, missing=NOTHING_THERE),
            self._folder(folders) as folder,
        ):
            file = os.open(name, READ_FLAGS, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ObjectNotFound(f"there is no {self._where(key)}")
            yield file
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _object(
        self, key: str, *, known: bool = True
    ) -> Iterator[tuple[int, ObjectInfo]]:
        """Open an object, with its record if requested."""
        while True:
            with self._open(key) as file:
                info = _info(key, os.fstat(file))
                if known:
                    info = self._with_record(info)
                if not known or info.crc32c is not None or self._is_current(info):
                    yield file, info
                    return

    def _with_record(self, info: ObjectInfo) -> ObjectInfo:
        try:
            with self._folder(local_records.folder_of(info.key)) as records:
                return local_records.with_record(records, info)
        except FileNotFoundError:
            return info

    def _is_current(self, info: ObjectInfo) -> bool:
        """Whether an object without a record still has its name.

        If not, the record went with it while we looked.
        """
        try:
            with self._open(info.key) as file:
                return local_records.version_of(os.fstat(file)) == info.version
        except ObjectNotFound:
            return False

    def _check(self, key: str, folder: int, put: CheckedPut) -> None:
        """Check the conditions of a write, under the lock of its key."""
        if not put.if_absent and put.if_version is None:
            return
        name = key.rpartition("/")[2]
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            found = None
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "not a file", name)
        if put.if_absent and found is not None:
            raise ObjectExists(f"{self._where(key)} already exists")
        version = None if found is None else local_records.version_of(found)
        if put.if_version not in {None, version}:
            raise ObjectChanged(f"{self._where(key)} has changed")

    def _verify(self, key: str, written: str | None, actual: str | None) -> None:
        if written not in {None, actual}:
            raise CorruptObject(
                f"{self._where(key)} is damaged: its CRC32C is {actual}, but it was "
                f"written with {written}; restore it from a copy"
            )

    def _walk(
        self, folders: Sequence[str], prefix: str, start_after: str
    ) -> Iterator[ObjectInfo]:
        path = "".join(f"{segment}/" for segment in folders)
        for name, found in self._entries(folders):
            key = path + name
            if stat.S_ISDIR(found.st_mode):
                # A folder sorts among its neighbours as its keys do, with a slash.
                if (key.startswith(prefix) or prefix.startswith(key)) and (
                    key > start_after or start_after.startswith(key)
                ):
                    inner = [*folders, name.removesuffix("/")]
                    yield from self._walk(inner, prefix, start_after)
            elif (
                stat.S_ISREG(found.st_mode)
                and key.startswith(prefix)
                and key > start_after
            ):
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
        """Remove partial files of killed writers, before the first write."""
        if self._swept:
            return
        self._swept = True
        for name in os.listdir(partial_folder):
            with contextlib.suppress(OSError):  # In use, or swept by another.
                remove_if_dead(name, partial_folder)


def _write(file: int, about: ObjectInfo, data: Iterable[Buffer]) -> ObjectInfo:
    """Write a partial file durably, and return its information as an object."""
    checksums = write_and_sum(file, data)
    # A finer time than the kernel's own: no two writes of a key make one version.
    now_ns = time.time_ns()
    os.utime(file, ns=(now_ns, now_ns))
    os.fsync(file)
    return replace(
        _info(about.key, os.fstat(file)),
        crc32c=checksums.crc32c,
        sha256=checksums.sha256,
        metadata=about.metadata,
    )


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size=found.st_size,
        version=local_records.version_of(found),
        updated=found.st_mtime,
    )


def strays(url: str) -> Iterator[str]:
    """Yield paths that ``LocalStore.list`` leaves out, relative to the folder.

    These are links, pipes and other special files, and names that no key can have.
    The store never reads them, but a program that opens the folder itself would.

    Args:
        url: URL of a store. Others than folders have no strays.
    """
    if not url.startswith(_SCHEME):
        return
    root = Path(url.removeprefix(_SCHEME))
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        own = _HIDDEN if here == root else frozenset[str]()
        for name in (*folders, *files):
            path = here / name
            is_usual = path.is_dir() if name in folders else path.is_file()
            if path.is_symlink() or not is_usual or not _is_key(path, root):
                yield path.relative_to(root).as_posix()
        folders[:] = [name for name in folders if name not in own]


def _is_key(path: Path, root: Path) -> bool:
    try:
        check_key(path.relative_to(root).as_posix())
    except ValueError:
        return False
    return True

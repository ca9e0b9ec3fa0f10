"""Streams, downloads and uploads of large objects, over any store.

All of them hold a few parts in memory, however large the object is, and keep to one
version of it. A store tries its requests again by itself; what is here tries again
beyond that, with longer waits, so that an outage of minutes does not end a transfer of
hours. Parts are asked for by their place, so what has arrived stays.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from cloud_adapters.storage.checksums import Checksums, Crc32c, crc32c
from cloud_adapters.storage.disk.part_file import (
    PART_BYTES,
    Part,
    PartFile,
    fetch_all,
    file_errors,
    parts_of,
)
from cloud_adapters.storage.retry import Retry
from federation.errors import CorruptObject, ObjectChanged, StoreUnavailable
from federation.protocols import ObjectInfo, ObjectStore, PutArguments

# Of a download. TLS and checksums take a core for a few hundred megabytes a second, so
# more threads than this do not make it faster; parts twice as large as a stream's do.
WORKERS = min(8, 2 * (os.cpu_count() or 1))
DOWNLOAD_PART_BYTES = 2 * PART_BYTES
PIECE_BYTES = 1 << 20  # Of a file: it stays in the processor's cache until it is used.
PATIENT = Retry(attempts=4, base_seconds=2.0, cap_seconds=60.0, deadline_seconds=900.0)


def stream(
    store: ObjectStore,
    key: str,
    *,
    if_version: str | None = None,
    part_bytes: int = PART_BYTES,
    ahead: int = 2,
    retry: Retry = PATIENT,
) -> Iterator[bytes]:
    """Yield an object's content in parts, in order, and check the whole at the end.

    The version that is there at the beginning is the one that is read.

    Args:
        store: Where it is.
        key: The object.
        if_version: Fail unless it is of this version.
        part_bytes: Size of a part.
        ahead: Parts that are fetched while the consumer works on one, at least 1.
        retry: Attempts beyond the store's own.

    Raises:
        ObjectNotFound: There is no such object.
        ObjectChanged: It has another version, or was replaced meanwhile.
        CorruptObject: The content does not have the object's checksum. What was
            yielded before must not be used.
        StoreUnavailable: The store is unreachable for too long.
        ValueError: ``part_bytes`` or ``ahead`` is not positive.
    """
    pinned = _pin(store, key, if_version, retry)
    sums = pinned.sums()
    fetched: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(ahead, "stream") as pool:
        try:
            parts = parts_of(pinned.info.size, part_bytes)
            while True:
                while len(fetched) < ahead and (part := next(parts, None)) is not None:
                    fetched.append(pool.submit(pinned.fetch, part))
                if not fetched:
                    break
                content = fetched.popleft().result()
                sums.update(content)
                yield content
        finally:
            for future in fetched:  # The consumer has left, or a part failed.
                future.cancel()
    pinned.check(sums)


def download(
    store: ObjectStore,
    key: str,
    path: Path,
    *,
    if_version: str | None = None,
    workers: int = WORKERS,
    part_bytes: int = DOWNLOAD_PART_BYTES,
    retry: Retry = PATIENT,
) -> ObjectInfo:
    """Write an object to a file, in parallel parts; whole and checked, or not at all.

    1. Pin the version, and open what a killed attempt has left beside ``path``.
    2. Fetch the parts that are missing into their places.
    3. Check the whole. If parts of an earlier attempt were wrong, fetch all again.
    4. Flush it to the disk and give it its name.

    What is left after an outage or a kill is named in ``part_file``; the next call for
    the same version continues with it.

    Args:
        store: Where it is.
        key: The object.
        path: The file, in a folder that exists; replaced if it exists.
        if_version: Fail unless it is of this version.
        workers: Parts that are fetched at the same time.
        part_bytes: Size of a part: ``workers`` of them are held in memory.
        retry: Attempts beyond the store's own.

    Raises:
        ObjectNotFound: There is no such object.
        ObjectChanged: It has another version, or was replaced meanwhile.
        CorruptObject: The content does not have the object's checksum.
        StoreUnavailable: The store is out of reach for too long, or the file cannot
            be written.
        ValueError: ``workers`` or ``part_bytes`` is not positive.
    """
    pinned = _pin(store, key, if_version, retry)  # 1.
    info = pinned.info
    parts = list(parts_of(info.size, part_bytes))
    name = "\0".join((store.url, key, info.version, str(part_bytes)))
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    with file_errors("write", path):
        file = PartFile(path, digest, info.size)
        try:
            fetched = _fetch_missing(pinned, parts, file, workers)  # 2.
            try:
                _check(pinned, parts, file, fetched)  # 3.
            except CorruptObject:
                if len(fetched) == len(parts):
                    raise
                file.forget()
                fetched = _fetch_missing(pinned, parts, file, workers)
                _check(pinned, parts, file, fetched)
            file.publish()  # 4.
        except StoreUnavailable:
            raise
        except Exception:
            file.discard()
            raise
        finally:
            file.close()
    return info


def upload(
    store: ObjectStore,
    key: str,
    path: Path,
    **options: Unpack[PutArguments],
) -> ObjectInfo:
    """Write a file as an object; see ``ObjectStore.put`` for conditions and errors.

    Raises:
        StoreUnavailable: The file cannot be read or changes meanwhile, and all that
            ``put`` raises.
    """
    with file_errors("read", path):
        return store.put(key, FilePieces(path), **options)


class FilePieces:
    """The content of a file in pieces, as often as it is asked for."""

    def __init__(self, path: Path, piece_bytes: int = PIECE_BYTES) -> None:
        """Look at the file.

        Raises:
            OSError: There is no such file.
        """
        self._path = path
        self._piece_bytes = piece_bytes
        self._state = _state(path.stat())

    def __iter__(self) -> Iterator[bytes]:
        """Yield the pieces.

        Raises:
            StoreUnavailable: The file has changed since the first look, so that a
                store may have seen two contents.
            OSError: It cannot be read.
        """
        with self._path.open("rb", buffering=0) as file:
            while piece := file.read(self._piece_bytes):
                yield piece
            if _state(os.fstat(file.fileno())) != self._state:
                raise StoreUnavailable(
                    f"{str(self._path)!r} changed while it was being read: write it "
                    "under another name, and rename it when it is complete"
                )


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class _OneVersion:
    """One version of an object, and how to retry reads."""

    store: ObjectStore
    info: ObjectInfo
    retry: Retry

    def fetch(self, part: Part) -> bytes:
        """Read a part."""
        return self.retry.call(lambda _: self._read(part))

    def _read(self, part: Part) -> bytes:
        key, version = self.info.key, self.info.version
        content = self.store.read(
            key, start=part.start, length=part.length, if_version=version
        )
        if len(content) != part.length:
            raise CorruptObject(
                f"{len(content)} bytes of {key!r} in {self.store.url} arrived from "
                f"{part.start} on instead of {part.length}",
                temporary=True,
            )
        return content

    def sums(self) -> Checksums | Crc32c:
        """Start the checksums to verify: SHA-256 only if there is no other."""
        return Checksums() if self.info.crc32c is None else Crc32c()

    def check(self, actual: Checksums | Crc32c) -> None:
        """Check the whole content's size and checksum against what is known."""
        info = self.info
        if isinstance(actual, Checksums):
            is_same = info.sha256 in {None, actual.sha256}
        else:
            is_same = info.crc32c == actual.crc32c
        if is_same and actual.size == info.size:
            return
        raise CorruptObject(
            f"{info.key!r} in {self.store.url} did not arrive as it was written: "
            f"{actual.size} bytes with CRC32C {actual.crc32c}, instead of {info.size} "
            f"with {info.crc32c}; try again, and restore the object if that does not "
            "help"
        )


def _pin(
    store: ObjectStore, key: str, if_version: str | None, retry: Retry
) -> _OneVersion:
    info = retry.call(lambda _: store.stat(key))
    if if_version not in {None, info.version}:
        raise ObjectChanged(f"{key!r} in {store.url} has changed")
    return _OneVersion(store, info, retry)


def _fetch_missing(
    pinned: _OneVersion, parts: Sequence[Part], file: PartFile, workers: int
) -> Mapping[int, str]:
    """Fetch missing parts, and return their CRC32C by the part's number."""
    fetched: dict[int, str] = {}

    def fetch(part: Part) -> None:
        content = pinned.fetch(part)
        fetched[part.number] = crc32c(content)
        file.fill(part, content)

    fetch_all([part for part in parts if not file.has(part)], fetch, workers=workers)
    return fetched


def _check(
    pinned: _OneVersion,
    parts: Sequence[Part],
    file: PartFile,
    fetched: Mapping[int, str],
) -> None:
    """Check a whole file; only parts of earlier attempts are read again."""
    sums = pinned.sums()
    for part in parts:
        if isinstance(sums, Crc32c) and part.number in fetched:
            sums.join(fetched[part.number], part.length)
        else:
            sums.update(file.read(part))
    pinned.check(sums)

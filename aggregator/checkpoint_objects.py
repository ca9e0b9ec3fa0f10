"""The objects of checkpoints: written once, in parallel, and verified.

Not here: which checkpoint is to be used, and which may go (``aggregator.checkpoint``).
"""

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aggregator import manifest as manifests
from aggregator.manifest import Blob, Chunk, Manifest, cut
from federation.errors import CorruptObject, ObjectNotFound
from federation.mapped import give_back
from federation.protocols import Buffer, ObjectInfo, ObjectStore

READ_BYTES = 8 << 20  # Of an object at a time.
WORKERS = 4  # Each holds a chunk, or what a store keeps of one that it sends.

_MANIFEST_NAME = re.compile(r"round-(\d{6,12})\.json")
_T = TypeVar("_T")
_R = TypeVar("_R")


class BadCheckpoint(CorruptObject):
    """A checkpoint that must not be used, and the damaged object."""

    def __init__(self, message: str, key: str | None = None) -> None:
        """Name the object by its whole key, if it is there to be moved aside."""
        super().__init__(message)
        self.key = key


class CheckpointObjects:
    """The objects of all checkpoints under one prefix."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        """Look at a store; nothing is read or written yet."""
        self._store = store
        self._prefix = prefix
        # What this object has written or verified, so that an unknown one is written
        # again instead of trusted for its name.
        self._known_whole: set[str] = set()
        self._lock = threading.Lock()

    def manifest_keys(self) -> Sequence[str]:
        """Keys of all manifests, oldest round first."""
        return [info.key for info in self.manifests()]

    def manifests(self) -> Sequence[ObjectInfo]:
        """All manifests, oldest round first."""
        found: list[tuple[int, ObjectInfo]] = []
        for info in self._store.list(f"{self._prefix}round-"):
            match = _MANIFEST_NAME.fullmatch(info.key.removeprefix(self._prefix))
            if match:
                found.append((int(match[1]), info))
        return [info for _, info in sorted(found, key=itemgetter(0))]

    def read_manifest(self, key: str) -> Manifest:
        """Read a manifest and verify its digest.

        Raises:
            BadCheckpoint: It is torn, altered or gone.
            CheckpointMismatch: It was written by another version of crossfed.
        """
        return _twice(lambda: self._manifest(key))

    def _manifest(self, key: str) -> Manifest:
        try:
            content = self._store.read(key, length=manifests.MAX_MANIFEST_BYTES + 1)
            return manifests.decode(key, content)
        except ObjectNotFound as error:
            raise BadCheckpoint(f"{key} is gone") from error
        except CorruptObject as error:
            raise BadCheckpoint(str(error), key) from error

    def stored(self) -> Iterator[ObjectInfo]:
        """Every blob and chunk that is there."""
        for folder in ("blobs/", "chunks/"):
            yield from self._store.list(self._prefix + folder)

    def size(self, key: str) -> int | None:
        """Bytes of an object by its whole key; None if it is not there."""
        try:
            return self._store.stat(key).size
        except ObjectNotFound:
            return None
        except CorruptObject as error:  # So says an encrypted store.
            raise _damaged(key, error) from error

    def write(self, blob: Blob, pieces: Sequence[Buffer]) -> int:
        """Write what may be missing, and return the bytes written.

        Chunks are views of the pieces: nothing is copied here.
        """
        sizes: dict[str, int | None] = {}
        if blob.chunks:
            listed = self._store.list(f"{self._prefix}chunks/")
            sizes = {info.key: info.size for info in listed}
        missing: dict[str, Chunk] = {}
        for chunk in blob.objects:
            key = self._prefix + chunk.key
            if key in self._known_whole:
                size = sizes.get(key) if blob.chunks else self.size(key)
                if size == chunk.size:
                    continue
            missing[key] = chunk

        def put(key: str) -> int:
            chunk = missing[key]
            views = list(cut(pieces, chunk.start, chunk.size))
            self._store.put(key, views)
            for view in views:
                give_back(np.frombuffer(view, np.uint8))
            with self._lock:
                self._known_whole.add(key)
            return chunk.size

        return sum(_each(missing, put))

    def read(self, blob: Blob, arrays: Sequence[NDArray[Any]]) -> None:
        """Fill arrays from the end of a blob, range by range, and verify it.

        Args:
            blob: What is stored.
            arrays: C-contiguous and writable, one after another.

        Raises:
            BadCheckpoint: Part of it is missing, or not what was written.
        """
        header_bytes = blob.size - sum(array.nbytes for array in arrays)
        header = bytearray(max(0, header_bytes))
        targets = [memoryview(header), *(a.view(np.uint8).data for a in arrays)]
        _each(blob.objects, lambda chunk: self._fill(chunk, targets))
        if int.from_bytes(header[:8], "little") != header_bytes - 8:
            first = self._prefix + blob.objects[0].key
            raise BadCheckpoint(f"{first} does not match its manifest", first)

    def damages(self, chunks: Sequence[Chunk]) -> list[str]:
        """Read objects and say what is wrong with each; an empty text if nothing is."""

        def damage(chunk: Chunk) -> str:
            try:
                self._fill(chunk, ())
            except BadCheckpoint as error:
                return str(error)
            return ""

        return _each(chunks, damage)

    def move_aside(self, key: str) -> None:
        """Move a damaged object out of the way."""
        # What was encrypted and cannot be decrypted is of no use, and not kept.
        with contextlib.suppress(BadCheckpoint):
            size = self.size(key)
            if size is None:  # Gone, or moved for another round that shared it.
                return
            target = f"{self._prefix}quarantine/{key.rpartition('/')[2]}."
            number = 1 + sum(1 for _ in self._store.list(target))
            self._store.put(f"{target}{number}", self._parts(key, size))
        self._store.delete(key)
        self._known_whole.discard(key)

    def remove(self, found: Sequence[ObjectInfo]) -> int:
        """Remove objects unless rewritten since, and return the bytes freed."""

        def delete(info: ObjectInfo) -> int:
            try:
                is_same = self._store.stat(info.key).version == info.version
            except ObjectNotFound:
                return 0
            # Another coordinator may have written it again, to name it soon.
            if is_same:
                self._store.delete(info.key)
            return info.size if is_same else 0

        freed = sum(_each(found, delete))
        self._known_whole -= {info.key for info in found}
        return freed

    def _fill(self, chunk: Chunk, targets: Sequence[memoryview]) -> None:
        """Read a chunk and verify it."""
        _twice(lambda: self._fill_once(chunk, targets))

    def _fill_once(self, chunk: Chunk, targets: Sequence[memoryview]) -> None:
        key = self._prefix + chunk.key
        size = self.size(key)
        if size is None:
            raise BadCheckpoint(f"{key} is missing")
        if size != chunk.size:
            raise BadCheckpoint(f"{key} has {size} bytes instead of {chunk.size}", key)
        digest = hashlib.sha256()
        for start in range(0, chunk.size, READ_BYTES):
            length = min(READ_BYTES, chunk.size - start)
            part = self._read(key, start, length)
            if len(part) != length:
                raise BadCheckpoint(f"{key} ends at byte {start + len(part)}", key)
            digest.update(part)
            copied = 0
            for view in cut(targets, chunk.start + start, length):
                view[:] = part[copied : copied + len(view)]
                copied += len(view)
        if digest.hexdigest() != chunk.sha256:
            raise BadCheckpoint(f"{key} does not have the SHA-256 of its name", key)
        with self._lock:
            self._known_whole.add(key)

    def _parts(self, key: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, READ_BYTES):
            yield self._read(key, start, READ_BYTES)

    def _read(self, key: str, start: int, length: int) -> bytes:
        try:
            return self._store.read(key, start=start, length=length)
        except CorruptObject as error:
            raise _damaged(key, error) from error


def _twice(read: Callable[[], _R]) -> _R:
    """Read something, and again if it is damaged.

    Ranges have no checksum of their own. What is wrong once may have changed on its
    way; twice it is what is stored, and is moved aside.
    """
    try:
        return read()
    except BadCheckpoint:
        return read()


def _damaged(key: str, error: CorruptObject) -> CorruptObject:
    """Distinguish damage in the store from damage in transit."""
    return error if error.temporary else BadCheckpoint(str(error), key)


def _each(items: Iterable[_T], act: Callable[[_T], _R]) -> list[_R]:
    """Act on all items, several at a time; a failure stops further ones."""
    todo = list(items)
    if len(todo) < 2:  # noqa: PLR2004 -- no other thread is worth while
        return [act(item) for item in todo]
    with ThreadPoolExecutor(min(WORKERS, len(todo)), "checkpoint") as pool:
        try:
            return list(pool.map(act, todo))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

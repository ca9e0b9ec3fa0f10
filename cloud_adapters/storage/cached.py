"""A disk cache of objects that never change, shared by all processes of a machine.

A file is named after the SHA-256 of its content, so it cannot be out of date, and
datasets that share objects share files. What is in the folder at any moment:

- ``NAME``, 64 hexadecimal digits: a content, whole; its time of modification is when
  it was last opened;
- ``.new-RANDOM``: being written, under a lock that ends with its writer. One without a
  lock was left by a killed process and is removed;
- ``.lock`` and ``.fetch-00`` to ``.fetch-ff``: empty; locks (flock) for the choice of
  what goes, and so that one content is fetched once.

A file that goes while someone reads it stays readable to them.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from federation.errors import StoreUnavailable

_NAME = re.compile(r"[0-9a-f]{64}")
_NEW = ".new-"
# Some kernels take ten times as long for pieces of more: they look for large pages.
_PIECE_BYTES = 64 * 1024


@dataclass(slots=True)
class CacheCounts:
    """Counts of a cache's use in this process.

    Attributes:
        hits: Contents that were there.
        hit_bytes: Their bytes.
        misses: Contents that were fetched.
        evicted: Contents that had to go.
        damaged: Contents that were there with another digest than their name.
    """

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    evicted: int = 0
    damaged: int = 0


class ObjectCache:
    """Keeps contents on disk up to a number of bytes, the last used ones."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Use a folder, which is made when something is kept.

        Args:
            folder: On a disk of this machine: flock must work there.
            max_bytes: Of all contents together; a larger one is not kept.

        Raises:
            ValueError: ``max_bytes`` is negative.
        """
        if max_bytes < 0:
            raise ValueError(f"a cache of {max_bytes} bytes is not possible")
        self._folder = folder
        self._max_bytes = max_bytes
        self._verified: set[str] = set()
        self._mutex = threading.Lock()
        self.counts = CacheCounts()

    def get(
        self, sha256: str, size: int, fetch: Callable[[], bytes]
    ) -> bytes | memoryview:
        """Return a content, from the disk if it is there.

        What is on the disk is held against its digest when a process first opens it.

        Args:
            sha256: Digest of the content.
            size: Its bytes, at least 1.
            fetch: Gets it from elsewhere, and has checked it.

        Raises:
            StoreUnavailable: The folder cannot be used; or what ``fetch`` raises.
        """
        if not _NAME.fullmatch(sha256):
            raise ValueError(f"{sha256[:80]!r} is not a digest")
        if size > self._max_bytes:
            return fetch()
        with self._errors():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._open(sha256, size)
            if found is not None:
                return found
        with self._lock(f".fetch-{sha256[:2]}"):
            with self._errors():  # Another process may have been faster.
                found = self._open(sha256, size)
            if found is not None:
                return found
            content = fetch()
            with self._mutex:
                self.counts.misses += 1
            with self._errors():
                self._keep(sha256, content)
        return content

    def has(self, sha256: str) -> bool:
        """Whether a content is there, without reading it."""
        return (self._folder / sha256).exists()

    def _open(self, sha256: str, size: int) -> memoryview | None:
        path = self._folder / sha256
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            # A cut file cannot be mapped at full length without danger.
            whole = os.fstat(file).st_size == size
            view = (
                memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ)) if whole else b""
            )
        finally:
            os.close(file)
        if not isinstance(view, memoryview) or not self._verify(sha256, view):
            with self._mutex:
                self.counts.damaged += 1
            path.unlink(missing_ok=True)
            return None
        with self._mutex:
            self.counts.hits += 1
            self.counts.hit_bytes += size
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return view

    def _verify(self, sha256: str, content: memoryview) -> bool:
        with self._mutex:
            if sha256 in self._verified:
                return True
        good = hashlib.sha256(content).hexdigest() == sha256
        if good:
            with self._mutex:
                self._verified.add(sha256)
        return good

    def _keep(self, sha256: str, content: bytes) -> None:
        """Write, free space, and rename."""
        path = self._folder / f"{_NEW}{secrets.token_hex(8)}"
        # Made and locked in one step: a cleaner must not see it without a lock.
        with self._lock(".lock"):
            file = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            _write_all(file, content)
            # Not fsync: what a power cut leaves is found out by its digest.
            with self._lock(".lock"):
                self._make_room(len(content))
                path.rename(self._folder / sha256)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        with self._mutex:
            self._verified.add(sha256)

    def _make_room(self, size: int) -> None:
        kept = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(_NEW):
                    _remove_orphan(entry.path)
                elif _NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat()
                        kept.append((found.st_mtime_ns, found.st_size, entry.path))
        total = size + sum(num_bytes for _, num_bytes, _ in kept)
        for _, num_bytes, path in sorted(kept):
            if total <= self._max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= num_bytes
            self.counts.evicted += 1

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Hold one of the folder's locks; the kernel ends it with the process."""
        with self._errors():
            file = os.open(
                self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        try:
            with self._errors():
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(
                f"the cache in {str(self._folder)!r} cannot be used: {error.strerror}; "
                "free some space or fix its permissions, or set another folder in "
                "CROSSFED_CACHE_DIR"
            ) from error


def _write_all(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest[:_PIECE_BYTES]) :]


def _remove_orphan(path: str) -> None:
    """Remove a file whose writer holds no lock on it any more."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(path).unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(file)

"""A file that is written in parts, in any order, and named when complete.

It is beside its target as ``.NAME.DIGEST.partial``; a second file with one byte for
each part says which are there. Both outlive a killed process, and the next attempt to
get the same content continues with them. After a power cut the second file may claim
what the disk has lost, so the whole content is checked in any case.
"""

import contextlib
import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.storage.disk.files import (
    ADVICE,
    FOLDER_FLAGS,
    Flushes,
    allocate,
    read_range,
)
from federation.errors import StoreUnavailable

PART_BYTES = 8 << 20

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_SUFFIX = ".partial"
_PARTS_SUFFIX = ".parts"
_THERE = b"1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes ``[start, start + length)``, the ``number``-th part from 0."""

    number: int
    start: int
    length: int


def parts_of(size: int, part_bytes: int) -> Iterator[Part]:
    """Yield the parts of so many bytes, in order; none of an empty object.

    Raises:
        ValueError: ``part_bytes`` is not positive.
    """
    if part_bytes < 1:
        raise ValueError(f"a part cannot have {part_bytes} bytes: at least one")
    for number, start in enumerate(range(0, size, part_bytes)):
        yield Part(number=number, start=start, length=min(part_bytes, size - start))


def fetch_all(
    parts: Iterable[Part], fetch: Callable[[Part], None], *, workers: int
) -> None:
    """Fetch parts in threads; each worker holds one at a time.

    After a failure, or when the caller is interrupted, no further part is started.

    Raises:
        Exception: What ``fetch`` raised first.
        ValueError: There is no worker.
    """
    todo, lock, stop = iter(parts), threading.Lock(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lock:
                part = next(todo, None)
            if part is None:
                return
            try:
                fetch(part)
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(workers, "parts") as pool:
        try:
            futures = [pool.submit(work) for _ in range(workers)]
            for future in futures:
                future.result()
        finally:
            stop.set()


@contextlib.contextmanager
def file_errors(verb: str, path: Path) -> Iterator[None]:
    """Turn the system's errors with a local file into ours, with the cause kept."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise StoreUnavailable(f"cannot {verb} {str(path)!r}: {advice}") from error


class PartFile:
    """A partial file; see the module. Several threads may write it.

    Args:
        target: The name that it will have.
        digest: Hexadecimal digest of what it will hold: the same content, cut in
            the same parts, has the same one.
        size: Bytes that it will have.
    """

    def __init__(self, target: Path, digest: str, size: int) -> None:
        """Open what an earlier attempt has left, or begin.

        Raises:
            StoreUnavailable: Another process is at it.
            OSError: The file cannot be made, or the disk is full.
        """
        _sweep(target, keep=digest)
        self._target = target
        self._path = target.with_name(f".{target.name}.{digest}{_SUFFIX}")
        self._parts_path = self._path.with_suffix(_PARTS_SUFFIX)
        self._flushes = Flushes()
        with contextlib.ExitStack() as opened:
            self._file = os.open(self._path, _FLAGS, 0o666)
            opened.callback(os.close, self._file)
            _lock(self._file, target)
            self._parts = os.open(self._parts_path, _FLAGS, 0o666)
            opened.callback(os.close, self._parts)
            if size and os.fstat(self._file).st_size != size:
                os.ftruncate(self._parts, 0)
                allocate(self._file, size)  # To fail early.
                os.ftruncate(self._file, size)
            self._opened = opened.pop_all()

    def has(self, part: Part) -> bool:
        """Whether a part is there, perhaps from an earlier attempt."""
        return os.pread(self._parts, 1, part.number) == _THERE

    def fill(self, part: Part, content: bytes) -> None:
        """Write a part.

        Raises:
            OSError: The disk reports an error.
        """
        left, at = memoryview(content), part.start
        while left:
            num_written = os.pwrite(self._file, left, at)
            left, at = left[num_written:], at + num_written
        os.pwrite(self._parts, _THERE, part.number)
        if self._flushes.are_due(part.length):
            os.fsync(self._file)

    def read(self, part: Part) -> bytes:
        """Return a part's content, to check it."""
        return read_range(self._file, part.start, part.length)

    def forget(self) -> None:
        """Mark every part as missing."""
        os.ftruncate(self._parts, 0)

    def publish(self) -> None:
        """Flush the content to the disk and give it its name.

        Raises:
            OSError: A folder is in its place, or the disk reports an error.
        """
        os.fsync(self._file)
        self._path.replace(self._target)
        self._parts_path.unlink()
        folder = os.open(self._target.parent, FOLDER_FLAGS)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Remove the partial file: it will not be needed again."""
        for path in (self._parts_path, self._path):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files; what is there stays for the next attempt."""
        self._opened.close()


def _lock(file: int, target: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreUnavailable(
            f"another process is writing {str(target)!r}: wait for it to end"
        ) from error
    if not os.fstat(file).st_nlink:
        raise StoreUnavailable(
            f"another process has just written {str(target)!r}: check it first"
        )


def _sweep(target: Path, *, keep: str) -> None:
    """Remove partial files of other contents for the same target."""
    left = re.compile(rf"\.{re.escape(target.name)}\.([0-9a-f]+)\{_SUFFIX}")
    for path in target.parent.iterdir():
        named = left.fullmatch(path.name)
        if named is None or named[1] == keep:
            continue
        with contextlib.suppress(OSError):  # In use, or gone.
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.with_suffix(_PARTS_SUFFIX).unlink(missing_ok=True)
                path.unlink()
            finally:
                os.close(file)

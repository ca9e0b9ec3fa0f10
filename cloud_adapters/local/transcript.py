"""Every message as the aggregator saw it, in files, for audit.

``TranscriptGrid`` stands between the aggregator and any grid. Each message becomes
one file with its wire frame, named by its place in the transcript, and one line of
``index.jsonl``, which is written after it::

    000001-to-left-train.frame
    000002-from-left-masked-update.frame
    index.jsonl

Files are new and only their owner can read them: under secure aggregation they hold
what the aggregator may see, without it every site's update. They are not flushed to
the disk one by one; a transcript is for audit, not for resuming. The reader is
``deploy.tools.transcript_reader``.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from federation.errors import ObjectExists, StoreUnavailable
from federation.ids import SiteId, TaskId
from federation.messages import (
    MaskedUpdate,
    Reply,
    RoundTask,
    SecureAnswer,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    Task,
)
from federation.protocols import Buffer, Grid
from federation.wire import frame as wire
from federation.wire.frame import WireMessage

INDEX = "index.jsonl"
TO, FROM = "to", "from"

_KINDS: Mapping[type[WireMessage], str] = {
    RoundTask: "task",
    SiteUpdate: "update",
    SiteEvaluation: "evaluation",
    SiteFailure: "failure",
    SecureTask: "secure-task",
    SecureAnswer: "secure-answer",
    MaskedUpdate: "masked-update",
}
_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.ENOTDIR: "a file is in the way of a folder; move it",
    errno.EEXIST: "a file is in the way; use a new folder for every transcript",
}


class TranscriptGrid:
    """A ``federation.protocols.Grid`` that records all messages."""

    def __init__(self, grid: Grid, folder: Path) -> None:
        """Write what passes through ``grid`` into a new or empty folder.

        Raises:
            ObjectExists: There is something in the folder.
            StoreUnavailable: The folder cannot be made or written.
        """
        check_fresh(folder)
        self._grid = grid
        self._folder = folder
        self._count = 0
        with _errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(folder / INDEX, ())

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Write the tasks, then send them.

        Raises:
            StoreUnavailable: The disk is full or reports an error; nothing was sent.
        """
        for task in tasks:
            self._note(TO, task)
        return self._grid.send(tasks, deadline_seconds=deadline_seconds)

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Write replies before they are passed on.

        Raises:
            StoreUnavailable: The disk is full or reports an error. No message passes
                that is not written down.
        """
        replies = self._grid.receive(timeout_seconds)
        for reply in replies:
            self._note(FROM, reply.message)
        return replies

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks; see ``Grid``."""
        return self._grid.withdraw(task_ids)

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        """Who is back; see ``Grid``."""
        return self._grid.returned(sites, round_index)

    def _note(self, direction: str, message: WireMessage) -> None:
        pieces = wire.encode(message)  # Checks every name that enters a path.
        sequence = self._count + 1
        kind, step = kind_of(message)
        word = step if step and not isinstance(message, SiteFailure) else kind
        name = f"{sequence:06d}-{direction}-{message.site}-{word}.frame"
        num_bytes, digest = _write_new(self._folder / name, pieces)
        row = {
            "sequence": sequence,
            "file": name,
            "direction": direction,
            "site": message.site,
            "round": message.round_index,
            "kind": kind,
            "step": step,
            "bytes": num_bytes,
            "sha256": digest,
        }
        _append(self._folder / INDEX, row)
        self._count = sequence


def recorded(grid: Grid, folder: Path | None) -> Grid:
    """Return the grid, or one that also writes a transcript into ``folder``."""
    return grid if folder is None else TranscriptGrid(grid, folder)


def check_fresh(folder: Path) -> None:
    """Check that a folder can take a new transcript; it need not exist.

    Raises:
        ObjectExists: There is something in it.
        StoreUnavailable: It is no folder, or cannot be read.
    """
    with _errors(folder), contextlib.suppress(FileNotFoundError):
        if any(folder.iterdir()):
            raise ObjectExists(
                f"the folder {folder} is not empty: use a new folder for every "
                "transcript"
            )


def kind_of(message: WireMessage) -> tuple[str, str | None]:
    """What a message is, and what it asks, answers or reports."""
    kind = _KINDS[type(message)]
    if isinstance(message, (RoundTask, SiteFailure)):
        return kind, message.kind.value
    if isinstance(message, (SecureTask, SecureAnswer)):
        return kind, message.step.value
    return kind, None


def _write_new(path: Path, pieces: Iterable[Buffer]) -> tuple[int, str]:
    """Create a file; return its size and SHA-256 in hexadecimal digits."""
    num_bytes, digest = 0, hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _errors(path):
        handle = os.open(path, flags, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                    digest.update(piece)
                    num_bytes += memoryview(piece).nbytes
        except OSError:
            path.unlink()  # Half a frame would look like a forged one.
            raise
    return num_bytes, digest.hexdigest()


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with _errors(path), path.open("a", encoding="ascii") as file:
        file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turn the system's errors into ours, with the cause kept."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise StoreUnavailable(
            f"cannot write the transcript {path}: {advice}, or choose another folder"
        ) from error

"""Files that are written atomically and survive a power cut.

Those that hold keys are in ``privacy.secret_files``.

A draft of a private file is written beside its target, and then renamed.
A process that is killed leaves its draft; the next writer of the same file removes it.
A writer holds a lock on its draft, so that two at once leave each other alone.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from federation.errors import (
    CorruptObject,
    FederationError,
    StoreUnavailable,
    os_errors,
)
from federation.typed_json import decode, encode, refuse_constant

if TYPE_CHECKING:
    from federation.protocols import Buffer


_ADVICE: Mapping[int, str] = {
    errno.ENOSPC: "free some space; resume the run if it has ended",
    errno.EDQUOT: "free some space; resume the run if it has ended",
    errno.ENOENT: (
        "its folder does not exist: create it, or choose another folder with --out"
    ),
    errno.ENOTDIR: (
        "a file is in the way of a folder: move it, or choose another folder with --out"
    ),
    errno.EEXIST: (
        "a file is in the way of a folder: move it, or choose another folder with --out"
    ),
}
_OTHER_ADVICE = "make it writable for this user, or choose another folder with --out"


def replace_file(path: Path, pieces: Iterable["Buffer"]) -> None:
    """Write a file atomically and durably.

    Raises:
        StoreUnavailable: The folder is full or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush(path.parent)
    except OSError as error:
        raise unavailable(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # Gone, if all went well.
            temporary.unlink()


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk.

    Raises:
        OSError: The disk is full or reports an error.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unavailable(path: Path, error: OSError) -> StoreUnavailable:
    """The error to raise if a file or a folder cannot be written."""
    advice = _ADVICE.get(error.errno or 0, _OTHER_ADVICE)
    return StoreUnavailable(f"cannot write {path}: {error.strerror}; {advice}")


_SUFFIX = ".new"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def private_draft(path: Path, data: bytes) -> Iterator[Path]:
    """Write a draft of a file durably, and remove it in the end.

    Args:
        path: The file; the caller gives the draft its name.
        data: What it will hold.

    Raises:
        OSError: It cannot be written.
    """
    _sweep(path)
    draft, handle = _create(path)
    try:
        os.fchmod(handle, 0o600)  # For any umask.
        with os.fdopen(handle, "wb", closefd=False) as file:
            file.write(data)
        os.fsync(handle)
        yield draft
        flush(path.parent)
    finally:
        draft.unlink(missing_ok=True)
        os.close(handle)


def _create(path: Path) -> tuple[Path, int]:
    while True:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
        handle = os.open(draft, _FLAGS, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return draft, handle
        os.close(handle)  # Another writer took it for one that was left.


def _sweep(path: Path) -> None:
    """Remove drafts that no process holds."""
    name = glob.escape(path.name)
    for draft in path.parent.glob(f".{name}.{'[0-9a-f]' * 8}{_SUFFIX}"):
        with suppress(OSError):  # Another writer's, or gone.
            handle = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()
            finally:
                os.close(handle)


_Kind = TypeVar("_Kind")


def write_json(path: Path, value: Any) -> None:
    """Write a dataclass, durably.

    Raises:
        StoreUnavailable: The folder is full or cannot be written.
    """
    text = json.dumps(encode(value), allow_nan=False)
    replace_file(path, [text.encode()])


def read_json(
    path: Path,
    kind: type[_Kind],
    *,
    advice: str,
    refusal: type[FederationError] = CorruptObject,
) -> _Kind | None:
    """Read a dataclass; None if there is no file.

    Args:
        path: The file.
        kind: What it holds.
        advice: What to do if it is damaged.
        refusal: What to raise.

    Raises:
        FederationError: Of the kind ``refusal``: it cannot be read, or is damaged.
    """
    try:
        with os_errors(refusal, f"read {path}"):
            raw = path.read_bytes() if path.exists() else None
        if raw is None:
            return None
        found = json.loads(raw, parse_constant=refuse_constant)
        decoded: _Kind = decode(found, kind, where=path.name)
    except (ValueError, RecursionError) as error:
        raise refusal(f"{path} is damaged: {error}; {advice}") from error
    return decoded

"""Drafts of private files: written beside their target, and then renamed.

A process that is killed leaves its draft; the next writer of the same file removes it.
A writer holds a lock on its draft, so that two at once leave each other alone.
"""

import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from federation.durable_files import flush

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

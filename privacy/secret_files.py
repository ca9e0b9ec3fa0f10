"""Key files: created once, readable only by their owner, and refused otherwise."""

import os
import stat
from pathlib import Path

from federation.durable_files import private_draft
from federation.errors import os_errors
from privacy.secagg.errors import KeyFileRefused

MAX_KEY_FILE_BYTES = 1 << 14
_CHECK = "check its path, or restore it from a backup"

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def write_new(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a new file durably; it must not exist.

    Raises:
        OSError: It exists or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, mode)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, mode)  # For any umask.
        file.write(data)
        file.flush()
        os.fsync(handle)


def replace_private(path: Path, data: bytes) -> None:
    """Write a file atomically and durably, readable only by its owner.

    Raises:
        OSError: It cannot be written; what was there is as it was.
    """
    with private_draft(path, data) as draft:
        draft.replace(path)


def read_private(path: Path) -> bytes:
    """Read a short file that only its owner may access.

    Raises:
        KeyFileRefused: It is missing, open to others, a link or too long.
    """
    # O_NONBLOCK: a pipe in the key's place must not hang the agent.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with os_errors(KeyFileRefused, f"open {path}", _CHECK):
        handle = os.open(path, flags)
    try:
        with os_errors(KeyFileRefused, f"read {path}"):
            _check_private(path, os.fstat(handle))
            data = os.read(handle, MAX_KEY_FILE_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > MAX_KEY_FILE_BYTES:
        raise KeyFileRefused(f"{path} is too long for a key file")
    return data


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileRefused(f"{path} is not a regular file")
    if status.st_uid != os.geteuid():
        raise KeyFileRefused(
            f"{path} belongs to user {status.st_uid}, not to this process's user"
        )
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise KeyFileRefused(
            f"{path} has mode {mode:04o}: others may read the key; chmod it to 0600 "
            "and, if anyone else had access, create a new identity"
        )

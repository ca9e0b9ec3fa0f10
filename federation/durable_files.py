"""Files that are written atomically and survive a power cut.

Those that hold keys are in ``privacy.secret_files``.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from federation.errors import StoreUnavailable

if TYPE_CHECKING:  # At run time it brings numpy, whose threads nothing would confine.
    from federation.protocols import Buffer

_ADVICE: Mapping[int, str] = {
    errno.ENOSPC: "free some space and resume the run",
    errno.EDQUOT: "free some space and resume the run",
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

"""Folders that no other user of the host may enter: the aggregator's and a site's."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# For every file that a command or its programs make.
UMASK = 0o077
MODE = 0o700

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_open(folder: Path) -> bool:
    """Whether other users may list, enter or change a folder.

    Raises:
        OSError: It is not there.
    """
    return bool(folder.stat().st_mode & _OTHERS)


def close(folder: Path, listener: Callable[[str], None]) -> None:
    """Close a folder to other users, if it is open and may be closed.

    Args:
        folder: One that somebody else has made has the mode that their umask gave it.
        listener: Called with a word about what was done.

    Raises:
        OSError: It is not there.
    """
    if not is_open(folder):
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    try:
        folder.chmod(MODE)
    except PermissionError:
        listener(
            f"other users can enter {folder} (mode {mode:04o}), and it belongs to user "
            f"{folder.stat().st_uid}: have its owner chmod it to 0700"
        )
    else:
        listener(f"{folder} had mode {mode:04o}: it is now closed to other users")


def make(folder: Path) -> None:
    """Make a folder that only its owner can enter; an existing one keeps its mode.

    Raises:
        OSError: It cannot be made.
    """
    folder.mkdir(mode=MODE, parents=True, exist_ok=True)


@contextmanager
def private_umask() -> Iterator[None]:
    """Make new files readable only by their owner, until the end of the context."""
    before = os.umask(UMASK)
    try:
        yield
    finally:
        os.umask(before)

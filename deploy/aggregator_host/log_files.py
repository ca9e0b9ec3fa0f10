"""Logs of the service's programs: none grows without an end.

A program appends to its log through a handle that it keeps, and of all of them nginx
alone can be told to open another. So it is the content that moves: into ``NAME.log.1``,
in the place of what was there, and the log begins again. What is written between those
two steps is lost, which only a log that overflows can lose.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

MAX_LOG_BYTES = 32 << 20


def bound(folders: Iterable[Path], *, most: int = MAX_LOG_BYTES) -> None:
    """Begin every log anew that has more than ``most`` bytes; its last content stays.

    Args:
        folders: What ends in ``.log`` there is a log.
        most: Bytes of one.

    Raises:
        OSError: A log cannot be looked at or cut.
    """
    for folder in folders:
        for path in folder.glob("*.log"):
            if path.stat().st_size > most:
                _begin_anew(path)


def _begin_anew(path: Path) -> None:
    before = path.with_name(f"{path.name}.1")
    try:
        shutil.copyfile(path, before)
    except OSError:
        # The disk is full, most likely: that is when space matters more than old lines.
        before.unlink(missing_ok=True)
    os.truncate(path, 0)

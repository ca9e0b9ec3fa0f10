"""Bounds the logs of the service's programs.

A program appends to its log through an open handle, and only nginx
can be asked to open another. So the content moves instead: into ``NAME.log.1``,
in the place of what was there, and the log begins again. What is written between those
two steps is lost, which only a log that overflows can lose.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

MAX_LOG_BYTES = 32 << 20


def bound(folders: Iterable[Path], *, most: int = MAX_LOG_BYTES) -> None:
    """Truncate every log of more than ``most`` bytes; its last content is kept.

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

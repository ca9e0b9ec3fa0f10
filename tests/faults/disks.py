"""Disks of their own for some folders, which can be filled up."""

import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from support.deployment import wait_for

# More than an aggregator keeps for itself.
SIZE_BYTES = 384 << 20
_BALLAST = "ballast"


@contextmanager
def disks(folders: Sequence[Path], *, size: int = SIZE_BYTES) -> Iterator[None]:
    """Mount a disk of so many bytes in memory at each of some folders."""
    mounted: list[Path] = []
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            options = f"size={size},mode=0700"
            _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
            mounted.append(folder)
        yield
    finally:
        for folder in reversed(mounted):
            # Who had a file open there may end a moment later than it seems to.
            wait_for(partial(_done, "umount", str(folder)), f"{folder} is free", 20)


def fill(folder: Path) -> None:
    """Leave no byte on a folder's disk."""
    with (folder / _BALLAST).open("ab", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12, 1):
            _write_until_full(ballast.fileno(), b"\0" * size)


def leave(folder: Path, free: int) -> None:
    """Leave so many bytes on a folder's disk, in whole pages."""
    fill(folder)
    ballast = folder / _BALLAST
    os.truncate(ballast, ballast.stat().st_size - free)


def clear(folder: Path) -> None:
    """Give the space back."""
    (folder / _BALLAST).unlink()


def _write_until_full(handle: int, block: bytes) -> None:
    while True:
        try:
            if os.write(handle, block) < len(block):
                return
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _done(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0

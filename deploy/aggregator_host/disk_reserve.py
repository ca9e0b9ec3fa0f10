"""Disk space that is reserved for revocations, which a full disk must not stop.

A file of zeros in the aggregator's folder. ``released`` removes it, so that what is
written then has room, and puts it back afterwards. Other files that fill the disk
cannot take it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cloud_adapters.storage.disk.files import reserve
from cloud_adapters.superlink.answer_limits import free_bytes
from deploy.aggregator_host.config import AggregatorConfig

NAME = "reserve"
# A book of sites of 16 MiB, its copy, and the list of revoked certificates.
RESERVE_BYTES = 64 << 20


def shortage(config: AggregatorConfig) -> str:
    """Say that a disk is too full for answers, and what to do; empty if none is."""
    folders = [each for each in (config.folder, config.flower) if each.exists()]
    free, folder = min((free_bytes(each), each) for each in folders)
    least = config.file.limits.bytes().reserve
    if free >= least:
        return ""
    return (
        f"the disk of {folder} has {free >> 20} MiB free: sites' answers are refused "
        f"until it has {least >> 20} MiB (limits.reserve_mib in aggregator.toml); free "
        "some space"
    )


def is_there(folder: Path) -> bool:
    """Whether the reserve is in place."""
    return (folder / NAME).exists()


def fill(folder: Path) -> bool:
    """Create the reserve; return whether it is complete."""
    path = folder / NAME
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o600)
        try:
            reserve(handle, RESERVE_BYTES)
        finally:
            os.close(handle)
    except OSError:  # The disk is full: part of a reserve would be none.
        path.unlink(missing_ok=True)
        return False
    return True


@contextlib.contextmanager
def released(folder: Path) -> Iterator[None]:
    """Release the reserve for writes inside the block.

    Where there was none, none is made: the folder may not be an aggregator's.
    """
    path = folder / NAME
    was_there = path.exists()
    path.unlink(missing_ok=True)
    try:
        yield
    finally:
        if was_there:
            fill(folder)

"""What sites may leave on the aggregator's disk, and how much room that has."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may be stored at the SuperLink, in bytes.

    Attributes:
        answer: Largest answer.
        site: All answers of one site that have not been collected.
        run: All of a run, likewise.
        reserve: Free space of the disk that no answer may take.
    """

    answer: int
    site: int
    run: int
    reserve: int


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the disk of a folder.

    Raises:
        OSError: The folder is not there.
    """
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize

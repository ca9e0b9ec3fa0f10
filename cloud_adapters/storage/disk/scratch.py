"""Vectors in files without a name, on a disk that is larger than memory.

A vector is a map of its file. What is given back (``federation.mapped.give_back``) no
longer counts as this process's memory; the kernel keeps it in its cache while there is
room, and on the disk otherwise. Values and arithmetic are those of vectors in memory.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloud_adapters.storage.disk.files import allocate
from cloud_adapters.storage.disk.part_file import file_errors
from federation.mapped import ScratchMap
from federation.vectors import Allocate, Vector, in_memory

_FLOAT_BYTES = 4


def allocator(disk_mib: int, folder: Path) -> Allocate:
    """What makes large vectors: files, if they have so many MiB; 0 for none."""
    if not disk_mib:
        return in_memory
    return ScratchVectors(folder=folder, least_bytes=disk_mib << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchVectors:
    """Allocates float32 vectors.

    Attributes:
        folder: Where their files are; a process that is killed leaves nothing there.
        least_bytes: Smaller vectors are in memory.
    """

    folder: Path
    least_bytes: int = 1

    def __call__(self, size: int) -> Vector:
        """Allocate a vector of zeros, shape ``(size,)``.

        Raises:
            StoreUnavailable: The disk has no room for it.
        """
        num_bytes = _FLOAT_BYTES * size
        if num_bytes < max(1, self.least_bytes):
            return in_memory(size)
        with file_errors("write below", self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                # Now: a map of a file without room kills the process that writes to it.
                allocate(file.fileno(), num_bytes)
                mapped = ScratchMap(file.fileno(), num_bytes)
        return np.frombuffer(mapped, np.float32)

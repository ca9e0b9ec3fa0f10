"""Room on a disk for a file, found before anything is written to it.

Linux reserves it. Where Python has no ``posix_fallocate``, as on macOS, the free space
is compared, and the file gets its size without blocks of its own: then another file
may still take the space.
"""

import errno
import os


def allocate(file: int, size: int) -> None:
    """Give a file at least a size, if the disk has room for all of it.

    Args:
        file: An open file.
        size: In bytes, above 0.

    Raises:
        OSError: The disk is full: ``errno.ENOSPC``.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    there = os.fstat(file).st_size
    if size <= there:
        return
    disk = os.fstatvfs(file)
    if size - there > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(file, size)


def reserve(file: int, size: int) -> None:
    """Take blocks of the disk for an empty file, so that no other file has them.

    Args:
        file: An open file of no bytes.
        size: In bytes, above 0.

    Raises:
        OSError: The disk is full: ``errno.ENOSPC``.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    piece = bytes(1 << 20)
    for start in range(0, size, len(piece)):
        os.pwrite(file, piece[: size - start], start)
    os.fsync(file)

"""Locks on files: of two processes that would contradict each other one works."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from federation.errors import FederationError


@contextmanager
def hold(path: Path, complaint: str) -> Iterator[None]:
    """Hold a lock for the time of a block; the kernel lets go of it with the process.

    Args:
        path: A file, which is made if there is none, with its folder.
        complaint: What to say if another process holds it.

    Raises:
        FederationError: Another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FederationError(complaint) from None
        yield


def is_held(path: Path) -> bool:
    """Whether a process holds a lock."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(handle)

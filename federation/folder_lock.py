"""Locks on files: only one of two conflicting processes works."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from federation.clock import SystemClock
from federation.errors import FederationError, StoreUnavailable, os_errors

if TYPE_CHECKING:  # It brings numpy, and a process that waits is to be small.
    from federation.protocols import Clock

# Looking whether a lock is held (``is_held``) holds it for a moment.
TRIES = 5
PAUSE_SECONDS = 0.05

# Who holds a lock is another process: virtual time does not make it let go.
_SYSTEM_CLOCK = SystemClock()


def acquire(handle: int, clock: "Clock" = _SYSTEM_CLOCK) -> bool:
    """Lock an open file, and return whether no other process holds it.

    Raises:
        OSError: The file cannot be locked.
    """
    for _ in range(TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            clock.sleep(PAUSE_SECONDS)
        else:
            return True
    return False


@contextmanager
def hold(path: Path, complaint: str) -> Iterator[None]:
    """Hold a lock during a block; the kernel releases it with the process.

    Args:
        path: A file, which is made if there is none, with its folder.
        complaint: What to say if another process holds it.

    Raises:
        FederationError: Another process holds it.
        StoreUnavailable: The file cannot be made or locked.
    """
    with ExitStack() as stack:
        advice = "name a folder that this user can write to"
        with os_errors(StoreUnavailable, f"lock {path}", advice):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.open("ab"))
            is_ours = acquire(lock.fileno())
        if not is_ours:
            raise FederationError(complaint)
        yield


@contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Wait for a lock on a private file, and hold it during a block.

    Another user of this machine who may open the file could hold it for ever.

    Raises:
        OSError: The file cannot be made or locked.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_held(path: Path) -> bool:
    """Whether a process holds a lock."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # Its holder has made the file.
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # Nothing here can be locked.
    else:
        return False
    finally:
        os.close(handle)

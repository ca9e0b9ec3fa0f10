"""Of two processes that would contradict each other one works."""

import fcntl
import os
from pathlib import Path

from federation import folder_lock
from federation.clock import SystemClock


class Passer(SystemClock):
    """Somebody who looks at a lock and is gone after the first pause."""

    def __init__(self, looked_at: int) -> None:
        self._looked_at = looked_at

    def sleep(self, seconds: float) -> None:
        del seconds
        fcntl.flock(self._looked_at, fcntl.LOCK_UN)


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def test_a_look_in_passing_is_waited_for(tmp_path: Path) -> None:
    """It holds the lock for a moment, and is no process that works."""
    ours, other = opened(tmp_path / ".lock"), opened(tmp_path / ".lock")
    try:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert folder_lock.acquire(ours, Passer(other))
        assert folder_lock.is_held(tmp_path / ".lock")
    finally:
        os.close(ours)
        os.close(other)

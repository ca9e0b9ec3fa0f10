"""What a coordinator's process may read: called by ``support.superlink_app``."""

from pathlib import Path
from typing import Any


def outcome(_grid: Any, *, path: str) -> str:
    """Read a file; how that ends."""
    try:
        Path(path).read_bytes()
    except OSError as error:
        return type(error).__name__
    return "read"


def unconfined(_grid: Any) -> list[str]:
    """Threads of this process that have not given anything up."""
    return [
        task.name
        for task in Path("/proc/self/task").iterdir()
        if "NoNewPrivs:\t1" not in (task / "status").read_text()
    ]

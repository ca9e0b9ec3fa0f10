"""What was made of a long log, for whoever reads it next: caches beside the log.

Only the account that writes one reads it; whoever deletes it loses a little time. One
of another release, or that is damaged, or whose log is another one, is left out.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from federation.durable_files import replace_file
from federation.errors import StoreUnavailable

WORTH_BYTES = 16 << 20  # Of events that were read: less is read again in half a second.


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a cache; not at all if the folder cannot be written."""
    body = json.dumps({"release": _release(), **content}).encode()
    with contextlib.suppress(StoreUnavailable):
        replace_file(path, [_seal(body), body])


def read(path: Path) -> Mapping[str, Any] | None:
    """Read a cache; None without one that this release has written."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        seal, body = path.read_bytes().splitlines(keepends=True)
        if seal != _seal(body):
            return None
        content: dict[str, Any] = json.loads(body)
        if content["release"] != _release():
            return None
        return content
    return None


def _seal(body: bytes) -> bytes:
    """The first line: a damaged number would be shown as if it were the run's."""
    return hashlib.sha256(body).hexdigest().encode() + b"\n"


def _release() -> str:
    return f"4 {metadata.version('crossfed')}"

"""Names of runs, sites and messages."""

import hashlib
import re
from datetime import UTC, datetime
from typing import NewType

SiteId = NewType("SiteId", str)
RunId = NewType("RunId", str)
TaskId = NewType("TaskId", int)  # Of a task that a grid has sent.

MAX_NAME_CHARS = 64
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")


def check_name(text: str) -> str:
    """Return ``text`` if it may name a site, a job or a run.

    Names become parts of object keys and file names on every cloud: lower-case
    letters, digits, ``.``, ``_`` and ``-``, at most 64, no sign at either end.

    Raises:
        ValueError: ``text`` is not such a name.
    """
    if len(text) > MAX_NAME_CHARS or not _NAME.fullmatch(text) or ".." in text:
        raise ValueError(
            f"{text[:80]!r} is not a name: use 1 to {MAX_NAME_CHARS} lower-case "
            "letters, digits, '.', '_' or '-', starting and ending with a letter "
            "or digit"
        )
    return text


def new_run_id(unix_seconds: float, entropy: bytes) -> RunId:
    """Name a run by its start in UTC and a few random bytes.

    Args:
        unix_seconds: Start of the run.
        entropy: At least 3 random bytes, so that two runs of one second differ.
    """
    start = datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y%m%d-%H%M%S")
    return RunId(f"{start}-{entropy[:3].hex()}")


def message_id(run_id: RunId, round_index: int, site: SiteId, kind: str) -> str:
    """Derive the identifier of a message from what it is about.

    A retry of the same message has the same identifier, which makes retries
    idempotent: 32 hexadecimal digits of SHA-256.
    """
    text = "\x00".join((run_id, str(round_index), site, kind))
    return hashlib.sha256(text.encode()).hexdigest()[:32]

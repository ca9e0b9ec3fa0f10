"""Files in the folder of a node of this host; see ``local_node``."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from federation import durable_files
from federation.errors import ComputeError, StoreUnavailable, os_errors

NODE = "node.json"
LOCK, STOP = "lock", "stop"
# Its log has the name with ".log" behind it.
PROGRAM = "program"
LOG = f"{PROGRAM}.log"
_LOG_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """What was launched; see ``NodeSpec``.

    Attributes:
        name: As there.
        command: As there.
        environment: Names and values.
        labels: Names and values.
        max_seconds: As there.
        market: As there.
        launched: When, in seconds since 1970.
    """

    name: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    labels: tuple[tuple[str, str], ...]
    max_seconds: float
    market: str
    launched: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStarted:
    """When a node began to work, and the number of its process."""

    at: float
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReady:
    """When the program of a node last said that it is ready."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnded:
    """When a node ended, and why; empty if it was asked to."""

    at: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTrouble:
    """When a node's program ended by itself, and with what."""

    at: float
    text: str


_Kind = TypeVar("_Kind", LocalNode, NodeStarted, NodeReady, NodeEnded, NodeTrouble)
_NAMES: Mapping[type, str] = {
    LocalNode: NODE,
    NodeStarted: "started.json",
    NodeReady: "ready.json",
    NodeEnded: "ended.json",
    NodeTrouble: "trouble.json",
}


def check_own(folder: Path) -> None:
    """Refuse a folder that another user could write to: what it holds is run.

    Raises:
        ComputeError: It belongs to another user, or others may write to it.
        StoreUnavailable: It cannot be looked at.
    """
    with os_errors(StoreUnavailable, f"look at {folder}"):
        found = folder.stat()
    if found.st_uid != os.geteuid():
        raise ComputeError(
            f"{folder} belongs to another user, who could run programs as this one: "
            "name a folder of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ComputeError(
            f"other users may write to {folder}, and so run programs as this one: "
            f"chmod go-w {folder}, after a look at what it holds"
        )


def write(
    folder: Path,
    value: LocalNode | NodeStarted | NodeReady | NodeEnded | NodeTrouble,
) -> None:
    """Write a file of a node, whole or not at all.

    Raises:
        StoreUnavailable: The folder is full or cannot be written.
    """
    durable_files.write_json(folder / _NAMES[type(value)], value)


def remove(folder: Path, kind: type[_Kind]) -> None:
    """Remove a file of a node, if it is there.

    Raises:
        StoreUnavailable: The folder cannot be written.
    """
    path = folder / _NAMES[kind]
    with os_errors(StoreUnavailable, f"remove {path}"):
        path.unlink(missing_ok=True)


def read(folder: Path, kind: type[_Kind]) -> _Kind | None:
    """Read a file of a node; None if there is none.

    Raises:
        ComputeError: It is damaged, or cannot be read.
    """
    advice = "crossfed down ends it; a folder that no process uses may be removed"
    path = folder / _NAMES[kind]
    return durable_files.read_json(path, kind, advice=advice, refusal=ComputeError)


def tail(path: Path) -> str:
    """Return the end of a log, 64 KiB at most; empty if there is none.

    Raises:
        StoreUnavailable: It cannot be read.
    """
    with os_errors(StoreUnavailable, f"read {path}"):
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return file.read().decode(errors="replace")

"""Rows of a study in a file of JSON lines, to which a run adds what it lacks."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Result = dict[str, Any]

_KEY_CHARACTERS = 16


def key_of(**decides: Any) -> str:
    """Return what a row is found by: a digest of all that decides about it.

    The data are the standard library's own sources, so its version is part of it.
    """
    text = json.dumps({"library": platform.python_version(), **decides}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_CHARACTERS]


def finished(out: Path) -> Mapping[str, Result]:
    """Rows of a file by their key; a last line that was cut off is not one."""
    if not out.exists():
        return {}
    *lines, _ = out.read_text().split("\n")
    rows = [json.loads(line) for line in lines]
    return {row["key"]: row for row in rows if "key" in row}


def add(out: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a file, in place of a line that was cut off, and print it."""
    text = out.read_text() if out.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        out.write_text(whole)
    line = json.dumps(row)
    with out.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def table_line(*cells: str) -> str:
    """Write one line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def load() -> float:
    """Processes that want a core now, as a mean over a minute."""
    return round(os.getloadavg()[0], 1)

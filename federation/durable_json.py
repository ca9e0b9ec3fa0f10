"""Dataclasses in files of their own: JSON, whole or not at all, checked when read."""

import json
from pathlib import Path
from typing import Any, TypeVar

from federation import durable_files
from federation.errors import CorruptObject, FederationError
from federation.os_errors import os_errors
from federation.typed_json import decode, encode, refuse_constant

_Kind = TypeVar("_Kind")


def write(path: Path, value: Any) -> None:
    """Write a dataclass, durably.

    Raises:
        StoreUnavailable: The folder is full or cannot be written.
    """
    text = json.dumps(encode(value), allow_nan=False)
    durable_files.replace_file(path, [text.encode()])


def read(
    path: Path,
    kind: type[_Kind],
    *,
    advice: str,
    refusal: type[FederationError] = CorruptObject,
) -> _Kind | None:
    """Read a dataclass; None if there is no file.

    Args:
        path: The file.
        kind: What it holds.
        advice: What to do if it is damaged.
        refusal: What to raise.

    Raises:
        FederationError: Of the kind ``refusal``: it cannot be read, or is damaged.
    """
    try:
        with os_errors(refusal, f"read {path}"):
            raw = path.read_bytes() if path.exists() else None
        if raw is None:
            return None
        found = json.loads(raw, parse_constant=refuse_constant)
        decoded: _Kind = decode(found, kind, where=path.name)
    except (ValueError, RecursionError) as error:
        raise refusal(f"{path} is damaged: {error}; {advice}") from error
    return decoded

"""The log of decisions about machines: ``decisions.jsonl`` in a deployment's folder.

One JSON object a line: ``at`` (seconds since 1970), ``role`` (empty for all machines),
``action``, ``offer`` (the machine, or null), ``reason`` in words and, for a start that
is held back, ``conditions``: the keys of the deployment file that hold it back.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.storage.disk.part_file import file_errors

NAME = "decisions.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """One line.

    Attributes:
        at: When, in seconds since 1970.
        role: Whose machine; empty for all.
        action: What is done.
        offer: The machine that is wanted; None for none.
        reason: Why, in words.
        conditions: Keys that hold a start back.
    """

    at: float
    role: str
    action: str
    offer: str | None
    reason: str
    conditions: Sequence[str] = ()


def append(folder: Path, *rows: DecisionRow) -> None:
    """Add lines to the log of a deployment.

    Args:
        folder: The deployment's, which exists.
        rows: The decisions.

    Raises:
        StoreUnavailable: It cannot be written.
    """
    if not rows:
        return
    path = folder / NAME
    with file_errors("write", path), path.open("a", encoding="utf-8") as log:
        for row in rows:
            document = {
                "at": row.at,
                "role": row.role,
                "action": row.action,
                "offer": row.offer,
                "reason": row.reason,
            }
            if row.conditions:
                document["conditions"] = [*row.conditions]
            log.write(f"{json.dumps(document)}\n")

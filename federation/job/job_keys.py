"""How a key of the job file is declared: its documentation, default and range.

What reads job files and what writes the reference page take them from the fields.
"""

import dataclasses
from typing import Any


def key(
    doc: str,
    *,
    default: Any = dataclasses.MISSING,
    choices: tuple[str, ...] = (),
    planned: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a key of the job file.

    Args:
        doc: What it does, with its unit, in one or two sentences.
        default: Its value when it is left out; without one it is required.
        choices: The words that it may be.
        planned: Words that will be choices and are not built yet.
        low: Smallest value that it may have.
        high: Largest value that it may have.
        above: Value that it must exceed.
        below: Value that it must not reach.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "planned": planned,
        "low": low,
        "high": high,
        "above": above,
        "below": below,
    }
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)

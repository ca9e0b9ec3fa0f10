"""How a key of the job file is declared: its default and its range.

What a key does is said under ``Attributes`` in its class's docstring: what reads job
files and what writes the reference pages take it from there.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any


def key(
    *,
    default: Any = dataclasses.MISSING,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a key that has a range; a field without one needs no ``key``.

    Args:
        default: Its value when it is left out; without one it is required.
        choices: The words that it may be.
        low: Smallest value that it may have.
        high: Largest value that it may have.
        above: Value that it must exceed.
        below: Value that it must not reach.
    """
    bounds = {"low": low, "high": high, "above": above, "below": below}
    metadata = {"choices": choices, "bounds": bounds}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def documented(cls: type) -> tuple[str, Mapping[str, str]]:
    """Read the description of a class, and of each attribute, from its docstring."""
    whole = inspect.cleandoc(cls.__doc__ or "")
    text, _, section = whole.partition("\nAttributes:\n")
    found = re.findall(r"^    (\w+): (.+(?:\n {8,}.+)*)", section, re.MULTILINE)
    return text.strip(), {name: " ".join(said.split()) for name, said in found}


def keys_below(cls: type, name: str = "") -> Iterator[str]:
    """Dotted names of the keys of a table's tables; lists of tables are left out."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        full = f"{name}.{field.name}" if name else field.name
        kinds = {hints[field.name], *typing.get_args(hints[field.name])}
        for kind in kinds:
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                yield from (
                    f"{full}.{inner.name}" for inner in dataclasses.fields(kind)
                )
                yield from keys_below(kind, full)

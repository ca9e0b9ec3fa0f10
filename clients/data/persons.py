"""Whose record each example is: what a data source may say, and its checks.

Names are compared exactly. Bytes are the text that they spell in UTF-8; bytes that
spell none keep their values (PEP 383), so that no two of them become one name.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import SiteError

ATTRIBUTE, COLUMN = "persons", "person_id"

_NAMES = (int, np.integer, str, bytes)
_NUL = "\U0010ffff"  # In place of NUL: Unicode has no such character, and never will.


def check_persons(persons: object, size: int) -> None:
    """Refuse persons that do not say whose each record is; None is accepted.

    Raises:
        ValueError: They are no array with one integer or text for each record.
    """
    if persons is None:
        return
    if not isinstance(persons, np.ndarray) or persons.shape != (size,):
        found = getattr(persons, "shape", type(persons).__name__)
        raise ValueError(
            f"persons must be an array of shape ({size},), one integer or text for "
            f"each record, not {found}"
        )
    if persons.dtype.kind not in "iuUS":
        # Of floats NaN is unequal to itself, and would be a person for each record.
        raise ValueError(_refusal(persons.dtype))


def _refusal(found: object) -> str:
    return (
        f"persons must be integers or texts, not {found}: drop records whose person is "
        "unknown"
    )


def numbered_alike(*parts: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Number the persons of several parts of a dataset, equal ones alike.

    Args:
        parts: Person of each record of a part, shape ``(n,)`` each; integers or texts.

    Returns:
        Numbers from 0 on, of the same shapes.
    """
    if np.result_type(*parts).kind == "f":
        # NumPy joins signed and unsigned integers of 64 bits in float64, where two
        # persons above 2**53 may be equal. Their digits are exact.
        parts = tuple(part.astype(np.str_) for part in parts)
    if len({part.dtype.kind for part in parts}) > 1:
        # NumPy would read bytes as ASCII, and fail with any other name.
        parts = tuple(_decoded(part) for part in parts)
    _, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    ends = np.cumsum([len(part) for part in parts])
    return np.split(numbers, ends[:-1])


def _decoded(part: NDArray[Any]) -> NDArray[Any]:
    """Bytes as texts; anything else as it is."""
    if part.dtype.kind != "S":
        return part
    found: NDArray[Any] = np.char.decode(part, "utf-8", "surrogateescape")
    return found


def as_persons(persons: object) -> NDArray[Any]:
    """Read a column or an attribute of persons.

    Integers that no integer type of NumPy holds together are read as texts.

    Raises:
        ValueError: It does not hold one integer or text for each record.
    """
    if isinstance(persons, tuple):
        persons = [*persons]
    elif not isinstance(persons, list):
        persons = np.asarray(persons)
        if persons.dtype == object:  # A column, as pandas gives it.
            persons = persons.tolist()
    if isinstance(persons, list):
        # NumPy would write NaN, as pandas marks what is missing, as a text.
        odd = {
            type(value).__name__
            for value in persons
            if isinstance(value, bool) or not isinstance(value, _NAMES)
        }
        if odd:
            raise ValueError(_refusal(", ".join(sorted(odd))))
        persons = [_name(value) for value in persons]
    values = np.asarray(persons)
    if isinstance(persons, list) and values.dtype.kind == "f":
        values = np.array(persons, dtype=object)  # -1 and 2**63 together, say.
    if values.dtype == object and all(type(value) is int for value in values.flat):
        values = values.astype(np.str_)
    check_persons(values, values.size)
    return values


def _name(value: object) -> object:
    """A name in a form that NumPy keeps: it reads bytes as ASCII, and drops NULs."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    return value.replace("\0", _NUL) if isinstance(value, str) else value


def of_columns(columns: Mapping[str, Any], *, name: str) -> NDArray[Any] | None:
    """Read the column of persons of a table; None if there is none.

    Raises:
        SiteError: It holds something else than integers or texts.
    """
    if COLUMN not in columns:
        return None
    try:
        return as_persons(columns[COLUMN])
    except ValueError as error:
        raise SiteError(f"{name}, column {COLUMN!r}: {error}") from error


def of_items(obj: object, size: int) -> NDArray[Any] | None:
    """Read whose the items of a dataset are, before the first of them is needed.

    Args:
        obj: A map-style dataset with an attribute ``persons`` or, as Hugging Face's,
            with columns; or a list of dicts.
        size: Number of items.

    Returns:
        None if it does not say so, or the attribute has another meaning.
    """
    found: object = getattr(obj, ATTRIBUTE, None)
    if COLUMN in (getattr(obj, "column_names", None) or ()):
        found = obj[COLUMN]  # type: ignore[index]
    elif isinstance(obj, list) and all(isinstance(item, Mapping) for item in obj):
        found = [item.get(COLUMN) for item in obj]
    try:
        persons = as_persons(found)
    except ValueError:
        return None
    return persons if len(persons) == size else None

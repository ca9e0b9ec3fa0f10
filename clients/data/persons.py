"""Whose record each example is: what a data source may say, and its checks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import SiteError

ATTRIBUTE, COLUMN = "persons", "person_id"


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
        raise ValueError(
            f"persons must be integers or texts, not {persons.dtype}: drop records "
            "whose person is unknown"
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
    _, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    ends = np.cumsum([len(part) for part in parts])
    return np.split(numbers, ends[:-1])


def as_persons(persons: object) -> NDArray[Any]:
    """Read a column or an attribute of persons.

    Integers that no integer type of NumPy holds together are read as texts.

    Raises:
        ValueError: It does not hold one integer or text for each record.
    """
    values = np.asarray(persons)
    if isinstance(persons, list) and values.dtype.kind == "f":
        values = np.array(persons, dtype=object)  # -1 and 2**63 together, say.
    if values.dtype == object and all(type(value) is int for value in values.flat):
        values = values.astype(np.str_)
    if values.dtype == object and all(isinstance(value, str) for value in values.flat):
        values = values.astype(np.str_)  # A column of texts, as pandas gives it.
    check_persons(values, values.size)
    return values


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

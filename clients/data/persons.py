"""Whose record each example is: what a data source may say, and its checks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import SiteError

PERSONS = "persons"  # Name of the column, and of the attribute.


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


def as_persons(persons: object) -> NDArray[Any]:
    """Read a column or an attribute of persons.

    Raises:
        ValueError: It does not hold one integer or text for each record.
    """
    values = np.asarray(persons)
    if values.dtype == object and all(isinstance(value, str) for value in values.flat):
        values = values.astype(np.str_)  # A column of texts, as pandas gives it.
    check_persons(values, values.size)
    return values


def take_column(columns: dict[str, Any], *, name: str) -> NDArray[Any] | None:
    """Remove the column of persons from a table, since it is no input of a model.

    Raises:
        SiteError: It holds something else than integers or texts.
    """
    if PERSONS not in columns:
        return None
    try:
        return as_persons(columns.pop(PERSONS))
    except ValueError as error:
        raise SiteError(f"{name}: {error}") from error


def of_items(obj: object, size: int) -> NDArray[Any] | None:
    """Read whose the items of a dataset are; None if no such attribute says it."""
    try:
        found = as_persons(getattr(obj, PERSONS, None))
    except ValueError:  # An attribute of another meaning, as may be with ``targets``.
        return None
    return found if len(found) == size else None

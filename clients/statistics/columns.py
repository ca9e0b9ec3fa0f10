"""Columns of a site's records, by name, as numbers or as codes of categories.

Columns are those of a table (``clients.data.tables``) or of a dict; those of an array
are called ``0``, ``1`` and so on, and the targets ``target``. Others follow from these:
see ``derived``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clients.data.datasets import Dataset, columns_of
from clients.data.tables import (
    Column as TableColumn,
    Table as Rows,
    Words,
    is_of_categories,
    words_of,
)
from clients.statistics.derived import derived
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.statistics_job import NUMBER
from federation.job.statistics_table import MAX_RECORDS, Column, Table

Numbers = NDArray[np.float64]
Codes = NDArray[np.int32]
Values = TableColumn
Warn = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class SiteColumns:
    """The columns that a job asks about, as a site holds them.

    Attributes:
        size: Number of records.
        numbers: By name, shape ``(n,)``, NaN where a value is missing.
        codes: By name, shape ``(n,)``: number of the category, -1 where a value is
            missing, and the number of categories for any other.
    """

    size: int
    numbers: Mapping[str, NDArray[np.generic]]
    codes: Mapping[str, Codes]


def read(table: Table, data: Dataset, site: SiteId, warn: Warn) -> SiteColumns:
    """Find all columns of a job in a site's records, and check them.

    Args:
        table: What the job asks.
        data: The records.
        site: Name of the site.
        warn: Takes what only the site's operator may know: it follows from values.

    Raises:
        SiteError: Columns are missing, or are not what the job says: all of them, each
            with what to do. No message holds a value.
    """
    if len(data) > MAX_RECORDS:
        raise SiteError(f"site {site!r} has more than {MAX_RECORDS:,} records")
    columns, units = columns_of(data)
    known = with_derived(columns, (column.name for column in table.columns))
    faults = list[str]()
    numbers, codes = dict[str, NDArray[np.generic]](), dict[str, Codes]()
    for column in table.columns:
        name = column.name
        fault = _fault(column, known, units.get(name, ""))
        if name not in known and isinstance(data, Rows) and name in data.unusable:
            fault = data.without(name)
        if fault:
            faults.append(f"{fault} ({column.place})")
            continue
        if column.spec.unit and not units.get(name):
            warn(
                f"site {site!r}: the job asks for column {name!r} in "
                f"{column.spec.unit!r:.40}, and this site's data state no unit: check "
                "it, and state it in the options of the data source (units)"
            )
        if column.spec.kind == NUMBER:
            numbers[name] = np.asarray(known[name])
            _look_at_bounds(column, numbers[name], site, warn)
        else:
            codes[name] = _codes(words_of(known[name]), column.spec.categories)
            _look_at_categories(column, known[name], codes[name], site, warn)
    if faults:
        raise SiteError(f"site {site!r} {'; '.join(faults)}")
    return SiteColumns(len(data), numbers, codes)


def check(table: Table, data_of: Mapping[SiteId, Dataset]) -> None:
    """Check the columns of all sites of a simulation.

    Raises:
        SiteError: As ``read``, of all sites together.
    """
    faults = list[str]()
    for site, data in data_of.items():
        try:
            read(table, data, site, lambda _: None)
        except SiteError as error:
            faults.append(str(error))
    if faults:
        raise SiteError(";\n".join(faults))


def with_derived(
    known: Mapping[str, Values], names: Iterable[str]
) -> Mapping[str, Values]:
    """Add the columns of these names that follow from others."""
    found = {name: derived(known, name) for name in names if name not in known}
    return {**known, **{n: each for n, each in found.items() if each is not None}}


def _fault(
    column: Column, known: Mapping[str, Words | NDArray[np.generic]], unit: str
) -> str:
    """Why a site cannot answer for a column; empty if it can."""
    name, wanted = f"column {column.name!r:.80}", column.spec.unit
    values = known.get(column.name)
    if values is None:
        return f"has no {name}: rename one in its data source, or leave it out"
    if unit and wanted and unit != wanted:
        return (
            f"has {name} in {unit!r:.40}, and the job asks in {wanted!r:.40}: convert "
            "it in its data source"
        )
    if not isinstance(values, Words) and values.ndim != 1:
        return f"has {name} with several values a record: give each a name"
    if column.spec.kind == NUMBER:
        if isinstance(values, Words):
            return (
                f"has {name} of text, and the job asks for numbers: list its "
                "categories in the job, or convert it in the data source"
            )
    elif not is_of_categories(values):
        return (
            f"has {name} of fractions, and the job asks for categories: give it low "
            "and high in the job, or convert it in the data source"
        )
    return ""


def _look_at_bounds(
    column: Column, values: NDArray[np.generic], site: SiteId, warn: Warn
) -> None:
    """Warn the site's operator of bounds that were read from its own data."""
    if values.dtype.kind != "f" or np.isnan(values).all():
        return
    low, high = column.spec.bounds
    least, most = float(np.nanmin(values)), float(np.nanmax(values))
    own = [n for n, a, b in (("low", low, least), ("high", high, most)) if a == b]
    if own:
        warn(
            f"site {site!r}: {' and '.join(own)} of column {column.name!r} in the job "
            "are exactly the extremes of this site's own data. Bounds must be public: "
            "ask where they come from before you let the run go on"
        )


def _look_at_categories(
    column: Column, values: Values, codes: Codes, site: SiteId, warn: Warn
) -> None:
    """Warn the site's operator if no value is one of the job's categories."""
    other = len(column.spec.categories)
    if not (codes == other).any() or ((codes >= 0) & (codes < other)).any():
        return
    kind = (
        "text: compare how the words are written"
        if isinstance(values, Words)
        else "whole numbers, without leading zeros and with 1 for true: for the words "
        "of a CSV file, list the column as text in the options of the data source"
    )
    warn(
        f"site {site!r}: no value of column {column.name!r} is one of the categories "
        f"that the job lists. The column is read as {kind}"
    )


def _codes(words: Words, categories: Sequence[str]) -> Codes:
    places = {category: at for at, category in enumerate(categories)}
    other = len(categories)
    of_value = np.array([places.get(v, other) for v in words.values] + [-1], np.int32)
    return of_value[words.codes]

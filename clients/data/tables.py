"""Tables: columns of numbers and words with names, from CSV, Parquet or NumPy files."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from clients.preprocessing import preprocessing
from federation.errors import MissingExtra, SiteError, os_errors

Indices = NDArray[np.int64]
# What errors of pyarrow say without a value of the file.
_SAFE = re.compile(r"Expected \d+ columns, got \d+|Empty CSV file")


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """A column of words.

    Attributes:
        codes: Shape ``(n,)``: place of each word in ``values``, -1 where it is missing.
        values: Different words.
    """

    codes: NDArray[np.int32]
    values: tuple[str, ...]


def words_of(column: Words | NDArray[Any]) -> Words:
    """Turn a column of whole numbers into words; words stay as they are."""
    if isinstance(column, Words):
        return column
    values, codes = np.unique(column.astype(np.int64), return_inverse=True)
    return Words(codes.astype(np.int32), tuple(map(str, values.tolist())))


Column = Words | NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """A ``Dataset`` of columns.

    Attributes:
        columns: By name, all of one length.
        target: Name of the column that models predict; empty for none.
        units: Units of measurement, by the name of the column, where they are known.
        index: Rows that it has, of the columns.
    """

    columns: Mapping[str, Column]
    index: Indices
    target: str = ""
    units: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.index)

    def column(self, name: str) -> Column:
        """Values of a column."""
        found = self.columns[name]
        if isinstance(found, Words):
            return replace(found, codes=found.codes[self.index])
        return found[self.index]

    def batch(self, indices: Indices) -> tuple[Any, Any]:
        """Columns of numbers but the target, side by side; and the target."""
        rows = self.index[indices]
        numbers = [
            column[rows].astype(np.float32)
            for name, column in self.columns.items()
            if name != self.target and not isinstance(column, Words)
        ]
        if not numbers:
            raise SiteError("the table has no column of numbers to train on")
        inputs = torch.from_numpy(np.stack(numbers, axis=1))
        if not self.target:
            return inputs, None
        labels = self.labels()
        if labels is not None:
            if isinstance(self.columns[self.target], Words) and (labels < 0).any():
                raise SiteError(
                    f"column {self.target!r}, the target, has missing values: leave "
                    "out these rows"
                )
            return inputs, torch.from_numpy(labels[indices])
        target = self.columns[self.target]
        return inputs, torch.from_numpy(np.asarray(target)[rows].astype(np.float32))

    def labels(self) -> Indices | None:
        """Class of each row; None if the target is no class."""
        found = self.columns.get(self.target)
        if found is None:
            return None
        if isinstance(found, Words):
            return found.codes[self.index].astype(np.int64)
        whole = found.dtype.kind in "biu"
        return found[self.index].astype(np.int64) if whole else None

    @property
    def groups(self) -> Indices | None:
        """A table has none."""
        return None

    @property
    def group_names(self) -> tuple[str, ...]:
        """A table has none."""
        return ()

    @property
    def persons(self) -> NDArray[Any] | None:
        """Whose record each row is: the column ``person_id``.

        Raises:
            SiteError: Somebody is unknown, who may be one of the others.
        """
        found = self.columns.get("person_id")
        if found is None:
            return None
        codes = (found.codes if isinstance(found, Words) else found)[self.index]
        if isinstance(found, Words) and (codes < 0).any():
            raise SiteError(
                "column 'person_id' has missing values: drop records whose person is "
                "unknown"
            )
        return codes

    def subset(self, indices: Indices) -> "Table":
        """A view of some rows."""
        return replace(self, index=self.index[indices])

    def with_columns(self, columns: Mapping[str, Column]) -> "Table":
        """The same rows of other columns."""
        return replace(self, columns=columns)

    def apart(self) -> "Table":
        """Rows do not depend on one another."""
        return self


@preprocessing("none")
def table(
    path: str,
    target: str = "",
    units: Mapping[str, str] | None = None,
    held_out_fraction: float = 0.0,
    categories: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Table, Table]:
    """A table in a file: Parquet, CSV with a line of names, or NumPy.

    Missing are nulls in Parquet, and in CSV fields that are empty or ``NA``, ``N/A``,
    ``NaN``, ``null`` or the like, with or without quotes.

    Args:
        path: A ``.parquet``, ``.csv``, ``.npz`` or ``.npy`` file. Columns of an array
            are called ``0``, ``1`` and so on.
        target: Column that models predict.
        units: Units of measurement, by column. They add to those in a Parquet file's
            metadata of a field, ``unit``.
        held_out_fraction: Share of the rows, the last ones, that is held out.
        categories: By column of words, all of them in the order of their codes: the
            same list at all sites gives the same codes.

    Raises:
        SiteError: The file cannot be read, or holds no columns of one length, or a
            column has words that are not listed.
    """
    file = Path(path).expanduser()
    stated = dict(units or {})
    if file.suffix in {".npz", ".npy"}:
        columns = _of_numpy(file)
    elif file.suffix in {".parquet", ".csv"}:
        columns, stated = _of_arrow(file, stated)
    else:
        raise SiteError(f"{file.name} is none of .parquet, .csv, .npz and .npy")
    sizes = {len(c.codes) if isinstance(c, Words) else len(c) for c in columns.values()}
    if len(sizes) != 1:
        raise SiteError(f"{file.name} has no columns, or columns of different lengths")
    if target and target not in columns:
        raise SiteError(f"{file.name} has no column {target!r}, the target")
    for name, listed in (categories or {}).items():
        columns[name] = _coded(file.name, name, columns.get(name), tuple(listed))
    rows = np.arange(sizes.pop())
    split = round(len(rows) * (1 - held_out_fraction))
    whole = Table(columns=columns, index=rows, target=target, units=stated)
    return whole.subset(rows[:split]), whole.subset(rows[split:])


def _coded(
    file: str, name: str, column: Column | None, listed: tuple[str, ...]
) -> Words:
    """A column with the codes of a list."""
    if column is None or (not isinstance(column, Words) and column.dtype.kind == "f"):
        raise SiteError(f"{file} has no column of words {name!r}")
    words, places = words_of(column), {word: at for at, word in enumerate(listed)}
    if not set(words.values) <= places.keys():
        raise SiteError(f"column {name!r} of {file} has words that are not listed")
    codes = np.array([*map(places.__getitem__, words.values), -1], np.int32)
    return Words(codes[words.codes], listed)


def _of_numpy(file: Path) -> dict[str, Column]:
    read = partial(np.load, file, allow_pickle=False)
    loaded = _read(file, read, (OSError, ValueError, EOFError, BadZipFile))
    if isinstance(loaded, np.ndarray):
        loaded = {"": loaded}
    found: dict[str, Column] = {}
    for name in loaded:
        array = loaded[name]
        if array.ndim == 1 and array.dtype.kind in "US":
            values, codes = np.unique(array, return_inverse=True)
            found[name] = Words(codes.astype(np.int32), tuple(map(str, values)))
        elif array.ndim == 1 and name:
            found[name] = array
        else:
            rows = array.reshape(len(array), -1)
            found |= {f"{name}{at}": rows[:, at] for at in range(rows.shape[1])}
    return found


def _of_arrow(
    file: Path, units: dict[str, str]
) -> tuple[dict[str, Column], dict[str, str]]:
    try:
        import pyarrow as pa  # noqa: PLC0415 -- an extra
        from pyarrow import csv, parquet  # noqa: PLC0415 -- an extra
    except ModuleNotFoundError as error:
        raise MissingExtra("pyarrow", "parquet") from error
    if file.suffix == ".parquet":
        read = partial(parquet.read_table, str(file))
    else:
        missing = csv.ConvertOptions(strings_can_be_null=True)
        read = partial(csv.read_csv, str(file), convert_options=missing)
    loaded = _read(file, read, (OSError, pa.ArrowException))
    if loaded.num_columns and not loaded.num_rows:
        raise SiteError(f"{file.name} has no records")
    if twice := [n for n, times in Counter(loaded.column_names).items() if times > 1]:
        raise SiteError(
            f"{file.name} has several columns {twice[0]!r}: rename all but one"
        )
    found: dict[str, Column] = {}
    for spec in loaded.schema:
        unit = (spec.metadata or {}).get(b"unit", b"").decode(errors="replace")
        units = {spec.name: unit, **units} if unit else units
        if file.suffix == ".csv" and pa.types.is_binary(spec.type):
            raise SiteError(
                f"column {spec.name!r} of {file.name} is not UTF-8 text: convert the "
                "file"
            )
        column = _of_column(pa, loaded.column(spec.name), spec.type)
        if column is not None:
            found[spec.name] = column
    return found, units


def _read(
    file: Path, read: Callable[[], Any], errors: tuple[type[Exception], ...]
) -> Any:
    """Read a file; errors quote none of its rows, neither does their cause."""
    with os_errors(SiteError, f"read {file.name}", "see data.options.path"):
        if not file.is_dir():  # One of Parquet may be a folder.
            file.open("rb").close()
    try:
        return read()
    except errors as error:
        said = _SAFE.search(str(error))
    why = said[0] if said else f"it is damaged, or no {file.suffix} file"
    fault = f"cannot read {file.name}: {why}"
    raise SiteError(f"{fault}; mend the file in data.options.path", outside=fault)


def _of_column(pa: Any, column: Any, kind: Any) -> Column | None:
    """A column of Arrow; None if it holds neither numbers nor words."""
    is_coded = pa.types.is_dictionary(kind)
    if is_coded or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        coded = column.combine_chunks()
        coded = coded if is_coded else coded.dictionary_encode()
        codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return Words(codes.astype(np.int32), tuple(map(str, coded.dictionary.tolist())))
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.int8()), pa.int8()
    is_whole = pa.types.is_integer(kind) and not column.null_count
    if not (is_whole or pa.types.is_floating(kind)):
        if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
            return None
        # NaN stands for a missing value, and float64 has one.
        column = column.cast(pa.float64(), safe=False)
    values: NDArray[Any] = column.to_numpy()
    return values

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

from clients.data.persons import COLUMN
from clients.preprocessing import preprocessing
from federation.errors import MissingExtra, SiteError, os_errors

Indices = NDArray[np.int64]
# What errors of pyarrow say without a value of the file.
_SAFE = re.compile(r"Expected \d+ columns, got \d+|Empty CSV file")
_COMMAS = "commas must separate columns, and a dot is the decimal point"
_WHOLE = 2.0**53  # Below, float64 holds every whole number.


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """A column of words.

    Attributes:
        codes: Shape ``(n,)``: place of each word in ``values``, -1 where it is missing.
        values: Different words.
        is_listed: Whether a person listed the words in this order; otherwise it is that
            of the file.
    """

    codes: NDArray[np.int32]
    values: tuple[str, ...]
    is_listed: bool = False


Column = Words | NDArray[Any]


def is_of_categories(column: Column) -> bool:
    """Whether a column has words or whole numbers, which may be missing.

    A whole number beside a missing one is a float, and the missing one is NaN.
    """
    if isinstance(column, Words) or column.dtype.kind in "biu":
        return True
    known = column[~np.isnan(column)] if column.dtype.kind == "f" else column
    return column.dtype.kind == "f" and bool(
        (np.abs(known) < _WHOLE).all() and (known == np.floor(known)).all()
    )


def words_of(column: Column) -> Words:
    """Turn a column of whole numbers into words; words stay as they are."""
    if isinstance(column, Words):
        return column
    is_known = ~np.isnan(column)
    values, places = np.unique(column[is_known].astype(np.int64), return_inverse=True)
    codes = np.full(len(column), -1, np.int32)
    codes[is_known] = places
    return Words(codes, tuple(map(str, values.tolist())))


def with_codes(column: Words, listed: tuple[str, ...]) -> Words | None:
    """Return a column with the codes of a list; None if it has other words."""
    places = {word: at for at, word in enumerate(listed)}
    if not set(column.values) <= places.keys():
        return None
    codes = np.array([*map(places.__getitem__, column.values), -1], np.int32)
    return Words(codes[column.codes], listed, is_listed=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """A ``Dataset`` of columns.

    Attributes:
        columns: By name, all of one length.
        target: Name of the column that models predict; empty for none.
        units: Units of measurement, by the name of the column, where they are known.
        unusable: What other columns of the file hold, such as dates, by name.
        index: Rows that it has, of the columns.
    """

    columns: Mapping[str, Column]
    index: Indices
    target: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.index)

    def column(self, name: str) -> Column:
        """Values of a column."""
        found = self.columns[name]
        if isinstance(found, Words):
            return replace(found, codes=found.codes[self.index])
        return found[self.index]

    @property
    def inputs(self) -> list[str]:
        """Columns of numbers but the target and persons, in their order."""
        return [
            name
            for name, column in self.columns.items()
            if name not in {self.target, COLUMN} and not isinstance(column, Words)
        ]

    def without(self, name: str) -> str:
        """Say why a column cannot be found, to follow the name of a site or file."""
        if name in self.unusable:
            return (
                f"has column {name!r:.80} of {self.unusable[name]!r:.40}, which is "
                "neither numbers nor text: convert it"
            )
        return f"has no column {name!r:.80}"

    def batch(self, indices: Indices) -> tuple[Any, Any]:
        """Columns of numbers but the target, side by side; and the target."""
        rows = self.index[indices]
        numbers = [
            np.asarray(self.columns[name])[rows].astype(np.float32)
            for name in self.inputs
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
        found = self.columns.get(COLUMN)
        if found is None:
            return None
        codes = (found.codes if isinstance(found, Words) else found)[self.index]
        with_gaps = np.isnan if codes.dtype.kind == "f" else np.zeros_like
        missing = codes < 0 if isinstance(found, Words) else with_gaps(codes)
        if missing.any():
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
    *,
    text: Sequence[str] = (),
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
        text: Columns of a CSV file that are text whatever they look like, such as codes
            with leading zeros.

    Raises:
        SiteError: The file cannot be read, or holds no columns of one length, or a
            column has words that are not listed.
    """
    file = Path(path).expanduser()
    stated, unusable = dict(units or {}), dict[str, str]()
    _check_options(file, text, held_out_fraction)
    if file.suffix in {".npz", ".npy"}:
        columns = _of_numpy(file)
    elif file.suffix in {".parquet", ".csv"}:
        columns, stated, unusable = _of_arrow(file, stated, text)
    else:
        raise SiteError(f"{file.name} is none of .parquet, .csv, .npz and .npy")
    sizes = {len(c.codes) if isinstance(c, Words) else len(c) for c in columns.values()}
    if len(sizes) != 1:
        raise SiteError(f"{file.name} has no columns, or columns of different lengths")
    rows = np.arange(sizes.pop())
    whole = Table(
        columns=columns, index=rows, target=target, units=stated, unusable=unusable
    )
    if target and target not in columns:
        raise SiteError(f"{file.name} {whole.without(target)} (target)")
    listed = {
        name: _coded(file.name, whole, name, tuple(words))
        for name, words in (categories or {}).items()
    }
    whole = whole.with_columns({**columns, **listed})
    split = round(len(rows) * (1 - held_out_fraction))
    if len(rows) and not split:
        raise SiteError(
            f"held_out_fraction leaves no record of {file.name} to train on"
        )
    return whole.subset(rows[:split]), whole.subset(rows[split:])


def _check_options(file: Path, text: Sequence[str], held_out_fraction: float) -> None:
    if not 0 <= held_out_fraction < 1:
        raise SiteError(
            f"held_out_fraction is {held_out_fraction}: give a number from 0 to below 1"
        )
    if isinstance(text, str):
        raise SiteError("text is a list of columns: put the name in brackets")
    if text and file.suffix != ".csv":
        raise SiteError(f"text is for CSV files, and {file.name} has types: remove it")


def _coded(file: str, data: Table, name: str, listed: tuple[str, ...]) -> Words:
    """A column with the codes of a list."""
    column = data.columns.get(name)
    if column is None:
        raise SiteError(f"{file} {data.without(name)} (categories)")
    if not is_of_categories(column):
        raise SiteError(f"column {name!r} of {file} has fractions, and no categories")
    coded = with_codes(words_of(column), listed)
    if coded is None:
        raise SiteError(f"column {name!r} of {file} has words that are not listed")
    return coded


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
    file: Path, units: dict[str, str], text: Sequence[str]
) -> tuple[dict[str, Column], dict[str, str], dict[str, str]]:
    try:
        import pyarrow as pa  # noqa: PLC0415 -- an extra
        from pyarrow import csv, parquet  # noqa: PLC0415 -- an extra
    except ModuleNotFoundError as error:
        raise MissingExtra("pyarrow", "parquet") from error
    if file.suffix == ".parquet":
        read = partial(parquet.read_table, str(file))
    else:
        kinds = dict.fromkeys(text, pa.string())
        convert = csv.ConvertOptions(strings_can_be_null=True, column_types=kinds)
        read = partial(_read_csv, csv, file, convert)
    loaded = _read(file, read, (OSError, pa.ArrowException, UnicodeDecodeError))
    _check_names(file, loaded, text)
    found: dict[str, Column] = {}
    unusable: dict[str, str] = {}
    for spec in loaded.schema:
        unit = (spec.metadata or {}).get(b"unit", b"").decode(errors="replace")
        units = {spec.name: unit, **units} if unit else units
        if file.suffix == ".csv" and pa.types.is_binary(spec.type):
            raise SiteError(
                f"column {spec.name!r} of {file.name} is not UTF-8 text: convert the "
                "file"
            )
        column = _of_column(pa, loaded.column(spec.name), spec.type)
        if column is None:
            unusable[spec.name] = str(spec.type)
        else:
            found[spec.name] = column
    return found, units, unusable


def _read_csv(csv: Any, file: Path, convert: Any) -> Any:
    """Read a CSV file, and the names of its columns, which Arrow decodes later."""
    found = csv.read_csv(str(file), convert_options=convert)
    names = found.column_names
    if len(names) == 1 and re.search(r"[;\t|]", names[0]):
        raise SiteError(f"{file.name} has one column: {_COMMAS}")
    return found


def _check_names(file: Path, loaded: Any, text: Sequence[str]) -> None:
    if loaded.num_columns and not loaded.num_rows:
        raise SiteError(f"{file.name} has no records")
    if twice := [n for n, times in Counter(loaded.column_names).items() if times > 1]:
        raise SiteError(
            f"{file.name} has several columns {twice[0]!r}: rename all but one"
        )
    if unknown := [name for name in text if name not in loaded.column_names]:
        raise SiteError(f"{file.name} has no column {unknown[0]!r} (text)")


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
        is_text = not isinstance(error, UnicodeDecodeError)
    why = said[0] if said else f"it is damaged, or no {file.suffix} file"
    if not is_text:
        why = "the names of its columns are not UTF-8 text"
    elif why.startswith("Expected 1 "):
        why = f"{why} ({_COMMAS})"
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
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
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

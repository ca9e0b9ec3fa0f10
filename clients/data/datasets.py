"""Datasets: what a data source may return, and the interface to read it.

A dataset of a user's is one of

- ``Examples``;
- a tuple ``(inputs, targets)`` of NumPy arrays or torch tensors of one length;
  ``targets`` may be None for language models; each may be a tuple, list or dict of
  arrays, nested as you like, and an objective gets batches in the same nesting;
- any map-style dataset: ``len(d)``, and ``d[i]`` returning ``(x, y)`` or a dict; with
  an attribute ``targets`` it can be dealt out by class; a list of such items;
- a ``torch.utils.data.DataLoader``, for its dataset, its ``collate_fn`` and its worker
  processes (``reading``); an ``IterableDataset``, which is read to its end;
- columns of one length: a dict of arrays, or a frame of pandas;
- a ``clients.data.tables.Table``, whose columns may be words and have units.

Of dicts and columns, ``labels``, ``label`` or ``targets`` holds the targets, and all
else is inputs, in a dict of that order; ``inputs`` alone stands for itself.

Which person a record is of, where persons are protected together (``unit = "person"``),
is said by ``persons`` of ``Examples``, an attribute ``persons`` of a map-style dataset
with one integer or text per item, or a column ``person_id``, which is no input.

Nothing has to be inherited or registered. ``as_dataset`` makes a ``Dataset`` of any.
Models see float32 and int64 only: floating-point and boolean inputs become
float32, integer inputs are tokens and become int64, and integer targets are classes and
become int64. Inputs of uint8 with four axes or more in a batch are images and become
float32 from 0 to 1, also those of items and of a ``collate_fn``; tokens with so many
axes must have another integer type. A list of numbers in an item is one array.

Where datasets come from is in ``data``, how one is dealt out to sites in
``partition``.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
)

from clients.data.loader_workers import LoaderWorkers
from clients.data.persons import COLUMN, check_persons, of_columns, of_items
from clients.data.tables import Column, Table
from clients.randomness import SECRET_BYTES, all_states, seeded_globally
from clients.user_code import place_of
from federation.errors import SiteError, UserCodeError
from federation.tree import Tree, leaves, map_tree, named_leaves, num_records

Indices = NDArray[np.int64]
Batch = tuple[Tree, Tree]

_EXPECTED = (
    "expected clients.data.Examples, a tuple (inputs, targets) of arrays, a dict of "
    "columns, or a map-style dataset whose items are (x, y) or dicts"
)
_PAIR = 2
_TARGETS = ("labels", "label", "targets")
_IMAGE_AXES = 4  # Records, channels, height and width, in any order of the last three.
_READ_AT_ONCE = 4096
_MOST_ITEMS = 10**7  # Of an ``IterableDataset``: one without an end is a mistake.

_NUMBERS = (int, float, np.number, np.bool_)
_LEAVES = (torch.Tensor, np.ndarray, *_NUMBERS)

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examples:
    """Examples in arrays.

    Attributes:
        inputs: Shape ``(n, ...)``; floating point, or integer tokens; or a tuple, list
            or dict of such arrays.
        targets: The same, or None if the inputs are their own targets; integers of
            shape ``(n,)`` are classes.
        groups: Shape ``(n,)``: index of each example's group in ``group_names``.
        group_names: Name of each group, by index.
        persons: Shape ``(n,)``: whose record each example is; integers or texts, of
            which equal ones are one person.

    Raises:
        ValueError: Lengths differ, a type is not numeric, or a group has no name.
    """

    inputs: Tree
    targets: Tree = None
    groups: Indices | None = None
    group_names: tuple[str, ...] = ()
    persons: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        """Check types and lengths."""
        parts = {"inputs": self.inputs, "targets": self.targets, "groups": self.groups}
        if not any(True for _ in leaves(self.inputs)):
            raise ValueError("inputs hold no array")
        named = (each for part in parts.items() for each in named_leaves(*part))
        for what, array in named:
            _check_numbers(what, array)
            if len(array) != self.size:
                raise ValueError(
                    f"there are {self.size} inputs and {len(array)} {what}"
                )
        check_persons(self.persons, self.size)
        groups = self.groups
        if groups is not None and groups.size:
            if groups.dtype.kind not in "iu" or groups.ndim != 1:
                raise ValueError("groups must be integers of shape (n,)")
            if groups.min() < 0 or groups.max() >= len(self.group_names):
                raise ValueError(
                    f"groups must be indices into the {len(self.group_names)} "
                    "group_names"
                )

    @property
    def size(self) -> int:
        """Number of examples."""
        return num_records(self.inputs)


class Dataset(Protocol):
    """What the rest of the product reads examples from."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def batch(self, indices: Indices) -> Batch:
        """Inputs and targets of some examples, float32 or int64, in fresh memory."""
        ...

    def labels(self) -> Indices | None:
        """Class of each example, shape ``(n,)``; None if there are no classes."""
        ...

    @property
    def groups(self) -> Indices | None:
        """Group of each example, shape ``(n,)``; None if there are no groups."""
        ...

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of all groups, including those without examples here."""
        ...

    @property
    def persons(self) -> NDArray[Any] | None:
        """Whose record each example is, shape ``(n,)``; None if the data has none."""
        ...

    def subset(self, indices: Indices) -> "Dataset":
        """A view of some of the examples; nothing is copied but the indices."""
        ...

    def apart(self) -> "Dataset":
        """A view in which no example depends on the others of its batch.

        Raises:
            SiteError: A user's code makes one of several examples at once.
        """
        ...


def _check_numbers(what: str, array: NDArray[Any]) -> None:
    """Check that an array holds one row of numbers for each example.

    Raises:
        ValueError: It does not.
    """
    is_text = array.dtype.kind in "US"
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise ValueError(
            f"{what} must be an array of numbers, one row per example, not "
            f"{'text' if is_text else array.dtype} of shape {array.shape}"
            f"{_replace_hint(array)}"
        )
    if trouble := _trouble(array):
        raise ValueError(f"{what} {trouble}")


def _replace_hint(array: NDArray[Any]) -> str:
    """What to do with values that are no numbers."""
    if array.dtype.kind not in "USOMm":
        return ""
    return "; replace each text, date or missing value (None, NA) by a number"


def _trouble(values: object) -> str:
    """Why a tensor or an array cannot be read as it is; empty if it can."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        return (
            "is a masked array, whose mask would be lost: fill it with filled(), and "
            "make the mask an input of its own"
        )
    if not isinstance(values, torch.Tensor):
        return ""
    found = {
        "is a nested tensor: use torch.nested.to_padded_tensor()": values.is_nested,
        "is a sparse tensor: use to_dense()": values.layout is not torch.strided,
        "is a quantized tensor: use dequantize()": values.is_quantized,
        "has no values: it is on the meta device": values.is_meta,
        "is complex: use torch.view_as_real()": values.is_complex(),
    }
    return next((text for text, is_so in found.items() if is_so), "")


def as_dataset(obj: object, *, name: str) -> Dataset:
    """Make a ``Dataset`` of anything that a data source may return.

    Args:
        obj: See the top of this module.
        name: What it is, for the message.

    Raises:
        SiteError: It is something else, malformed or empty.
    """
    if hasattr(obj, "columns") and hasattr(obj, "to_numpy"):  # Of pandas.
        obj = {str(column): obj[column].to_numpy() for column in obj.columns}  # type: ignore[index]
    if isinstance(obj, Table):
        return obj  # It may be empty: statistics add up what there is.
    if isinstance(obj, Examples):
        dataset = _from_examples(obj)
    elif isinstance(obj, tuple):
        dataset = _from_examples(_examples_of_tuple(obj, name=name))
    elif isinstance(obj, Mapping):
        columns = {key: _column(part, name, key) for key, part in obj.items()}
        persons = of_columns(columns, name=name)
        pair = parts_of_dict(columns, name=name)
        examples = _examples_of_tuple(pair, name=name, persons=persons)
        dataset = _from_examples(examples)
    elif isinstance(obj, DataLoader):
        dataset = _from_loader(obj, name=name)
    else:
        dataset = _from_items(obj, name=name)
    if len(dataset) == 0:
        raise SiteError(f"{name} has no example")
    return dataset


def parts_of_dict(item: Mapping[str, Any], *, name: str) -> tuple[Tree, Tree]:
    """Split a record, a batch or columns into inputs and targets.

    Raises:
        SiteError: There is no input, or there are several kinds of targets.
    """
    known = [key for key in _TARGETS if key in item]
    if len(known) > 1:
        raise SiteError(
            f"{name} has the columns {' and '.join(known)}: keep one of them as the "
            "targets, and remove or rename the other"
        )
    inputs = {key: value for key, value in item.items() if key not in (*known, COLUMN)}
    if not inputs:
        only = f"column besides {known[0]}" if known else "columns"
        raise SiteError(f"{name} has no {only}")
    alone = inputs["inputs"] if inputs.keys() == {"inputs"} else inputs
    return alone, item[known[0]] if known else None


def _column(values: object, name: str, key: str) -> object:
    """A column as an array, if its rows have one length."""
    if isinstance(values, list):
        try:
            return np.asarray(values)
        except ValueError as error:
            raise SiteError(
                f"{name}: the column {key!r} holds rows of different lengths: return "
                "a DataLoader of a list of dicts, whose collate_fn pads them"
            ) from error
    if key == COLUMN:
        return values
    if isinstance(values, np.ndarray) and values.dtype == object and values.size:
        return _column([np.asarray(row) for row in values], name, key)
    return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _View:
    """Some examples of a source: the only implementation of ``Dataset``."""

    fetch: Callable[[Indices], Batch]
    index: Indices
    all_labels: Indices | None
    all_groups: Indices | None
    group_names: tuple[str, ...]
    all_persons: NDArray[Any] | None = None
    items: Any = None
    examples: Examples | None = None
    workers: LoaderWorkers | None = None
    collated: str = ""  # Name of the part of the data, if a user's code makes batches.

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, indices: Indices) -> Batch:
        return self.fetch(self.index[indices])

    def labels(self) -> Indices | None:
        return None if self.all_labels is None else self.all_labels[self.index]

    @property
    def groups(self) -> Indices | None:
        return None if self.all_groups is None else self.all_groups[self.index]

    @property
    def persons(self) -> NDArray[Any] | None:
        return None if self.all_persons is None else self.all_persons[self.index]

    def subset(self, indices: Indices) -> "_View":
        return dataclasses.replace(self, index=self.index[indices])

    def apart(self) -> "_View":
        if not self.collated:
            return self
        _check_apart(self)
        one_by_one = partial(_one_by_one, self.fetch, name=self.collated)
        return dataclasses.replace(self, fetch=one_by_one, collated="")


def _from_examples(examples: Examples) -> _View:
    groups = examples.groups
    return _View(
        fetch=partial(_fetch_rows, examples),
        index=np.arange(examples.size),
        all_labels=_labels_of(examples.targets, examples.size),
        all_groups=None if groups is None else groups.astype(np.int64),
        group_names=examples.group_names,
        all_persons=examples.persons,
        examples=examples,
    )


def columns_of(dataset: Dataset) -> tuple[Mapping[str, Column], Mapping[str, str]]:
    """Return a dataset's columns by name, and the units of those whose unit is known.

    An array's columns are ``0``, ``1`` and so on, those of a dict have its names, and
    the targets are ``target``. An array of more axes is one column, ``inputs``. A
    dataset without arrays is read, as float32.
    """
    if isinstance(dataset, Table):
        names = dataset.columns
        return {name: dataset.column(name) for name in names}, dataset.units
    examples = getattr(dataset, "examples", None)
    if isinstance(dataset, _View) and examples is not None:
        rows = dataset.index
        inputs, targets = (
            map_tree(lambda array: array[rows], part)
            for part in (examples.inputs, examples.targets)
        )
    else:
        read = [dataset.batch(part) for part in _blocks(len(dataset))]
        inputs, targets = (_joined([pair[at] for pair in read]) for at in range(_PAIR))
    found: dict[str, Column] = {}
    named = inputs if isinstance(inputs, Mapping) else {"": inputs}
    for name, array in {**named, "target": targets}.items():
        if not isinstance(array, np.ndarray):
            continue
        if array.ndim == 1 and name:
            found[name] = array
        elif array.ndim > 2:  # noqa: PLR2004 -- rows and columns
            found[name or "inputs"] = array
        else:
            table = array.reshape(len(array), -1)
            found |= {f"{name}{at}": table[:, at] for at in range(table.shape[1])}
    return found, {}


def _blocks(size: int) -> list[Indices]:
    return np.array_split(np.arange(size), -(-size // _READ_AT_ONCE))


def _joined(parts: list[Tree]) -> Tree:
    """Put batches of a dataset together, as arrays."""
    first = parts[0] if parts else None
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if not isinstance(first, torch.Tensor):
        return None
    return torch.cat(parts).numpy()


def _fetch_rows(examples: Examples, indices: Indices) -> Batch:
    return (
        map_tree(partial(_as_tensor, indices, "iu"), examples.inputs),
        map_tree(partial(_as_tensor, indices, "biu"), examples.targets),
    )


def _as_tensor(
    indices: Indices, integer_kinds: str, array: NDArray[Any]
) -> torch.Tensor:
    rows = array[indices]
    if rows.dtype == np.uint8 and rows.ndim >= _IMAGE_AXES and "b" not in integer_kinds:
        return torch.from_numpy(rows.astype(np.float32) / 255)
    dtype = np.int64 if rows.dtype.kind in integer_kinds else np.float32
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=dtype))


def _examples_of_tuple(
    pair: tuple[object, ...], *, name: str, persons: NDArray[Any] | None = None
) -> Examples:
    if len(pair) != _PAIR:
        raise SiteError(f"{name} is a tuple of length {len(pair)}: {_EXPECTED}")
    for what, part in zip(("inputs", "targets"), pair, strict=True):
        for place, leaf in named_leaves(what, part):
            if trouble := _trouble(leaf):
                raise SiteError(f"{name}: {place} {trouble}")
    try:
        inputs, targets = (map_tree(_as_array, part) for part in pair)
    except ValueError as error:
        raise SiteError(f"{name}: {error}") from error
    arrays = list(leaves((pair[0], pair[1])))
    if inputs is None or len(list(leaves((inputs, targets)))) < len(arrays):
        found = f"({describe(pair[0])}, {describe(pair[1])})"
        lists = any(isinstance(part, list) for part in pair)
        hint = "; make lists arrays, for example with numpy.asarray" if lists else ""
        raise SiteError(f"{name} is {found}: {_EXPECTED}{hint}")
    try:
        return Examples(inputs=inputs, targets=targets, persons=persons)
    except ValueError as error:
        raise SiteError(f"{name}: {error}") from error


def _as_array(obj: object) -> NDArray[Any] | None:
    if isinstance(obj, np.ndarray):
        return obj
    if isinstance(obj, torch.Tensor):
        values = obj.detach().cpu()
        # NumPy has no bfloat16 nor float8; batches are float32 in any case.
        is_small = values.dtype == torch.bfloat16 or values.itemsize == 1
        is_cast = is_small and values.is_floating_point()
        return (values.float() if is_cast else values).numpy()
    if hasattr(obj, "to_numpy"):  # A frame or a column of pandas.
        return _of_pandas(obj)
    return None


def _of_pandas(obj: Any) -> NDArray[Any]:
    """Read a frame as a matrix, or a column; those that differ in type one by one."""
    values: NDArray[Any] = np.asarray(obj.to_numpy())
    if values.dtype != object:
        return values
    if not hasattr(obj, "columns"):
        return np.asarray(values.tolist())  # Numbers, if it holds nothing else.
    columns = {column: _of_pandas(obj[column]) for column in obj.columns}
    for column, array in columns.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"the column {str(column)!r} holds {obj[column].dtype}"
                f"{_replace_hint(array)}"
            )
    return np.column_stack(list(columns.values()))


def _labels_of(targets: object, size: int) -> Indices | None:
    """Read classes from arrays, or from a list as torchvision keeps them."""
    array = _as_array(targets)
    if array is None and isinstance(targets, Sequence):
        try:
            array = np.asarray(targets)
        except ValueError:  # Ragged.
            return None
    if array is None or array.shape != (size,) or array.dtype.kind not in "biu":
        return None
    return array.astype(np.int64)


def _from_loader(loader: "DataLoader[Any]", *, name: str) -> _View:
    """Take all of a loader but its batches and their order, which are the job's."""
    data, usual = loader.dataset, (RandomSampler, SequentialSampler)
    if not isinstance(data, IterableDataset) and not isinstance(loader.sampler, usual):
        raise SiteError(
            f"{name} is a DataLoader with a {type(loader.sampler).__name__}, but the "
            "job decides which records make a batch (training.batch_size): remove the "
            "sampler, or repeat records in the dataset"
        )
    is_own = loader.collate_fn not in {default_collate, default_convert}
    view = _from_items(data, name=name, collate=loader.collate_fn if is_own else None)
    return dataclasses.replace(view, workers=LoaderWorkers.of(loader, name=name))


def _from_items(obj: Any, *, name: str, collate: Collate | None = None) -> _View:
    """Wrap a map-style dataset, after a look at its first item."""
    if isinstance(obj, IterableDataset):
        obj = list(islice(obj, _MOST_ITEMS + 1))
        if len(obj) > _MOST_ITEMS:
            raise SiteError(
                f"{name} is an IterableDataset of more than {_MOST_ITEMS} records, and "
                "a site reads it to its end: limit it, or write shards with crossfed "
                "data shard"
            )
    has_methods = hasattr(obj, "__len__") and hasattr(obj, "__getitem__")
    if not has_methods or isinstance(obj, (np.ndarray, torch.Tensor, Mapping, str)):
        alone = isinstance(obj, (np.ndarray, torch.Tensor))
        hint = (
            "; a source returns two of these, training and held-out data"
            if alone
            else ""
        )
        raise SiteError(f"{name} is {describe(obj)}: {_EXPECTED}{hint}")
    size = len(obj)
    if collate is None:
        fetch: Callable[[Indices], Batch] = partial(_fetch_items, obj, name=name)
        if size:
            _check_item(obj[0], name=name)
    else:
        fetch = partial(_collated, obj, collate=collate, name=name)
        if size:
            fetch(np.zeros(1, np.int64))
    return _View(
        fetch=fetch,
        index=np.arange(size),
        all_labels=_labels_of(getattr(obj, "targets", None), size),
        all_groups=None,
        group_names=(),
        all_persons=of_items(obj, size),
        items=obj,
        collated="" if collate is None else name,
    )


def records_of(dataset: Dataset, indices: Indices) -> "Subset[Any]":
    """Records as their source has them, for a loop with a collator of its own.

    Args:
        dataset: From ``as_dataset``, of a map-style dataset.
        indices: Which records, in this order; one may be there several times.

    Raises:
        SiteError: It was made of arrays or shards.
    """
    items = getattr(dataset, "items", None)
    if not isinstance(dataset, _View) or items is None:
        raise SiteError(
            'training.task = "trainer" needs records that its collator takes: '
            "let the data source return the Trainer, or two map-style datasets or "
            "lists of dicts"
        )
    return Subset(items, [int(i) for i in dataset.index[indices]])


def _check_item(item: object, *, name: str) -> None:
    if isinstance(item, Mapping):
        item = parts_of_dict(item, name=f"each item of {name}")
    if not isinstance(item, (tuple, list)) or len(item) != _PAIR:
        raise SiteError(f"each item of {name} is {describe(item)}: {_EXPECTED}")
    pair = tuple(map(_with_arrays, item))
    parts = [*named_leaves("inputs", pair[0]), *named_leaves("targets", pair[1])]
    if not parts:
        found = ", ".join(describe(part) for part in item)
        raise SiteError(
            f"each item of {name} is ({found}): expected tensors, arrays or numbers"
        )
    for what, part in parts:
        trouble = _trouble(part)
        if not trouble and not isinstance(part, _LEAVES):
            trouble = (
                f"is {describe(part)}: expected a tensor, an array or a number; "
                "transform it to one, or leave it out"
            )
        if trouble:
            raise SiteError(f"{what} of each item of {name} {trouble}")
    try:
        map_tree(_stacked, pair)
    except TypeError as error:
        raise SiteError(
            f"items of {name} cannot be stacked into a batch: {error}; transform "
            "them to tensors, arrays or numbers"
        ) from error


def _with_arrays(tree: Tree) -> Tree:
    """Make each list of numbers in a record an array, as one of Hugging Face's needs.

    A dataset without a format gives lists where its columns hold tokens.
    """
    if isinstance(tree, Mapping):
        return {key: _with_arrays(part) for key, part in tree.items()}
    if not isinstance(tree, (tuple, list)):
        return tree
    first: Any = tree
    while isinstance(first, list) and first:
        first = first[0]
    if first is not tree and isinstance(first, _NUMBERS):
        try:
            return np.asarray(tree)
        except ValueError:  # Of lists that differ in length.
            pass
    parts = map(_with_arrays, tree)
    return list(parts) if isinstance(tree, list) else tuple(parts)


def _collated(items: Any, indices: Indices, *, collate: Collate, name: str) -> Batch:
    """Make a batch by the collate of the user's."""
    try:
        batch = collate([items[int(i)] for i in indices])
    except Exception as error:
        # Foreign code may raise anything. This translates and does not continue.
        raise UserCodeError(f"collate_fn of {name}", error, place_of(error)) from error
    pair = parts_of_dict(batch, name=name) if isinstance(batch, Mapping) else batch
    if not isinstance(pair, (tuple, list)) or len(pair) != _PAIR:
        raise SiteError(
            f"collate_fn of {name} returned {describe(batch)}: expected (inputs, "
            "targets) or a dict"
        )
    for part in leaves(tuple(pair)):
        if trouble := _trouble(part):
            raise SiteError(f"a part of what collate_fn of {name} returned {trouble}")
        if not isinstance(part, torch.Tensor) or len(part) != len(indices):
            fault = (
                f"collate_fn of {name} must return tensors with one row per record: "
                "stack and pad the records"
            )
            raise SiteError(
                f"{fault}; for {len(indices)} records it returned {describe(part)}",
                outside=fault,
            )
    return (
        map_tree(_as_input, pair[0]),
        map_tree(partial(_as_model_type, bools=torch.int64), pair[1]),
    )


def _one_by_one(
    fetch: Callable[[Indices], Batch], indices: Indices, *, name: str
) -> Batch:
    """Collate every record in a batch of its own, and join these batches."""
    alone = [fetch(indices[i : i + 1]) for i in range(len(indices))]
    try:
        joined: Batch = map_tree(lambda *parts: torch.cat(parts), *alone)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        fault = (
            f"collate_fn of {name} gives records different shapes or columns when it "
            "gets them one by one, as differential privacy needs: pad all records to "
            'one length that the job states (padding="max_length"), since the longest '
            "of a batch would change the gradients of all others"
        )
        raise SiteError(f"{fault} ({error})", outside=fault) from error
    return joined


def _check_apart(data: _View) -> None:
    """Check that a ``collate_fn`` makes of a record what it would make of it alone.

    Each time with the same draws. One that draws may draw otherwise in a batch of
    another size, so that its batches of one record are not compared; and nothing is of
    data that is different when it is read again.

    Raises:
        SiteError: It does not; the message names the tensor.
    """
    # Drawn, since other threads may draw from the same generators meanwhile.
    secret, cpu = os.urandom(SECRET_BYTES), torch.device("cpu")

    def rows(*indices: int) -> tuple[dict[str, torch.Tensor], bool]:
        with seeded_globally(secret, cpu):
            before = all_states()
            pair = data.batch(np.array(indices) % len(data))
            drew = all_states() != before
        return dict(
            each
            for what, part in zip(("inputs", "targets"), pair, strict=True)
            for each in named_leaves(what, part)
        ), drew

    if not len(data):
        return
    beside, drew = rows(0, 1, 2)
    again, others = rows(0, 1, 2)[0], [rows(0, 3, 4)[0]]
    others += [] if drew else [rows(0)[0]]
    for name, values in beside.items():
        is_settled = name in again and torch.equal(values[0], again[name][0])
        for other in others if is_settled else []:
            if name not in other or not torch.equal(values[0], other[name][0]):
                fault = (
                    f"collate_fn of {data.collated} makes {name} of a record depend on "
                    "the other records of its batch, which differential privacy cannot "
                    "protect: transform single records, and pad all to one length that "
                    'the job states (padding="max_length")'
                )
                raise SiteError(fault, outside=fault)


def _fetch_items(items: Any, indices: Indices, *, name: str) -> Batch:
    found = [items[int(i)] for i in indices]
    found = [
        parts_of_dict(item, name=name) if isinstance(item, Mapping) else item
        for item in found
    ]
    found = [tuple(map(_with_arrays, item)) for item in found]
    inputs, targets = zip(*found, strict=True)
    try:
        return (
            map_tree(lambda *each: _as_input(_stacked(*each)), *inputs),
            map_tree(
                lambda *each: _as_model_type(_stacked(*each), bools=torch.int64),
                *targets,
            ),
        )
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        fault = (
            "records of one batch have different shapes or types and cannot be "
            "stacked: pad or crop them in the dataset's __getitem__, or return a "
            "DataLoader whose collate_fn pads them"
        )
        forms = [[describe(part) for part in item] for item in found]
        odd = next((i for i, form in enumerate(forms) if form != forms[0]), 0)
        raise SiteError(
            f"{fault}; record {indices[0]} is {', '.join(forms[0])}, and record "
            f"{indices[odd]} is {', '.join(forms[odd])}",
            outside=fault,
        ) from error


def _stacked(*parts: object) -> Any:
    if isinstance(parts[0], np.bool_):  # Which torch 2.6 reads as an index.
        parts = tuple(map(bool, parts))
    for part in parts:
        # Its mask differs from record to record.
        if isinstance(part, np.ma.MaskedArray) and (trouble := _trouble(part)):
            raise SiteError(f"a record {trouble}")
    return default_collate(list(parts))


def _as_input(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.uint8 and values.ndim >= _IMAGE_AXES:
        return values.float() / 255
    return _as_model_type(values)


def _as_model_type(
    values: torch.Tensor, *, bools: torch.dtype = torch.float32
) -> torch.Tensor:
    if values.dtype == torch.bool:
        return values.to(bools)
    return values.to(torch.float32 if values.is_floating_point() else torch.int64)


def first_not_finite(
    dataset: Dataset, walk: Iterable[Indices], is_handled: Callable[[Batch], bool]
) -> int | None:
    """Index of the first record of some batches whose NaN or infinity does harm.

    Args:
        dataset: The records.
        walk: Those of each batch.
        is_handled: Whether model and objective handle some records, as they do if NaN
            stands for a missing value.
    """
    for indices in walk:
        rows = not_finite_rows(dataset.batch(indices))
        if not len(rows) or is_handled(dataset.batch(indices[rows])):
            continue
        each = (indices[[row]] for row in rows)
        found = (one for one in each if not is_handled(dataset.batch(one)))
        return int(next(found, indices[rows])[0])
    return None


def not_finite_rows(batch: Batch) -> Indices:
    """Places of the records in a batch that hold NaN or infinity."""
    bad = [~part.isfinite().reshape(len(part), -1).all(1) for part in leaves(batch)]
    return torch.stack(bad).any(0).nonzero()[:, 0].cpu().numpy()


def not_finite_records(part: str, first: int) -> str:
    """Say which record holds NaN or infinity, and what to do; see above.

    Args:
        part: ``training`` or ``held-out``.
        first: Index of the first such record in this part of the site's data.
    """
    return (
        f"{part} record {first} holds NaN or infinite values: drop or fill these "
        "records in the data function (records are counted from 0 at each site)"
    )


def describe(obj: object) -> str:
    """Describe a value without its content, which may be private."""
    if isinstance(obj, (np.ndarray, torch.Tensor)):
        return f"{type(obj).__name__}{list(obj.shape)}"
    if isinstance(obj, (tuple, list)):
        return f"{type(obj).__name__} of length {len(obj)}"
    if obj is None:
        return "None"
    kind = type(obj).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"

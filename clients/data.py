"""Datasets: what a data source returns, how it is read, and three sources.

A data source is any ``module:function`` that returns ``(train, held_out)``. Each
of the two is one of

- ``Examples``;
- a tuple ``(inputs, targets)`` of NumPy arrays or torch tensors of one length;
  ``targets`` may be None for language models;
- any map-style dataset: ``len(d)``, and ``d[i]`` returning ``(x, y)``; with an
  attribute ``targets`` it can be dealt out by class.

Nothing has to be inherited or registered. ``load`` makes a ``Dataset`` of either.
Models see float32 and int64 only: floating-point and boolean inputs become
float32, integer inputs are tokens and become int64 (so scale integer images to
floating point), and integer targets are classes and become int64.

How a dataset is dealt out to sites is in ``partition``.
"""

import dataclasses
import hashlib
import math
import os
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from clients.factories import call_factory, import_factory
from federation.errors import SiteError

Indices = NDArray[np.int64]
Batch = tuple[torch.Tensor, torch.Tensor | None]

TOP_LEVEL = "(top level)"

_EXPECTED = (
    "expected clients.data.Examples, a tuple (inputs, targets) of arrays, or a "
    "map-style dataset whose items are (x, y)"
)
# Folders of the standard library that are not read: installed packages, tests, and
# the interpreter's build files, whose folder is named after the machine's type.
_LIBRARY_SKIPS = ("site-packages", "dist-packages", "test", "tests", "config-*")
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examples:
    """Examples in arrays.

    Attributes:
        inputs: Shape ``(n, ...)``; floating point, or integer tokens.
        targets: Shape ``(n, ...)``, or None if the inputs are their own targets;
            integers of shape ``(n,)`` are classes.
        groups: Shape ``(n,)``: index of each example's group in ``group_names``.
        group_names: Names of the groups.

    Raises:
        ValueError: Lengths differ, a type is not numeric, or a group has no name.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any] | None = None
    groups: Indices | None = None
    group_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check types and lengths."""
        parts = {"inputs": self.inputs, "targets": self.targets, "groups": self.groups}
        for what, array in parts.items():
            if array is None:
                continue
            if array.ndim == 0 or array.dtype.kind not in "biuf":
                raise ValueError(
                    f"{what} must be an array of numbers, one row per example, not "
                    f"{array.dtype} of shape {array.shape}"
                )
            if len(array) != len(self.inputs):
                raise ValueError(
                    f"there are {len(self.inputs)} inputs and {len(array)} {what}"
                )
        groups = self.groups
        if groups is not None and groups.size:
            if groups.dtype.kind not in "iu" or groups.ndim != 1:
                raise ValueError("groups must be integers of shape (n,)")
            if groups.min() < 0 or groups.max() >= len(self.group_names):
                raise ValueError(
                    f"groups must be indices into the {len(self.group_names)} "
                    "group_names"
                )


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
        """Names of all groups, also of those that have no example here."""
        ...

    def subset(self, indices: Indices) -> "Dataset":
        """A view of some of the examples; nothing is copied but the indices."""
        ...


def load(
    source: str, options: Mapping[str, Any], *, key: str = "data"
) -> tuple[Dataset, Dataset]:
    """Call a data source.

    Args:
        source: ``module:function``.
        options: Keyword arguments of the function.
        key: Table of the job file that holds ``source`` and ``options``.

    Returns:
        The training and the held-out dataset, neither of them empty.

    Raises:
        JobError: There is no such function, or it does not take these options.
        SiteError: It failed, or returned something else than two datasets.
    """
    factory = import_factory(source, key=f"{key}.source")
    pair = call_factory(factory, options, key=f"{key}.options")
    if not isinstance(pair, (tuple, list)) or len(pair) != _PAIR:
        raise SiteError(
            f"{source} returned {_describe(pair)}: expected a tuple (train, held_out)"
        )
    train, held_out = pair
    return (
        as_dataset(train, name=f"train of {source}"),
        as_dataset(held_out, name=f"held_out of {source}"),
    )


def as_dataset(obj: object, *, name: str) -> Dataset:
    """Make a ``Dataset`` of anything that a data source may return.

    Args:
        obj: See the top of this module.
        name: What it is, for the message.

    Raises:
        SiteError: It is something else, malformed or empty.
    """
    if isinstance(obj, Examples):
        dataset = _from_examples(obj)
    elif isinstance(obj, tuple):
        dataset = _from_examples(_examples_of_tuple(obj, name=name))
    else:
        dataset = _from_items(obj, name=name)
    if len(dataset) == 0:
        raise SiteError(f"{name} has no example")
    return dataset


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _View:
    """Some examples of a source: the only implementation of ``Dataset``."""

    fetch: Callable[[Indices], Batch]
    index: Indices
    all_labels: Indices | None
    all_groups: Indices | None
    group_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, indices: Indices) -> Batch:
        return self.fetch(self.index[indices])

    def labels(self) -> Indices | None:
        return None if self.all_labels is None else self.all_labels[self.index]

    @property
    def groups(self) -> Indices | None:
        return None if self.all_groups is None else self.all_groups[self.index]

    def subset(self, indices: Indices) -> "_View":
        return dataclasses.replace(self, index=self.index[indices])


def _from_examples(examples: Examples) -> _View:
    groups = examples.groups
    return _View(
        fetch=partial(_fetch_rows, examples),
        index=np.arange(len(examples.inputs)),
        all_labels=_labels_of(examples.targets, len(examples.inputs)),
        all_groups=None if groups is None else groups.astype(np.int64),
        group_names=examples.group_names,
    )


def _fetch_rows(examples: Examples, indices: Indices) -> Batch:
    targets = examples.targets
    return (
        _as_tensor(examples.inputs[indices], integer_kinds="iu"),
        None if targets is None else _as_tensor(targets[indices], integer_kinds="biu"),
    )


def _as_tensor(rows: NDArray[Any], *, integer_kinds: str) -> torch.Tensor:
    dtype = np.int64 if rows.dtype.kind in integer_kinds else np.float32
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=dtype))


def _examples_of_tuple(pair: tuple[object, ...], *, name: str) -> Examples:
    if len(pair) != _PAIR:
        raise SiteError(f"{name} is a tuple of {len(pair)} things: {_EXPECTED}")
    inputs, targets = (_as_array(part) for part in pair)
    if inputs is None or (targets is None and pair[1] is not None):
        found = f"({_describe(pair[0])}, {_describe(pair[1])})"
        raise SiteError(f"{name} is {found}: {_EXPECTED}")
    try:
        return Examples(inputs=inputs, targets=targets)
    except ValueError as error:
        raise SiteError(f"{name}: {error}") from error


def _as_array(obj: object) -> NDArray[Any] | None:
    if isinstance(obj, np.ndarray):
        return obj
    if isinstance(obj, torch.Tensor):
        values = obj.detach().cpu()
        # NumPy has no bfloat16; batches are float32 in any case.
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return None


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


def _from_items(obj: Any, *, name: str) -> _View:
    """Wrap a map-style dataset, after a look at its first item."""
    has_methods = hasattr(obj, "__len__") and hasattr(obj, "__getitem__")
    if not has_methods or isinstance(obj, (np.ndarray, torch.Tensor, Mapping, str)):
        raise SiteError(f"{name} is {_describe(obj)}: {_EXPECTED}")
    size = len(obj)
    if size:
        _check_item(obj[0], name=name)
    return _View(
        fetch=partial(_fetch_items, obj),
        index=np.arange(size),
        all_labels=_labels_of(getattr(obj, "targets", None), size),
        all_groups=None,
        group_names=(),
    )


def _check_item(item: object, *, name: str) -> None:
    if not isinstance(item, (tuple, list)) or len(item) != _PAIR:
        raise SiteError(f"items of {name} are {_describe(item)}: {_EXPECTED}")
    try:
        parts = [default_collate([part]) for part in item if part is not None]
    except TypeError as error:
        raise SiteError(
            f"items of {name} cannot be stacked into a batch: {error}; transform "
            "them to tensors, arrays or numbers"
        ) from error
    if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        found = ", ".join(_describe(part) for part in item)
        raise SiteError(
            f"items of {name} are ({found}): expected tensors, arrays or numbers"
        )


def _fetch_items(items: Any, indices: Indices) -> Batch:
    inputs, targets = zip(*(items[int(i)] for i in indices), strict=True)
    return (
        _as_model_type(default_collate(list(inputs))),
        None
        if targets[0] is None
        else _as_model_type(default_collate(list(targets)), bools=torch.int64),
    )


def _as_model_type(
    values: torch.Tensor, *, bools: torch.dtype = torch.float32
) -> torch.Tensor:
    if values.dtype == torch.bool:
        return values.to(bools)
    return values.to(torch.float32 if values.is_floating_point() else torch.int64)


def _describe(obj: object) -> str:
    """Say what something is, without its content: it may be private."""
    if isinstance(obj, (np.ndarray, torch.Tensor)):
        return f"{type(obj).__name__}{list(obj.shape)}"
    if isinstance(obj, (tuple, list)):
        return f"{type(obj).__name__} of length {len(obj)}"
    return "None" if obj is None else f"a {type(obj).__name__}"


def digits(held_out_fraction: float = 0.2, seed: int = 0) -> tuple[Examples, Examples]:
    """1,797 handwritten digits of 8 x 8 pixels, in ten classes.

    Source: scikit-learn's bundled copy of the test part of UCI's "Optical
    Recognition of Handwritten Digits".

    Args:
        held_out_fraction: Share of each class that is held out.
        seed: Seed of the split.

    Returns:
        Training and held-out examples: inputs ``(n, 1, 8, 8)``, float32 from 0 to 1.
    """
    # scikit-learn takes a second to import, which only two sources need.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    pixels, classes = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    train, held_out = _stratified_split(classes, held_out_fraction, seed=seed)
    return (
        Examples(inputs=images[train], targets=classes[train]),
        Examples(inputs=images[held_out], targets=classes[held_out]),
    )


def breast_cancer(
    held_out_fraction: float = 0.2, seed: int = 0
) -> tuple[Examples, Examples]:
    """569 tumours with 30 measurements each; class 0 is malignant, 1 benign.

    Source: scikit-learn's bundled copy of UCI's "Breast Cancer Wisconsin
    (Diagnostic)".

    Args:
        held_out_fraction: Share of each class that is held out.
        seed: Seed of the split.

    Returns:
        Training and held-out examples: inputs ``(n, 30)``, float32, standardised
        with mean and deviation of the training part.
    """
    from sklearn.datasets import load_breast_cancer  # noqa: PLC0415

    values, classes = load_breast_cancer(return_X_y=True)
    train, held_out = _stratified_split(classes, held_out_fraction, seed=seed)
    mean, deviation = values[train].mean(axis=0), values[train].std(axis=0)
    standard = ((values - mean) / deviation).astype(np.float32)
    return (
        Examples(inputs=standard[train], targets=classes[train]),
        Examples(inputs=standard[held_out], targets=classes[held_out]),
    )


def _stratified_split(
    classes: Indices, fraction: float, *, seed: int
) -> tuple[Indices, Indices]:
    """Hold out the same share of every class, at least one example of each."""
    _check_fraction(fraction)
    rng = np.random.default_rng(seed)
    held_out = []
    for label in np.unique(classes):
        members = rng.permutation(np.flatnonzero(classes == label))
        held_out.append(members[: max(1, round(fraction * len(members)))])
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(classes)), chosen), chosen


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise SiteError(
            f"held_out_fraction is {fraction}: give a number between 0 and 1"
        )


def text_folder(
    path: str | None = None,
    pattern: str = "*.py",
    context: int = 128,
    *,
    max_bytes: int | None = None,
    held_out_fraction: float = 0.1,
    seed: int = 0,
) -> tuple[Examples, Examples]:
    """A folder of text as windows of bytes, for byte-level language models.

    A file's group is the first folder on its path, ``(top level)`` if there is
    none. Whole files are held out, of every group whose files allow it, so that no
    file is on both sides. Windows lie inside a group and overlap by the one byte
    that is the last target of one and the first input of the next. Hidden files
    and folders are left out.

    Args:
        path: The folder; by default the standard library of the running Python,
            without its tests.
        pattern: Names of the files that are read, as a shell pattern.
        context: Tokens that a model sees; windows are one byte longer.
        max_bytes: Read no more than this; which files are left out depends on
            ``seed`` and on nothing of the machine.
        held_out_fraction: Share of each group's bytes that is held out, about.
        seed: Seed of the choice of files.

    Returns:
        Training and held-out windows: inputs ``(n, context + 1)``, uint8.

    Raises:
        SiteError: There is no such folder, or too little text in it.
    """
    _check_fraction(held_out_fraction)
    if context < 1:
        raise SiteError(f"context is {context}: give at least 1")
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path).expanduser()
    skips = _LIBRARY_SKIPS if path is None else ()
    sizes = _text_files(root, pattern, skips)
    order = sorted(sizes, key=partial(_draw, seed))
    if max_bytes is not None:
        order = _fitting(order, sizes, budget=max_bytes)
    by_group = defaultdict(list)
    for name in order:
        by_group[name.split("/")[0] if "/" in name else TOP_LEVEL].append(name)
    train, held_out = [], []
    for group in sorted(by_group):
        window = context + 1
        kept_out = _held_out(by_group[group], sizes, held_out_fraction, window)
        rest = sorted(set(by_group[group]) - set(kept_out))
        windows = _windows(root, rest, context)
        if len(windows):
            train.append((group, windows))
            held_out.append((group, _windows(root, sorted(kept_out), context)))
    if not sum(len(windows) for _, windows in held_out):
        raise SiteError(
            f"there is too little text in {pattern!r} files of {str(root)!r} for one "
            f"training and one held-out window of {context + 1} bytes"
        )
    return _grouped(train), _grouped(held_out)


def _text_files(root: Path, pattern: str, skips: tuple[str, ...]) -> dict[str, int]:
    """Sizes of the files, by path from the root with ``/`` between its parts."""
    if not root.is_dir():
        raise SiteError(f"there is no folder {str(root)!r} to read text from")
    sizes = {}
    for folder, below, names in os.walk(root):
        below[:] = [
            b for b in below if not any(fnmatchcase(b, s) for s in (".*", *skips))
        ]
        for name in names:
            if fnmatchcase(name, pattern) and not name.startswith("."):
                file = Path(folder, name)
                sizes[file.relative_to(root).as_posix()] = file.stat().st_size
    return sizes


def _draw(seed: int, name: str) -> bytes:
    """A random-looking key that depends on the file's path and the seed only."""
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def _fitting(order: list[str], sizes: Mapping[str, int], *, budget: float) -> list[str]:
    """Take each file that still fits into a budget of bytes."""
    taken, used = [], 0
    for name in order:
        if used + sizes[name] <= budget:
            taken.append(name)
            used += sizes[name]
    return taken


def _held_out(
    order: list[str], sizes: Mapping[str, int], fraction: float, window: int
) -> list[str]:
    """Choose a group's held-out files: at least a window if the group has two."""
    total = sum(sizes[name] for name in order)
    taken = _fitting(order, sizes, budget=fraction * total)
    if sum(sizes[name] for name in taken) >= window:
        return taken
    enough = [name for name in order if window <= sizes[name] <= total - window]
    return [min(enough, key=sizes.__getitem__)] if enough else []


def _windows(root: Path, names: list[str], context: int) -> NDArray[np.uint8]:
    text = np.frombuffer(b"".join((root / n).read_bytes() for n in names), np.uint8)
    if len(text) <= context:
        return np.empty((0, context + 1), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]


def _grouped(parts: list[tuple[str, NDArray[np.uint8]]]) -> Examples:
    return Examples(
        inputs=np.concatenate([windows for _, windows in parts]),
        groups=np.repeat(np.arange(len(parts)), [len(w) for _, w in parts]),
        group_names=tuple(group for group, _ in parts),
    )


def unigram_entropy(dataset: Dataset) -> float:
    """Entropy of the tokens, each by itself, in nats per token.

    No language model that ignores context does better on these tokens; a model
    that has learnt anything of their order has a smaller loss.

    Args:
        dataset: Windows of tokens.
    """
    counts: Indices = np.zeros(0, np.int64)
    for part in np.array_split(np.arange(len(dataset)), 1 + len(dataset) // 4096):
        tokens, _ = dataset.batch(part)
        found = np.bincount(tokens.flatten().numpy(), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    shares = counts[counts > 0] / counts.sum()
    return -math.fsum(shares * np.log(shares))

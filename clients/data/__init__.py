"""Data sources: how to call one, and three built-in ones.

A data source is any ``module:function`` that returns ``(train, held_out)``; what
each of the two may be is told in ``datasets``.
"""

import hashlib
import math
import os
import sysconfig
from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.data.datasets import (
    Batch,
    Dataset,
    Examples,
    Indices,
    as_dataset,
    describe,
)
from clients.data.tables import Table, table
from clients.factories import call_factory, import_factory
from clients.preprocessing import preprocessing
from clients.users_trainer import is_trainer, loaders_of
from federation.errors import JobError, SiteError
from federation.job.code_files import unpinned

__all__ = [
    "TOP_LEVEL",
    "Batch",
    "Dataset",
    "Examples",
    "Table",
    "as_dataset",
    "breast_cancer",
    "digits",
    "load",
    "preprocessing",
    "table",
    "text_folder",
    "unigram_entropy",
]

TOP_LEVEL = "(top level)"

# Folders of the standard library that are not read: installed packages, tests, and
# the interpreter's build files, whose folder is named after the machine's type.
_LIBRARY_SKIPS = ("site-packages", "dist-packages", "test", "tests", "config-*")
_PAIR = 2

# Centre and spread of each measurement as the mean over a tumour's cells, its standard
# error and the mean of the three largest. They stand for reference values, which a real
# project takes from the literature: rounded from the ranges in the documentation of the
# data, at a quarter of the range above its low end, since most are skewed, and a sixth.
_TUMOUR_REFERENCE = {
    "radius": ((12, 4), (0.8, 0.5), (15, 5)),
    "texture": ((17, 5), (1.5, 0.8), (21, 6)),
    "perimeter": ((80, 20), (6.1, 4), (100, 30)),
    "area": ((730, 400), (140, 90), (1200, 700)),
    "smoothness": ((0.081, 0.02), (0.0092, 0.005), (0.11, 0.03)),
    "compactness": ((0.1, 0.05), (0.035, 0.02), (0.28, 0.2)),
    "concavity": ((0.11, 0.07), (0.099, 0.07), (0.31, 0.2)),
    "concave points": ((0.05, 0.03), (0.013, 0.009), (0.073, 0.05)),
    "symmetry": ((0.16, 0.03), (0.026, 0.01), (0.28, 0.08)),
    "fractal dimension": ((0.062, 0.008), (0.0083, 0.005), (0.093, 0.03)),
}


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
    source = unpinned(source)
    try:
        pair = call_factory(factory, options, key=f"{key}.options")
    except JobError as error:
        # What a source calls, such as `tokenizer`, cannot know whose table it serves.
        if key == "data" or not (error.key or "").startswith("data.options."):
            raise
        full = f"{key}{str(error.key).removeprefix('data')}"
        raise JobError(error.reason, key=full, outside=error.outside) from error
    if is_trainer(pair):
        pair = loaders_of(pair, name=source)
    if not isinstance(pair, (tuple, list)) or len(pair) != _PAIR:
        raise SiteError(
            f"{source} returned {describe(pair)}: expected a tuple (train, held_out)"
        )
    train, held_out = pair
    return (
        as_dataset(train, name=f"train of {source}"),
        as_dataset(held_out, name=f"held_out of {source}"),
    )


@preprocessing("public")
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
    pixels, classes = _bundled("digits.csv.gz")
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    train, held_out = _stratified_split(classes, held_out_fraction, seed=seed)
    return (
        Examples(inputs=images[train], targets=classes[train]),
        Examples(inputs=images[held_out], targets=classes[held_out]),
    )


@preprocessing("public")
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
        Training and held-out examples: inputs ``(n, 30)``, float32, less a
        reference value and divided by another; neither depends on a record.
    """
    values, classes = _bundled("breast_cancer.csv", skip_rows=1)
    train, held_out = _stratified_split(classes, held_out_fraction, seed=seed)
    # First all means over cells, then all standard errors, then all largest.
    reference = np.array(list(_TUMOUR_REFERENCE.values())).swapaxes(0, 1)
    centre, spread = reference.reshape(-1, 2).T
    standard = ((values - centre) / spread).astype(np.float32)
    return (
        Examples(inputs=standard[train], targets=classes[train]),
        Examples(inputs=standard[held_out], targets=classes[held_out]),
    )


def _bundled(name: str, skip_rows: int = 0) -> tuple[NDArray[np.float64], Indices]:
    """Read the measurements and classes of a data set that scikit-learn ships."""
    # Read and not imported: scikit-learn and SciPy take a second to start.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise SiteError(f"{name} needs scikit-learn: pip install scikit-learn")
    path = Path(package.origin).with_name("datasets") / "data" / name
    rows = np.loadtxt(path, delimiter=",", skiprows=skip_rows)
    return rows[:, :-1], rows[:, -1].astype(np.int64)


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


@preprocessing("none")
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
    file is on both sides. Windows lie inside a group and share the one byte
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
        at = Path(folder)
        inside = "" if at == root else f"{at.relative_to(root).as_posix()}/"
        for name in names:
            if fnmatchcase(name, pattern) and not name.startswith("."):
                sizes[inside + name] = (at / name).stat().st_size
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
    """Entropy of single tokens without context, in nats per token.

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

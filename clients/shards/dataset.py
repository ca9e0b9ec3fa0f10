"""A dataset in an object store, with the interface of other datasets."""

import dataclasses
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.data.batches import ALONE, Rank
from clients.data.datasets import Batch, Indices
from clients.shards.index import INDEX_KEY, DatasetIndex, Split, read_index
from clients.shards.order import shard_order
from clients.shards.shard_cache import MEMORY_BYTES, PATIENCE, THREADS, ShardCache
from clients.shards.tar_shard import classes_of
from cloud_adapters.storage.cached import ObjectCache
from cloud_adapters.storage.retry import Retry
from federation.errors import CorruptObject
from federation.protocols import ObjectStore

WINDOW = 8
ORDERS = ("examples", "shards")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a dataset is read.

    Attributes:
        version: The one that is wanted; any if empty.
        order: Order of an epoch: ``examples`` as data in memory is read, or ``shards``,
            which reads each shard once (``clients.shards.order``).
        window: Shards whose examples are shuffled together in the order ``shards``.
        memory_bytes: Of the shards that are open.
        threads: Shards that are fetched in advance at the same time; 0 for none.
    """

    version: str = ""
    order: str = "examples"
    window: int = WINDOW
    memory_bytes: int = MEMORY_BYTES
    threads: int = THREADS

    def __post_init__(self) -> None:
        """Check the values."""
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}: use {' or '.join(ORDERS)}")
        if self.window < 1:
            raise ValueError(f"window is {self.window}: use at least 1")


_AS_IN_MEMORY = ReadOptions()


def open_dataset(
    store: ObjectStore,
    *,
    cache: ObjectCache | None = None,
    reading: ReadOptions = _AS_IN_MEMORY,
    retry: Retry = PATIENCE,
) -> tuple["ShardedDataset", "ShardedDataset"]:
    """Open a dataset: its index and labels are read, and no example.

    Args:
        store: Where ``crossfed data shard`` wrote it.
        cache: Where shards are kept on disk; None for nowhere.
        reading: How it is read.
        retry: How long an outage may last once the index is read.

    Returns:
        The training and the held-out part.

    Raises:
        SiteError: There is no dataset, or one of another version.
        CorruptObject: Its index or its labels are damaged.
        StoreUnavailable: The store is unreachable.
    """
    index = read_index(store, version=reading.version)
    opened = ShardCache(
        store,
        index,
        cache=cache,
        window=reading.window,
        memory_bytes=reading.memory_bytes,
        threads=reading.threads,
        retry=retry,
    )
    return (
        _open_split(store, index, index.train, opened, reading),
        _open_split(store, index, index.held_out, opened, reading),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedDataset:
    """A ``clients.data.datasets.Dataset`` and ``ReadsAhead`` over shards.

    Attributes:
        index: What the whole dataset consists of.
        split: The part that these are examples of.
        cache: Where its shards are opened.
        reading: How it is read.
        chosen: Shape ``(n,)``: places in the split of the examples that are in view.
        starts: Place of the first example of each shard.
        classes: Class of each example of the split.
        all_groups: Group of each example of the split.
        all_persons: Number of the person of each example of the split.
    """

    index: DatasetIndex
    split: Split
    cache: ShardCache
    reading: ReadOptions
    chosen: Indices
    starts: Indices
    classes: Indices | None
    all_groups: Indices | None
    all_persons: Indices | None

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.chosen)

    def batch(self, indices: Indices) -> Batch:
        """Inputs and targets of some examples; see ``Dataset.batch``.

        Raises:
            CorruptObject: A shard is damaged or gone.
            StoreUnavailable: The store is unreachable.
        """
        places = self.chosen[indices]
        inputs = self._empty("inputs", len(places))
        targets = (
            self._empty("targets", len(places))
            if self.split.targets == "array"
            else None
        )
        shards = self._shard_of(places)
        for number in np.unique(shards).tolist():
            rows = self.cache.rows(self.split, number)
            here = np.flatnonzero(shards == number)
            local = places[here] - self.starts[number]
            inputs[here] = rows.inputs[local]
            if targets is not None and rows.targets is not None:
                targets[here] = rows.targets[local]
        if self.split.targets == "class" and self.classes is not None:
            targets = self.classes[places]
        return (
            torch.from_numpy(inputs),
            None if targets is None else torch.from_numpy(targets),
        )

    def labels(self) -> Indices | None:
        """Class of each example."""
        return None if self.classes is None else self.classes[self.chosen]

    @property
    def groups(self) -> Indices | None:
        """Group of each example."""
        return None if self.all_groups is None else self.all_groups[self.chosen]

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of all groups."""
        return self.split.group_names

    @property
    def persons(self) -> Indices | None:
        """Whose record each example is: a number, alike in both parts."""
        return None if self.all_persons is None else self.all_persons[self.chosen]

    def subset(self, indices: Indices) -> "ShardedDataset":
        """View some of the examples."""
        return dataclasses.replace(self, chosen=self.chosen[indices])

    def apart(self) -> "ShardedDataset":
        """Return it: examples in shards are read one by one."""
        return self

    @property
    def examples_ahead(self) -> int:
        """As many as a window of shards holds."""
        window = self.reading.window * max(s.examples for s in self.split.shards)
        return min(window, len(self.chosen))

    def epoch_order(
        self, rng: np.random.Generator, rank: Rank = ALONE
    ) -> Indices | None:
        """A rank's share of an epoch in the order of shards, if this is read so."""
        if self.reading.order == "examples":
            return None
        return shard_order(
            self._shard_of(self.chosen), rng, window=self.reading.window, rank=rank
        )

    def expect(self, indices: Indices) -> None:
        """Begin to fetch the shards of some examples, in the order of their need."""
        numbers = self._shard_of(self.chosen[indices])
        _, first = np.unique(numbers, return_index=True)
        self.cache.expect(self.split, numbers[np.sort(first)].tolist())

    def warm_up(self) -> None:
        """Fetch every shard with these examples into the cache.

        Raises:
            CorruptObject: A shard is damaged or gone.
            StoreUnavailable: The store or the cache is unreachable.
        """
        for number in np.unique(self._shard_of(self.chosen)).tolist():
            self.cache.content(self.split.shards[number])

    def _shard_of(self, places: Indices) -> Indices:
        return np.searchsorted(self.starts, places, side="right") - 1

    def _empty(self, part: str, size: int) -> NDArray[Any]:
        first = self.split.shards[0]
        if part == "inputs":
            name, shape = first.input_type, self.split.input_shape
        else:
            name, shape = first.target_type, self.split.target_shape
        dtype = np.float32 if np.dtype(name).kind == "f" else np.int64
        return np.empty((size, *shape), dtype)


def _open_split(
    store: ObjectStore,
    index: DatasetIndex,
    split: Split,
    cache: ShardCache,
    reading: ReadOptions,
) -> ShardedDataset:
    labels = _labels(store, split, cache)
    sizes = [shard.examples for shard in split.shards]
    return ShardedDataset(
        index=index,
        split=split,
        cache=cache,
        reading=reading,
        chosen=np.arange(split.examples),
        starts=np.cumsum([0, *sizes[:-1]]),
        classes=labels.get("class"),
        all_groups=labels.get("group"),
        all_persons=labels.get("person"),
    )


def _labels(store: ObjectStore, split: Split, cache: ShardCache) -> dict[str, Indices]:
    about = split.labels
    if about is None:
        return {}
    content = io.BytesIO(cache.content(about))
    try:
        table = np.load(content, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise CorruptObject(
            f"{about.key!r} in {store.url} is not an array: write the dataset again "
            "with `crossfed data shard --replace`"
        ) from error
    if table.shape != (split.examples, len(about.columns)) or table.dtype != np.int64:
        raise CorruptObject(
            f"{about.key!r} in {store.url} disagrees with {INDEX_KEY}: it has "
            f"{table.dtype}{list(table.shape)}; write the dataset again with "
            "`crossfed data shard --replace`"
        )
    return {name: table[:, i].copy() for i, name in enumerate(about.columns)}


def verify_dataset(store: ObjectStore, *parts: ShardedDataset) -> None:
    """Read every shard, and check digests, layout and classes.

    Args:
        store: Where the dataset is.
        parts: Its training and held-out part.

    Raises:
        CorruptObject: Something is damaged or gone, or contradicts the index.
        StoreUnavailable: The store is unreachable.
    """
    for part in parts:
        first = 0
        for number, shard in enumerate(part.split.shards):
            classes = part.classes
            part.cache.rows(part.split, number)
            if classes is not None:
                here = classes[first : first + shard.examples]
                _check_counts(store, part.split, number, here)
                if part.index.encoding == "tar":
                    inner = classes_of(part.cache.content(shard))
                    _check(np.array_equal(inner, here), store, shard.key, "its classes")
            first += shard.examples


def _check_counts(
    store: ObjectStore, split: Split, number: int, classes: Indices
) -> None:
    shard = split.shards[number]
    labels, counts = np.unique(classes, return_counts=True)
    found = dict(zip(map(str, labels.tolist()), counts.tolist(), strict=True))
    _check(found == dict(shard.classes), store, shard.key, "its counts of classes")


def _check(good: bool, store: ObjectStore, key: str, what: str) -> None:  # noqa: FBT001
    if not good:
        raise CorruptObject(
            f"{key!r} in {store.url} disagrees with {INDEX_KEY} or the labels: {what} "
            "are others; write the dataset again with `crossfed data shard --replace`"
        )

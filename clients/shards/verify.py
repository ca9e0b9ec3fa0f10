"""Read a whole dataset, and compare it with its index."""

import numpy as np

from clients.data.datasets import Indices
from clients.shards.dataset import ShardedDataset
from clients.shards.index import INDEX_KEY, Split
from clients.shards.tar_shard import classes_of
from federation.errors import CorruptObject
from federation.protocols import ObjectStore


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
            part.shelf.rows(part.split, number)
            if classes is not None:
                here = classes[first : first + shard.examples]
                _check_counts(store, part.split, number, here)
                if part.index.encoding == "tar":
                    inner = classes_of(part.shelf.content(shard))
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

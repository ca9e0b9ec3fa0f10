"""Replacing a dataset in an object store by another version."""

from typing import Any

import numpy as np
import pytest
import torch

from clients.data.datasets import Dataset, Examples, as_dataset
from clients.shards.dataset import open_dataset
from clients.shards.index import INDEX_KEY, DatasetIndex
from clients.shards.write import write_dataset
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import ObjectChanged, ObjectExists, SiteError


def points(size: int = 50) -> Dataset:
    rng = np.random.default_rng(size)
    inputs = rng.normal(size=(size, 2)).astype(np.float32)
    targets = rng.integers(0, 4, size)
    return as_dataset(Examples(inputs=inputs, targets=targets), name="points")


def write(store: MemoryStore, data: Dataset, **options: Any) -> DatasetIndex:
    held_out = data.subset(np.arange(8))
    return write_dataset(
        store, data, held_out, name="test", shard_bytes=20_000, **options
    )


def assert_same(found: Dataset, expected: Dataset) -> None:
    every = np.arange(len(expected))
    assert len(found) == len(expected)
    for ours, theirs in zip(found.batch(every), expected.batch(every), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def test_another_version_is_refused_unless_it_may_be_replaced():
    """Then its shards are gone, and whoever reads them is told why."""
    store = MemoryStore()
    before = write(store, points())
    old, _ = open_dataset(store)
    old.batch(np.array([0]))
    with pytest.raises(ObjectExists, match=r"memory://.*--replace"):
        write(store, points(51))
    assert len(open_dataset(store)[0]) == 50
    assert before.keys <= {info.key for info in store.list()}
    now = write(store, points(51), replace=True)
    assert_same(open_dataset(store)[0], points(51))
    assert {info.key for info in store.list()} == now.keys | {INDEX_KEY}
    old.batch(np.array([0]))  # It is open.
    gone = next(
        sum(shard.examples for shard in before.train.shards[:i])
        for i, shard in enumerate(before.train.shards)
        if i and shard.key not in now.keys
    )
    with pytest.raises(
        SiteError, match=rf"was replaced.*{now.version}.*{before.version}"
    ):
        old.batch(np.array([gone]))


def test_a_replacement_that_was_killed_is_made_again():
    """What is left of other versions goes; what is not ours stays."""
    store = MemoryStore()
    before = write(store, points())
    left = {key: store.read(key) for key in before.keys}
    now = write(store, points(51), replace=True)
    ours = {INDEX_KEY, *now.keys}
    for key, content in left.items():
        store.put(key, [content])
    theirs = {"train/readme.txt", "train/000001-0.tar", "notes.tar"}
    for key in theirs:
        store.put(key, [b"x"])
    write(store, points(51))
    assert before.keys <= {info.key for info in store.list()}
    write(store, points(51), replace=True)
    assert {info.key for info in store.list()} == ours | theirs


def test_two_who_replace_at_once(monkeypatch: pytest.MonkeyPatch):
    """Who sees another's index deletes nothing."""
    store = MemoryStore()
    write(store, points())
    put = store.put

    def put_and_be_overtaken(key: str, data: Any, **options: Any) -> Any:
        info = put(key, data, **options)
        if key == INDEX_KEY:
            monkeypatch.setattr(store, "put", put)
            write(store, points(52), replace=True)
        return info

    monkeypatch.setattr(store, "put", put_and_be_overtaken)
    with pytest.raises(ObjectChanged, match="has just replaced"):
        write(store, points(51), replace=True)
    assert_same(open_dataset(store)[0], points(52))

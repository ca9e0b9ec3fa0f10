"""Datasets in object storage: what is written, read back, refused."""

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from support.small_jobs import blobs

from clients.data.datasets import Dataset, Examples, as_dataset
from clients.shards.dataset import (
    ReadOptions,
    ShardedDataset,
    open_dataset,
    verify_dataset,
)
from clients.shards.index import INDEX_KEY, DatasetIndex, read_index
from clients.shards.write import Progress, write_dataset
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import CorruptObject, SiteError

ENCODINGS = ("tar", "parquet")


def images(size: int = 50) -> Examples:
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(size, 2, 3)).astype(np.float32)
    return Examples(inputs=inputs, targets=rng.integers(-2, 4, size))


def tokens(size: int = 40) -> Examples:
    rng = np.random.default_rng(6)
    groups = np.arange(size) % 3
    inputs = rng.integers(0, 256, (size, 9))
    persons = np.array(["x", "y"])[np.arange(size) % 2]
    names = ("a", "b", "c")
    return Examples(inputs=inputs, groups=groups, group_names=names, persons=persons)


def regression(size: int = 30) -> Examples:
    rng = np.random.default_rng(7)
    inputs, targets = rng.normal(size=(size, 4)), rng.normal(size=(size, 2))
    return Examples(inputs=inputs.astype(np.float32), targets=targets)


def masks(size: int = 30) -> Examples:
    rng = np.random.default_rng(8)
    inputs = rng.normal(size=(size, 4)).astype(np.float32)
    return Examples(inputs=inputs, targets=rng.integers(-1, 300, (size, 4)))


def photos(size: int = 30) -> Examples:
    """Integers of two bytes, and a class of two."""
    rng = np.random.default_rng(9)
    inputs = rng.integers(0, 300, (size, 3, 20, 20))
    return Examples(inputs=inputs, targets=rng.integers(0, 2, size).astype(bool))


SOURCES = (images, tokens, regression, masks, photos)


def memory(examples: Examples) -> Dataset:
    return as_dataset(examples, name="test data")


def write(store: MemoryStore, examples: Examples, **options: Any) -> DatasetIndex:
    data = memory(examples)
    options = {"name": "test", "shard_bytes": 9000} | options
    return write_dataset(store, data, data.subset(np.arange(8)), **options)


def assert_same(found: Dataset, expected: Dataset) -> None:
    rng = np.random.default_rng(0)
    assert len(found) == len(expected)
    for indices in (np.arange(len(expected)), rng.integers(0, len(expected), 17)):
        pairs = zip(found.batch(indices), expected.batch(indices), strict=True)
        for ours, theirs in pairs:
            if theirs is None:
                assert ours is None
            else:
                assert ours is not None
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)
    for ours_n, theirs_n in (
        (found.labels(), expected.labels()),
        (found.groups, expected.groups),
    ):
        np.testing.assert_array_equal(ours_n, theirs_n)
    assert found.group_names == expected.group_names
    if expected.persons is None:
        assert found.persons is None
    else:
        assert found.persons is not None
        assert (found.persons == (expected.persons == "y")).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_read_is_what_was_written(source: Any, encoding: str):
    """Examples, labels and groups, whole and in views, are those of the source."""
    store, examples = MemoryStore(), source()
    index = write(store, examples, encoding=encoding, shard_bytes=400)
    assert len(index.train.shards) > 1
    train, held_out = open_dataset(store)
    whole = memory(examples)
    assert_same(train, whole)
    assert_same(held_out, whole.subset(np.arange(8)))
    chosen = np.array([5, 29, 3, 3, 17, 20, 1])
    assert_same(train.subset(chosen), whole.subset(chosen))
    verify_dataset(store, train, held_out)


def test_stock_tools_read_parquet_shards():
    """A table with a list of inputs and a class in each row."""
    store, examples = MemoryStore(), images()
    index = write(store, examples, encoding="parquet", shard_bytes=10**6)
    (shard,) = index.train.shards
    table = parquet.read_table(io.BytesIO(store.read(shard.key)))
    assert examples.targets is not None
    assert table["class"].to_pylist() == examples.targets.tolist()
    assert table["x"].to_pylist()[7] == examples.inputs[7].reshape(-1).tolist()


def test_writing_again_sends_nothing_and_changes_nothing():
    """The bytes follow from the examples alone."""
    store = MemoryStore()
    index = write(store, images())
    before = {info.key: info.version for info in store.list()}
    seen: list[Progress] = []
    again = write(store, images(), report=seen.append)
    assert again == index
    assert {info.key: info.version for info in store.list()} == before
    assert seen[-1].sent_bytes == 0
    assert seen[-1].examples == seen[-1].of_examples == 58


def test_what_is_missing_or_cut_short_is_sent_again():
    """A writer that was killed is simply called again."""
    store = MemoryStore()
    index = write(store, images())
    shards = index.train.shards
    store.delete(INDEX_KEY)
    store.delete(shards[0].key)
    store.put(shards[1].key, [store.read(shards[1].key)[:-1]])
    seen: list[Progress] = []
    assert write(store, images(), report=seen.append) == index
    assert seen[-1].sent_bytes == shards[0].bytes + shards[1].bytes
    assert_same(open_dataset(store)[0], memory(images()))


def test_a_pinned_version():
    """A job may name the version that it was made for."""
    store = MemoryStore()
    version = write(store, images()).version
    open_dataset(store, reading=ReadOptions(version=version))
    with pytest.raises(SiteError, match=rf"{version}.* wants 0123"):
        open_dataset(store, reading=ReadOptions(version="0123"))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_truncated_shard(encoding: str):
    """It is named with its store and both sizes."""
    store = MemoryStore()
    index = write(store, images(), encoding=encoding)
    shard = index.train.shards[0]
    store.put(shard.key, [store.read(shard.key)[:-512]])
    train, _ = open_dataset(store)
    for _ in range(2):  # The failure is not remembered for the data.
        with pytest.raises(CorruptObject, match=rf"{shard.key}.*memory://.*cut short"):
            train.batch(np.arange(2))


def test_a_shard_of_another_version():
    """Right size, other content."""
    store = MemoryStore()
    index = write(store, images())
    shard = index.train.shards[0]
    content = bytearray(store.read(shard.key))
    content[1000] ^= 1
    store.put(shard.key, [bytes(content)])
    train, _ = open_dataset(store)
    with pytest.raises(CorruptObject, match="version of the dataset"):
        train.batch(np.array([0]))


def rewritten(store: MemoryStore, **changes: Any) -> None:
    """Change the first training shard's entry, and make the index agree with itself."""
    document = json.loads(store.read(INDEX_KEY))
    document["splits"]["train"]["shards"][0] |= changes
    store.put(INDEX_KEY, [json.dumps(document).encode()])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not the index of a dataset"),
        (b"[]", "not the index of a dataset"),
        (b'{"format": "x", "format_version": 1}', "of format 'x' 1"),
        (b'{"format": "crossfed-shards", "format_version": 2}', "of format"),
        (b'{"format": "crossfed-shards", "format_version": 1}', "KeyError"),
    ],
)
def test_other_indices_are_refused(content: bytes, reason: str):
    """Each with the URL."""
    store = MemoryStore()
    store.put(INDEX_KEY, [content])
    with pytest.raises(CorruptObject, match=rf"index.json in memory://.*{reason}"):
        read_index(store)


def test_an_index_that_was_edited():
    """Its version tells."""
    store = MemoryStore()
    write(store, images())
    rewritten(store, bytes=7)
    with pytest.raises(CorruptObject, match="not match its content"):
        read_index(store)


def test_an_index_that_disagrees_with_its_shards(monkeypatch: pytest.MonkeyPatch):
    """Even if its version is right: the layout of each shard is looked at."""
    store = MemoryStore()
    write(store, images())
    rewritten(store, input_type="<f8")
    monkeypatch.setattr(
        DatasetIndex, "version", json.loads(store.read(INDEX_KEY))["version"]
    )
    train, _ = open_dataset(store)
    with pytest.raises(CorruptObject, match=r"disagrees with index\.json"):
        train.batch(np.array([0]))


def test_classes_that_disagree_are_found_by_verify(monkeypatch: pytest.MonkeyPatch):
    """The counts of the index are those of the labels."""
    store = MemoryStore()
    write(store, images())
    rewritten(store, classes={"0": 1})
    monkeypatch.setattr(
        DatasetIndex, "version", json.loads(store.read(INDEX_KEY))["version"]
    )
    with pytest.raises(CorruptObject, match="counts of classes"):
        verify_dataset(store, *open_dataset(store))


def test_examples_of_several_shapes_are_refused():
    """A shard is one array."""

    class Ragged:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> tuple[np.ndarray[Any, Any], int]:
            return np.zeros(3 if i < 4 else 4), 0

    train = as_dataset(Ragged(), name="ragged")
    held_out = as_dataset(blobs()[1], name="blobs")
    # Shards of four, after a look at the first examples alone.
    with pytest.raises((SiteError, RuntimeError)):
        write_dataset(MemoryStore(), train, held_out, name="x", shard_bytes=8192)


def shards_read(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that are read from now on."""
    keys: list[str] = []
    read = store.read
    monkeypatch.setattr(
        store,
        "read",
        lambda key, **options: (keys.append(key), read(key, **options))[1],
    )
    return keys


def test_a_shard_that_stays_open_is_read_once(monkeypatch: pytest.MonkeyPatch):
    """As long as there is room."""
    store = MemoryStore()
    index = write(store, images())
    keys = shards_read(store, monkeypatch)
    train, _ = open_dataset(store)
    for _ in range(3):
        train.batch(np.arange(50))
    assert sorted(k for k in keys if k.endswith(".tar")) == sorted(
        shard.key for shard in index.train.shards
    )


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """With room for two windows, older shards are let go and read again."""
    store = MemoryStore()
    index = write(store, images(200), shard_bytes=10 * 2048)
    keys = shards_read(store, monkeypatch)
    train, _ = open_dataset(store, reading=ReadOptions(window=1, memory_bytes=0))
    for _ in range(2):
        for start in range(0, 200, 10):
            train.batch(np.arange(start, start + 10))
    read = [k for k in keys if k.endswith(".tar")]
    assert len(read) == 2 * len(index.train.shards)


def test_expected_shards_are_fetched_before_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    """And each of them once."""
    store = MemoryStore()
    index = write(store, images())
    keys = shards_read(store, monkeypatch)
    train, _ = open_dataset(store)
    assert isinstance(train, ShardedDataset)
    train.expect(np.arange(50))
    train.batch(np.arange(50))
    assert sorted(k for k in keys if k.endswith(".tar")) == sorted(
        shard.key for shard in index.train.shards
    )


def test_persons_are_numbered_alike_in_both_parts():
    """So a person who is in both is found, by a number in place of the name."""
    inputs = np.ones((2, 1), np.float32)
    parts = (
        memory(Examples(inputs=inputs, persons=np.array(["bob", "ann"]))),
        memory(Examples(inputs=inputs, persons=np.array(["cy", "bob"]))),
    )
    store = MemoryStore()
    write_dataset(store, *parts, name="test")
    train, held_out = open_dataset(store)
    assert train.persons is not None
    assert held_out.persons is not None
    assert train.persons[0] == held_out.persons[1]
    assert len({*train.persons.tolist(), *held_out.persons.tolist()}) == 3
    stored = b"".join(store.read(info.key) for info in store.list())
    assert not [name for name in (b"ann", b"bob") if name in stored]

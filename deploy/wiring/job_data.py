"""Data of a job: from a function, or from shards in an object store."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clients import data
from clients.data.datasets import Dataset
from clients.privacy import source_check
from clients.shards import write
from clients.shards.dataset import ReadOptions, open_dataset, verify_dataset
from clients.shards.index import INDEX_KEY, DatasetIndex, Split
from cloud_adapters.storage.cached import ObjectCache
from cloud_adapters.storage.encrypted_format import MAGIC
from cloud_adapters.urls import StoreOptions, open_store, parse_url
from deploy.wiring.encryption import DATASET, NO_KEY, KeyName, encrypted_with
from deploy.wiring.store_meters import Watch
from federation.errors import JobError, ObjectExists, ObjectNotFound
from federation.protocols import ObjectStore

CACHE_DIR, CACHE_GIB = "CROSSFED_CACHE_DIR", "CROSSFED_CACHE_GIB"
DEFAULT_GIB = 10.0

_GIB = 1024**3
_OPTIONS: Mapping[str, type] = {
    "version": str,
    "order": str,
    "window": int,
    "warm_up": bool,
    "endpoint": str,
    "region": str,
    "bucket_owner": str,
    "encryption_key": str,
    "encryption_endpoint": str,
}
_OF_READING = ("version", "order", "window")
_ITSELF = StoreOptions()


def load_data(
    source: str,
    options: Mapping[str, Any],
    *,
    key: str = "data",
    watch: Watch | None = None,
) -> tuple[Dataset, Dataset]:
    """Load a data source: a function, or the URL of a dataset in shards.

    Args:
        source: ``module:function``; or a URL that ``crossfed data shard`` wrote to.
        options: Keyword arguments of the function; or, of a URL, ``version``,
            ``order``, ``window``, ``warm_up``, ``endpoint``, ``region``,
            ``bucket_owner``, ``encryption_key`` and ``encryption_endpoint``.
        key: Table of the job file that holds ``source`` and ``options``.
        watch: Notes what a store is used for.

    Returns:
        The training and the held-out dataset.

    Raises:
        JobError: There is no such function or store, or it has no such option.
        SiteError: The function failed, or there is no dataset.
        KeyRefused: The dataset is encrypted, and the key is not its own.
        StoreError: The dataset is damaged, or its store unreachable.
    """
    if "://" not in source:
        return data.load(source, options, key=key)
    reading = _reading(options, f"{key}.options")
    service = StoreOptions(
        endpoint=options.get("endpoint", ""),
        region=options.get("region", ""),
        bucket_owner=options.get("bucket_owner", ""),
    )
    lock = KeyName(
        name=options.get("encryption_key", ""),
        endpoint=options.get("encryption_endpoint", ""),
        argument=f"{key}.options.encryption_key",
    )
    store, cache = _store(source, f"{key}.source", service), _cache(source)
    if watch is not None:
        store = watch(store, service.region, cache)
    store = encrypted_with(lock, store, place=DATASET)
    pair = open_dataset(store, cache=cache, reading=reading)
    if options.get("warm_up"):
        for part in pair:
            part.warm_up()
    return pair


def shard(
    source: str,
    url: str,
    options: Mapping[str, Any],
    *,
    name: str,
    report: Callable[[write.Progress], None],
    service: StoreOptions = _ITSELF,
    encryption: KeyName = NO_KEY,
    encoding: str = "tar",
    shard_bytes: int = write.SHARD_BYTES,
    workers: int = 4,
    replace: bool = False,
) -> dict[str, Any]:
    """Write a data source as shards, and return the facts of the dataset.

    Args:
        source: ``module:function``, or the URL of another dataset.
        url: Where to.
        options: Options of the source.
        name: What the dataset is called.
        report: Is told of progress.
        service: Where the store of ``url`` is, if that is not what the URL says.
        encryption: Key that encrypts the dataset; none for one in clear.
        encoding: ``tar`` or ``parquet``.
        shard_bytes: Size of a shard, about.
        workers: Shards that are made at the same time.
        replace: Whether another version may be replaced.

    Raises:
        JobError: Source or URL are not of the permitted form.
        KeyRefused: The key cannot be used, or the dataset there has another.
        StoreError: The store is unreachable, or holds another version.
    """
    if shard_bytes < 1 or workers < 1:
        raise JobError("give --shard-size and --workers at least 1")
    store = _store(url, "URL", service)
    try:
        if not encryption:
            _check_in_clear(store)
        store = encrypted_with(encryption, store, place=DATASET)
        train, held_out = load_data(source, options, key="SOURCE")
        index = write.write_dataset(
            store,
            train,
            held_out,
            name=name,
            encoding=encoding,
            shard_bytes=shard_bytes,
            workers=workers,
            replace=replace,
            preprocessing=source_check.declared(source, train, key="SOURCE"),
            report=report,
        )
    finally:
        store.close()
    return facts(index, url) | {"encrypted": bool(encryption)}


def info(
    url: str,
    *,
    service: StoreOptions = _ITSELF,
    encryption: KeyName = NO_KEY,
    verify: bool = False,
) -> dict[str, Any]:
    """Return the facts of a stored dataset: see ``facts``.

    Args:
        url: Where ``crossfed data shard`` wrote to.
        service: Where its store is, if that is not what the URL says.
        encryption: Key of an encrypted dataset.
        verify: Read everything and compare it with the index.

    Raises:
        JobError: The URL is not of the permitted form.
        SiteError: There is no dataset.
        KeyRefused: The dataset is encrypted, and the key is not its own.
        StoreError: The dataset is damaged, or its store unreachable.
    """
    store = _store(url, "URL", service)
    try:
        store = encrypted_with(encryption, store, place=DATASET)
        train, held_out = open_dataset(store, reading=ReadOptions(threads=0))
        if verify:
            verify_dataset(store, train, held_out)
        found = facts(train.index, url)
    finally:
        store.close()
    return found | {"encrypted": bool(encryption), "verified": verify}


def _check_in_clear(store: ObjectStore) -> None:
    """Refuse to write an unencrypted dataset over an encrypted one.

    Shards are named after what they hold, so that those of both have one name.
    """
    with contextlib.suppress(ObjectNotFound):
        if store.read(INDEX_KEY, start=0, length=len(MAGIC)) == MAGIC:
            raise ObjectExists(
                f"{store.url} holds an encrypted dataset: name its key with "
                "--encryption-key, or choose another URL for an unencrypted dataset"
            )


def facts(index: DatasetIndex, url: str) -> dict[str, Any]:
    """Summarise an index: sizes, classes and how even the shards are."""
    return {
        "url": url,
        "dataset": index.dataset,
        "version": index.version,
        "encoding": index.encoding,
        "preprocessing": index.preprocessing,
        "train": _split_facts(index.train),
        "held_out": _split_facts(index.held_out),
    }


def _split_facts(split: Split) -> dict[str, Any]:
    classes: dict[str, int] = {}
    for part in split.shards:
        for label, count in part.classes.items():
            classes[label] = classes.get(label, 0) + count
    sizes = [part.examples for part in split.shards]
    return {
        "examples": split.examples,
        "bytes": sum(part.bytes for part in split.shards),
        "shards": len(split.shards),
        "smallest_shard": min(sizes),
        "largest_shard": max(sizes),
        "input_shape": list(split.input_shape),
        "input_type": split.shards[0].input_type,
        "targets": split.targets,
        "classes": dict(sorted(classes.items(), key=lambda item: int(item[0]))),
        "class_imbalance": _imbalance(split, classes),
        "groups": len(split.group_names),
    }


def _imbalance(split: Split, classes: Mapping[str, int]) -> float | None:
    """Largest total variation distance of a shard's class shares from all data's.

    0 where every shard has the same shares; near 1 where data was sorted by class.
    """
    if not classes:
        return None
    names = list(classes)
    shares_c = np.array([classes[name] for name in names]) / split.examples
    distances = (
        np.abs(
            np.array([part.classes.get(name, 0) for name in names]) / part.examples
            - shares_c
        ).sum()
        / 2
        for part in split.shards
    )
    return float(max(distances))


def _reading(options: Mapping[str, Any], key: str) -> ReadOptions:
    for name, value in options.items():
        if name not in _OPTIONS:
            raise JobError(
                f"there is no option {name!r} of a dataset in shards; its options are "
                f"{', '.join(_OPTIONS)}",
                key=key,
            )
        if type(value) is not _OPTIONS[name]:
            raise JobError(
                f"is {value!r}: expected {_OPTIONS[name].__name__}", key=f"{key}.{name}"
            )
    try:
        return ReadOptions(
            **{name: options[name] for name in _OF_READING if name in options}
        )
    except ValueError as error:
        raise JobError(str(error), key=key) from error


def _store(url: str, key: str, service: StoreOptions) -> ObjectStore:
    try:
        return open_store(url, options=service)
    except JobError as error:
        raise JobError(error.reason, key=key) from error


def _cache(url: str) -> ObjectCache | None:
    """Make the cache that this machine's environment configures for remote data."""
    if not parse_url(url).is_remote:
        return None
    text = os.environ.get(CACHE_GIB, "")
    try:
        gib = float(text) if text else DEFAULT_GIB
    except ValueError:
        gib = -1.0
    if not 0 <= gib < float("inf"):
        raise JobError(
            f"is {text!r}: give a number of GiB, or 0 for none", key=CACHE_GIB
        )
    if gib == 0:
        return None
    given = os.environ.get(CACHE_DIR)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(given) if given else Path(home) / "crossfed" / "objects"
    return ObjectCache(folder, int(gib * _GIB))

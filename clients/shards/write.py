"""Write a dataset as shards: in parallel, and without sending anything twice."""

import io
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from clients.data.datasets import Dataset, Indices
from clients.data.persons import numbered_alike
from clients.shards import parquet_shard, tar_shard
from clients.shards.index import (
    INDEX_KEY,
    SPLITS,
    DatasetIndex,
    Labels,
    Rows,
    Shard,
    Split,
    digest_of,
    narrow,
    read_index,
)
from cloud_adapters.storage.checksums import crc32c
from federation.errors import ObjectChanged, ObjectExists, ObjectNotFound, SiteError
from federation.protocols import ObjectStore

SHARD_BYTES = 32 * 1024 * 1024

_CODECS = {"tar": tar_shard, "parquet": parquet_shard}
_PROBE = 256
_OURS = re.compile(
    r"[a-z_]+/(\d{6,}-[0-9a-f]{16}\.(tar|parquet)|labels-[0-9a-f]{16}\.npy)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of writing a dataset.

    Attributes:
        examples: Examples that are in the store.
        of_examples: Examples of the dataset.
        sent_bytes: Bytes that were sent.
        kept_objects: Objects that were there already.
    """

    examples: int
    of_examples: int
    sent_bytes: int
    kept_objects: int


def write_dataset(
    store: ObjectStore,
    train: Dataset,
    held_out: Dataset,
    *,
    name: str,
    encoding: str = "tar",
    shard_bytes: int = SHARD_BYTES,
    workers: int = 4,
    replace: bool = False,
    preprocessing: str = "",
    report: Callable[[Progress], None] = lambda _: None,
) -> DatasetIndex:
    """Write a dataset; readers see the old one or the new one.

    1. Write the shards that are not there. They are named after their content, so a
       call that was killed is made again and continues.
    2. Write the index, which makes the dataset visible.
    3. If it may have replaced another version, delete what no index names any more.

    Args:
        store: Where to.
        train: Training examples, written in their order.
        held_out: Held-out examples.
        name: What the dataset is called.
        encoding: ``tar`` or ``parquet``.
        shard_bytes: Size of a shard, about.
        workers: Shards that are made and sent at the same time; as many are in
            memory.
        replace: Whether another version may be replaced. Its shards are deleted, and
            so are those that a writer left who never came to its index.
        preprocessing: What the source declares; empty for nothing.
        report: Is told after each shard, from this thread.

    Raises:
        ObjectExists: Another version is there, and ``replace`` is not given.
        ObjectChanged: Someone else has written an index in the meantime.
        SiteError: The examples are not all of one shape.
        StoreUnavailable: The store is unreachable, full or read-only.
        ValueError: An unknown encoding, or a number that is not positive.
    """
    if encoding not in _CODECS or shard_bytes < 1 or workers < 1:
        raise ValueError(
            f"encoding {encoding!r}, shards of {shard_bytes} bytes and {workers} "
            "workers are not possible"
        )
    before = _version_there(store)
    writer = _Writer(
        store=store,
        encoding=encoding,
        shard_bytes=shard_bytes,
        workers=workers,
        of_examples=len(train) + len(held_out),
        report=report,
        persons=_person_numbers({"train": train, "held_out": held_out}),
    )
    index = DatasetIndex(
        dataset=name,
        encoding=encoding,
        train=writer.split("train", train),  # 1.
        held_out=writer.split("held_out", held_out),
        preprocessing=preprocessing,
    )
    _publish(store, index, before, replace=replace)  # 2.
    if replace:
        _delete_others(store, index)  # 3.
    return index


def _person_numbers(parts: Mapping[str, Dataset]) -> Mapping[str, Indices]:
    """Number the persons of both parts alike; their names are not stored."""
    ids = {name: part.persons for name, part in parts.items()}
    known = {name: each for name, each in ids.items() if each is not None}
    if not known:
        return {}
    return dict(zip(known, numbered_alike(*known.values()), strict=True))


def _version_there(store: ObjectStore) -> str | None:
    try:
        return store.stat(INDEX_KEY).version
    except ObjectNotFound:
        return None


def _publish(
    store: ObjectStore, index: DatasetIndex, before: str | None, *, replace: bool
) -> None:
    raw = index.encode()
    if before is None:
        store.put(INDEX_KEY, [raw], if_absent=True)
        return
    try:
        if store.read(INDEX_KEY, if_version=before) == raw:
            return  # Also if a call that replaced was killed before it had deleted all.
    except ObjectNotFound as error:
        raise ObjectChanged(
            f"{INDEX_KEY} in {store.url} was deleted in the meantime: run this again"
        ) from error
    if not replace:
        raise ObjectExists(
            f"{store.url} holds another dataset or another version of this one: use "
            "another URL, or --replace (jobs that are reading the old one will stop)"
        )
    store.put(INDEX_KEY, [raw], if_version=before)


def _delete_others(store: ObjectStore, index: DatasetIndex) -> None:
    """Delete only shards and labels that the index does not list."""
    if read_index(store).version != index.version:
        raise ObjectChanged(
            f"someone else has just replaced the dataset in {store.url}: check it with "
            "`crossfed data info`, and run this again"
        )
    named = index.keys
    for name in SPLITS:
        others = [
            info.key
            for info in store.list(f"{name}/")
            if _OURS.fullmatch(info.key) and info.key not in named
        ]
        for key in others:
            store.delete(key)


@dataclass(slots=True, kw_only=True)
class _Writer:
    """Writes the shards of a dataset and counts."""

    store: ObjectStore
    encoding: str
    shard_bytes: int
    workers: int
    of_examples: int
    report: Callable[[Progress], None]
    persons: Mapping[str, Indices]
    examples: int = 0
    sent: int = 0
    kept: int = 0
    counting: threading.Lock = field(default_factory=threading.Lock)

    def split(self, name: str, dataset: Dataset) -> Split:
        """Write one part of the dataset."""
        probe = _rows(dataset, np.arange(min(_PROBE, len(dataset))))
        per_shard = max(
            1, self.shard_bytes // _CODECS[self.encoding].example_bytes(probe)
        )
        classes: list[Indices] = []
        shards = tuple(self._shards(name, dataset, probe, per_shard, classes))
        targets = "class" if probe.classes is not None else "array"
        if probe.classes is None and probe.targets is None:
            targets = "none"
        labels = self._labels(name, dataset, classes)
        return Split(
            examples=len(dataset),
            input_shape=probe.inputs.shape[1:],
            targets=targets,
            target_shape=() if probe.targets is None else probe.targets.shape[1:],
            group_names=dataset.group_names,
            labels=labels,
            shards=shards,
        )

    def _shards(
        self,
        name: str,
        dataset: Dataset,
        probe: Rows,
        per_shard: int,
        classes: list[Indices],
    ) -> Iterator[Shard]:
        """Yield the shards in order, a few ahead in threads; append their classes."""
        waiting: deque[Future[Shard]] = deque()
        with ThreadPoolExecutor(self.workers, "shards") as pool:
            try:
                for number, first in enumerate(range(0, len(dataset), per_shard)):
                    chosen = np.arange(first, min(first + per_shard, len(dataset)))
                    # Here and not in the pool: a user's dataset is of one thread.
                    rows = _rows(dataset, chosen)
                    _check_alike(rows, probe, name)
                    if rows.classes is not None:
                        classes.append(rows.classes)
                    waiting.append(pool.submit(self._shard, name, number, first, rows))
                    if len(waiting) >= self.workers:
                        yield self._done(waiting.popleft())
                while waiting:
                    yield self._done(waiting.popleft())
            finally:
                for future in waiting:
                    future.cancel()

    def _shard(self, name: str, number: int, first: int, rows: Rows) -> Shard:
        classes = rows.classes
        rows = Rows(
            inputs=narrow(rows.inputs),
            targets=None if rows.targets is None else narrow(rows.targets),
            classes=classes,
            groups=rows.groups,
        )
        content = _CODECS[self.encoding].encode(rows, first=first)
        digest = digest_of(content)
        key = f"{name}/{number:06d}-{digest[:16]}.{self.encoding}"
        self._send(key, content)
        counts = Counter(() if classes is None else classes.tolist())
        return Shard(
            key=key,
            examples=len(rows.inputs),
            bytes=len(content),
            sha256=digest,
            input_type=rows.inputs.dtype.str,
            target_type="" if rows.targets is None else rows.targets.dtype.str,
            classes={str(label): counts[label] for label in sorted(counts)},
        )

    def _labels(
        self, name: str, dataset: Dataset, classes: list[Indices]
    ) -> Labels | None:
        columns: dict[str, Indices] = {}
        if classes:
            columns["class"] = np.concatenate(classes)
        if dataset.groups is not None:
            columns["group"] = dataset.groups
        if name in self.persons:
            columns["person"] = self.persons[name]
        if not columns:
            return None
        buffer = io.BytesIO()
        table = np.stack(list(columns.values()), axis=1).astype(np.int64)
        np.save(buffer, table, allow_pickle=False)
        content = buffer.getvalue()
        digest = digest_of(content)
        key = f"{name}/labels-{digest[:16]}.npy"
        self._send(key, content)
        return Labels(
            key=key, bytes=len(content), sha256=digest, columns=tuple(columns)
        )

    def _send(self, key: str, content: bytes) -> None:
        """Write an object unless it is there with this content."""
        try:
            there = self.store.stat(key)
            if there.size == len(content) and there.crc32c == crc32c(content):
                with self.counting:
                    self.kept += 1
                return
        except ObjectNotFound:
            pass
        self.store.put(key, [content])
        with self.counting:
            self.sent += len(content)

    def _done(self, future: Future[Shard]) -> Shard:
        shard = future.result()
        self.examples += shard.examples
        self.report(
            Progress(
                examples=self.examples,
                of_examples=self.of_examples,
                sent_bytes=self.sent,
                kept_objects=self.kept,
            )
        )
        return shard


def _rows(dataset: Dataset, chosen: Indices) -> Rows:
    inputs, targets = dataset.batch(chosen)
    if not all(isinstance(part, torch.Tensor | None) for part in (inputs, targets)):
        raise SiteError(
            "shards hold inputs and targets of one array each, but these are nested: "
            "use the function itself as the source"
        )
    groups = None if dataset.groups is None else dataset.groups[chosen]
    if targets is None:
        return Rows(inputs=inputs.numpy(), groups=groups)
    if targets.ndim == 1 and targets.dtype == torch.int64:
        return Rows(inputs=inputs.numpy(), classes=targets.numpy(), groups=groups)
    return Rows(inputs=inputs.numpy(), targets=targets.numpy(), groups=groups)


def _check_alike(rows: Rows, probe: Rows, name: str) -> None:
    if _form(rows) != _form(probe):
        raise SiteError(
            f"examples of {name} differ in shape or type ({_form(rows)} and "
            f"{_form(probe)}): make the source return arrays of one shape"
        )


def _form(rows: Rows) -> tuple[Any, ...]:
    arrays = (rows.inputs, rows.targets, rows.classes)
    return tuple(None if a is None else (str(a.dtype), a.shape[1:]) for a in arrays)

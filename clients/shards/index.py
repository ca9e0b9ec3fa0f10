"""The index of a dataset in an object store: its objects and their digests.

``index.json`` is beside the shards and is written last, so what it names is there.
Every other object is named after its content: a new version of the dataset writes new
objects and then deletes the old ones, and readers of the old index get an error.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.preprocessing import PREPROCESSINGS
from cloud_adapters.storage.encrypted_format import MAGIC
from federation.errors import CorruptObject, ObjectNotFound, SiteError
from federation.protocols import ObjectStore

INDEX_KEY = "index.json"
FORMAT = "crossfed-shards"
FORMAT_VERSION = 1
ENCODINGS = ("tar", "parquet")
SPLITS = ("train", "held_out")

_DIGEST_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One object with examples, in the order of the dataset.

    Attributes:
        key: Its key in the store.
        examples: How many it holds, at least 1.
        bytes: Its size.
        sha256: Its digest, 64 hexadecimal digits.
        input_type: NumPy's name of the type that inputs have in it.
        target_type: Likewise; empty if there are no targets or they are classes.
        classes: Examples of each class, if there are classes.
    """

    key: str
    examples: int
    bytes: int
    sha256: str
    input_type: str
    target_type: str = ""
    classes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The object with class and group of every example of a split.

    Attributes:
        key: Its key in the store: an array of int64, shape ``(n, columns)``.
        bytes: Its size.
        sha256: Its digest.
        columns: Some of ``class``, ``group`` and ``person``, in this order.
    """

    key: str
    bytes: int
    sha256: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The training or the held-out part of a dataset.

    Attributes:
        examples: Number of examples in all its shards.
        input_shape: Shape of one example's inputs.
        targets: ``none``, ``class`` (one integer per example) or ``array``.
        target_shape: Shape of one example's targets.
        group_names: Names of all groups; empty if there are none.
        labels: Where classes and groups are; None if there are neither.
        shards: In the order of the examples.
    """

    examples: int
    input_shape: tuple[int, ...]
    targets: str
    target_shape: tuple[int, ...]
    group_names: tuple[str, ...]
    labels: Labels | None
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetIndex:
    """All of a dataset.

    Attributes:
        dataset: Its name.
        encoding: ``tar`` or ``parquet``.
        train: Training examples.
        held_out: Held-out examples.
        preprocessing: What the source declared, see ``clients.preprocessing``; empty
            if it declared nothing. The version does not depend on it.
    """

    dataset: str
    encoding: str
    train: Split
    held_out: Split
    preprocessing: str = ""

    @property
    def version(self) -> str:
        """16 hexadecimal digits that depend only on the content."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def keys(self) -> frozenset[str]:
        """Keys of all objects that belong to it, without that of the index."""
        splits = (self.train, self.held_out)
        labels = {part.labels.key for part in splits if part.labels is not None}
        return frozenset(labels | {s.key for part in splits for s in part.shards})

    def encode(self) -> bytes:
        """Make the bytes of ``index.json``."""
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dataset": self.dataset,
            "version": self.version,
            **({"preprocessing": self.preprocessing} if self.preprocessing else {}),
            **self._content(),
        }
        return (json.dumps(document, indent=1) + "\n").encode()

    def _content(self) -> dict[str, Any]:
        splits = {"train": asdict(self.train), "held_out": asdict(self.held_out)}
        return {"encoding": self.encoding, "splits": splits}


def read_index(store: ObjectStore, *, version: str = "") -> DatasetIndex:
    """Read a dataset's index.

    Args:
        store: Where the dataset is.
        version: The one that is wanted; any if empty.

    Raises:
        SiteError: There is no dataset, or one of another version.
        CorruptObject: The index is not a crossfed index, or contradicts itself.
        StoreUnavailable: The store is unreachable.
    """
    try:
        raw = store.read(INDEX_KEY)
    except ObjectNotFound as error:
        raise SiteError(
            f"there is no {INDEX_KEY} in {store.url}: write the dataset with "
            f"`crossfed data shard SOURCE {store.url}`, or correct the URL"
        ) from error
    index = _decode(raw, store.url)
    if version not in {"", index.version}:
        raise SiteError(
            f"the dataset in {store.url} is of version {index.version}, but the job "
            f"wants {version}: name the new version, or write the old data again"
        )
    return index


def digest_of(content: bytes | memoryview) -> str:
    """SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def check_content(
    content: bytes | memoryview, about: Shard | Labels, store_url: str
) -> None:
    """Check an object that an index names.

    Raises:
        CorruptObject: It is cut short, or another than the index says.
    """
    where = f"{about.key!r} in {store_url}"
    if len(content) < about.bytes:
        raise CorruptObject(
            f"{where} is cut short: it has {len(content)} of the {about.bytes} bytes "
            f"that {INDEX_KEY} names; write the dataset again with `crossfed data "
            "shard`, which sends what is missing"
        )
    if len(content) != about.bytes or digest_of(content) != about.sha256:
        raise CorruptObject(
            f"{where} is not what {INDEX_KEY} names: it is damaged, or belongs to "
            "another version of the dataset; write the dataset again with `crossfed "
            "data shard`, or restore index and shards together"
        )


def _decode(raw: bytes, url: str) -> DatasetIndex:
    where = f"{INDEX_KEY} in {url}"
    if raw.startswith(MAGIC):
        raise CorruptObject(
            f"{where} is encrypted: give its key, with the option encryption_key of "
            "the data or with --encryption-key"
        )
    try:
        document = json.loads(raw)
        name, number = document["format"], document["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptObject(
            f"{where} is not the index of a dataset: check what is stored there"
        ) from error
    if name != FORMAT or number != FORMAT_VERSION:
        raise CorruptObject(
            f"{where} is of format {name!r} {number!r}, but this crossfed reads "
            f"{FORMAT!r} {FORMAT_VERSION}: read it with the version that wrote it"
        )
    try:
        index = DatasetIndex(
            dataset=str(document["dataset"]),
            encoding=document["encoding"],
            train=_split(document["splits"]["train"]),
            held_out=_split(document["splits"]["held_out"]),
            preprocessing=str(document.get("preprocessing", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _contradiction(where, f"{type(error).__name__}: {error}") from error
    _check_words(index, where)
    if index.version != document.get("version"):
        raise _contradiction(where, "its version does not match its content")
    for part in (index.train, index.held_out):
        _check_split(part, where)
    return index


def _check_words(index: DatasetIndex, where: str) -> None:
    if index.encoding not in ENCODINGS:
        raise _contradiction(where, f"encoding {index.encoding!r}")
    if index.preprocessing not in ("", *PREPROCESSINGS):
        raise _contradiction(where, f"preprocessing {index.preprocessing!r}")


def _contradiction(where: str, what: str) -> CorruptObject:
    return CorruptObject(
        f"{where} is damaged ({what}): write the dataset again with `crossfed data "
        "shard --replace`; existing shards are not sent again"
    )


def _split(table: dict[str, Any]) -> Split:
    labels = table["labels"]
    return Split(
        examples=int(table["examples"]),
        input_shape=tuple(map(int, table["input_shape"])),
        targets=str(table["targets"]),
        target_shape=tuple(map(int, table["target_shape"])),
        group_names=tuple(map(str, table["group_names"])),
        labels=None
        if labels is None
        else Labels(**(labels | {"columns": tuple(labels["columns"])})),
        shards=tuple(Shard(**shard) for shard in table["shards"]),
    )


def _check_split(split: Split, where: str) -> None:
    """Check what later steps rely on."""
    if split.examples < 1 or split.examples != sum(s.examples for s in split.shards):
        raise _contradiction(where, "examples are not those of the shards")
    if split.targets not in {"none", "class", "array"}:
        raise _contradiction(where, f"targets {split.targets!r}")
    if split.targets == "class" and (
        split.labels is None or "class" not in split.labels.columns
    ):
        raise _contradiction(where, "classes without labels")
    named: list[Shard | Labels] = [*split.shards]
    if split.labels is not None:
        named.append(split.labels)
    for about in named:
        if about.bytes < 1 or len(about.sha256) != _DIGEST_DIGITS:
            raise _contradiction(where, f"size or digest of {about.key!r}")
    if any(shard.examples < 1 for shard in split.shards):
        raise _contradiction(where, "a shard without examples")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Examples of one shard.

    Attributes:
        inputs: Shape ``(n, ...)``.
        targets: Shape ``(n, ...)``; None if there are none, or they are classes.
        classes: Shape ``(n,)``, int64; only seen by writers.
        groups: Shape ``(n,)``, int64; likewise.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any] | None = None
    classes: NDArray[np.int64] | None = None
    groups: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """What a reader must know in advance about a shard's examples.

    Attributes:
        examples: How many.
        first: Number of the first in its split.
        input_shape: Input shape of one example.
        input_type: NumPy's name of the type.
        has_classes: Whether each example has a class.
        target_shape: Target shape of one example.
        target_type: Empty if there are no targets but classes.
    """

    examples: int
    first: int
    input_shape: tuple[int, ...]
    input_type: str
    has_classes: bool
    target_shape: tuple[int, ...] = ()
    target_type: str = ""


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Store integers in the smallest type that holds them; models get int64 again."""
    if values.dtype.kind != "i" or not values.size:
        return values
    low, high = int(values.min()), int(values.max())
    smallest = np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high))
    # A mix of uint64 and negative numbers would become a float.
    return values.astype(smallest) if smallest.kind in "iu" else values

"""Export a run's final model: the model, its card and its job, under one URL.

    model.safetensors   the model, in its own types
    job.toml            the resolved job
    README.md           the model card; it names the model's SHA-256

The card is written last and, where an export is replaced, removed first: an export is
whole when its card is there.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
from safetensors import SafetensorError

from cloud_adapters.storage.disk import transfer
from federation.errors import (
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    RunNotFound,
)
from federation.protocols import Buffer, ObjectStore
from monitoring.pages.model_card import ModelFile, model_card
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_view import COMPLETED, EXHAUSTED, RunView

MODEL, JOB, CARD = "model.safetensors", "job.toml", "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The result of an export.

    Attributes:
        run_id: The run.
        url: Where it is.
        sha256: Digests of its objects by key, as they were read back.
        bytes_written: What was sent; objects that were there already are not.
    """

    run_id: str
    url: str
    sha256: Mapping[str, str]
    bytes_written: int


def export(run: RunFolder, store: ObjectStore, *, overwrite: bool = False) -> Export:
    """Write a run's model, job and card into a store, and read them back.

    An object that is there and has the same bytes is left as it is, so that an export
    that was cut short can be made again.

    1. Read what the run says, and the model's header.
    2. Write the model, which claims the place; then the job, then the card.
    3. Read everything back and compare digests.

    Args:
        run: A run that has ended with a model.
        store: Where to; its root is the place of the export.
        overwrite: Replace another export that is there.

    Raises:
        RunNotFound: The run has no final model.
        ObjectExists: Something else is there, and ``overwrite`` is not set.
        CorruptObject: The model's file is not whole, or what the store gives back is
            not what was sent.
        KeyRefused: The store encrypts, and what is there has another key.
        StoreUnavailable: The store is unreachable.
    """
    view = _ended(run)  # 1.
    job = run.read_job()
    model = examine(run.model)
    card = model_card(view, job, model).encode()
    contents: Mapping[str, Iterable[Buffer]] = {  # In the order of writing.
        MODEL: transfer.FilePieces(run.model),
        JOB: [job.encode()],
        CARD: [card],
    }
    digests = {
        MODEL: model.sha256,
        JOB: hashlib.sha256(job.encode()).hexdigest(),
        CARD: hashlib.sha256(card).hexdigest(),
    }
    written = 0
    if overwrite:  # 2.
        with contextlib.suppress(ObjectNotFound):
            store.stat(CARD)  # With a wrong key this fails while all is there.
        store.delete(CARD)
    for key, pieces in contents.items():
        written += _write(store, key, pieces, digests[key], overwrite=overwrite)
    for key, digest in digests.items():  # 3.
        if _digest(store, key) != digest:
            raise CorruptObject(
                f"{key!r} in {store.url} is not what was written: another export may "
                "have used the same place; export again with --overwrite"
            )
    return Export(
        run_id=view.started.run_id,
        url=store.url,
        sha256=digests,
        bytes_written=written,
    )


def examine(path: Path) -> ModelFile:
    """Read the header of a model's file, and all of it for its digest.

    Raises:
        CorruptObject: It is not a whole safetensors file.
    """
    digest = hashlib.sha256()
    num_values = num_tensors = 0
    types = set()
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                tensor = file.get_slice(name)
                values = 1
                for length in tensor.get_shape():
                    values *= length
                num_values += values
                num_tensors += 1
                types.add(str(tensor.get_dtype()))
        for piece in transfer.FilePieces(path):
            digest.update(piece)
        size = path.stat().st_size
    except (OSError, SafetensorError) as error:
        raise CorruptObject(
            f"{path} cannot be read: {error}; resume the run to write it again"
        ) from error
    return ModelFile(
        size=size,
        sha256=digest.hexdigest(),
        num_tensors=num_tensors,
        num_values=num_values,
        types=tuple(sorted(types)),
    )


def _ended(run: RunFolder) -> RunView:
    """The view of a run that has ended with a model."""
    view = run.view()
    if view.status not in {COMPLETED, EXHAUSTED} or not run.model.is_file():
        raise RunNotFound(
            f"the run in {run.path} has no final model (it is {view.status}): resume "
            "it, and export it after its last round"
        )
    return view


def _write(
    store: ObjectStore,
    key: str,
    pieces: Iterable[Buffer],
    digest: str,
    *,
    overwrite: bool,
) -> int:
    """Write an object unless it is there already, and return the bytes written."""
    try:
        return store.put(key, pieces, if_absent=True).size
    except ObjectExists as error:
        if _digest(store, key) == digest:
            return 0
        if not overwrite:
            raise ObjectExists(
                f"{key!r} in {store.url} belongs to another export: choose another "
                "place, or replace it with --overwrite"
            ) from error
    return store.put(key, pieces).size


def _digest(store: ObjectStore, key: str) -> str:
    digest = hashlib.sha256()
    for part in transfer.stream(store, key):
        digest.update(part)
    return digest.hexdigest()

"""Export a run's final model: the model, its card and its job, under one URL.

    model.safetensors   the model, in its own types; or files of another format
    job.toml            the resolved job
    signature.json      who gives it away, if they sign it
    README.md           the model card; it names the model's SHA-256

The card is written last and, where an export is replaced, removed first: an export is
whole when its card is there.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import safetensors
from safetensors import SafetensorError

from clients.data.datasets import Dataset
from cloud_adapters.storage import sealed_tensors
from cloud_adapters.storage.disk import transfer
from deploy.tools.export_signature import SIGNATURE, sign
from deploy.tools.formats import SAFETENSORS, write_format
from federation.errors import (
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    RunNotFound,
)
from federation.job import job_file
from federation.protocols import Buffer, ObjectStore
from monitoring.pages.model_card import ConvertedModel, ModelFile, model_card
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_view import COMPLETED, EXHAUSTED, RunView
from privacy.secagg.agreement.identity import Identity

MODEL, JOB, CARD = "model.safetensors", "job.toml", "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The result of an export.

    Attributes:
        url: Where it is.
        sha256: Digests of its objects by key, as they were read back.
        bytes_written: What was sent; objects that were there already are not.
        format: See ``deploy.tools.formats``.
        parity: How far its outputs are from those of the run's model, in words; empty
            for the run's own file.
    """

    run_id: str
    url: str
    sha256: Mapping[str, str]
    bytes_written: int
    format: str = SAFETENSORS
    parity: str = ""


def export(
    run: RunFolder,
    store: ObjectStore,
    *,
    overwrite: bool = False,
    kind: str = SAFETENSORS,
    data: Dataset | None = None,
    signer: Identity | None = None,
    model: Path | None = None,
    site: str = "",
) -> Export:
    """Write a run's model, job and card into a store, and read them back.

    An object that is there and has the same bytes is left as it is, so that an export
    that was cut short can be made again.

    1. Read what the run says, and the model's header; convert the model if need be.
    2. Write the model, which claims the place; then the job, then the card.
    3. Read everything back and compare digests.

    Args:
        run: A run that has ended with a model.
        store: Where to; its root is the place of the export.
        overwrite: Replace another export that is there.
        kind: The format, ``safetensors`` or one of ``formats.TOLERANCES``.
        data: Records to compare the outputs of a converted model on.
        signer: Signs the export.
        model: The model's file, in place of the run's: a site's own model.
        site: Whose it is, for the card.

    Raises:
        RunNotFound: The run has no final model.
        JobError: The format does not fit the model.
        ParityFailed: The converted model computes something else.
        ObjectExists: Something else is there, and ``overwrite`` is not set.
        CorruptObject: The model's file is not whole, or what the store gives back is
            not what was sent.
        KeyRefused: The store encrypts, and what is there has another key.
        StoreUnavailable: The store is unreachable.
    """
    with TemporaryDirectory(prefix="crossfed-export-") as folder:
        view = _ended(run)  # 1.
        path = run.model if model is None else model
        job, file = run.read_job(), examine(path)
        files, converted = _in_format(kind, job, path, Path(folder), data)
        card = model_card(view, job, file, converted, site=site).encode()
        contents: dict[str, Iterable[Buffer]] = {  # In the order of writing.
            **{name: transfer.FilePieces(path) for name, path in files.items()},
            JOB: [job.encode()],
            CARD: [card],
        }
        digests = {
            **({MODEL: file.sha256} if converted is None else converted.sha256),
            JOB: hashlib.sha256(job.encode()).hexdigest(),
            CARD: hashlib.sha256(card).hexdigest(),
        }
        if signer is not None:
            card_last = contents.pop(CARD)
            signature = sign(signer, view.started.run_id, digests)
            contents |= {SIGNATURE: [signature], CARD: card_last}
            digests[SIGNATURE] = hashlib.sha256(signature).hexdigest()
            _check_alone(store, digests)
        written = _write_all(store, contents, digests, overwrite=overwrite)  # 2.
    _check_all(store, digests)  # 3.
    return Export(
        run_id=view.started.run_id,
        url=store.url,
        sha256=digests,
        bytes_written=written,
        format=kind,
        parity="" if converted is None else converted.parity,
    )


def _in_format(
    kind: str, job: str, model: Path, folder: Path, data: Dataset | None
) -> tuple[Mapping[str, Path], ConvertedModel | None]:
    """Files of a model by name, and what its conversion has shown if it needs one."""
    if kind == SAFETENSORS:
        return {MODEL: model}, None
    made = write_format(kind, job_file.loads(job), model, folder, data)
    about = ConvertedModel(
        format=kind, sha256=_digests(made.files), parity=str(made.parity)
    )
    return made.files, about


def _check_alone(store: ObjectStore, digests: Mapping[str, str]) -> None:
    """Refuse to sign where users could not verify, because of files of others."""
    for info in store.list():
        if info.key not in digests:
            raise ObjectExists(
                f"{info.key!r} in {store.url} is not a part of this export, so its "
                "signature would not cover the whole place: remove it, or choose an "
                "empty place"
            )


def _digests(files: Mapping[str, Path]) -> Mapping[str, str]:
    found = {}
    for name, path in files.items():
        with path.open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _write_all(
    store: ObjectStore,
    contents: Mapping[str, Iterable[Buffer]],
    digests: Mapping[str, str],
    *,
    overwrite: bool,
) -> int:
    if overwrite:
        with contextlib.suppress(ObjectNotFound):
            store.stat(CARD)  # With a wrong key this fails while all is there.
        store.delete(CARD)
    return sum(
        _write(store, key, pieces, digests[key], overwrite=overwrite)
        for key, pieces in contents.items()
    )


def _check_all(store: ObjectStore, digests: Mapping[str, str]) -> None:
    for key, digest in digests.items():
        if _digest(store, key) != digest:
            raise CorruptObject(
                f"{key!r} in {store.url} is not what was written: another export may "
                "have used the same place; export again with --overwrite"
            )


def examine(path: Path) -> ModelFile:
    """Read the header of a model's file, and all of it for its digest.

    Raises:
        CorruptObject: It is not a whole safetensors file, or it is damaged.
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
        sealed_tensors.check(path)
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

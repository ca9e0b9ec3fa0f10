"""The weights that a run starts from: ``model.weights`` in a job.

When a job is loaded, the name is *pinned*: it gets a SHA-256 of the weights,
``runs/first/model.safetensors@DIGEST``, so that the digest of the job covers them. Only
who makes the first model needs the file. Sites are sent that model, and compare it with
the digest: see ``check_first``.

The digest covers each tensor's name, shape and values as sites receive them: float32,
rounded by the job's codec if it has one, or int64.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.models import weight_files
from clients.models.model_pool import ModelPool
from cloud_adapters.storage.disk.transfer import download
from cloud_adapters.urls import StoreUrl, open_store, parse_url
from federation.compression.codec import BeyondCodec, Codec, decoded
from federation.errors import JobError, ObjectNotFound, ProtocolError
from federation.job import code_files
from federation.job.spec import JobSpec
from federation.vectors import IntegerVector, Layout, Role, Vector

KEY = "model.weights"
MODEL = "model.safetensors"
# Of a file in a bucket: 17 billion values of float32.
MAX_DOWNLOAD_BYTES = 64 << 30

_FORM = re.compile(r"(.+?)(?:@([0-9a-f]{64}))?", re.DOTALL)

Tensors = Mapping[str, torch.Tensor]


def pinned(job: JobSpec, folder: Path) -> JobSpec:
    """Add the digest to the name of a job's weights, if it has none.

    Args:
        job: As read from its file; ``model.weights`` may lack a digest.
        folder: What a path is relative to; the working folder is looked in as well.

    Raises:
        JobError: There is no such file, or it holds no weights.
        StoreError: It is in a bucket that cannot be read.
    """
    text = job.model.weights
    if text is None or _split(text)[1]:
        return job
    with _files(text, [folder, Path()]) as files:
        name, path = files[0]
        digest = _digest(
            _arrays(_read(name, path)), job.communication.links.whole, name
        )
    code_files.look_in(folder)
    return replace(job, model=replace(job.model, weights=f"{text}@{digest}"))


def find(job: JobSpec, folder: Path) -> None:
    """Check that a party which starts in a folder finds the job's weights.

    Raises:
        JobError: They are not there, or are not those that were pinned.
    """
    name, _ = _split(job.model.weights or "")
    if job.model.weights is not None and not _is_remote(name):
        _load(job, [folder])


def initial_weights(job: JobSpec, pool: ModelPool) -> tuple[Vector, IntegerVector]:
    """Weights that a run starts with: shapes ``(d,)`` and ``(m,)``.

    Raises:
        JobError: The file of ``model.weights`` is not here, has changed, or does not
            fit the model.
        StoreError: It is in a bucket that cannot be read.
    """
    weights_d, integers_m = pool.initial_weights()
    if job.model.weights is None:
        return weights_d, integers_m
    name, tensors = _load(job, [*code_files.places(), Path()])
    _check_fits(pool.layout, tensors, name)
    _check_frozen(pool, tensors, name)
    for spec, view in pool.layout.float_views(weights_d):
        view[...] = tensors[spec.name].float().numpy()
    for spec, integers in pool.layout.integer_views(integers_m):
        integers[...] = tensors[spec.name].long().numpy()
    if not np.isfinite(weights_d).all():
        raise JobError(f"{name} holds NaN or infinite values", key=KEY)
    return _sent(weights_d, job.communication.links.whole), integers_m


def check_first(
    job: JobSpec, pool: ModelPool, weights_d: Vector, integers_m: IntegerVector
) -> None:
    """Check, at a site, that a run starts from the weights that its job names.

    Args:
        job: Names the weights with their digest.
        pool: The site's own model, whose frozen tensors never travel.
        weights_d: The first model as it arrived, shape ``(d,)``.
        integers_m: Its integer values, shape ``(m,)``.

    Raises:
        ProtocolError: It has other values.
    """
    if job.model.weights is None:
        return
    name, digest = _split(job.model.weights)
    layout, codec = pool.layout, job.communication.links.whole
    received: dict[str, NDArray[Any]] = {
        spec.name: view
        for views in (layout.float_views(weights_d), layout.integer_views(integers_m))
        for spec, view in views
    }
    possible = [received]
    if layout.frozen_names:  # A file holds all of them or none.
        possible.append(received | pool.frozen_arrays())
    found = [_digest(sorted(each.items()), codec, name) for each in possible]
    if digest not in found:
        raise ProtocolError(
            f"received a first model with different weights than the job gives ({KEY} "
            f"= {name!r}): SHA-256 {found[0]} here, {digest or 'none'} in the job. The "
            "aggregator must start from these weights"
        )


def notice(job: JobSpec) -> str:
    """Say what epsilon leaves out of a run that starts from weights; empty for none."""
    if job.model.weights is None or not job.privacy.differential_privacy.enabled:
        return ""
    return (
        "epsilon covers how this run changes the weights that it starts from "
        "(model.weights). If they were trained on records of these sites, add those "
        "runs: the ledgers list the private ones"
    )


def _split(text: str) -> tuple[str, str]:
    match = _FORM.fullmatch(text)
    return ("", "") if match is None else (match[1], match[2] or "")


def _is_remote(name: str) -> bool:
    return "://" in name and not name.startswith("file://")


def _load(job: JobSpec, places: Sequence[Path]) -> tuple[str, Tensors]:
    """Read the weights that a job names, and return where they were.

    Raises:
        JobError: They are not here, are not those that were pinned, or were not pinned.
    """
    text, digest = _split(job.model.weights or "")
    found = {}
    with _files(text, places) as files:
        for name, path in files:
            tensors = _read(name, path)
            codec = job.communication.links.whole
            found[name] = _digest(_arrays(tensors), codec, name)
            if found[name] == digest:
                return name, tensors
    name, other = next(iter(found.items()))
    raise JobError(
        f"{name} holds different weights than the job gives (SHA-256 of its values "
        f"{other} here, {digest or 'none'} in the job): restore those weights, or load "
        "the job again",
        key=KEY,
    )


@contextmanager
def _files(name: str, places: Sequence[Path]) -> Iterator[Sequence[tuple[str, Path]]]:
    """Files that a name may mean, at least one, each as shown and as a path.

    What is in a bucket is here as long as the block lasts.
    """
    if _is_remote(name):
        with TemporaryDirectory(prefix="crossfed-weights-") as folder:
            copy = Path(folder) / MODEL
            yield [(_download(name, copy), copy)]
        return
    if "\0" in name:
        raise JobError(f"{name!r:.200} is no path", key=KEY)
    found = [place / name.removeprefix("file://") for place in places]
    found = [each / MODEL if each.is_dir() else each for each in found]
    files = [each for each in found if each.is_file()]
    if not files:
        tried = " or ".join(dict.fromkeys(str(each.resolve()) for each in found))
        raise JobError(
            f"there is no file {tried}: give a safetensors file, or the folder of a "
            "completed run",
            key=KEY,
        )
    yield [(str(file), file) for file in files]


def _download(url: str, path: Path) -> str:
    """Copy the object of a URL to a file, and return the object's URL."""
    parsed = _parsed(url)
    store = open_store(f"{parsed.scheme}://{parsed.place}")
    keys = [parsed.prefix, f"{parsed.prefix}/{MODEL}"] if parsed.prefix else [MODEL]
    try:
        for key in keys:
            try:
                info = store.stat(key)
            except ObjectNotFound:
                continue
            if info.size > MAX_DOWNLOAD_BYTES:
                raise JobError(
                    f"{store.url}/{key} has {info.size:,} bytes, but at most "
                    f"{MAX_DOWNLOAD_BYTES:,} are downloaded: copy it to this machine "
                    "and give the copy",
                    key=KEY,
                )
            download(store, key, path, if_version=info.version)
            return f"{store.url}/{key}"
    finally:
        store.close()
    tried = " or ".join(f"{store.url}/{key}" for key in keys)
    raise JobError(
        f"there is no object {tried}: give a safetensors file, or the place of an "
        "exported model",
        key=KEY,
    )


def _parsed(url: str) -> StoreUrl:
    try:
        parsed = parse_url(url)
    except JobError as error:
        raise JobError(error.reason, key=KEY) from error
    if not parsed.is_remote:
        raise JobError(f"{url} holds no file: give a path or a bucket", key=KEY)
    return parsed


def _read(name: str, path: Path) -> Tensors:
    found = weight_files.tensors(name, path, key=KEY)
    for key, tensor in found.items():
        try:
            tensor.reshape(-1)[:1].float()
        except NotImplementedError as error:
            # The format has types, such as F4, of which torch has no values.
            raise JobError(
                f"{name} holds {key!r} as {tensor.dtype}, whose values cannot be read: "
                "give the weights as they were before they were quantised",
                key=KEY,
            ) from error
    return found


def _arrays(tensors: Tensors) -> Iterator[tuple[str, NDArray[Any]]]:
    for key in sorted(tensors):
        tensor = tensors[key]
        yield (
            key,
            (tensor.float() if tensor.is_floating_point() else tensor.long()).numpy(),
        )


def _digest(arrays: Iterable[tuple[str, NDArray[Any]]], codec: Codec, name: str) -> str:
    """SHA-256 of weights as sites receive them.

    Args:
        arrays: By name, in the order of names.
        codec: Codec of the downlink.
        name: Name of the file, for errors.
    """
    whole = hashlib.sha256(b"crossfed/starting-weights\0")
    for key, array in arrays:
        is_float = np.issubdtype(array.dtype, np.floating)
        head = json.dumps([key, array.shape, bool(is_float)]).encode()
        whole.update(len(head).to_bytes(8, "little") + head)
        values = np.ascontiguousarray(array, "<f4" if is_float else "<i8").reshape(-1)
        try:
            whole.update((_sent(values, codec) if is_float else values).data)
        except BeyondCodec as error:
            raise JobError(f"{key!r} in {name}: {error}", key=KEY) from error
    return whole.hexdigest()


def _sent(values_d: Vector, codec: Codec) -> Vector:
    """Values as sites receive them."""
    return decoded(codec, codec.encode(values_d))


def _check_fits(layout: Layout, tensors: Tensors, name: str) -> None:
    """Compare names, shapes and kinds of numbers; the first difference is named."""
    fault = "does not fit the model of model.factory and model.options"
    has_frozen = any(frozen in tensors for frozen in layout.frozen_names)
    for spec in layout.tensors:
        found = tensors.get(spec.name)
        if spec.role is Role.PERSONAL:
            _check_no_personal(spec.name, tensors, name)
            continue
        if found is None and spec.role is Role.FROZEN and not has_frozen:
            continue
        here = "nothing" if found is None else _described(found)
        is_float = "float" in spec.dtype
        if (
            found is None
            or tuple(found.shape) != spec.shape
            or found.is_floating_point() != is_float
        ):
            hint = weight_files.renamed(spec.name, tensors) if found is None else ""
            raise JobError(
                f"{name} {fault}: {spec.name!r} is {spec.dtype}{list(spec.shape)} in "
                f"the model and {here} in the file{hint}",
                key=KEY,
            )
    known = {spec.name for spec in layout.tensors}
    for key, tensor in tensors.items():
        if key not in known:
            raise JobError(
                f"{name} {fault}: {key!r} is not in the model, but "
                f"{_described(tensor)} in the file",
                key=KEY,
            )


def _check_no_personal(key: str, tensors: Tensors, name: str) -> None:
    if key in tensors:
        raise JobError(
            f"{name} holds {key!r}, but personal parts are never sent "
            "(model.personal): have model.factory read it at every site, and remove "
            "it from this file",
            key=KEY,
        )


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check_frozen(pool: ModelPool, tensors: Tensors, name: str) -> None:
    for key, values in pool.frozen_arrays().items():
        mine, theirs = torch.from_numpy(values), tensors.get(key)
        if theirs is not None and not torch.equal(mine, theirs.to(mine.dtype)):
            raise JobError(
                f"{name} has different values of {key!r} than model.factory, but "
                "frozen tensors are never sent: let the factory read them from a file "
                "at every site",
                key=KEY,
            )

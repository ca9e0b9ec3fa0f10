"""The model before the first round: the factory's, or that of ``model.weights``."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from clients.models.model_pool import ModelPool
from federation.errors import JobError
from federation.job import weights_file
from federation.job.spec import JobSpec
from federation.job.weights_file import KEY
from federation.vectors import IntegerVector, Layout, Role, Vector


def initial_weights(job: JobSpec, pool: ModelPool) -> tuple[Vector, IntegerVector]:
    """Weights that a run starts with: shapes ``(d,)`` and ``(m,)``.

    Raises:
        JobError: The file of ``model.weights`` is not here, has changed, or does not
            fit the model.
    """
    weights_d, integers_m = pool.initial_weights()
    if job.model.weights is None:
        return weights_d, integers_m
    path = weights_file.find(job.model.weights)
    tensors = _read(path)
    _check_fits(pool.layout, tensors, path)
    _check_frozen(pool, tensors, path)
    for spec, view in pool.layout.float_views(weights_d):
        view[...] = tensors[spec.name].float().numpy()
    for spec, integers in pool.layout.integer_views(integers_m):
        integers[...] = tensors[spec.name].long().numpy()
    if not np.isfinite(weights_d).all():
        raise JobError(f"{path} holds NaN or infinite values", key=KEY)
    return weights_d, integers_m


def notice(job: JobSpec) -> str:
    """Say what epsilon leaves out of a run that starts from weights; empty for none."""
    if job.model.weights is None or not job.privacy.differential_privacy.enabled:
        return ""
    return (
        "epsilon covers how this run changes the weights that it starts from "
        "(model.weights). If they were trained on records of these sites, count the "
        "runs that did so as well: the ledgers hold those that were private"
    )


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise JobError(f"{path} is no safetensors file: {error}", key=KEY) from error


def _check_fits(
    layout: Layout, tensors: Mapping[str, torch.Tensor], path: Path
) -> None:
    """Compare names, shapes and kinds of numbers; the first difference is named."""
    fault = "fits another model than that of model.factory and model.options"
    for spec in layout.tensors:
        found = tensors.get(spec.name)
        if found is None and spec.role is Role.FROZEN:
            continue
        here = "nothing" if found is None else _described(found)
        is_float = "float" in spec.dtype
        if (
            found is None
            or tuple(found.shape) != spec.shape
            or found.is_floating_point() != is_float
        ):
            raise JobError(
                f"{path} {fault}: {spec.name!r} is {spec.dtype}{list(spec.shape)} in "
                f"the model and {here} in the file",
                key=KEY,
            )
    known = {spec.name for spec in layout.tensors}
    for name, tensor in tensors.items():
        if name not in known:
            raise JobError(
                f"{path} {fault}: {name!r} is nothing in the model and "
                f"{_described(tensor)} in the file",
                key=KEY,
            )


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check_frozen(
    pool: ModelPool, tensors: Mapping[str, torch.Tensor], path: Path
) -> None:
    for name, values in pool.frozen_arrays().items():
        mine, theirs = torch.from_numpy(values), tensors.get(name)
        if theirs is not None and not torch.equal(mine, theirs.to(mine.dtype)):
            raise JobError(
                f"{path} has other values of {name!r} than model.factory, and frozen "
                "tensors are never sent: let the factory read them, at every site",
                key=KEY,
            )

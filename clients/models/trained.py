"""A run's model as a torch module with the weights that the run has left."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from clients.models import personal
from clients.models.model_pool import ModelPool
from clients.models.starting_weights import initial_weights, pinned
from federation.errors import JobError
from federation.job.spec import CommunicationSpec, JobSpec


def trained_model(job: JobSpec, file: Path) -> tuple[ModelPool, torch.nn.Module]:
    """Build a job's model with the weights that a run has left, for evaluation.

    Args:
        job: The run's job.
        file: Its ``model.safetensors``, or a site's own model.

    Returns:
        The pool that the model is of, and the model.

    Raises:
        JobError: The model cannot be built, or the file belongs to another model, or
            is only the part of one that sites share.
    """
    _check_whole(job, file)
    # The file is exact; only what a site receives is rounded.
    exact = replace(
        job,
        communication=CommunicationSpec(),
        model=replace(job.model, personal=()),  # Personal parts are in the file.
    )
    model = replace(exact.model, weights=str(file.resolve()))
    pool = ModelPool(exact)
    weights = initial_weights(pinned(replace(exact, model=model), Path()), pool)
    with pool.borrow() as instance:
        instance.load(*weights)
        module = instance.module
    return pool, module.eval()


def _check_whole(job: JobSpec, file: Path) -> None:
    if not job.model.personal:
        return
    try:
        with safe_open(file, framework="numpy") as found:
            # Counters, as of batch normalisation, are in the shared part as well.
            names = [
                name
                for name in found.keys()  # noqa: SIM118 -- not a mapping
                if "F" in found.get_slice(name).get_dtype()
            ]
    except (OSError, SafetensorError) as error:
        raise JobError(
            f"{file} is not a safetensors file: {error}; restore it, or resume the run"
        ) from error
    if not any(personal.match(name, job.model.personal) for name in names):
        raise JobError(
            "the model of this run is the part that its sites share: each site keeps "
            "the rest (model.personal), so the whole is known there only; `crossfed "
            "export RUN --site NAME` writes the own model of a site of a simulation",
            key="model.personal",
        )

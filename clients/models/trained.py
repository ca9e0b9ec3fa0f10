"""A run's model as a torch module with the weights that the run has left."""

from dataclasses import replace
from pathlib import Path

import torch

from clients.models.model_pool import ModelPool
from clients.models.starting_weights import initial_weights, pinned
from federation.job.spec import CommunicationSpec, JobSpec


def trained_model(job: JobSpec, file: Path) -> tuple[ModelPool, torch.nn.Module]:
    """Build a job's model with the weights that a run has left, for evaluation.

    Args:
        job: The run's job.
        file: Its ``model.safetensors``.

    Returns:
        The pool that the model is of, and the model.

    Raises:
        JobError: The model cannot be built, or the file belongs to another model.
    """
    # The file is exact; only what a site receives is rounded.
    exact = replace(job, communication=CommunicationSpec())
    model = replace(job.model, weights=str(file.resolve()))
    pool = ModelPool(exact)
    weights = initial_weights(pinned(replace(exact, model=model), Path()), pool)
    with pool.borrow() as instance:
        instance.load(*weights)
        module = instance.module
    return pool, module.eval()

"""Whether a job can be trained by a site's ranks, asked before the first round."""

import torch

from clients.data.datasets import Dataset
from clients.shards.order import reads_ahead
from federation.errors import JobError, SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.vectors import Layout, Role


def check_shares(job: JobSpec, site: SiteId, train: Dataset, num_ranks: int) -> None:
    """Check that every rank of a site gets something to do.

    Raises:
        SiteError: There are fewer examples than ranks.
        JobError: A batch cannot be shared out evenly, and the data needs it.
    """
    if len(train) < num_ranks:
        raise SiteError(
            f"site {site!r} has fewer training examples than its {num_ranks} ranks: "
            "use fewer"
        )
    size = job.training.batch_size
    if reads_ahead(train) and size % num_ranks:
        raise JobError(
            f"is {size}: data in shards is read in equal parts by the {num_ranks} "
            f"ranks of site {site!r}, so make it a multiple of that",
            key="training.batch_size",
        )


def check_devices(job: JobSpec, num_ranks: int, *, is_sharded: bool = False) -> None:
    """Check that each rank finds a GPU, where they are used.

    Args:
        job: Sets ``training.device``.
        num_ranks: Number of ranks of the site.
        is_sharded: Whether each holds a part of the model.

    Raises:
        SiteError: There are too few, or this torch cannot shard a model without any.
    """
    # Counting starts nothing on a GPU, so that an agent may ask too.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = job.training.device
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        # FSDP2 records events on streams, which CPUs do not have in old releases.
        if is_sharded and not hasattr(torch.cpu.Stream, "record_event"):
            raise SiteError(
                f"torch {torch.__version__} cannot shard a model on CPUs: upgrade "
                'torch, or set compute.sharding = "none"'
            )
        return
    if num_gpus < num_ranks:
        raise SiteError(
            f"{num_ranks} ranks (compute.ranks) need a GPU each, and there are "
            f"{num_gpus}: start fewer, or show them more (CUDA_VISIBLE_DEVICES)"
        )


def check_shardable(layout: Layout) -> None:
    """Check that a model can be cut into parts.

    Raises:
        JobError: It cannot: a parameter has no rows, or types differ.
    """
    parameters = [t for t in layout.tensors if t.role in {Role.PARAMETER, Role.FROZEN}]
    scalar = next((t.name for t in parameters if not t.shape), None)
    if scalar is not None:
        raise JobError(
            f"the parameter {scalar!r} is a single number without rows and cannot be "
            "sharded: give it the shape (1,)",
            key="model.factory",
        )
    types = sorted({t.dtype for t in parameters})
    if len(types) > 1:
        raise JobError(
            f"the model has parameters of {' and '.join(types)}, but a layer's "
            "parameters are gathered together: use one type",
            key="model.factory",
        )

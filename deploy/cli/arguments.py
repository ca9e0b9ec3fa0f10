"""The job that the arguments of a verb name."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from federation.job.spec import JobSpec


def load_job(options: argparse.Namespace) -> "JobSpec":
    """Read the job that the arguments ``job`` of ``verbs.toml`` name.

    Raises:
        JobError: It cannot be read, or is not one that can be run.
        StoreError: ``model.weights`` is in a bucket that cannot be read.
    """
    from federation.job import job_file  # noqa: PLC0415 -- keeps `--help` fast

    overrides = list(options.set)
    if options.seed is not None:
        overrides.append(f"seed={options.seed}")
    if getattr(options, "extend", None) is not None:
        overrides.append(f"rounds={options.extend}")
    job = job_file.load(options.job, overrides)
    if job.model.weights is None:
        return job
    from clients.models.starting_weights import pinned  # noqa: PLC0415 -- imports torch

    return pinned(job, options.job.parent)

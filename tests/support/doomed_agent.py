"""A process with ranks that says who they are and waits to be killed."""

import time
from collections.abc import Sequence

from support import forked
from support.ranked_sites import pids_of, ranked
from support.small_jobs import small_job

from clients.models.model_pool import ModelPool


def train(_: Sequence[str]) -> None:
    """Do it, in a process of its own."""
    forked.fork_ranks()
    job = small_job()
    pool = ModelPool(job)
    with ranked(job, pool) as trainer:
        trainer.evaluate(*pool.initial_weights(), round_index=1)
        print(*pids_of(trainer), flush=True)  # noqa: T201
        time.sleep(600)

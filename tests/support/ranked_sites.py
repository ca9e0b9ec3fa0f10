"""Sites with several ranks, and what is seen of their processes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clients.model_pool import ModelPool
from clients.private_steps import PrivateTraining
from clients.ranks.trainer import RankedTrainer
from clients.trainer import TorchTrainer
from deploy import site_ranks
from deploy.data import load_data
from deploy.site_file import AggregatorSpec, ComputeSpec, SiteDataSpec, SiteFile
from federation.ids import SiteId
from federation.job import JobSpec

TESTS = Path(__file__).resolve().parent.parent  # What ranks need on PYTHONPATH.
SITE = SiteId("site-0")
BLOBS = "support.small_jobs:blobs"


def site_file(source: str = "", **compute: Any) -> SiteFile:
    """The file of a site with ranks."""
    return SiteFile(
        name=SITE,
        aggregator=AggregatorSpec(address="127.0.0.1:1", authority="ca.crt"),
        data=SiteDataSpec(source=source),
        compute=ComputeSpec(**{"ranks": 2, **compute}),
    )


@contextmanager
def ranked(
    job: JobSpec,
    pool: ModelPool,
    source: str = "",
    private: PrivateTraining | None = None,
    **compute: Any,
) -> Iterator[RankedTrainer]:
    """Ranks that train a job; no process of theirs is left."""
    file = site_file(source, **compute)
    with site_ranks.ranked_trainer(job, file, pool.layout, private) as trainer:
        pids = pids_of(trainer)
        yield trainer
        pids += pids_of(trainer)
    wait_until_gone(pids)


def alone(job: JobSpec, pool: ModelPool) -> TorchTrainer:
    """One process that trains the same."""
    train, held_out = load_data(BLOBS, {})
    return TorchTrainer(job, SITE, pool=pool, train=train, held_out=held_out)


def pids_of(trainer: RankedTrainer) -> list[int]:
    """Process ids of a trainer's ranks, as they are now."""
    return list(trainer._group.pids)


def wait_until_gone(pids: Sequence[int], seconds: float = 120.0) -> None:
    """Wait until none of these processes runs; one that nobody reaped has ended."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"{alive} still run"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"

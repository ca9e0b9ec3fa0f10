"""Sites with several ranks, and what is seen of their processes."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support import forked

from clients.models.model_pool import ModelPool
from clients.ranks.ranked_trainer import RankedTrainer
from clients.training.private_steps import PrivateTraining
from clients.training.trainer import TorchTrainer
from deploy.site_host import ranks as site_ranks
from deploy.site_host.config import (
    AggregatorSpec,
    ComputeSpec,
    LocalDataSpec,
    SiteFile,
)
from deploy.wiring.job_data import load_data
from federation.ids import SiteId
from federation.job.spec import JobSpec


class ForkedRanks:
    """Starts ranks as ``subprocess`` does, but forks them: see ``support.forked``.

    Attributes:
        started: All of this process.
    """

    started: ClassVar[list[forked.Forked]] = []
    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def Popen(  # noqa: N802 -- its name
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        **_: Any,
    ) -> forked.Forked:
        log = Path("/proc/self/fd/2")
        rank = forked.shared().start(
            *command[command.index(site_ranks.MODULE) + 1 :],
            call="support.ranked_sites:be_a_rank",
            out=log,
            err=log,
            environment=env,
            files=[*pass_fds, 2],
        )
        ForkedRanks.started.append(rank)
        return rank

    @classmethod
    def living(cls) -> list[int]:
        """Those that have not ended, in order."""
        return [rank.pid for rank in cls.started if rank.poll() is None]


def be_a_rank(arguments: Sequence[str]) -> int:
    """Do what ``python -m`` would."""
    from deploy.site_host import rank_process  # noqa: PLC0415 -- of a fork alone

    sys.argv[1:] = arguments
    rank_process.main()
    return 0


TESTS = Path(__file__).resolve().parent.parent  # What ranks need on PYTHONPATH.
SITE = SiteId("site-0")
BLOBS = "support.small_jobs:blobs"


def site_file(source: str = "", **compute: Any) -> SiteFile:
    """The file of a site with ranks."""
    return SiteFile(
        name=SITE,
        aggregator=AggregatorSpec(address="127.0.0.1:1", authority="ca.crt"),
        data=LocalDataSpec(source=source),
        compute=ComputeSpec(**{"ranks": 2, **compute}),
    )


@contextmanager
def ranked(
    job: JobSpec,
    pool: ModelPool,
    source: str = "",
    private: PrivateTraining | None = None,
    *,
    order_seed: int | None = None,
    **compute: Any,
) -> Iterator[RankedTrainer]:
    """Ranks that train a job; no process of theirs is left."""
    file = site_file(source, **compute)
    with site_ranks.ranked_trainer(
        job, file, pool.layout, private, order_seed=order_seed
    ) as trainer:
        pids = pids_of(trainer)
        yield trainer
        pids += pids_of(trainer)
    wait_until_gone(pids)


def alone(job: JobSpec, pool: ModelPool, source: str = BLOBS) -> TorchTrainer:
    """One process that trains the same."""
    train, held_out = load_data(source, {})
    return TorchTrainer(job, SITE, pool=pool, train=train, held_out=held_out)


def assert_like_one(
    trainer: RankedTrainer,
    one: TorchTrainer,
    pool: ModelPool,
    *,
    atol: float = 2e-6,
    rtol: float = 1e-6,
) -> None:
    """Two rounds and their evaluations, but for the order of sums.

    Args:
        trainer: The ranks.
        one: One process that trains the same.
        pool: Of the job.
        atol: Most that a weight differs after a round.
        rtol: Most that a loss differs, of its size.
    """
    weights_d, integers_m = pool.initial_weights()
    for round_index in (1, 2):
        expected = one.fit(weights_d, integers_m, round_index=round_index)
        found = trainer.fit(weights_d, integers_m, round_index=round_index)
        np.testing.assert_allclose(expected.weights_d, found.weights_d, atol=atol)
        assert (expected.num_steps, expected.num_examples) == (
            found.num_steps,
            found.num_examples,
        )
        assert expected.training is not None
        assert found.training is not None
        assert expected.training.count == found.training.count
        assert expected.training.loss == pytest.approx(found.training.loss, rel=rtol)
        weights_d = expected.weights_d
        measured = trainer.evaluate(weights_d, integers_m, round_index=1)
        reference = one.evaluate(weights_d, integers_m, round_index=1)
        assert reference.count == measured.count
        assert reference.metrics.keys() == measured.metrics.keys()
        for name, value in reference.metrics.items():
            assert abs(value - measured.metrics[name]) <= rtol * measured.count
        assert reference.loss == pytest.approx(measured.loss, rel=rtol)


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

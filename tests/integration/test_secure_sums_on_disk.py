"""Runs whose aggregator keeps its vectors in files, secure sums among them."""

from functools import partial
from pathlib import Path

import pytest
from support.small_jobs import small_job

from cloud_adapters.local.inproc_grid import InProcessGrid
from cloud_adapters.storage.disk.scratch import ScratchVectors
from cloud_adapters.storage.memory import MemoryStore
from deploy.wiring import parts as wiring
from deploy.wiring.rehearsal import rehearse
from deploy.wiring.run import ConnectedSites, Run
from federation.clock import SystemClock
from federation.ids import RunId, SiteId
from federation.vectors import Allocate, Vector

RUN = RunId("run-1")
ROUNDS = 2
OF_THE_MODEL = 2  # Its values, and what updates without masks would be combined in.
SECURE = {"enabled": True, "clip_norm": 10.0}


def drive(privacy: dict[str, object], allocate: Allocate) -> None:
    """Run a small job to its end."""
    job = small_job(
        num_sites=9 if "groups" in privacy else 3,
        rounds=ROUNDS,
        privacy={"secure_aggregation": SECURE | privacy},
        aggregation={
            "combine": "median" if "groups" in privacy else "mean",
            "weights": "uniform",
        },
    )
    with wiring.torch_threads(job):
        federation = wiring.build_federation(job)
        parties, store = rehearse(federation, RUN, None), MemoryStore()
        sites = {
            name: federation.site(
                name,
                make_trainer=partial(federation.trainer, name),
                store=store,
                clock=SystemClock(),
                seal=parties.seal(name, None),
                tells_all=False,
            )
            for name in (SiteId(site.name) for site in job.sites)
        }
        with InProcessGrid(sites, clock=SystemClock()) as grid:
            run = Run(
                federation=federation,
                run_id=RUN,
                clock=SystemClock(),
                store=store,
                emit=lambda _event: None,
                allocate=allocate,
            )
            connected = ConnectedSites(engine="test", grid=grid)
            state = run.drive(connected, secret=parties.secret)
    assert state.rounds_completed == ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("privacy", "num_sums"), [({}, 1), ({"levels": 4}, 2), ({"groups": 3}, 3)]
)
def test_sums_are_where_the_aggregator_keeps_its_model(
    tmp_path: Path, privacy: dict[str, object], num_sums: int
):
    """In few levels a sum has a vector of words, and one of the mean."""
    on_disk, made = ScratchVectors(folder=tmp_path / "scratch"), []

    def allocate(size: int) -> Vector:
        made.append(size)
        return on_disk(size)

    drive(privacy, allocate)
    assert len(made) == OF_THE_MODEL + ROUNDS * num_sums

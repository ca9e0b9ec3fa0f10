"""Secure runs whose aggregator, or sites, keep large vectors in files."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
from federation.vectors import Allocate, Vector, in_memory

RUN = RunId("run-1")
ROUNDS = 2
NUM_SITES = 3  # Of one group.
OF_THE_MODEL = 2  # Its values, and what updates without masks would be combined in.
SECURE = {"enabled": True, "clip_norm": 10.0}


class Counted:
    """Allocates vectors in files, and counts them."""

    def __init__(self, folder: Path) -> None:
        """Allocate nothing yet."""
        self._on_disk = ScratchVectors(folder=folder / "scratch")
        self.sizes: list[int] = []

    def __call__(self, size: int) -> Vector:
        """Allocate a vector."""
        self.sizes.append(size)
        return self._on_disk(size)


def drive(
    privacy: dict[str, object],
    allocate: Allocate,
    *,
    of_sites: Allocate = in_memory,
    **tables: object,
) -> bytes:
    """Run a small job to its end; the model."""
    document: dict[str, Any] = {
        "aggregation": {
            "combine": "median" if "groups" in privacy else "mean",
            "weights": "uniform",
        },
    }
    job = small_job(
        num_sites=NUM_SITES**2 if "groups" in privacy else NUM_SITES,
        rounds=ROUNDS,
        privacy={"secure_aggregation": SECURE | privacy},
        **(document | tables),
    )
    with wiring.torch_threads(job):
        federation = replace(wiring.build_federation(job), allocate=of_sites)
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
    return state.weights_d.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("privacy", "num_sums"), [({}, 1), ({"levels": 4}, 2), ({"groups": 3}, 3)]
)
def test_sums_are_where_the_aggregator_keeps_its_model(
    tmp_path: Path, privacy: dict[str, object], num_sums: int
):
    """In few levels a sum has a vector of words, and one of the mean."""
    allocate = Counted(tmp_path)
    drive(privacy, allocate)
    assert len(allocate.sizes) == OF_THE_MODEL + ROUNDS * num_sums


@pytest.mark.slow
def test_sites_hold_the_model_where_they_hold_what_updates_leave_out(tmp_path: Path):
    """The model, the velocity, and the mean of each sum; the same bits."""
    tables = {
        "communication": {"down_content": "sum"},
        "aggregation": {
            "weights": "uniform",
            "server_optimizer": {"name": "nesterov", "momentum": 0.5},
        },
    }
    wanted = drive({"levels": 4}, in_memory, **tables)
    on_disk = Counted(tmp_path)
    assert drive({"levels": 4}, in_memory, of_sites=on_disk, **tables) == wanted
    of_models = on_disk.sizes.count(len(wanted) // 4)
    assert of_models == NUM_SITES * (2 + ROUNDS)

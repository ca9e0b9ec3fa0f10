"""An aggregator cannot single a site out by asking it for other work."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cloud_adapters.local.inproc_grid import InProcessGrid
from cloud_adapters.storage.memory import MemoryStore
from deploy.wiring import parts as wiring
from deploy.wiring.rehearsal import rehearse
from deploy.wiring.run import ConnectedSites, Run
from federation.clock import SystemClock
from federation.errors import FederationError
from federation.ids import RunId, SiteId, TaskId
from federation.job import job_file
from federation.messages import Reply, RoundTask, Task, TaskKind
from federation.protocols import Grid

JOB = Path(__file__).parents[2] / "jobs/secure.toml"


class Divider:
    """A grid that asks one site to train and all others to evaluate only."""

    def __init__(self, grid: Grid, victim: SiteId) -> None:
        """Single ``victim`` out."""
        self._grid = grid
        self._victim = victim

    def send(
        self, tasks: Sequence[Task], *, deadline_seconds: float
    ) -> Sequence[TaskId]:
        """Change what the others are asked."""
        changed = [
            replace(task, kind=TaskKind.EVALUATE)
            if isinstance(task, RoundTask) and task.site != self._victim
            else task
            for task in tasks
        ]
        return self._grid.send(changed, deadline_seconds=deadline_seconds)

    def receive(self, timeout_seconds: float | None = None) -> deque[Reply]:
        """Hand on the answers."""
        return self._grid.receive(timeout_seconds)

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Close tasks."""
        return self._grid.withdraw(task_ids)

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        """Who is back."""
        return self._grid.returned(sites, round_index)


@pytest.mark.slow
def test_site_that_is_asked_for_other_work_is_not_opened():
    """The kind of work is in every mask key: no sum comes out, the round is lost."""
    job = job_file.load(JOB, ["rounds=1", "simulation.faults=[]"])
    told: list[object] = []
    with wiring.torch_threads(job):
        federation = wiring.build_federation(job)
        parties, store = rehearse(federation, RunId("run-1"), None), MemoryStore()
        names = [SiteId(site.name) for site in job.sites]
        sites = {
            n: federation.site(
                n,
                make_trainer=partial(federation.trainer, n),
                store=store,
                clock=SystemClock(),
                seal=parties.seal(n, None),
                tells_all=False,
            )
            for n in names
        }
        with InProcessGrid(sites, clock=SystemClock()) as grid:
            run = Run(
                federation=federation,
                run_id=RunId("run-1"),
                clock=SystemClock(),
                store=store,
                emit=told.append,
            )
            divided = ConnectedSites(engine="test", grid=Divider(grid, names[0]))
            with pytest.raises(FederationError):
                run.drive(divided, secret=parties.secret)
    assert not any(getattr(event, "training", None) for event in told)

"""``--engine flower``: the same job and code on Flower's simulation engine.

Sites live in Ray's processes: what they need travels as the job's text, and each
process builds model and data once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import tomli_w

from clients.training.local_federation import Federation
from cloud_adapters.flower.simulation import import_flower, run_on_flower_simulation
from cloud_adapters.local.faults import FaultInjector
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from deploy.wiring import parts as wiring, run_store
from federation.clock import SystemClock
from federation.errors import JobError
from federation.ids import SiteId
from federation.job import job_file
from federation.job.kept_state import keepers
from federation.job.spec import JobSpec
from federation.messages import FailureKind, SiteMessage, Task
from federation.protocols import Clock, Grid, RunState, SiteHandler
from federation.resources import THREAD
from federation.rounds.failures import failure
from federation.vectors import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerSimulation:
    """Sites in Ray's processes.

    Attributes:
        layout: Layout of its model.
        folder: The run's folder, where sites keep what never leaves them.
        clock: Clock of deadlines.
    """

    job: JobSpec
    layout: Layout
    folder: Path | None
    clock: Clock

    @property
    def engine(self) -> str:
        """Its name in the record of the run."""
        return "flower"

    def reach(self, rounds: Callable[[Grid], RunState]) -> RunState:
        """Run the rounds against the sites.

        Raises:
            MissingExtra: Flower is not installed.
        JobError: The job needs what this engine lacks.
        """
        import_flower()
        job, folder = self.job, self.folder
        _check(job, self.layout, folder)
        return run_on_flower_simulation(
            rounds,
            partial(site_handler, None if folder is None else str(folder.resolve())),
            sites=[SiteId(site.name) for site in job.sites],
            job_text=tomli_w.dumps(job_file.document(job)),
            clock=self.clock,
            workers=wiring.num_workers(job),
            cpus_per_site=job.training.threads,
        )


_NOT_HERE = {
    "duplicate": "Flower accepts only one answer per site",
    "restart": "Flower's simulation keeps no sites in memory that could be restarted",
    "leave": "Flower's simulation has no sites that could come back",
}


def _check(job: JobSpec, layout: Layout, folder: Path | None) -> None:
    privacy = job.privacy
    for is_asked, key, keeps_what, instead in (
        (
            privacy.secure_aggregation.enabled,
            "privacy.secure_aggregation.enabled",
            "keeps its keys",
            (
                ", or train without secure aggregation with --set "
                "privacy.secure_aggregation.enabled=false"
            ),
        ),
        (
            privacy.differential_privacy.enabled,
            "privacy.differential_privacy.unit",
            "keeps its ledger open",
            "",
        ),
        (
            job.communication.links.changes,
            "communication.down_content",
            "keeps its last model",
            ", or send whole models with --set communication.down_content=model",
        ),
    ):
        if is_asked:
            raise JobError(
                f"a site {keeps_what} in one process, but Flower's simulation runs its "
                f"rounds in any process; rehearse this with --engine inproc{instead}",
                key=key,
            )
    for index, fault in enumerate(job.simulation.faults):
        if fault.kind in _NOT_HERE:
            raise JobError(
                f"{_NOT_HERE[fault.kind]}; rehearse this with --engine inproc",
                key=f"simulation.faults[{index}].kind",
            )
    keeps = bool(keepers(job, layout))
    if job.storage.encryption is not None and keeps:
        raise JobError(
            "sites in other processes keep their state unencrypted: use "
            "--engine inproc",
            key="storage.encryption",
        )
    if run_store.in_bucket(job) and keeps:
        raise JobError(
            "sites in other processes keep their state on this machine, so another "
            "machine could not resume the run: use --engine inproc, or file://",
            key="storage.url",
        )
    if folder is None and keeps:
        raise JobError(
            "sites in other processes need a folder for their state; use file:// and a "
            "folder",
            key="storage.url",
        )


def site_handler(folder: str | None, site: SiteId, job_text: str) -> SiteHandler:
    """Build a site's handler in the process that calls this."""
    federation = _federation(job_text)
    job, clock = federation.job, SystemClock()
    store = MemoryStore() if folder is None else LocalStore(Path(folder))
    handler = federation.site(
        site,
        make_trainer=lambda: federation.trainer(site),
        store=store,
        clock=clock,
        meter=THREAD,
        report=lambda _task, _error: None,  # Another process: its answer says it all.
    )
    if not job.simulation.faults:
        return handler
    faults = FaultInjector(job.simulation.faults, clock=clock, seed=job.seed)
    return _FaultyHandler(handler, faults)


@lru_cache(maxsize=1)
def _federation(job_text: str) -> Federation:
    return wiring.build_federation(job_file.loads(job_text))


class _FaultyHandler:
    """A site with the job's faults."""

    def __init__(self, handler: SiteHandler, faults: FaultInjector) -> None:
        self._handler = handler
        self._faults = faults

    def close(self) -> None:
        """End the site's part in the run."""
        self._handler.close()

    def handle(self, task: Task) -> SiteMessage:
        """Answer a task, or report that no answer will come."""
        for message in self._faults(task, lambda: self._handler.handle(task)):
            return message
        return failure(task, FailureKind.UNREACHABLE, "never answered")

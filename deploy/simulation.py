"""Run a whole federation here: the function behind ``crossfed simulate``."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from cloud_adapters.faults import FaultInjector
from cloud_adapters.inproc_grid import InProcessGrid
from cloud_adapters.storage.local import LocalStore
from cloud_adapters.storage.memory import MemoryStore
from deploy import model_export, wiring
from deploy.run_folder import RunFolder, replace_file
from federation import job_file
from federation.clock import SystemClock
from federation.coordinator import run_federation
from federation.errors import RunConflict
from federation.event_log import EventWriter
from federation.events import Emit, Event
from federation.ids import RunId, SiteId, new_run_id
from federation.job import JobSpec
from federation.protocols import Grid, ObjectStore, RunState
from monitoring.run_view import RunFold, RunView, result

ENGINES = ("inproc", "flower")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to.

    Attributes:
        status: ``completed`` or ``stopped``.
        run_id: The run.
        rounds_completed: Rounds after which the weights changed.
        loss: Pooled held-out loss of the final model, in nats; None if it was not
            evaluated.
        accuracy: Its pooled held-out accuracy; None if it was not evaluated.
        view: Everything else that the run's events tell: rounds, sites, bytes.
        weights: The final model: arrays by tensor name, float32 and int64.
        folder: Where the run is kept; None if it is not.
    """

    status: str
    run_id: str
    rounds_completed: int
    loss: float | None
    accuracy: float | None
    view: RunView
    weights: Mapping[str, NDArray[Any]]
    folder: Path | None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The final model for ``torch.nn.Module.load_state_dict``.

        Tied weights appear under one of their names: load with ``strict=False``.
        """
        return {name: torch.from_numpy(a) for name, a in self.weights.items()}

    def summary(self) -> dict[str, Any]:
        """The content of ``result.json``."""
        return result(self.view)


def simulate(
    job: JobSpec | str | Path,
    *,
    folder: Path | None = None,
    resume: bool = False,
    engine: str = "inproc",
    listeners: Sequence[Emit] = (),
    stop_requested: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Run a federation with every site on this machine.

    Args:
        job: A job, or the path of a job file.
        folder: Where to keep the run; nothing is written without it.
        resume: Go on with the run in ``folder`` from its newest checkpoint.
        engine: ``inproc`` calls the sites in threads of this process; ``flower``
            runs them on Flower's simulation engine (extra ``crossfed[flower]``).
            Both give the same weights, bit for bit.
        listeners: Called with every event, in order, in this thread.
        stop_requested: Asked after every round; a true answer ends the run after
            its checkpoint.

    Returns:
        The result; it is also in ``folder`` as ``result.json``.

    Raises:
        JobError: The job asks for something that cannot be done.
        RunConflict: ``folder`` holds a run and ``resume`` is not set, or another
            process works on it.
        FederationError: Anything else that ends a run before its time.
    """
    if not isinstance(job, JobSpec):
        job = job_file.load(Path(job))
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    with ExitStack() as stack:
        run = None if folder is None else RunFolder(folder)
        if run is not None:
            stack.enter_context(run.locked())
            _check_fresh(run, resume=resume)
        stack.enter_context(wiring.torch_threads(job))
        return _Simulation(job, run, engine, stop_requested).run(listeners)


def _check_fresh(run: RunFolder, *, resume: bool) -> None:
    if run.exists() and not resume:
        raise RunConflict(
            f"{run.path} already holds run {run.run_id() or '(not begun)'}; add "
            "--resume to go on with it, or choose another folder with --out"
        )


class _Simulation:
    """One call of ``simulate``, once its arguments are checked."""

    def __init__(
        self,
        job: JobSpec,
        run: RunFolder | None,
        engine: str,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._job = job
        self._run = run
        self._engine = engine
        self._stop_requested = stop_requested
        self._clock = SystemClock()
        self._fold = RunFold()
        self._federation = wiring.build_federation(job)
        known = None if run is None else run.run_id()
        self._run_id = known or new_run_id(self._clock.now(), os.urandom(3))
        self._store: ObjectStore = (
            MemoryStore() if run is None else LocalStore(run.path)
        )

    def run(self, listeners: Sequence[Emit]) -> RunResult:
        """Run the federation and leave its files."""
        with ExitStack() as stack:
            everyone: list[Emit] = [self._fold.add, *listeners]
            if self._run is not None:
                if not self._run.exists():
                    self._run.write_job(self._job)
                else:
                    for event in self._run.read_events():
                        self._fold.add(event)
                everyone.insert(0, stack.enter_context(EventWriter(self._run.events)))

            def emit(event: Event) -> None:
                for listener in everyone:
                    listener(event)

            try:
                state = self._drive(emit)
            finally:
                self._leave_result()
        return self._result(state)

    def _drive(self, emit: Emit) -> RunState:
        """Run the round loop over the chosen engine."""
        if self._engine == "flower":
            from deploy import flower_engine  # noqa: PLC0415 -- an optional extra

            return flower_engine.run(
                self._job,
                self._federation.pool.layout,
                lambda grid: self._coordinate(grid, emit),
                folder=None if self._run is None else self._run.path,
            )
        fault = FaultInjector(
            self._job.simulation.faults, clock=self._clock, seed=self._job.seed
        )
        sites = {
            SiteId(site.name): self._federation.site(
                SiteId(site.name), store=self._store, clock=self._clock
            )
            for site in self._job.sites
        }
        with InProcessGrid(
            sites,
            clock=self._clock,
            workers=wiring.num_workers(self._job),
            fault=fault,
        ) as grid:
            return self._coordinate(grid, emit)

    def _coordinate(self, grid: Grid, emit: Emit) -> RunState:
        emit(wiring.data_distributed(self._federation, at=self._clock.now()))
        parts = wiring.build_server(
            self._federation,
            run_id=RunId(self._run_id),
            engine=self._engine,
            grid=grid,
            store=self._store,
            clock=self._clock,
            emit=emit,
            stop_requested=self._stop_requested,
        )
        return run_federation(self._job, parts)

    def _result(self, state: RunState) -> RunResult:
        view = self._fold.view()
        last = view.last_evaluated
        layout = self._federation.pool.layout
        weights = model_export.named_arrays(layout, state)
        if self._run is not None and view.status == "completed":
            replace_file(self._run.model, model_export.file_pieces(layout, weights))
        return RunResult(
            status=view.status,
            run_id=self._run_id,
            rounds_completed=state.rounds_completed,
            loss=None if last is None else last.pooled.loss,
            accuracy=None if last is None else last.pooled.accuracy,
            view=view,
            weights=weights,
            folder=None if self._run is None else self._run.path,
        )

    def _leave_result(self) -> None:
        """Write result and report of a run that has begun, however it ended."""
        if self._run is not None and self._fold.has_started:
            self._run.write_result(result(self._fold.view()))
            leave_report(self._run)


def leave_report(run: RunFolder, path: Path | None = None) -> Path:
    """Write the report of a run from what it left, and return where it is.

    Raises:
        RunNotFound: There is no run in the folder.
        StoreUnavailable: The report cannot be written.
    """
    from monitoring.report import write_report  # noqa: PLC0415 -- slow to import

    path = path or run.report
    write_report(run.view(), run.job.read_text(), versions(), path)
    return path


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    packages = ("crossfed", "numpy", "torch", "scikit-learn", "safetensors")
    found = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **found}

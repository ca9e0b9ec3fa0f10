"""Run a whole federation here: the function behind ``crossfed simulate``."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from aggregator import model_export
from clients.data.privacy_units import note_on_persons
from clients.models.starting_weights import initial_weights, notice, pinned
from clients.privacy.dataset_name import lineage
from clients.privacy.ledger_memory import LifetimeBudget
from clients.privacy.site_memory import FileMemory, InMemory
from clients.privacy.site_plans import LedgerContext, PrivateSites
from clients.training.local_federation import Federation, SiteData
from clients.training.surrogate import NOTICE
from clients.user_code import FirstFailure, last_frames, origin, sentence
from cloud_adapters.local.transcript import check_fresh
from deploy.wiring import (
    begun_run,
    extension,
    parts as wiring,
    run_store,
    virtual_engine,
)
from deploy.wiring.rehearsal import (
    Rehearsal,
    cohort_notice,
    dropout_notice,
    predicted,
    rehearse,
    statistics_notice,
    traffic_of,
)
from deploy.wiring.run import InProcess, Run, SiteSource
from deploy.wiring.run_record import RunRecord
from deploy.wiring.store_meters import StoreMeters
from federation.clock import SystemClock, VirtualClock
from federation.errors import (
    CorruptObject,
    FederationError,
    JobError,
    QuorumNotMet,
    RunConflict,
    RunNotFound,
)
from federation.events import Emit, Event, Warned
from federation.ids import RunId, SiteId, new_run_id
from federation.job import job_file
from federation.job.code_files import unpinned
from federation.job.spec import LEARNT, SURROGATE, JobSpec
from federation.messages import join_anchors
from federation.protocols import (
    Clock,
    RunState,
    SiteHandler,
    Trainer,
)
from federation.resources import CLOCK, THREAD
from federation.rounds.local_work import is_auto, is_by_capacity, moves_data
from monitoring.runs.find import find_runs, runs_root
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult, result_of
from monitoring.views.run_view import RunView

_LOG = logging.getLogger(__name__)

ENGINES = ("inproc", "flower", "virtual")


def simulate(
    job: JobSpec | str | Path,
    *,
    folder: Path | None = None,
    resume: bool = False,
    extend: bool = False,
    engine: str = "inproc",
    listeners: Sequence[Emit] = (),
    stop_requested: Callable[[], bool] = lambda: False,
    transcript: Path | None = None,
    clock: Clock | None = None,
    show_failure: Callable[[str, Exception], None] | None = None,
    report: bool = True,
    data: Mapping[SiteId, SiteData] | None = None,
) -> RunResult:
    """Run a federation with every site on this machine.

    Args:
        job: A job, or the path of a job file.
        folder: Where to keep the run; nothing is written without it, and not
            before model and data are built.
        resume: Go on with the run in ``folder`` from its newest checkpoint. A run
            that is completed is left as it is.
        extend: Resume a run that was begun with fewer rounds: it gets those of the job.
        engine: ``inproc`` calls the sites in threads of this process; ``flower``
            runs them on Flower's simulation engine (extra ``crossfed[flower]``).
            Both give the same weights, bit for bit. ``virtual`` calls them one by one
            in virtual time, with the speeds of ``simulation.machines``: updates are
            added up in the order in which they would have come.
        listeners: Called with every event, in order, in this thread.
        stop_requested: Asked after every round; a true answer ends the run after
            its checkpoint.
        transcript: A new folder for every message as the aggregator saw it.
        clock: The process's; by default a system clock is made for this run. Virtual
            time has its own.
        show_failure: Shows where the first failure of a site was, and its error, as
            soon as it happens; by default the log has the user's last frames.
        report: Whether to write ``report.html``, which takes up to a second.
        data: Data of the sites that are here already, in place of the job's sources.

    Returns:
        The result; it is also in ``folder`` as ``result.json``.

    Raises:
        JobError: The job asks for something that cannot be done.
        SiteError: The data is not what the sites can use.
        RunNotFound: ``resume`` is set, and ``folder`` holds no run.
        RunConflict: ``folder`` holds a run and ``resume`` is not set, or another
            process works on it.
        CheckpointMismatch: The run to resume was started from another job or by
            another engine, or cannot be extended to this one.
        FederationError: Anything else that ends a run before its time.
    """
    beside = Path()
    if not isinstance(job, JobSpec):
        beside = Path(job).parent
        job = job_file.load(Path(job))
    job = pinned(job, beside)
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    wiring.check_sites_are_here(job)
    _check_time(job, engine)
    runs_root(job)
    if transcript is not None:
        check_fresh(transcript)
    resume = resume or extend
    run = _run_folder(job, folder, engine=engine, resume=resume, extend=extend)
    done = _done_before(job, run) if resume else None
    if done is not None:
        return done
    with ExitStack() as stack:
        stack.enter_context(wiring.torch_threads(job))
        clock = _clock(job, run, engine, clock)
        meters = StoreMeters(clock)
        live = stack.enter_context(_live_metrics(job, run))
        federation = wiring.build_federation(job, meters, data)
        if engine == "inproc":
            federation.pool.reserve(wiring.num_workers(job))
        # Before the folder is made: a promise that cannot be kept leaves nothing.
        simulation = _Simulation(
            federation,
            run,
            engine=engine,
            stop_requested=stop_requested,
            transcript=transcript,
            clock=clock,
            meters=meters,
            listeners=[*listeners, *live],
            show_failure=show_failure or _log_failure,
            report=report,
        )
        if run is not None:
            stack.enter_context(run.locked())
            _take_over(run, simulation, engine=engine, resume=resume)
            if extend:
                extension.record(job, run, clock)
        return simulation.run()


def _id_of(run: RunFolder | None, now: float) -> RunId:
    """The ID of a run that begins or goes on."""
    if run is None:
        return new_run_id(now, os.urandom(3))
    return run.run_id() or begun_run.begun_id(run) or run.new_run_id(now)


def _check_time(job: JobSpec, engine: str) -> None:
    """Refuse choices by real time, which would make each simulation another one."""
    if job.simulation.training == SURROGATE and engine != "virtual":
        raise JobError("needs --engine virtual", key="simulation.training")
    measuring = {
        "schedule.local_work": ("'fixed'", is_auto(job)),
        "schedule.allocation": ("'static'", is_by_capacity(job)),
        "data.placement": ("'static'", moves_data(job)),
        "schedule.grace": ("a number", job.schedule.grace == LEARNT),
    }
    for key, (instead, measures) in measuring.items():
        if measures and engine != "virtual":
            raise JobError(
                "measures sites and lines, which a simulation has in virtual time "
                f"only: use --engine virtual, or {instead}",
                key=key,
            )


def _live_metrics(
    job: JobSpec, run: RunFolder | None
) -> AbstractContextManager[Sequence[Emit]]:
    names = job.simulation.live_metrics
    if not names:
        return nullcontext(())
    if run is None:
        raise JobError(
            "needs a folder for the run: give simulate one, or a storage.url that "
            "keeps the run",
            key="simulation.live_metrics",
        )
    from monitoring.runs.trackers import live_metrics  # noqa: PLC0415 -- an extra

    return live_metrics(run, names)


def _take_over(
    run: RunFolder, simulation: "_Simulation", *, engine: str, resume: bool
) -> None:
    """Check a folder again: another process may have used it meanwhile."""
    _check_folder(run, engine=engine, resume=resume)
    if run.run_id() not in {None, simulation.run_id}:
        raise RunConflict(f"{run.path} was just started by another process")


def _clock(
    job: JobSpec, run: RunFolder | None, engine: str, given: Clock | None
) -> Clock:
    if engine == "virtual":
        return virtual_engine.clock(job, run)
    return SystemClock() if given is None else given


def _run_folder(
    job: JobSpec, folder: Path | None, *, engine: str, resume: bool, extend: bool
) -> RunFolder | None:
    """Find the run's folder, updated from its bucket, and check it."""
    run = None if folder is None else RunFolder(Path(folder))
    if resume and run is not None:
        run_store.fetch(job, run)
    _check_folder(run, engine=engine, resume=resume)
    if run is not None and extend:
        extension.check(job, run)
    elif run is not None and resume:
        # Before ledgers and checkpoints, which name fewer of the keys that differ.
        begun_run.check_job(run, job)
    return run


def _check_folder(run: RunFolder | None, *, engine: str, resume: bool) -> None:
    if run is None:
        if resume:
            raise RunNotFound(
                "there is nothing to resume: this run is not stored; give a folder"
            )
        return
    if resume and not run.exists():
        raise RunNotFound(
            f"there is no run in {run.path} to resume (no events.jsonl): omit --resume "
            "or --extend to start one"
        )
    if run.exists() and not resume:
        raise RunConflict(
            f"{run.path} already holds run {run.run_id() or '(not started)'}; add "
            "--resume to continue it, or choose another folder with --out"
        )
    begun_run.check_engine(run, engine)


def _log_failure(place: str, error: Exception) -> None:
    _LOG.error("%s:\n%s", place, last_frames(error))


def _done_before(job: JobSpec, run: RunFolder | None) -> RunResult | None:
    """The result of a finished run; None if rounds are left."""
    view = None if run is None else run.completed(job)
    if run is None or view is None:
        return None
    try:
        weights = model_export.read(run.model)
    except CorruptObject:
        return None  # It will be written again, from the last checkpoint.
    return result_of(view, weights, run, job=job, rounds_now=0)


def keeping(job: JobSpec, run: RunFolder | None, name: SiteId) -> LedgerContext:
    """What a simulated site remembers over the runs in the same folder."""
    (site,) = [site for site in job.sites if site.name == name]
    data = job.data if site.data is None else site.data
    dataset = "records" if data is None else unpinned(data.source)
    # Epsilons of different neighbours cannot be added: each kind is counted by itself.
    unit = job.privacy.differential_privacy.unit
    apart = {"person": " (by person)", "site": " (by site)"}.get(unit, "")
    return LedgerContext(
        memory=InMemory() if run is None else FileMemory(run.memory / name),
        budget=LifetimeBudget(
            dataset=dataset + apart,
            epsilon=job.simulation.total_epsilon,
            key="simulation.total_epsilon",
        ),
        is_anchor=False,
        lineage=_lineage(job, name),
    )


def _lineage(job: JobSpec, name: SiteId) -> str:
    """Name what a simulated site trains on: all that determines the split."""
    document = job_file.document(job)
    dealt = {key: document.get(key) for key in ("data", "sites", "seed")}
    return lineage(dataset=name, options=dealt)


class _Simulation:
    """One call of ``simulate``, once its arguments are checked."""

    def __init__(
        self,
        federation: Federation,
        run: RunFolder | None,
        *,
        engine: str,
        stop_requested: Callable[[], bool],
        transcript: Path | None,
        clock: Clock,
        meters: StoreMeters,
        listeners: Sequence[Emit],
        show_failure: Callable[[str, Exception], None],
        report: bool,
    ) -> None:
        self._first = FirstFailure(show_failure)
        self._job = federation.job
        self._transcript = transcript
        self._run = run
        self._engine = engine
        self._stop_requested = stop_requested
        self._clock = clock
        # Sites share this process; and two runs in virtual time have the same events.
        self._meter = CLOCK if isinstance(clock, VirtualClock) else THREAD
        self._clocks: Mapping[SiteId, VirtualClock] = {}  # Only in virtual time.
        self._speeds = virtual_engine.speeds_of(self._job)
        self._is_over = threading.Event()
        federation = replace(federation, ends_early=self._is_over.is_set)
        self._make_trainer = virtual_engine.trainers(federation)
        self._federation = federation
        now = self._clock.now()
        if run is None or not run.exists():
            initial_weights(self._job, federation.pool)  # Before anything is written.
        self._run_id = _id_of(run, now)
        self._private: PrivateSites | None = None
        if self._job.privacy.differential_privacy.enabled:
            self._private = PrivateSites(
                federation,
                run_id=self._run_id,
                folder=None if run is None else run.path,
                clock=self._clock,
                keeping=partial(keeping, self._job, run),
            )
        self._rehearsal: Rehearsal | None = None
        if self._job.privacy.secure_aggregation.enabled:
            self._rehearsal = rehearse(federation, self._run_id, self._private)
        self._record = RunRecord(
            self._job,
            run,
            self._run_id,
            pool=federation.pool,
            clock=clock,
            meters=meters,
            introduce=self._facts,
            conclude=self._paid,
            listeners=listeners,
            report=report,
        )

    @property
    def run_id(self) -> RunId:
        """The run."""
        return self._run_id

    def run(self) -> RunResult:
        """Run the federation and write its files."""
        with ExitStack() as stack:
            if self._private is not None:
                stack.enter_context(self._private)
            try:
                return self._record.keep(self._drive)
            except QuorumNotMet as error:
                # Beside events and files: those may not hold what user code said.
                first = self._first.error
                if first is None:
                    raise
                said = sentence(origin(first))
                more = "" if said in str(error) else f"; the first failure: {said}"
                raise QuorumNotMet(f"{error}{more}") from first

    def _facts(self) -> Iterator[Event]:
        yield wiring.data_distributed(self._federation, at=self._clock.now())
        trained = [train for train, _ in self._federation.site_data.values()]
        notes = {note_on_persons(self._job, train) for train in trained}
        surrogate = self._job.simulation.training == SURROGATE
        notes |= {NOTICE} if surrogate else set()
        notes.add(cohort_notice(self._job, self._asked_before()))
        notes.add(statistics_notice(self._job))
        for text in (dropout_notice(self._job), notice(self._job), *sorted(notes)):
            if text:
                yield Warned(at=self._clock.now(), message=text)
        if self._private is not None:
            yield self._private.planned(at=self._clock.now())
        virtual = isinstance(self._clock, VirtualClock)
        contract = None if self._rehearsal is None else self._rehearsal.contract
        traffic = traffic_of(self._federation, contract, measured=not virtual)
        if traffic is not None:
            yield predicted(traffic, at=self._clock.now(), virtual=virtual)

    def _paid(self, view: RunView) -> Iterator[Event]:
        if isinstance(self._clock, VirtualClock):
            yield from virtual_engine.sites_paid(self._job, view, at=self._clock.now())

    def _asked_before(self) -> Iterator[JobSpec]:
        """Jobs of the other runs of statistics in the folder of all runs."""
        if self._job.statistics is None or self._run is None:
            return
        root = self._run.path.resolve().parent
        root = root.parent if root.name == self._job.name else root
        for run in find_runs(root):
            with suppress(FederationError):  # Of another version, perhaps.
                if run.statistics.is_file():
                    yield job_file.loads(run.read_job())

    def _drive(self) -> RunState:
        """Run the round loop over the chosen engine."""
        run = Run(
            federation=self._federation,
            run_id=self._run_id,
            clock=self._clock,
            store=self._record.store,
            emit=self._record.emit,
            stop_requested=self._stop_requested,
            transcript=self._transcript,
            meter=self._meter,
            extensions=[] if self._run is None else self._run.extensions(),
            newest_saved=None if self._run is None else self._run.newest_saved(),
        )
        if self._private is not None:
            noted = {} if self._run is None else self._run.anchors()
            self._private.expect(join_anchors(run.checkpoints().anchors(), noted))
        secret = None if self._rehearsal is None else self._rehearsal.secret
        return run.drive(self._sites(), secret=secret)

    def _sites(self) -> SiteSource:
        """Where the sites are: the chosen engine."""
        if self._engine == "flower":
            from deploy.wiring.flower_engine import FlowerSimulation  # noqa: PLC0415 -- an optional extra

            return FlowerSimulation(
                job=self._job,
                layout=self._federation.pool.layout,
                folder=None if self._run is None else self._run.path,
                clock=self._clock,
            )
        if isinstance(self._clock, VirtualClock):
            self._clocks = {
                SiteId(site.name): VirtualClock(self._clock.now())
                for site in self._job.sites
            }
            return virtual_engine.VirtualMachines(
                job=self._job,
                make=self._site,
                clock=self._clock,
                clocks=self._clocks,
                speeds=self._speeds,
                emit=self._record.emit,
            )
        return InProcess(
            job=self._job,
            sites=[SiteId(site.name) for site in self._job.sites],
            make=self._site,
            clock=self._clock,
            faults=self._job.simulation.faults,
            end_early=self._is_over.set,
        )

    def _site(self, name: SiteId) -> SiteHandler:
        trainer, store = self._trainer(name), self._record.store_of(name)
        folder = None if self._run is None else self._run.path
        seal = None if self._rehearsal is None else self._rehearsal.seal(name, folder)
        return self._federation.site(
            name,
            make_trainer=trainer,
            store=store,
            clock=self._clock_of(name),
            meter=self._meter,
            seal=seal,
            tells_all=seal is None and self._private is None,
            report=self._first,
        )

    def _clock_of(self, name: SiteId) -> Clock:
        return self._clocks.get(name, self._clock)

    def _trainer(self, name: SiteId) -> Callable[[], Trainer]:
        if self._private is None:
            return lambda: self._timed(name, self._make_trainer(name))
        # First: what is wrong with a ledger must show before the run begins.
        trainer = self._timed(name, self._private.trainer(name))
        return lambda: trainer

    def _timed(self, name: SiteId, trainer: Trainer) -> Trainer:
        clock = self._clocks.get(name)
        if clock is None:
            return trainer
        return virtual_engine.timed(
            self._federation, name, trainer, clock, self._speeds[name]
        )

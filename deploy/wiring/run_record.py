"""A run's files: its events as they happen, and at its end model and result."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace

from aggregator import model_export
from clients.models.model_pool import ModelPool
from cloud_adapters.local.process_end import ProcessEnded
from cloud_adapters.storage.memory import MemoryStore
from deploy.wiring import run_store
from deploy.wiring.store_meters import StoreMeters
from federation.durable_files import replace_file
from federation.errors import FederationError
from federation.event_log import EventWriter
from federation.events import (
    CheckpointSaved,
    Emit,
    Event,
    RoundFinished,
    RunFinished,
    RunStarted,
)
from federation.ids import RunId, SiteId
from federation.job.disclosure import Exposure, conceal
from federation.job.spec import JobSpec
from federation.protocols import Clock, ObjectStore, RunState
from monitoring.runs.numbers_reader import NumbersReader
from monitoring.runs.run_folder import RunFolder, leave_report
from monitoring.runs.run_reader import RunReader
from monitoring.runs.run_result import RunResult, found_statistics, result_of
from monitoring.views.result_json import result
from monitoring.views.run_view import COMPLETED, EXHAUSTED, INTERRUPTED, RunView

# What ends a coordinator that a person or a supervisor has asked to end.
_ENDED = (KeyboardInterrupt, SystemExit)


@dataclass(eq=False)
class RunRecord:
    """Records a run, in a folder and a bucket, or only in memory.

    Nothing is written before it begins.

    Attributes:
        run: The run's folder; None to keep everything in memory.
        pool: Holds the model: its layout, and what of it is frozen.
        clock: Tells time.
        meters: Meters of every store of the run.
        introduce: Makes the events about data and promises, once the run has
            begun.
        listeners: Called with every event after it has been noted.
        conclude: Makes what is noted of the whole run before its end, from its view.
        goes_on: Whether another coordinator continues the run after an error.
        report: Whether to write ``report.html`` in the run's folder at the end.
        store: Holds checkpoints, and in a simulation what sites keep.
    """

    job: JobSpec
    run: RunFolder | None
    run_id: RunId
    _: KW_ONLY
    pool: ModelPool
    clock: Clock
    meters: StoreMeters
    introduce: Callable[[], Iterable[Event]]
    listeners: Sequence[Emit] = ()
    conclude: Callable[[RunView], Iterable[Event]] = lambda _view: ()
    goes_on: Callable[[BaseException], bool] = lambda _error: False
    report: bool = True

    def __post_init__(self) -> None:
        """Find the places that it writes to."""
        self._setting = Exposure.of(self.job, deployed=True)
        self._start = self.clock.monotonic()
        self._reader = RunReader(None if self.run is None else self.run.events)
        # What takes note of events first; those who only look on come after it.
        self._records: list[Emit] = [self._reader.take]
        self._copies: run_store.Copies | None = None
        self._place: run_store.RunPlace | None = None
        self._first_round: int | None = None
        self.store: ObjectStore = MemoryStore()
        if self.run is not None:
            self._place = run_store.RunPlace(
                self.job, self.run, self.run_id, self.meters
            )
            self.store = self._place.store
            if run_store.in_bucket(self.job):
                self._copies = run_store.Copies(self.run, self.store)
                self._records.append(self._copies.listen)

    def store_of(self, name: SiteId) -> ObjectStore:
        """Where a simulated site keeps what never leaves it."""
        return self.store if self._place is None else self._place.store_of(name)

    def keep(self, drive: Callable[[], RunState]) -> RunResult:
        """Drive a run to its end and write its files, also if it fails."""
        with contextlib.closing(self.store):
            with self._open():
                try:
                    state = drive()
                except BaseException as error:
                    self._leave_failure(error)
                    raise
            return self._leave(state)

    @contextmanager
    def _open(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.run is not None:
                log = stack.enter_context(EventWriter(self.run.events))
                self._reader.look()
                if self._reader.tail.damaged:
                    self.run.read_events()  # Says where.
                self._records.insert(0, log)
                numbers = NumbersReader(self.run.events)
                if numbers.is_near_the_end:  # Or a monitor reads it: no run waits.
                    numbers.look()
                    self._records.insert(1, numbers.take)
            yield

    def emit(self, event: Event) -> None:
        """Record an event, without what it must not reveal."""
        if isinstance(event, RunStarted):
            self._setting = Exposure.of(self.job, deployed=event.engine == "deployed")
        event = conceal(event, self._setting)
        if isinstance(event, RoundFinished):
            # The site that has spent most need not be among those that answered.
            event = replace(event, epsilon=self._reader.fold.most_spent(event.epsilon))
        if isinstance(event, RunFinished):  # It is the last one.
            self._conclude()
            if self.run is not None and event.status in {COMPLETED, EXHAUSTED}:
                self.run.forget_model()
        for listener in (*self._records, *self.listeners):
            listener(event)
        if isinstance(event, RunStarted):
            self._begin(event)
        if isinstance(event, CheckpointSaved):
            self._tell_use()

    def _conclude(self) -> None:
        self._tell_use()
        for last in self.conclude(self._reader.fold.view()):
            self.emit(last)

    def _tell_use(self) -> None:
        for used in self.meters.used():
            self.emit(used)

    def _begin(self, event: RunStarted) -> None:
        """From here on the run is this coordinator's: write what describes it."""
        self._first_round = event.first_round
        if self.run is not None:
            self.run.write_job(self.job)
            self.run.flush_events()
        if self._place is not None:
            self._place.try_out()
        if self._copies is not None:
            self._copies.begin()
        for fact in self.introduce():
            self.emit(fact)

    def _leave(self, state: RunState) -> RunResult:
        """Write a run's files, the most important first."""
        view = self._reader.fold.view()
        layout = self.pool.layout
        left, frozen = state.with_model_left(), self.pool.frozen_arrays()
        weights = model_export.named_arrays(layout, left, frozen)
        if self.run is not None:
            if view.status in {COMPLETED, EXHAUSTED}:
                replace_file(self.run.model, model_export.file_pieces(layout, weights))
            if found := found_statistics(self.job, weights, view):
                self.run.write_statistics(found)
            self.run.write_result(result(view))
            if self.report:
                leave_report(self.run, view=view)
        if self._copies is not None:
            self._copies.leave()
        first = self._first_round or 1
        rounds_now = sum(row.index >= first for row in view.totals.rows)
        return result_of(view, weights, self.run, job=self.job, rounds_now=rounds_now)

    def _leave_failure(self, error: BaseException) -> None:
        """Write what is known about a run that ends early.

        What cannot be written is left out: ``error`` is what a person must see.
        """
        if self._first_round is None:
            return
        with contextlib.suppress(FederationError):
            if self._reader.fold.finished is None:
                self._note_end(error)
        if self.run is None:
            return
        with contextlib.suppress(FederationError):
            self.run.write_result(result(self._reader.fold.view()))
            # Drawing takes seconds, and an interrupted person waits.
            if self.report and not isinstance(error, _ENDED):
                leave_report(self.run)
            if self._copies is not None:
                self._copies.leave()

    def _status_after(self, error: BaseException) -> str:
        if self.goes_on(error):
            return INTERRUPTED
        return "stopped" if isinstance(error, _ENDED) else "failed"

    def _note_end(self, error: BaseException) -> None:
        """Record an end that the round loop did not foresee."""
        view = self._reader.fold.view()
        event = RunFinished(
            at=self.clock.now(),
            status=self._status_after(error),
            rounds_completed=view.rounds_completed,
            last_round=view.rounds[-1].index if view.rounds else 0,
            message=_reason(error),
            seconds=self.clock.monotonic() - self._start,
        )
        ends = [*self.meters.used(), *self.conclude(view), event]
        for last in ends:
            for record in reversed(self._records):
                record(last)


def _reason(error: BaseException) -> str:
    if isinstance(error, ProcessEnded):
        return error.why
    return f"{type(error).__name__}: {error}"

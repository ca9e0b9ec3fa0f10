"""Metrics of a run for TensorBoard and MLflow, read from its events.

``events.jsonl`` holds only what ``federation.job.disclosure`` allows, and nothing else
is read here. Both packages are optional and are imported when they are used.
"""

import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cloud_adapters.extras import naming_extras
from federation import folder_lock
from federation.errors import FederationError, StoreUnavailable, os_errors
from federation.events import (
    CheckpointSaved,
    Emit,
    Event,
    PrivacyPlanned,
    RoundEvent,
    RunExtended,
    RunFinished,
    RunStarted,
)
from federation.protocols import Clock
from monitoring.runs.event_tail import EventTail
from monitoring.runs.run_folder import RunFolder
from monitoring.views.result_json import history
from monitoring.views.round_view import accuracy_of, loss_of, metrics_of
from monitoring.views.run_fold import fold
from monitoring.views.run_view import INTERRUPTED, RunView

LOOK_SECONDS = 1.0
_RUNNING = {"running", INTERRUPTED}
# Events that are not of a round, and decide about points.
_WHOLE_RUN = (RunStarted, RunExtended, PrivacyPlanned, RunFinished)
_KEPT_ROUNDS = 4  # Behind the newest final one: of these, a resumed run measures some.
_BATCH = 1000  # Most metrics that an MLflow server takes in one request.
_SUFFIX = ".crossfed"  # Only files with this ending are ours to remove.
_ENDS = {"completed": "FINISHED", "exhausted": "FINISHED", "stopped": "KILLED"}


class MetricStep(NamedTuple):
    """The place of a value: one metric after one round."""

    name: str
    step: int


class Point(NamedTuple):
    """A value, and when it was measured, in milliseconds since the epoch."""

    value: float
    at_ms: int


Points = Mapping[MetricStep, Point]


class Tracker(Protocol):
    """A destination of metrics."""

    def written(self) -> Points:
        """What an earlier export has written and this one keeps."""
        ...

    def restart(self) -> None:
        """Discard everything written before."""
        ...

    def write(self, points: Points, status: str) -> None:
        """Add points.

        Args:
            points: None of them was written before.
            status: The run's, as in ``RunView.status``.
        """
        ...

    def close(self) -> None:
        """Close open files and connections."""
        ...


def points_of(view: RunView, last: float = math.inf) -> Points:
    """Every number that a run's events state by round.

    Names are those of the columns of ``history``; a site's own numbers are
    ``sites/NAME/...``. Values that are not finite are left out, and those that can
    still change: while a run continues, what came after the checkpoint before the last.

    Args:
        view: The run.
        last: Leave out later rounds.
    """
    if view.status in _RUNNING:
        saved = max((saved.round_index for saved in view.checkpoints), default=0)
        last = min(last, saved - 1)
    when = {row.index: row.finished.at for row in view.rounds if row.finished}
    series: dict[str, list[tuple[int, Any]]] = {}
    for row in history(view):
        for name, value in row.items():
            series.setdefault(name, []).append((row["round"], value))
    series.pop("round", None)
    if view.initial is not None:
        when[0], sums = view.initial.at, view.initial.pooled
        first = {"loss": loss_of(sums), "accuracy": accuracy_of(sums)}
        for name, value in {**first, **metrics_of(sums)}.items():
            series.setdefault(name, []).append((0, value))
    for site in view.sites:
        for name in ("training_loss", "loss", "accuracy", "epsilon"):
            series[f"sites/{site.site}/{name}"] = list(getattr(site, name))
    return {
        MetricStep(name, step): Point(float(value), round(1000 * when[step]))
        for name, values in series.items()
        for step, value in values
        if isinstance(value, int | float)
        and math.isfinite(value)
        and step in when
        and step <= last
    }


@dataclass(slots=True)
class TensorBoardFiles:
    """Event files in a folder of the run. Each export rewrites them.

    Attributes:
        folder: For ``tensorboard --logdir``.
    """

    folder: Path
    _writer: Any = None

    def written(self) -> Points:
        """Return nothing: old files are removed, since a killed export may tear one."""
        self.restart()
        return {}

    def restart(self) -> None:
        """Begin a new file, and remove those of earlier exports."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 -- an extra

        with os_errors(StoreUnavailable, f"write to {self.folder}"):
            self.close()
            for old in self.folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
                old.unlink()
            # With purge_step a TensorBoard that is open forgets the removed points.
            self._writer = SummaryWriter(
                str(self.folder), purge_step=0, filename_suffix=_SUFFIX
            )

    def write(self, points: Points, _: str) -> None:
        """Append points to the file."""
        with os_errors(StoreUnavailable, f"write to {self.folder}"):
            for place, point in points.items():
                seconds = point.at_ms / 1000
                self._writer.add_scalar(
                    place.name, point.value, place.step, walltime=seconds
                )
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


@dataclass(slots=True)
class MlflowRun:
    """A run of MLflow, in an experiment with the job's name.

    The tag ``crossfed.run`` finds it again. MLflow cannot remove points, so a restart
    deletes the MLflow run (``mlflow gc`` empties that trash) and creates another.

    Attributes:
        job_name: Names the experiment.
        run_id: Names the run.
        started_at: Start of the run, in seconds since the epoch.
    """

    job_name: str
    run_id: str
    started_at: float
    _client: Any = None
    _run: Any = None
    _experiment: str = ""

    def written(self) -> Points:
        """The points that earlier exports have logged."""
        from mlflow import MlflowClient  # noqa: PLC0415 -- an extra

        with _mlflow_errors():
            self._client = client = MlflowClient()
            found = client.get_experiment_by_name(self.job_name)
            self._experiment = (
                found.experiment_id
                if found is not None
                else client.create_experiment(self.job_name)
            )
            query = f"tags.`crossfed.run` = '{self.run_id}'"
            runs = client.search_runs([self._experiment], query, max_results=1)
            if not runs:
                self._create()
                return {}
            self._run = runs[0].info.run_id
            return {
                MetricStep(name, each.step): Point(each.value, each.timestamp)
                for name in runs[0].data.metrics
                for each in client.get_metric_history(self._run, name)
            }

    def restart(self) -> None:
        """Delete the MLflow run and create another."""
        with _mlflow_errors():
            self._client.delete_run(self._run)
            self._create()

    def write(self, points: Points, status: str) -> None:
        """Log points, and whether the run has ended."""
        from mlflow.entities import Metric  # noqa: PLC0415 -- an extra

        found = [Metric(p.name, v.value, v.at_ms, p.step) for p, v in points.items()]
        with _mlflow_errors():
            for begin in range(0, len(found), _BATCH):
                batch = found[begin : begin + _BATCH]
                self._client.log_batch(self._run, metrics=batch)
            if status in _RUNNING:
                self._client.update_run(self._run, status="RUNNING")
            else:
                self._client.set_terminated(self._run, _ENDS.get(status, "FAILED"))

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _create(self) -> None:
        run = self._client.create_run(
            self._experiment,
            start_time=round(1000 * self.started_at),
            tags={"crossfed.run": self.run_id},
            run_name=self.run_id,
        )
        self._run = run.info.run_id


@contextmanager
def _mlflow_errors() -> Iterator[None]:
    from mlflow.exceptions import MlflowException  # noqa: PLC0415 -- an extra

    try:
        yield
    except (MlflowException, OSError) as error:
        raise StoreUnavailable(f"MLflow: {error}") from error


def tracker_of(name: str, run: RunFolder, view: RunView) -> Tracker:
    """Where a run's metrics go: a folder of the run, or an MLflow run."""
    if name == "tensorboard":
        return TensorBoardFiles(run.path / name)
    started = view.started
    return MlflowRun(started.job_name, started.run_id, view.first_started_at)


@contextmanager
def exporting_alone(run: RunFolder, name: str) -> Iterator[None]:
    """Hold the lock of a run's metrics for one tracker during a block.

    Raises:
        FederationError: Another process exports them.
    """
    complaint = f"another process exports {run.path} to {name}"
    with folder_lock.hold(run.path / f".{name}.lock", complaint):
        yield


def export_metrics(
    run: RunFolder,
    name: str,
    *,
    follow: bool,
    clock: Clock,
    tell: Callable[[str], None],
) -> int:
    """Write each metric of a run once, even if this is repeated or killed.

    Args:
        run: Folder of a run, which may still be running.
        name: ``tensorboard`` or ``mlflow``.
        follow: Go on until the run ends.
        clock: Tells how long to wait.
        tell: Called with what a person should know.

    Returns:
        The number of points that are there now.

    Raises:
        MissingExtra: The package is not installed.
        FederationError: Another process exports this run.
        RunNotFound: No run has begun in the folder.
        StoreUnavailable: Events cannot be read, or metrics cannot be written.
    """
    tracker = tracker_of(name, run, run.settled_view())
    with exporting_alone(run, name), closing(tracker):
        with naming_extras():
            export = Export(run, tracker)
        is_alone = False
        while True:
            export.look()
            if not follow or export.status not in _RUNNING:
                return export.count
            if not (is_alone or run.is_locked()):
                tell(f"no process works on {run.path}: waiting until it is resumed")
            is_alone = not run.is_locked()
            clock.sleep(LOOK_SECONDS)


class FinalPoints:
    """Makes points of a run's events, of which it holds those of the last rounds.

    Attributes:
        status: The run's, as in ``RunView.status``.
        has_changed: Whether points that were taken have changed, or have gone.
    """

    def __init__(self, first_rounds: Sequence[int] = ()) -> None:
        """Begin before the first event.

        Args:
            first_rounds: With which rounds coordinators begin, as far as that is known:
                what a later one measures again is left to it.
        """
        self.status, self.has_changed = "running", False
        self._coming, self._forgotten = [*first_rounds], -1
        self._events: list[Event] = []
        self._taken: dict[MetricStep, Point] = {}

    def add(self, event: Event) -> None:
        """Add the next event."""
        if isinstance(event, RunStarted):
            self._coming = self._coming[1:]
        is_wanted = isinstance(event, _WHOLE_RUN) or (
            isinstance(event, RoundEvent) and event.round_index > self._forgotten
        )
        if is_wanted and (self._events or isinstance(event, RunStarted)):
            self._events.append(event)

    def take(self) -> Points:
        """Return the points that have become final since."""
        if not self._events:
            return {}
        view = fold(self._events)
        self.status = view.status
        found = points_of(view, min(self._coming, default=math.inf) - 2)
        self.has_changed |= any(
            found.get(p) != known for p, known in self._taken.items()
        )
        new = {
            place: point
            for place, point in found.items()
            if place not in self._taken and place.step > self._forgotten
        }
        newest = max((place.step for place in found), default=0)
        self._forget(newest - _KEPT_ROUNDS, {**self._taken, **new})
        return new

    def _forget(self, last: int, taken: Points) -> None:
        self._forgotten = max(self._forgotten, last)
        self._taken = {p: v for p, v in taken.items() if p.step > self._forgotten}
        self._events = [
            event
            for event in self._events
            if not isinstance(event, RoundEvent) or event.round_index > self._forgotten
        ]


class Export:
    """Brings a tracker up to date with the log of a run.

    Attributes:
        count: Points that are there.
        status: The run's, as in ``RunView.status``.
    """

    def __init__(self, run: RunFolder, tracker: Tracker) -> None:
        """Begin with what an earlier export has written."""
        self.count, self.status = 0, ""
        self._run, self._tracker = run, tracker
        self._before = dict(tracker.written())
        self._known: Sequence[int] = ()
        self._begin()

    def _begin(self) -> None:
        self._tail, self._points = EventTail(self._run.events), FinalPoints(self._known)
        self._new: dict[MetricStep, Point] = {}  # That are not written yet.

    def look(self) -> None:
        """Write what has become final since.

        Raises:
            CorruptObject: The log is damaged.
            StoreUnavailable: It cannot be read, or the tracker is not there.
        """
        with os_errors(StoreUnavailable, f"read {self._run.events}"):
            while not self._has_looked():
                self._known = self._tail.first_rounds()
                self._tracker.restart()
                self._before, self.count = {}, 0
                self._begin()
        if self._tail.is_gone:
            raise StoreUnavailable(f"{self._run.events} was deleted")
        if self._tail.damaged:
            self._run.read_events()  # Says where.

    def _has_looked(self) -> bool:
        """Look; false if all that was written is to be written anew."""
        events, is_first = self._tail.news(), self.status == ""
        if self._tail.is_anew and self.count:
            return False  # Another log has taken the place of the one before.
        for event in events:
            self._points.add(event)
            if isinstance(event, CheckpointSaved) and not self._take():
                return False
            if len(self._new) >= _BATCH:
                self._write()
        # What an earlier export has written may be what the run does not have any more.
        if not self._take() or (is_first and self._before):
            return False
        if self._new or self.status != self._points.status:
            self._write()
        return True

    def _take(self) -> bool:
        """Take the points that are final; false if others of them were written."""
        new = self._points.take()
        known = {p: self._before.pop(p) for p in new if p in self._before}
        is_wrong = any(new[place] != point for place, point in known.items())
        is_wrong |= self._points.has_changed and self._is_resumed()
        self._points.has_changed = False
        self.count += len(new)
        self._new |= {
            place: point for place, point in new.items() if place not in known
        }
        return not is_wrong

    def _write(self) -> None:
        self.status = self._points.status
        self._tracker.write(self._new, self.status)
        self._new = {}

    def _is_resumed(self) -> bool:
        return [*self._known] != self._tail.first_rounds()


_LOG = logging.getLogger(__name__)
_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow"}


@contextmanager
def live_metrics(run: RunFolder, names: Sequence[str]) -> Iterator[list[Emit]]:
    """Listeners that write a run's metrics while the block runs, and at its end.

    Args:
        run: The run; its events are in its file before a listener is called.
        names: ``tensorboard``, ``mlflow``.

    Raises:
        MissingExtra: A package is not installed.
    """
    with ExitStack() as stack:
        for name in names:
            with naming_extras():
                importlib.import_module(_PACKAGES[name])
        exports = [_LiveExport(run, name) for name in names]
        for export in exports:
            stack.callback(export.end)
        yield list(exports)


@dataclass(eq=False)
class _LiveExport:
    """Writes metrics to one place.

    Attributes:
        name: The place.
    """

    run: RunFolder
    name: str
    _stack: ExitStack = field(default_factory=ExitStack)
    _export: Export | None = None

    def __call__(self, event: Event) -> None:
        """Write after a checkpoint."""
        if isinstance(event, RunStarted):
            self._attempt(self._begin)
        elif isinstance(event, CheckpointSaved) and self._export is not None:
            self._attempt(self._export.look)

    def end(self) -> None:
        """Write what came last, also where the run ended with an error."""
        with self._stack:
            if self._export is not None:
                self._attempt(self._export.look)

    def _begin(self) -> None:
        self._stack.enter_context(exporting_alone(self.run, self.name))
        tracker = tracker_of(self.name, self.run, self.run.settled_view())
        self._stack.enter_context(closing(tracker))
        self._export = Export(self.run, tracker)

    def _attempt(self, step: Callable[[], None]) -> None:
        """Take a step; where it fails, log why and write no more."""
        try:
            step()
        except FederationError as error:
            self._export = None
            _LOG.warning(
                "simulation.live_metrics: %s; the run continues, and crossfed "
                "export-metrics %s --to %s can write its metrics later",
                error,
                self.run.path,
                self.name,
            )

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
from federation.events import CheckpointSaved, Emit, Event, RunStarted
from federation.protocols import Clock
from monitoring.runs.run_folder import RunFolder
from monitoring.views.result_json import history
from monitoring.views.round_view import accuracy_of, loss_of, metrics_of
from monitoring.views.run_fold import RunFold
from monitoring.views.run_view import INTERRUPTED, RunView

LOOK_SECONDS = 1.0
_RUNNING = {"running", INTERRUPTED}
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


def points_of(view: RunView) -> Points:
    """Every number that a run's events state by round.

    Names are those of the columns of ``history``; a site's own numbers are
    ``sites/NAME/...``. Values that are not finite are left out, and those that can
    still change: while a run continues, what came after the checkpoint before the last.
    """
    last = math.inf
    if view.status in _RUNNING:
        last = max((saved.round_index for saved in view.checkpoints), default=0) - 1
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
    view = run.view()
    tracker = tracker_of(name, run, view)
    with exporting_alone(run, name), closing(tracker):
        with naming_extras():
            written = dict(tracker.written())
        size, is_alone = -1, False
        while True:
            with os_errors(StoreUnavailable, f"read {run.events}"):
                before, size = size, run.events.stat().st_size
            if size != before:
                view = run.view()
                written = bring_up_to_date(tracker, written, view)
            if not follow or view.status not in _RUNNING:
                return len(written)
            if not (is_alone or run.is_locked()):
                tell(f"no process works on {run.path}: waiting until it is resumed")
            is_alone = not run.is_locked()
            clock.sleep(LOOK_SECONDS)


def bring_up_to_date(
    tracker: Tracker, written: Points, view: RunView
) -> dict[MetricStep, Point]:
    """Write new points; all of them if a resumed run has measured some again."""
    points = points_of(view)
    if any(points.get(place) != point for place, point in written.items()):
        tracker.restart()
        written = {}
    new = {place: p for place, p in points.items() if place not in written}
    tracker.write(new, view.status)
    return dict(points)


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
    _fold: RunFold = field(default_factory=RunFold)
    _stack: ExitStack = field(default_factory=ExitStack)
    _tracker: Tracker | None = None
    _written: Points = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        """Take note of an event, and write after a checkpoint."""
        if isinstance(event, RunStarted):
            self._attempt(self._begin)
            return
        self._fold.add(event)
        if isinstance(event, CheckpointSaved) and self._tracker is not None:
            self._attempt(lambda: self._write(self._fold.view()))

    def end(self) -> None:
        """Write what came last, also where the run ended with an error."""
        with self._stack:
            if self._tracker is not None:
                self._attempt(lambda: self._write(self.run.view()))

    def _begin(self) -> None:
        for event in self.run.read_events():  # Of a resumed run, the earlier ones too.
            self._fold.add(event)
        self._stack.enter_context(exporting_alone(self.run, self.name))
        tracker = tracker_of(self.name, self.run, self._fold.view())
        self._stack.enter_context(closing(tracker))
        self._written = tracker.written()
        self._tracker = tracker

    def _write(self, view: RunView) -> None:
        if self._tracker is not None:
            self._written = bring_up_to_date(self._tracker, dict(self._written), view)

    def _attempt(self, step: Callable[[], None]) -> None:
        """Take a step; where it fails, log why and write no more."""
        try:
            step()
        except FederationError as error:
            self._tracker = None
            _LOG.warning(
                "simulation.live_metrics: %s; the run continues, and crossfed "
                "export-metrics %s --to %s can write its metrics later",
                error,
                self.run.path,
                self.name,
            )

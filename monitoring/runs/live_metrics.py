"""A run that writes its own metrics for TensorBoard and MLflow, after each checkpoint.

``simulation.live_metrics`` asks for it. What fails here never ends a run:
``crossfed export-metrics`` writes what is missing.
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

from cloud_adapters.extras import naming_extras
from federation.errors import FederationError
from federation.events import CheckpointSaved, Emit, Event, RunStarted
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.trackers import (
    Points,
    Tracker,
    bring_up_to_date,
    exporting_alone,
    tracker_of,
)
from monitoring.views.run_fold import RunFold
from monitoring.views.run_view import RunView

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

"""One trial of a search: a run on this machine, and what the study keeps of it."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clients.user_code import sentence
from deploy.tuning import ledger_marks
from deploy.tuning.selection_checks import check_sound
from deploy.tuning.space import Choice, Space
from deploy.tuning.spending import may_have_spent
from deploy.wiring import simulation
from federation.errors import (
    FederationError,
    JobError,
    RunConflict,
    StoreUnavailable,
    os_errors,
)
from federation.events import Event, ModelEvaluated, RunFinished
from monitoring.runs.run_folder import RunFolder
from monitoring.views.result_json import history
from monitoring.views.run_fold import RunFold

if TYPE_CHECKING:
    import optuna

    from monitoring.runs.run_result import RunResult

TRIALS = "trials"
REASON = "reason"  # Why a trial failed: of the trial, in the study.


def folder_of(folder: Path, number: int) -> Path:
    """Folder of a trial's run, in that of the search; people count from 1."""
    return folder / TRIALS / f"{number + 1:04d}"


def run_trial(
    space: Space,
    folder: Path,
    trial: "optuna.Trial",
    values: Mapping[str, Choice],
    stop_requested: Callable[[], bool] = lambda: False,
) -> None:
    """Run one trial to its end, or resume it, and record what came of it.

    A trial that was asked to stop stays open, to be resumed.

    Raises:
        JobError: With private selection, if the values do not fit the job. An error of
            the run is a result: it may depend on the records, and ends the trial alone.
        FederationError: See ``make_ready``.
    """
    import optuna  # noqa: PLC0415 -- an extra

    spec, own, states = (
        space.spec,
        folder_of(folder, trial.number),
        optuna.trial.TrialState,
    )
    make_ready(RunFolder(own))
    watch = _TrialWatch(trial, spec.metric, own)
    if spec.privacy.selection:
        check_sound(space, trial.number, values)
    try:
        with watch.marking_ledgers():
            result = simulation.simulate(
                space.job(values),
                folder=own,
                resume=RunFolder(own).exists(),
                engine=spec.engine,
                listeners=[watch],
                stop_requested=lambda: stop_requested() or watch.ends_early(),
                report=False,
            )
        value = _value(result, spec.metric)
    except FederationError as error:
        trial.set_user_attr(REASON, sentence(error))
        trial.study.tell(trial, state=states.FAIL)
        return
    if result.status == "stopped" and not watch.is_pruned:
        return
    if value is None or not math.isfinite(value):
        trial.set_user_attr(REASON, f"its last model has no {spec.metric}")
        trial.study.tell(trial, state=states.FAIL)
    elif watch.is_pruned and result.status == "stopped":
        trial.study.tell(trial, state=states.PRUNED)
    else:
        trial.study.tell(trial, value)


def make_ready(run: RunFolder) -> None:
    """Remove what a process has left that was killed before its run started.

    Its ledgers hold no charge, but name that run, so they would refuse another one.

    Raises:
        RunConflict: A worker of a search that was killed still works on the trial.
        StoreUnavailable: What is left cannot be removed.
    """
    if run.is_locked():
        raise RunConflict(
            f"another process works on {run.path}, perhaps a worker of a search that "
            "was killed: wait until it ends, and start the search again"
        )
    if run.path.is_dir() and run.run_id() is None and not may_have_spent(run.path):
        with os_errors(StoreUnavailable, f"remove {run.path}"):
            shutil.rmtree(run.path)


class _TrialWatch:
    """Reports each round to the study: its metric, and how far ledgers have come."""

    def __init__(self, trial: "optuna.Trial", metric: str, folder: Path) -> None:
        self._trial, self._metric, self._folder = trial, metric, folder
        self._marks = ledger_marks.parse(trial.user_attrs)
        self._fold, self._told = RunFold(), 0
        self.is_pruned = False

    def __call__(self, event: Event) -> None:
        self._fold.add(event)
        if not isinstance(event, ModelEvaluated | RunFinished):
            return
        self._mark_ledgers()
        for row in history(self._fold.view()):
            value = row.get(self._metric)
            if row["round"] > self._told and value is not None:
                self._told = row["round"]
                if math.isfinite(value):
                    self._trial.report(value, self._told)

    @contextmanager
    def marking_ledgers(self) -> Iterator[None]:
        """Mark what a trial has spent at its end, however it ends."""
        try:
            yield
        finally:
            self._mark_ledgers()

    def _mark_ledgers(self) -> None:
        self._marks = ledger_marks.marks_below(self._folder, self._marks)
        if self._marks:
            document = ledger_marks.document(self._marks)
            self._trial.set_user_attr(ledger_marks.ATTRIBUTE, document)

    def ends_early(self) -> bool:
        if not self.is_pruned and self._told:
            self.is_pruned = self._trial.should_prune()
        return self.is_pruned


def _value(result: "RunResult", metric: str) -> float | None:
    known: dict[str, Any] = {"loss": result.loss, "accuracy": result.accuracy}
    known |= result.metrics
    if metric not in known:
        names = ", ".join(sorted(name for name, value in known.items() if value))
        raise JobError(
            f"the job has no metric {metric!r}; it has {names}", key="metric"
        )
    value: float | None = known[metric]
    return value

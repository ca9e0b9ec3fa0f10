"""What ``[selection]`` must not request, and which way each metric is better.

Sums of metrics are made for numbers within bounds, so NaN counts as one of them: as the
worse bound, so that no model is the best for being NaN.
"""

import difflib
from collections.abc import Mapping

from federation.errors import JobError
from federation.job.metrics import BUILT_IN, ERRORS, TRAINER, evaluated_of, metrics_of
from federation.job.selection_job import SelectionSpec
from federation.job.spec import JobSpec, TrainingSpec

_MIN, _MAX = "min", "max"
_BETTER = {_MIN: "smaller", _MAX: "larger"}
# Sums that other metrics are computed from.
_COUNTS = ("correct", "tp", "fp", "fn")


def check_selection(job: JobSpec) -> None:
    """Refuse metrics that the job does not have, and averages of no model.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    spec = job.selection
    if spec is None:
        return
    if spec.model == "last" and spec.patience is None:
        raise JobError(
            "the last model is what a run leaves without [selection]: remove the "
            "table, choose another model, or set patience",
            key="selection.model",
        )
    if spec.compares:
        goal_of(spec, job.training)
    if spec.averages and spec.average_from > job.rounds:
        raise JobError(
            f"the job has {job.rounds} rounds, so nothing would be averaged: choose an "
            "earlier round",
            key="selection.average_from",
        )


def goal_of(spec: SelectionSpec, training: TrainingSpec) -> str:
    """Return ``min`` or ``max``: which values of the metric are better.

    Raises:
        JobError: The job has no such metric, or its goal is unknown.
    """
    goals = _goals(training)
    if spec.metric not in goals:
        near = difflib.get_close_matches(spec.metric, goals, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(goals)}"
        raise JobError(
            f"{spec.metric!r:.80} is not a result of this task: {hint}",
            key="selection.metric",
        )
    known = goals[spec.metric]
    if spec.goal and known and spec.goal != known:
        raise JobError(
            f"{spec.metric!r} is better the {_BETTER[known]} it is, so the worst model "
            "would be chosen: remove this key",
            key="selection.goal",
        )
    goal = spec.goal or known
    if not goal:
        raise JobError(
            f"say which values of {spec.metric!r} are better: min or max",
            key="selection.goal",
        )
    return goal


def counts_for_nan(job: JobSpec) -> Mapping[str, float]:
    """What NaN counts as in the sum of each metric besides the loss, by name.

    As the lower bound of metrics that are better when larger: the task,
    ``selection.goal`` or the name ``accuracy`` says so. As the upper bound of others,
    of which none is compared if its goal is unknown.
    """
    goals = {"accuracy": _MAX}
    goals |= {name: goal for name, goal in _goals(job.training).items() if goal}
    if job.selection is not None and job.selection.goal:
        goals[job.selection.metric] = job.selection.goal
    return {
        name: metric.low if goals.get(name) == _MAX else metric.high
        for name, metric in evaluated_of(job.training).items()
    }


def _goals(training: TrainingSpec) -> Mapping[str, str]:
    """Results of a task by name, as reports show them, each with its goal."""
    # A loop of the user's own reports its metrics on held-out data only.
    is_loop = training.task == TRAINER
    sums = evaluated_of(training) if is_loop else metrics_of(training)
    found = {"loss": _MIN}
    if "correct" in sums:
        found["accuracy"] = _MAX
    own = "" if training.task not in BUILT_IN else _MAX
    found |= {name: own for name in sums if name not in _COUNTS}
    found |= dict.fromkeys((name for name in ERRORS if name in sums), _MIN)
    if "squared_error" in sums:
        found["rmse"] = _MIN
    if {"tp", "fp", "fn"} <= sums.keys():
        found |= dict.fromkeys(("precision", "recall", "f1"), _MAX)
    if training.classes:
        found |= dict.fromkeys(("macro_f1", "mean_iou"), _MAX)
    measured = dict.fromkeys(("calibration", "reliability"), "calibration_error")
    for measure in training.measures:
        goal = _MIN if measure in measured else _MAX
        found[measured.get(measure, measure)] = goal
    return found

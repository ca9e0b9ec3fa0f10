"""The metrics of a job's objective: a loss and named sums, with bounds.

A metric is a sum over predictions. What one prediction adds to it is in bounds that
the job states: noise on held-out results is made for them. Names and bounds are keys of
the job, and so part of its digest, which every site accepts and every mask key holds.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from federation.errors import JobError
from federation.job import code_files
from federation.job.spec import JobSpec, TrainingSpec
from federation.messages import MAX_CLASSES, MAX_METRICS, METRIC_NAME

LOSS = "loss"
# The loss of a prediction of a built-in task is clipped to this many nats before it
# gets noise: guessing among 256 tokens costs 5.5. A larger bound would need more noise;
# a smaller one would hide more of how wrong a model is that is wrong and sure of it.
MAX_LOSS = 6.0
# Under secure aggregation nobody sees which site reports a loss: the mean of a site's
# predictions counts for this many nats at most, more than guessing among 10^13 costs.
MAX_MEAN_LOSS = 32.0
# On held-out data of one site, if the job does not limit its examples.
MAX_PREDICTIONS = 10**12

# Readers take ``correct`` for the number of right predictions.
_RESERVED = ("count", "loss_sum", "metrics", "correct")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A sum over predictions.

    Attributes:
        low: Least that one prediction adds to it.
        high: Most that one prediction adds to it.
        is_whole: Whether it counts predictions.
    """

    low: float = -math.inf
    high: float = math.inf
    is_whole: bool = False

    @property
    def reach(self) -> float:
        """Largest absolute value of one prediction."""
        return max(-self.low, self.high)


CORRECT: Mapping[str, Metric] = {"correct": Metric(low=0.0, high=1.0, is_whole=True)}
# Of one cell of a confusion matrix: confusion_LABEL_PREDICTION, both from 0.
CONFUSION = "confusion"
MAX_CLASS_CHARS = 40
BUILT_IN: Mapping[str, Mapping[str, Metric]] = {
    "classification": CORRECT,
    "causal_lm": CORRECT,
}


def metrics_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """Metrics of the job's objective, by name, in the order of messages.

    On held-out data those of ``confusion_of`` follow.
    """
    built_in = BUILT_IN.get(training.task)
    if built_in is not None:
        return built_in
    return {name: _bounds(training, name) for name in training.metrics if name != LOSS}


def confusion_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """Cells of the confusion matrix, row by row; empty if the job names no classes."""
    labels = range(len(training.classes))
    names = (f"{CONFUSION}_{label}_{found}" for label in labels for found in labels)
    return dict.fromkeys(names, CORRECT["correct"])


def evaluated_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """All metrics that are reported on held-out data."""
    return {**metrics_of(training), **confusion_of(training)}


def loss_of(training: TrainingSpec) -> Metric:
    """Bounds of the loss of one prediction, where noise is added."""
    if training.task in BUILT_IN:
        return Metric(low=0.0, high=MAX_LOSS)
    return _bounds(training, LOSS)


def reported_loss_of(training: TrainingSpec) -> Metric:
    """Bounds of a site's mean loss in a secure sum, where no noise is added."""
    if training.task in BUILT_IN:
        return Metric(low=0.0, high=MAX_MEAN_LOSS)
    return _bounds(training, LOSS)


def most_of_a_record(training: TrainingSpec) -> int:
    """Most predictions of a record: one, but for windows of tokens."""
    return training.max_tokens if training.task == "causal_lm" else 1


def _bounds(training: TrainingSpec, name: str) -> Metric:
    stated = training.metrics.get(name, ())
    return Metric(low=stated[0], high=stated[1]) if stated else Metric()


def check_objective(job: JobSpec) -> None:
    """Refuse unknown objectives, and metrics that cannot be reported.

    Raises:
        JobError: The first such thing.
    """
    training, key = job.training, "training.metrics"
    _check_classes(job)
    if training.task in BUILT_IN:
        if training.metrics:
            raise JobError(
                f"{training.task} reports its own metrics: remove the table, or name "
                "your own objective in training.task",
                key=key,
            )
        return
    if not (_FUNCTION.fullmatch(training.task) or code_files.parse(training.task)):
        raise JobError(
            f"{training.task!r:.80} is none of {', '.join(BUILT_IN)} and not of the "
            "form module:function or ./file.py:function",
            key="training.task",
        )
    if len(training.metrics) > MAX_METRICS:
        raise JobError(f"names more than {MAX_METRICS} metrics", key=key)
    for name, stated in training.metrics.items():
        fault = _fault(name, stated)
        if fault:
            raise JobError(fault, key=f"{key}.{name}")
    _check_bounded(job)


def _check_classes(job: JobSpec) -> None:
    """Refuse a confusion matrix without classes, or one with too much noise."""
    classes, private = job.training.classes, job.privacy.differential_privacy
    fault = ""
    if job.training.task != "classification":
        fault = "names classes: set training.task to classification, or leave it out"
    elif not 2 <= len(set(classes)) == len(classes) <= MAX_CLASSES:  # noqa: PLR2004
        fault = f"must be 2 to {MAX_CLASSES} different names"
    elif any(not (0 < len(c) <= MAX_CLASS_CHARS and c.isprintable()) for c in classes):
        fault = f"must be printable names of at most {MAX_CLASS_CHARS} characters"
    elif private.enabled and private.held_out == "noise":
        fault = (
            "asks for a confusion matrix, whose many counts would need too much noise "
            "under differential privacy: leave it out, or set privacy."
            'differential_privacy.held_out to "public" if the held-out data is public'
        )
    if classes and fault:
        raise JobError(fault, key="training.classes")


def _fault(name: str, stated: tuple[float, ...]) -> str:
    if not METRIC_NAME.fullmatch(name) or name in _RESERVED:
        return (
            "is not a metric name: use up to 32 lower-case letters, digits and _, and "
            f"none of {', '.join(_RESERVED)}"
        )
    if stated and (len(stated) != _PAIR or not stated[0] < stated[1]):
        return (
            "must be [low, high], the least and the most that one record adds; or [] "
            "for no bounds"
        )
    if name == LOSS and stated and stated[0] < 0:
        return (
            "starts below 0: add a constant to a loss that can be negative, so that "
            "its sum can be decoded"
        )
    return ""


def _check_bounded(job: JobSpec) -> None:
    """Require bounds if they determine the noise, or what is possible."""
    secure = job.privacy.secure_aggregation.enabled
    if not secure and not job.privacy.differential_privacy.enabled:
        return
    why = (
        "differential privacy adds noise to its sum in proportion to what one record "
        "may add"
        if job.privacy.differential_privacy.enabled
        else "secure aggregation sums it without seeing the site's value"
    )
    for name in (LOSS, *metrics_of(job.training)):
        if not job.training.metrics.get(name):
            raise JobError(
                f"has no bounds, and {why}: set {name} = [low, high]",
                key=f"training.metrics.{name}",
            )

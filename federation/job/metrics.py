"""The metrics of a job's objective: a loss and named sums, with bounds.

A metric is a sum over predictions. What one prediction adds to it is in bounds that
the job states: noise on held-out results is made for them. Names and bounds are keys of
the job, and so part of its digest, which every site accepts and every mask key holds.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from federation.errors import JobError
from federation.job import code_files
from federation.job.spec import JobSpec, TrainingSpec
from federation.messages import MAX_CLASSES, MAX_METRICS, METRIC_NAME

LOSS = "loss"
# The task of a transformers.Trainer, whose own loop trains.
TRAINER = "trainer"
# The task of jobs of statistics, which train nothing.
STATISTICS = "statistics"
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
# What an own objective may return besides its metrics, for those of ``cells_of``.
LOGITS = "logits"
_RESERVED = ("count", "loss_sum", "metrics", "correct", LOGITS)
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A sum over predictions.

    Attributes:
        low: Least that one prediction adds to it.
        high: Most that one prediction adds to it.
        is_whole: Whether it counts predictions.
        histogram: The histogram that it is a cell of: each prediction adds to one cell
            only. Empty for a sum that is no cell.
    """

    low: float = -math.inf
    high: float = math.inf
    is_whole: bool = False
    histogram: str = ""

    @property
    def reach(self) -> float:
        """Largest absolute value of one prediction."""
        return max(-self.low, self.high)

    @property
    def with_noise(self) -> "Metric":
        """Bounds of a mean that has noise: a cell's are on both sides of 0.

        Noise of mean 0 makes many cells that hold little negative. Raised to 0, they
        would be too large on average, and so would be what many cells add up to.
        """
        return replace(self, low=-self.reach) if self.histogram else self


CORRECT: Mapping[str, Metric] = {"correct": Metric(low=0.0, high=1.0, is_whole=True)}
# Of one cell of a confusion matrix: confusion_LABEL_PREDICTION, both from 0.
CONFUSION = "confusion"
MAX_CLASS_CHARS = 40
# Of a sum of one subgroup: subgroup_NUMBER_SUM, from 0.
SUBGROUP = "subgroup"
MAX_SUBGROUPS = 16
# Of yes or no: true positives, false positives, false negatives; of several labels the
# share of a record's labels.
_FOUND = {name: Metric(low=0.0, high=1.0) for name in ("tp", "fp", "fn")}
BUILT_IN: Mapping[str, Mapping[str, Metric]] = {
    "classification": CORRECT,
    "binary": {**CORRECT, **_FOUND},
    "multi_label": {**CORRECT, **_FOUND},
    "regression": {},  # Its bounds are in the unit of the targets: the job's.
    "segmentation": CORRECT,
    "causal_lm": CORRECT,
    "masked_lm": CORRECT,
    "seq2seq_lm": CORRECT,
    "sft": CORRECT,
    "contrastive": CORRECT,
    "ranking": CORRECT,
    STATISTICS: {},
}
# Cross-entropies in nats, with the bounds above; errors are bounded by the job.
ENTROPIES = frozenset(BUILT_IN) - {"regression"}
ERRORS = ("absolute_error", "squared_error")  # of regression
# Of tokens; and those that predict only the places that have a label.
LANGUAGE = frozenset({"causal_lm", "masked_lm", "seq2seq_lm", "sft"})
LABELLED = frozenset({"masked_lm", "seq2seq_lm", "sft", "segmentation"})


def _is_positive(value: object) -> bool:
    return type(value) in {int, float} and 0 < value < math.inf  # type: ignore[operator]


# Options of the built-in tasks, each with which values it takes, in code and in words.
_Values = tuple[Callable[[Any], bool], str]
_POSITIVE: _Values = (_is_positive, "must be a number above 0")
WEIGHTING: Mapping[str, _Values] = {
    "class_weights": (
        lambda v: (
            isinstance(v, list | tuple) and len(v) > 1 and all(map(_is_positive, v))
        ),
        (
            "must be a list of numbers above 0, one for each class in the order of the "
            'labels. There is no "balanced": weights from its own records would give '
            "each site another loss and reveal its counts; take weights from public "
            "knowledge, or from the confusion matrix of an earlier run"
        ),
    ),
    "label_smoothing": (
        lambda v: _is_positive(v) and v < 1,
        "must be a number above 0 and below 1",
    ),
}
_LOSSES = ("mse", "mae", "huber")
OPTIONS: Mapping[str, Mapping[str, _Values]] = {
    "classification": WEIGHTING,
    "regression": {
        "loss": (_LOSSES.__contains__, f"must be one of {', '.join(_LOSSES)}"),
        "delta": _POSITIVE,
    },
    "binary": {"positive_weight": _POSITIVE},
    "segmentation": {
        "ignore_index": (lambda v: type(v) is int, "must be a whole number"),
        **WEIGHTING,
    },
    "contrastive": {"temperature": _POSITIVE},
}
AUC_BINS, CALIBRATION_BINS = 32, 15
_MEASURES: Mapping[str, str] = {
    "classification": "calibration|reliability|recall_at_[1-9][0-9]?",
    "binary": "auc|calibration|reliability",
    "contrastive": "recall_at_[1-9][0-9]?",
}


def metrics_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """Metrics of the job's objective, by name, in the order of messages.

    On held-out data those of ``cells_of`` follow.
    """
    if training.task == TRAINER:
        return {}
    if training.task == "regression":
        return {name: _bounds(training, name) for name in ERRORS}
    built_in = BUILT_IN.get(training.task)
    if built_in is not None:
        return built_in
    return {name: _bounds(training, name) for name in training.metrics if name != LOSS}


def confusion_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """Cells of the confusion matrix, row by row; empty if the job names no classes."""
    labels = range(len(training.classes))
    names = (f"{CONFUSION}_{label}_{found}" for label in labels for found in labels)
    return dict.fromkeys(names, replace(CORRECT["correct"], histogram=CONFUSION))


def measured_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """Sums that the job's ``training.measures`` are computed from, in their order."""
    count, found = CORRECT["correct"], dict[str, Metric]()
    for measure in training.measures:
        if measure == "auc":
            # A record is in one cell of both sides together.
            cell = replace(count, histogram=measure)
            sides = [f"auc_{side}" for side in ("pos", "neg")]
            found |= {f"{s}_{b}": cell for s in sides for b in range(AUC_BINS)}
        elif measure in {"calibration", "reliability"}:
            # Confidence less hits: the error needs no more of a bin.
            gap = Metric(low=-1.0, high=1.0, histogram="calibration")
            found |= {f"calibration_{b}": gap for b in range(CALIBRATION_BINS)}
            for what in ("count", "hits") if measure == "reliability" else ():
                cell = replace(count, histogram=f"bin_{what}")
                found |= {f"bin_{what}_{b}": cell for b in range(CALIBRATION_BINS)}
        else:
            found[measure] = count
    return found


def subgroups_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """Number of predictions, loss and hits of each subgroup, by name in their order.

    A record is in one subgroup at most, so each of the three is a histogram.
    """
    count, loss = CORRECT["correct"], reported_loss_of(training)
    kinds = {"count": count, "loss": loss}
    if "correct" in metrics_of(training):
        kinds["correct"] = count
    return {
        f"{SUBGROUP}_{number}_{what}": replace(kind, histogram=f"{SUBGROUP}_{what}")
        for number in range(len(training.subgroups))
        for what, kind in kinds.items()
    }


def computed_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """Metrics that the objective itself returns on held-out data."""
    return {**metrics_of(training), **confusion_of(training), **measured_of(training)}


def noised_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """All metrics on held-out data, with bounds that hold where losses are clipped."""
    high = loss_of(training).high
    found = dict(evaluated_of(training))
    for name, metric in subgroups_of(training).items():
        found[name] = replace(metric, high=min(metric.high, high))
    return found


def cells_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """Sums that are reported on held-out data only."""
    if training.task == TRAINER:
        return {n: _bounds(training, n) for n in training.metrics if n != LOSS}
    return {
        **confusion_of(training),
        **measured_of(training),
        **subgroups_of(training),
    }


def evaluated_of(training: TrainingSpec) -> Mapping[str, Metric]:
    """All metrics that are reported on held-out data."""
    return {**metrics_of(training), **cells_of(training)}


def reported_of(job: JobSpec) -> Mapping[str, Metric]:
    """All metrics of held-out data, with bounds that hold for what leaves a site."""
    exact = evaluated_of(job.training)
    if not has_noised_results(job):
        return exact
    return {name: metric.with_noise for name, metric in exact.items()}


def has_noised_results(job: JobSpec) -> bool:
    """Whether results on held-out data leave a site with noise."""
    private = job.privacy.differential_privacy
    is_noised = private.enabled and private.held_out == "noise"
    return is_noised and job.evaluation.every > 0


def has_own_bounds(training: TrainingSpec) -> bool:
    """Whether the task itself bounds its loss and metrics, and not the job."""
    return training.task in ENTROPIES


def loss_of(training: TrainingSpec) -> Metric:
    """Bounds of the loss of one prediction, where noise is added."""
    if has_own_bounds(training):
        return Metric(low=0.0, high=MAX_LOSS)
    return _bounds(training, LOSS)


def reported_loss_of(training: TrainingSpec) -> Metric:
    """Bounds of a site's mean loss in a secure sum, where no noise is added."""
    if has_own_bounds(training):
        return Metric(low=0.0, high=MAX_MEAN_LOSS)
    return _bounds(training, LOSS)


def most_of_a_record(training: TrainingSpec) -> int:
    """Most predictions of a record: one, but for tokens and for pixels."""
    return training.max_tokens if training.task in LANGUAGE | LABELLED else 1


def _bounds(training: TrainingSpec, name: str) -> Metric:
    stated = training.metrics.get(name, ())
    return Metric(low=stated[0], high=stated[1]) if len(stated) == _PAIR else Metric()


def check_objective(job: JobSpec) -> None:
    """Refuse unknown objectives, and metrics that cannot be reported.

    Raises:
        JobError: The first such thing.
    """
    training, key = job.training, "training.metrics"
    _check_classes(training)
    _check_measures(training)
    _check_subgroups(training)
    _check_options(training)
    if has_own_bounds(training):
        if training.metrics:
            raise JobError(
                f"{training.task} reports its own metrics: remove the table, or name "
                "your own objective in training.task",
                key=key,
            )
        return
    known = (*BUILT_IN, TRAINER)
    if training.task not in known and not is_function(training.task):
        raise JobError(
            f"{training.task!r:.80} is none of {', '.join(known)} and not of the "
            "form module:function or ./file.py:function",
            key="training.task",
        )
    if len(training.metrics) > MAX_METRICS:
        raise JobError(f"names more than {MAX_METRICS} metrics", key=key)
    for name, stated in training.metrics.items():
        fault = _fault(name, stated, training)
        if training.task == "regression" and name not in {LOSS, *ERRORS}:
            fault = (
                f"is no metric of regression, which reports {LOSS}, "
                f"{' and '.join(ERRORS)}: remove it, or name your own objective in "
                "training.task"
            )
        if fault:
            raise JobError(fault, key=f"{key}.{name}")
    _check_bounded(job)


def is_function(name: str) -> bool:
    """Whether a value of a job names a user's function."""
    return bool(_FUNCTION.fullmatch(name) or code_files.parse(name))


def _check_options(training: TrainingSpec) -> None:
    """Refuse options that a built-in task does not have."""
    if training.task not in BUILT_IN:
        return
    known = OPTIONS.get(training.task, {})
    for name, value in training.options.items():
        key = f"training.options.{name}"
        if name not in known:
            said = ", ".join(known) or "none"
            raise JobError(
                f"{training.task} has no such option; its options are {said}", key=key
            )
        takes, words = known[name]
        if not takes(value):
            raise JobError(words, key=key)
    weights = training.options.get("class_weights", ())
    if training.classes and len(weights) not in {0, len(training.classes)}:
        raise JobError(
            f"has {len(weights)} weights, and training.classes names "
            f"{len(training.classes)} classes",
            key="training.options.class_weights",
        )


def _check_measures(training: TrainingSpec) -> None:
    """Refuse measures that the task does not have."""
    # An own objective's logits may be of one class or of several.
    own = "auc|calibration|reliability|recall_at_[1-9][0-9]?" * is_function(
        training.task
    )
    form = _MEASURES.get(training.task, own)
    for at, name in enumerate(training.measures):
        key = f"training.measures[{at}]"
        if name in training.measures[:at]:
            raise JobError(f"{name!r:.40} is there twice", key=key)
        if not (form and re.fullmatch(form, name)):
            having = [task for task, f in _MEASURES.items() if re.fullmatch(f, name)]
            hint = (
                f"it is a measure of {' and '.join(having)}"
                if having
                else (
                    "the measures are auc, calibration, reliability and recall_at_K, K "
                    "from 1 to 99"
                )
            )
            raise JobError(
                f"{name!r:.40} cannot be computed for {training.task}: {hint}", key=key
            )


def _check_subgroups(training: TrainingSpec) -> None:
    """Refuse subgroups that are not a public list of different names or numbers."""
    names, fault = training.subgroups, ""
    if training.task in {TRAINER, "contrastive"}:
        fault = f"{training.task} does not evaluate each record by itself"
    elif not len(set(names)) == len(names) <= MAX_SUBGROUPS:
        fault = f"must be at most {MAX_SUBGROUPS} different names"
    elif any(not (0 < len(n) <= MAX_CLASS_CHARS and n.isprintable()) for n in names):
        fault = f"must be printable names of at most {MAX_CLASS_CHARS} characters"
    elif training.subgroup_column and not all(map(_is_number, names)):
        fault = (
            'must be numbers, such as "1": columns of inputs hold numbers. Remove '
            "training.subgroup_column to use the names of the data's groups"
        )
    if names and fault:
        raise JobError(fault, key="training.subgroups")
    if training.subgroup_column and not names:
        raise JobError(
            "has no effect without training.subgroups: name the public values to "
            "report, or remove this key",
            key="training.subgroup_column",
        )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _check_classes(training: TrainingSpec) -> None:
    """Refuse a confusion matrix of classes that the task does not have."""
    classes, fault = training.classes, ""
    known = {"classification", "segmentation"}
    if training.task not in known and not is_function(training.task):
        fault = (
            "names classes: set training.task to classification, segmentation or your "
            "own objective, or leave it out"
        )
    elif not 2 <= len(set(classes)) == len(classes) <= MAX_CLASSES:  # noqa: PLR2004
        fault = f"must be 2 to {MAX_CLASSES} different names"
    elif any(not (0 < len(c) <= MAX_CLASS_CHARS and c.isprintable()) for c in classes):
        fault = f"must be printable names of at most {MAX_CLASS_CHARS} characters"
    if classes and fault:
        raise JobError(fault, key="training.classes")


def _fault(name: str, stated: tuple[float, ...], training: TrainingSpec) -> str:
    if not METRIC_NAME.fullmatch(name) or name in _RESERVED:
        return (
            "is not a metric name: use up to 32 lower-case letters, digits and _, and "
            f"none of {', '.join(_RESERVED)}"
        )
    if name in cells_of(replace(training, metrics={})):
        return (
            "is the name of a sum of training.classes, training.measures or "
            "training.subgroups"
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
    training = job.training
    for name, metric in {LOSS: loss_of(training), **evaluated_of(training)}.items():
        if metric == Metric():
            raise JobError(
                f"has no bounds, and {why}: set {name} = [low, high]",
                key=f"training.metrics.{name}",
            )

"""Objectives of local training, as functions of a model and a batch.

Each returns tensors, so that nothing waits for the device inside the loop. A user's
objective returns, for each record, its loss and its metrics by name.
Shape suffixes: B batch, K classes, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.nn import functional

from clients.data.datasets import Batch
from clients.factories import check_options, import_factory
from clients.models import tasks
from clients.models.applying import (
    describe,
    logits_of,
    misfit,
    one_tensor,
)
from clients.user_code import place_of
from federation.errors import FederationError, JobError, SiteError, UserCodeError
from federation.job.code_files import unpinned
from federation.job.metrics import (
    BUILT_IN,
    CONFUSION,
    LABELLED,
    LOGITS,
    LOSS,
    STATISTICS,
    TRAINER,
    Metric,
    computed_of,
    has_own_bounds,
    loss_of,
    metrics_of,
)
from federation.job.spec import TrainingSpec
from federation.tree import Tree, num_records

_KEY = "training.task"
_NO_LABEL = torch.iinfo(torch.int64).min
_LEFT_OUT = -100  # How torch and transformers mark places without a label.
_MATRIX = 2
_PART = 1 << 14  # Predictions that are sorted into a confusion matrix at a time.


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """Loss of a batch.

    Attributes:
        total: Sum of the losses of all predictions; carries the gradient.
        count: Number of predictions.
        loss: The same sum as it is reported: clipped, where the job bounds it.
        metrics: Sums of the job's metrics, by name, in their order; the cells of a
            confusion matrix in one tensor.
        means_b: Each record's mean loss over its own predictions, where records make
            different numbers of them; otherwise None.
    """

    total: torch.Tensor
    count: int
    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor]
    means_b: torch.Tensor | None = None

    def sum_of_means(self, num_records: int) -> torch.Tensor:
        """Sum over the records of each one's mean loss; carries the gradient.

        What a record adds depends on no other record, as private steps need.
        """
        if self.means_b is not None:
            return self.means_b.sum()
        return self.total / (self.count / num_records)


class Objective(Protocol):
    """A loss. ``max_loss`` clips that of each prediction, in nats."""

    def __call__(
        self,
        model: torch.nn.Module,
        inputs: Tree,
        targets: Tree,
        /,
        *,
        max_loss: float | None = None,
    ) -> BatchLoss:
        """Apply the model to a batch and compare it with the targets."""
        ...


def objective_of(
    training: TrainingSpec, for_nan: Mapping[str, float] = MappingProxyType({})
) -> Objective:
    """Find the objective that a job names.

    Args:
        training: The job's.
        for_nan: What NaN counts as in the sum of a metric, by name; see
            ``selection_checks.counts_for_nan``. In others, as the upper bound.

    Raises:
        JobError: There is no such function.
    """
    task, num_classes = training.task, len(training.classes)
    if task in {TRAINER, STATISTICS}:
        return _in_the_trainer
    if task in LABELLED:
        return LabelledPlaces(
            task,
            max_places=training.max_tokens,
            num_classes=num_classes,
            **_weighted(training.options),
        )
    if task == "causal_lm":
        return partial(causal_lm, max_tokens=training.max_tokens)
    if task == "classification":
        counted = partial(
            classification,
            num_classes=num_classes,
            measures=training.measures,
            **_weighted(training.options),
        )
        is_plain = not (num_classes or training.measures or training.options)
        return classification if is_plain else counted
    if task in tasks.TASKS:
        function = partial(tasks.TASKS[task], **training.options)
        return RecordObjective(training, function, for_nan)
    own = import_factory(task, key=_KEY)
    if training.options:
        batch = (object(),) * 3  # Model, inputs and targets.
        check_options(partial(own, *batch), training.options, key="training.options")
    return RecordObjective(training, partial(own, **training.options), for_nan)


@dataclass(frozen=True, slots=True)
class Weighting:
    """Changes to the cross-entropy that is minimised, and not to what is reported.

    Each prediction's loss is a function of that prediction alone, since nothing is
    divided by the sum of a batch's weights: clipped gradients of records bound what one
    record adds, as without weights.

    Attributes:
        weights: Factor of each class, in the order of labels; empty for none.
        smoothing: Share of a label that is spread over all classes (Szegedy et al.
            2015, arXiv:1512.00567, section 7).
    """

    weights: tuple[float, ...] = ()
    smoothing: float = 0.0

    def losses(
        self, logits_nk: torch.Tensor, labels_n: torch.Tensor, *, ignored: int
    ) -> torch.Tensor:
        """Loss of each prediction, shape ``(n,)``; 0 for the label ``ignored``.

        Raises:
            SiteError: The model has another number of outputs.
        """
        num_classes = logits_nk.shape[1]
        if len(self.weights) not in {0, num_classes}:
            raise misfit(
                "training.options.class_weights must have one weight for each output "
                "of the model, in order",
                f"it has {len(self.weights)}, and the model has {num_classes} outputs",
            )
        return functional.cross_entropy(
            logits_nk,
            labels_n,
            weight=logits_nk.new_tensor(self.weights) if self.weights else None,
            ignore_index=ignored,
            label_smoothing=self.smoothing,
            reduction="none",
        )


def _weighted(options: Mapping[str, Any]) -> dict[str, Any]:
    """A task's options, those of its weighting in one."""
    others = dict(options)
    weighting = Weighting(
        tuple(others.pop("class_weights", ())), others.pop("label_smoothing", 0.0)
    )
    return others if weighting == Weighting() else {**others, "weighting": weighting}


def _in_the_trainer(
    _model: torch.nn.Module,
    _inputs: Tree,
    _targets: Tree,
    /,
    *,
    max_loss: float | None = None,  # noqa: ARG001 -- of the interface
) -> BatchLoss:
    """Refuse to compute the loss of a loop; see ``clients.training.users_loop``."""
    raise JobError(
        f'the loss of the task "{TRAINER}" is inside the Trainer: name another task '
        "here",
        key=_KEY,
    )


def classification(
    model: torch.nn.Module,
    inputs: Tree,
    labels: Tree,
    /,
    *,
    max_loss: float | None = None,
    num_classes: int = 0,
    measures: Sequence[str] = (),
    weighting: Weighting | None = None,
) -> BatchLoss:
    """Cross-entropy of one label per example: ``model(inputs)`` gives ``(B, K)``.

    With ``num_classes``, evaluation also counts predictions by label and class, and
    with ``measures`` what ``calibration`` and ``recall_at_K`` are computed from.

    Raises:
        SiteError: Labels or logits have another shape or type, or the model has
            another number of outputs.
    """
    labels = _checked_labels(labels)
    logits_bk = logits_of(model, inputs)
    if logits_bk.ndim != 2 or len(logits_bk) != len(labels):  # noqa: PLR2004
        raise misfit(
            "classification needs logits of shape (examples, classes), one for each "
            'class; for a single yes or no set training.task to "binary"',
            f"for {len(labels)} examples the model returned {tuple(logits_bk.shape)}",
        )
    _check_outputs(num_classes, logits_bk)
    found = _cross_entropy(logits_bk, labels, max_loss)
    if weighting is not None:
        each_b = weighting.losses(logits_bk, labels, ignored=_NO_LABEL)
        found = replace(found, total=each_b.sum())
    if torch.is_grad_enabled():
        return found
    cells = _cells(logits_bk, labels, num_classes, measures)
    return replace(found, metrics={**found.metrics, **cells})


def _check_outputs(num_classes: int, logits_bk: torch.Tensor) -> None:
    if num_classes not in {0, logits_bk.shape[-1]}:
        raise misfit(
            "training.classes must name each output of the model, in order",
            f"it names {num_classes}, and the model has {logits_bk.shape[-1]} outputs",
        )


def _cells(
    logits_bk: torch.Tensor,
    labels_b: torch.Tensor,
    num_classes: int,
    measures: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Sums of ``training.classes`` and ``training.measures``; a matrix in one."""
    sums = {}
    if num_classes:
        sums[CONFUSION] = _confusion(logits_bk.argmax(1), labels_b, num_classes)
    for measure in measures:
        each = tasks.of_logits(logits_bk, labels_b, measure)
        sums |= {name: value_b.double().sum() for name, value_b in each.items()}
    return sums


def _checked_labels(labels: Tree) -> torch.Tensor:
    if labels is None:
        raise SiteError("classification needs targets, and the data has none")
    found = one_tensor(labels, "targets of classification")
    if found.ndim != 1 or found.is_floating_point():
        raise misfit(
            "classification needs one integer class per example: make the targets "
            "integers of shape (n,), or name your own objective in training.task",
            f"the targets are {found.dtype} of shape {tuple(found.shape)}",
        )
    return found


def _confusion(
    predicted_b: torch.Tensor, labels_b: torch.Tensor, num_classes: int
) -> torch.Tensor:
    """Cells of a confusion matrix, row by row; a label below 0 is in none."""
    # Compared and not counted: torch.bincount would wait for the device.
    cells_b = labels_b * num_classes + predicted_b
    cells_b = cells_b.masked_fill(labels_b < 0, -1)
    cells_k = torch.arange(num_classes**2, device=cells_b.device)
    total_k = torch.zeros_like(cells_k)
    # In parts, since the cells of many pixels at once would fill the memory.
    for start in range(0, len(cells_b), _PART):
        part = cells_b[start : start + _PART]
        total_k += (part[:, None] == cells_k).sum(0)
    return total_k


def causal_lm(
    model: torch.nn.Module,
    tokens: Tree,
    _: Tree,
    /,
    *,
    max_loss: float | None = None,
    max_tokens: float = math.inf,
) -> BatchLoss:
    """Cross-entropy of each next token: windows ``(B, T+1)``, logits ``(B, T, V)``.

    Raises:
        SiteError: Tokens or logits have another shape or type, or T is more than
            ``max_tokens``.
    """
    tokens = one_tensor(tokens, "inputs of causal_lm")
    if tokens.ndim != 2 or tokens.shape[1] < 2 or tokens.is_floating_point():  # noqa: PLR2004
        raise misfit(
            "causal_lm needs windows of at least two integer tokens",
            f"the inputs are {tokens.dtype} of shape {tuple(tokens.shape)}",
        )
    inputs_bt, targets_bt = tokens[:, :-1], tokens[:, 1:]
    if targets_bt.shape[1] > max_tokens:
        raise misfit(
            f"a record has more predictions than the job's {max_tokens}: use shorter "
            "windows, or raise training.max_tokens",
            f"it has {targets_bt.shape[1]}",
        )
    logits_btv = logits_of(model, inputs_bt)
    if logits_btv.ndim != 3 or logits_btv.shape[:2] != targets_bt.shape:  # noqa: PLR2004
        raise misfit(
            "causal_lm needs logits of shape (windows, predictions, vocabulary)",
            f"for {tuple(targets_bt.shape)} predictions the model returned "
            f"{tuple(logits_btv.shape)}",
        )
    return _cross_entropy(logits_btv.flatten(0, 1), targets_bt.reshape(-1), max_loss)


class LabelledPlaces:
    """Cross-entropy of each place that has a label, of pixels or of tokens.

    Places with the label ``ignore_index`` are no predictions. Losses are added over all
    predictions of a batch, as torch and transformers do; private steps take the mean of
    each record instead.
    """

    def __init__(
        self,
        task: str,
        *,
        max_places: int,
        num_classes: int = 0,
        ignore_index: int = _LEFT_OUT,
        weighting: Weighting | None = None,
    ) -> None:
        """Set the task.

        Args:
            task: ``segmentation``: logits ``(B, K, ...)`` and labels ``(B, ...)``.
                ``masked_lm``: logits ``(B, T, V)`` and labels ``(B, T)``.
                ``sft``: the same, but each place predicts the next one's label.
                ``seq2seq_lm``: the same as ``masked_lm``; the decoder's inputs are
                ``decoder_input_ids`` among the inputs, or made of the labels by the
                model's ``prepare_decoder_input_ids_from_labels``.
            max_places: Most places of a record.
            num_classes: Classes of a confusion matrix on held-out data; 0 for none.
            ignore_index: Label of places that are not predicted.
            weighting: Of the loss that is minimised; None for the plain one.
        """
        self._task, self._most, self._ignored = task, max_places, ignore_index
        self._num_classes, self._weighting = num_classes, weighting

    def __call__(
        self,
        model: torch.nn.Module,
        inputs: Tree,
        labels: Tree,
        /,
        *,
        max_loss: float | None = None,
    ) -> BatchLoss:
        """Add up the cross-entropies of all labelled places.

        Raises:
            SiteError: Labels or logits have another shape or type, or a record has too
                many places.
        """
        logits, labels = self._matched(self.logits(model, inputs, labels), labels)
        size, classes = len(labels), logits.shape[-1]
        flat_n = labels.reshape(-1)
        is_counted_n = flat_n != self._ignored
        known_n = flat_n.masked_fill(~is_counted_n, -1)
        if flat_n.device.type == "cpu":
            of_pixels = self._task == "segmentation"
            _check_classes(flat_n[is_counted_n], classes, of_pixels=of_pixels)
        logits_nk = logits.reshape(-1, classes)
        loss_n = Weighting().losses(logits_nk, flat_n, ignored=self._ignored)
        if max_loss is not None:
            loss_n = loss_n.nan_to_num(nan=max_loss).clamp(max=max_loss)
        # One wait for the device a batch: what the gradient is divided by.
        count = int(is_counted_n.sum())
        counts_b = is_counted_n.view(size, -1).sum(1).clamp(min=1)
        predicted_n = logits.argmax(-1).reshape(-1)
        metrics = {"correct": ((predicted_n == flat_n) & is_counted_n).sum()}
        if self._num_classes and not torch.is_grad_enabled():
            _check_outputs(self._num_classes, logits)
            metrics[CONFUSION] = _confusion(predicted_n, known_n, classes)
        reported = loss_n.detach().sum()
        if self._weighting is not None:
            loss_n = self._weighting.losses(logits_nk, flat_n, ignored=self._ignored)
        means_b = loss_n.view(size, -1).sum(1) / counts_b
        return BatchLoss(loss_n.sum(), count, reported, metrics, means_b)

    def logits(
        self, model: torch.nn.Module, inputs: Tree, labels: Tree
    ) -> torch.Tensor:
        """Apply the model to a batch."""
        if labels is None:
            raise SiteError(f"{self._task} needs targets, and the data has none")
        labels = one_tensor(labels, f"targets of {self._task}")
        prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if (
            self._task == "seq2seq_lm"
            and prepare is not None
            and isinstance(inputs, Mapping)
            and "decoder_input_ids" not in inputs
        ):
            inputs = {**inputs, "decoder_input_ids": prepare(labels=labels)}
        return logits_of(model, inputs)

    def _matched(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits with the classes last, and the label of each place."""
        is_image = self._task == "segmentation"
        if labels.is_floating_point() or labels.ndim < 2:  # noqa: PLR2004
            raise misfit(
                f"{self._task} needs one integer label for each "
                f"{'pixel' if is_image else 'token'}, and {self._ignored} where there "
                "is none",
                f"the targets are {labels.dtype} of shape {tuple(labels.shape)}",
            )
        if is_image and logits.ndim == labels.ndim + 1:
            logits = logits.movedim(1, -1)
        if logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape:
            form = (
                "(records, classes, height, width)"
                if is_image
                else ("(records, tokens, vocabulary)")
            )
            raise misfit(
                f"{self._task} needs logits of shape {form} and a label for each place",
                f"for labels {tuple(labels.shape)} the model returned "
                f"{tuple(logits.shape)}",
            )
        if labels[0].numel() > self._most:
            raise misfit(
                f"a record has more predictions than the job's {self._most}: use "
                "smaller records, or raise training.max_tokens",
                f"it has {labels[0].numel()}",
            )
        if self._task == "sft":
            return logits[:, :-1], labels[:, 1:]
        return logits, labels


OBJECTIVES: Mapping[str, Objective] = {
    "classification": classification,
    "causal_lm": causal_lm,
}


def stays_finite(
    objective: Objective, model: torch.nn.Module, batch: Batch, *, gradients: bool
) -> bool:
    """Whether the loss of some records is finite, and its gradients if asked.

    In evaluation mode, in which one record is enough for batch normalisation.
    """
    before = model.training
    model.eval()
    # cuDNN differentiates recurrent layers in training mode only.
    with torch.set_grad_enabled(gradients), torch.backends.cudnn.flags(enabled=False):
        total = objective(model, *batch).total
        found: list[torch.Tensor | None] = [total]
        if total.requires_grad:
            trained = [p for p in model.parameters() if p.requires_grad]
            found += torch.autograd.grad(total, trained, allow_unused=True)
    model.train(before)
    return all(bool(f.to_dense().isfinite().all()) for f in found if f is not None)


class RecordObjective:
    """A function from model, inputs and targets to values of each record.

    It returns a dict of tensors of shape ``(B,)``: ``loss``, and the job's metrics. It
    is the user's, or one of ``clients.models.tasks``.
    """

    def __init__(
        self,
        training: TrainingSpec,
        function: Callable[..., object],
        for_nan: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Set the function.

        Args:
            training: The job's.
            function: With the job's options.
            for_nan: As for ``objective_of``.
        """
        self._is_built_in = training.task in BUILT_IN
        self._name = unpinned(training.task)
        self._function = function
        self._measures, self._num_classes = training.measures, len(training.classes)
        # A built-in task returns the values of its measures itself.
        of_logits = bool(training.classes or training.measures)
        self._needs_logits = of_logits and not self._is_built_in
        bounded = partial(_bounded_sums, loss_of(training), for_nan=for_nan)
        self._trained = bounded(metrics_of(training))
        evaluated = metrics_of if self._needs_logits else computed_of
        self._evaluated = bounded(evaluated(training))
        # A built-in task's are those of noise; ``max_loss`` says when they count.
        self._clips_loss = not has_own_bounds(training)

    def __call__(
        self,
        model: torch.nn.Module,
        inputs: Tree,
        targets: Tree,
        /,
        *,
        max_loss: float | None = None,
    ) -> BatchLoss:
        """Add up the function's values for each record.

        Raises:
            SiteError: It failed, or gave something else.
        """
        values, sums = self.values(model, inputs, targets), self._expected()
        losses_b = values[LOSS]
        loss_sum = sums[LOSS] if self._clips_loss else _loss_within(max_loss)
        metrics = {
            name: add(values[name]) for name, add in sums.items() if name != LOSS
        }
        if self._needs_logits and not torch.is_grad_enabled():
            metrics |= self._cells(values[LOGITS], targets)
        return BatchLoss(losses_b.sum(), losses_b.shape[0], loss_sum(losses_b), metrics)

    def _check_logits(self, logits: object, num_records: int) -> None:
        if (
            not isinstance(logits, torch.Tensor)
            or not 0 < logits.ndim <= _MATRIX
            or len(logits) != num_records
        ):
            raise misfit(
                f"{self._name} must also return {LOGITS!r}, of shape (records, "
                "classes) or one per record, because the job sets training.classes or "
                "training.measures",
                f"it returned {describe(logits)}",
            )

    def _cells(self, logits: torch.Tensor, targets: Tree) -> dict[str, torch.Tensor]:
        """Sums of ``training.classes`` and ``training.measures`` from the logits."""
        num_records = len(logits)
        logits_bk = logits.reshape(num_records, -1)
        if logits_bk.shape[1] == 1:  # Of yes; softmax is then the sigmoid.
            logits_bk = functional.pad(logits_bk, (1, 0))
        labels_b = one_tensor(targets, f"targets of {self._name}").reshape(-1).long()
        if len(labels_b) != num_records:
            raise misfit(
                "training.classes and training.measures need one label per record",
                f"the targets are {describe(targets)}",
            )
        _check_outputs(self._num_classes, logits_bk)
        if labels_b.device.type == "cpu":
            _check_classes(labels_b, logits_bk.shape[1])
        return _cells(logits_bk, labels_b, self._num_classes, self._measures)

    def _expected(self) -> "Mapping[str, _BoundedSum]":
        return self._trained if torch.is_grad_enabled() else self._evaluated

    def _call(self, model: torch.nn.Module, inputs: Tree, targets: Tree) -> object:
        if self._is_built_in:
            if self._measures and not torch.is_grad_enabled():
                return self._function(model, inputs, targets, measures=self._measures)
            return self._function(model, inputs, targets)
        try:
            return self._function(model, inputs, targets)
        except FederationError:
            raise
        except Exception as error:
            # Foreign code may raise anything. This translates and does not continue.
            raise UserCodeError(self._name, error, place_of(error)) from error

    def values(
        self, model: torch.nn.Module, inputs: Tree, targets: Tree
    ) -> Mapping[str, torch.Tensor]:
        """The function's values for each record, shape ``(B,)``, by name."""
        found, expected = self._call(model, inputs, targets), self._expected()
        # A dict by itself: to look for an abstract class takes longer.
        if (
            not isinstance(found, (dict, Mapping))
            or found.keys() - {LOGITS} != expected.keys()
        ):
            names = list(found) if isinstance(found, Mapping) else describe(found)
            raise misfit(
                f"{self._name} must return a dict of {list(expected)}: name its "
                "metrics in training.metrics",
                f"it returned {names}",
            )
        shape = (num_records(inputs),)
        for name in expected:
            values = found[name]
            if not isinstance(values, torch.Tensor) or values.shape != shape:
                raise misfit(
                    f"{self._name} must return {name!r} as a tensor with one value per "
                    "record: do not call mean() or sum() over the records",
                    f"it returned {describe(values)} instead of shape {shape}",
                )
            if values.dtype.is_complex:
                raise SiteError(
                    f"{self._name} returned {name!r} as complex numbers: return their "
                    "absolute values, or the real and imaginary parts under separate "
                    "names"
                )
        if self._needs_logits and not torch.is_grad_enabled():
            self._check_logits(found.get(LOGITS), shape[0])
        if torch.is_grad_enabled() and not found[LOSS].requires_grad:
            raise SiteError(
                f"{self._name} returned a loss without a gradient: compute it from "
                "what the model returns, without detach(), item() or no_grad()"
            )
        return found

    def by_record(
        self, model: torch.nn.Module, batch: Batch, *, gradients: bool
    ) -> torch.Tensor:
        """What is compared between batches: the losses, or all values as columns."""
        values = self.values(model, *batch)
        if gradients:
            return values[LOSS]
        names = [n for n in values if n != LOGITS or self._needs_logits]
        columns = [values[n].double().reshape(len(values[n]), -1) for n in names]
        return torch.cat(columns, dim=1)


class _BoundedSum:
    """Sum of a metric's values in float64, each within its bounds.

    It is part of every step, where what counts is the number of operations.
    """

    def __init__(self, metric: Metric, for_nan: float) -> None:
        """``for_nan`` is the bound that NaN counts as."""
        self._bounds = None if metric == Metric() else (metric.low, metric.high)
        # fmax and fmin also replace NaN, and promote to float64, as a bound of shape ()
        # would not.
        self._limit = torch.fmax if for_nan == metric.low else torch.fmin
        self._for_nan_1 = torch.tensor([for_nan], dtype=torch.float64)

    def __call__(self, values_b: torch.Tensor) -> torch.Tensor:
        values_b = values_b.detach()
        if self._bounds is None:
            return values_b.sum(dtype=torch.float64)
        for_nan_1 = self._for_nan_1  # Sites of other devices may change it meanwhile.
        if for_nan_1.device != values_b.device:
            for_nan_1 = self._for_nan_1 = for_nan_1.to(values_b.device)
        return self._limit(values_b, for_nan_1).clamp_(*self._bounds).sum()


def _bounded_sums(
    loss: Metric, metrics: Mapping[str, Metric], *, for_nan: Mapping[str, float]
) -> Mapping[str, _BoundedSum]:
    return {
        name: _BoundedSum(metric, for_nan.get(name, metric.high))
        for name, metric in {LOSS: loss, **metrics}.items()
    }


@lru_cache(maxsize=16)
def _loss_within(max_loss: float | None) -> _BoundedSum:
    if max_loss is None:
        return _BoundedSum(Metric(), math.inf)
    return _BoundedSum(Metric(low=0, high=max_loss), max_loss)


def results_by_record(
    objective: Objective, training: TrainingSpec, *, gradients: bool
) -> Callable[[torch.nn.Module, Batch], object]:
    """A model's and its objective's results for each record, to compare batches.

    The built-in tasks treat each result of the model by itself, so that the results
    are enough. What a user's objective does is looked at with the model.

    Args:
        objective: From ``objective_of``.
        training: The job's.
        gradients: Only what gradients are computed from.
    """
    if isinstance(objective, RecordObjective):
        return partial(objective.by_record, gradients=gradients)
    if isinstance(objective, LabelledPlaces):
        return lambda model, batch: objective.logits(model, *batch)
    if training.task == "causal_lm":
        return lambda model, batch: logits_of(model, batch[0][:, :-1])
    return lambda model, batch: logits_of(model, batch[0])


def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, max_loss: float | None
) -> BatchLoss:
    """Sum of the cross-entropies; one that is not a number counts ``max_loss``."""
    try:
        # No label is left out, as torch does with -100: it would count as learnt.
        losses = functional.cross_entropy(
            logits,
            targets,
            ignore_index=_NO_LABEL,
            reduction="sum" if max_loss is None else "none",
        )
    except IndexError as error:  # Which a GPU cannot raise.
        raise classes_misfit(logits.shape[1], targets) from error
    total = losses
    if max_loss is not None:
        total = losses.nan_to_num(nan=max_loss).clamp(max=max_loss).sum()
    correct = (logits.argmax(1) == targets).sum()
    return BatchLoss(total, targets.numel(), total.detach(), {"correct": correct})


def _check_classes(
    labels_n: torch.Tensor, num_classes: int, *, of_pixels: bool = False
) -> None:
    if bool(((labels_n < 0) | (labels_n >= num_classes)).any()):
        raise classes_misfit(num_classes, labels_n, of_pixels=of_pixels)


def classes_misfit(
    num_classes: int, targets: torch.Tensor, *, of_pixels: bool = False
) -> SiteError:
    """Classes that the model has no output for.

    Args:
        num_classes: Outputs of the model.
        targets: Labels, of which some have no output.
        of_pixels: Whether some may be left out: not of records.
    """
    fault = (
        f"the model (model.factory) has {num_classes} outputs, so classes and tokens "
        f"must be from 0 to {num_classes - 1}: renumber them, or give the model more "
        "outputs"
    )
    if num_classes == 1:
        fault = (
            "the model (model.factory) has a single output, but classification needs "
            "one for each class: give it two for a yes and a no, or name your own "
            "objective in training.task"
        )
    if of_pixels:
        fault += (
            "; if pixels without a class have a label of their own, set "
            "training.options.ignore_index to it"
        )
    if targets.min() == _LEFT_OUT:
        fault += (
            f"; {_LEFT_OUT} leaves out places of segmentation and of language tasks, "
            "but no record: leave such records out of the data"
        )
    return misfit(
        fault,
        f"there are classes from {targets.min()} to {targets.max()}",
    )

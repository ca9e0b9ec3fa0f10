"""What local training minimises, as functions of a model and a batch.

Each returns tensors, so that nothing waits for the device inside the loop. A user's
objective returns, for each record, its loss and its metrics by name.
Shape suffixes: B batch, K classes, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional

from clients.data.datasets import Batch
from clients.factories import import_factory
from clients.user_code import place_of
from federation.errors import FederationError, SiteError, UserCodeError
from federation.job.code_files import unpinned
from federation.job.metrics import (
    BUILT_IN,
    CONFUSION,
    LOSS,
    Metric,
    loss_of,
    metrics_of,
)
from federation.job.spec import TrainingSpec
from federation.tree import Tree, leaves, num_records

_KEY = "training.task"


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """Loss of a batch.

    Attributes:
        total: Sum of the losses of all predictions; carries the gradient.
        count: Number of predictions.
        loss: The same sum as it is reported: clipped, where the job bounds it.
        metrics: Sums of the job's metrics, by name, in their order; the cells of a
            confusion matrix in one tensor.
    """

    total: torch.Tensor
    count: int
    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


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


def objective_of(training: TrainingSpec) -> Objective:
    """Find the objective that a job names.

    Raises:
        JobError: There is no such function.
    """
    if training.task == "causal_lm":
        return partial(causal_lm, max_tokens=training.max_tokens)
    if training.classes:
        return partial(classification, num_classes=len(training.classes))
    if training.task in BUILT_IN:
        return OBJECTIVES[training.task]
    return UserObjective(training)


def classification(
    model: torch.nn.Module,
    inputs: Tree,
    labels: Tree,
    /,
    *,
    max_loss: float | None = None,
    num_classes: int = 0,
) -> BatchLoss:
    """Cross-entropy of one label per example: ``model(inputs)`` gives ``(B, K)``.

    With ``num_classes``, evaluation also counts predictions by label and class.

    Raises:
        SiteError: Labels or logits have another shape or type, or the model has
            another number of outputs.
    """
    if labels is None:
        raise SiteError("classification needs targets, and the data has none")
    labels = _one_tensor(labels, "targets of classification")
    if labels.ndim != 1 or labels.is_floating_point():
        raise _misfit(
            "classification needs one integer class per example: make the targets "
            "integers of shape (n,), or name your own objective in training.task",
            f"the targets are {labels.dtype} of shape {tuple(labels.shape)}",
        )
    logits_bk = _logits(model, inputs)
    if logits_bk.ndim != 2 or len(logits_bk) != len(labels):  # noqa: PLR2004
        raise _misfit(
            "classification needs logits of shape (examples, classes)",
            f"for {len(labels)} examples the model returned {tuple(logits_bk.shape)}",
        )
    if num_classes not in {0, logits_bk.shape[1]}:
        raise _misfit(
            "training.classes must name each output of the model, in order",
            f"it names {num_classes}, and the model has {logits_bk.shape[1]} outputs",
        )
    found = _cross_entropy(logits_bk, labels, max_loss)
    if not num_classes or torch.is_grad_enabled():
        return found
    # Compared and not counted: torch.bincount would wait for the device.
    cells_b = labels * num_classes + logits_bk.argmax(1)
    cells_k = torch.arange(num_classes**2, device=cells_b.device)
    confusion_k = (cells_b[:, None] == cells_k).sum(0)
    return replace(found, metrics={**found.metrics, CONFUSION: confusion_k})


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
    tokens = _one_tensor(tokens, "inputs of causal_lm")
    if tokens.ndim != 2 or tokens.shape[1] < 2 or tokens.is_floating_point():  # noqa: PLR2004
        raise _misfit(
            "causal_lm needs windows of at least two integer tokens",
            f"the inputs are {tokens.dtype} of shape {tuple(tokens.shape)}",
        )
    inputs_bt, targets_bt = tokens[:, :-1], tokens[:, 1:]
    if targets_bt.shape[1] > max_tokens:
        raise _misfit(
            f"a record has more predictions than the job's {max_tokens}: use shorter "
            "windows, or raise training.max_tokens",
            f"it has {targets_bt.shape[1]}",
        )
    logits_btv = _logits(model, inputs_bt)
    if logits_btv.ndim != 3 or logits_btv.shape[:2] != targets_bt.shape:  # noqa: PLR2004
        raise _misfit(
            "causal_lm needs logits of shape (windows, predictions, vocabulary)",
            f"for {tuple(targets_bt.shape)} predictions the model returned "
            f"{tuple(logits_btv.shape)}",
        )
    return _cross_entropy(logits_btv.flatten(0, 1), targets_bt.reshape(-1), max_loss)


OBJECTIVES: Mapping[str, Objective] = {
    "classification": classification,
    "causal_lm": causal_lm,
}


class UserObjective:
    """A user's function: from model, inputs and targets to values of each record.

    It returns a dict of tensors of shape ``(B,)``: ``loss``, and the job's metrics.
    """

    def __init__(self, training: TrainingSpec) -> None:
        """Import the function.

        Raises:
            JobError: There is no such function.
        """
        self._name = unpinned(training.task)
        self._function = import_factory(training.task, key=_KEY)
        self._bounds = {LOSS: loss_of(training), **metrics_of(training)}

    def __call__(
        self,
        model: torch.nn.Module,
        inputs: Tree,
        targets: Tree,
        /,
        *,
        max_loss: float | None = None,  # noqa: ARG002 -- the job's bounds hold anyway
    ) -> BatchLoss:
        """Add up the function's values for each record.

        Raises:
            SiteError: It failed, or gave something else.
        """
        values = self.values(model, inputs, targets)
        sums = {name: self._bounded_sum(name, values[name]) for name in self._bounds}
        loss = sums.pop(LOSS)
        return BatchLoss(values[LOSS].sum(), num_records(inputs), loss, sums)

    def values(
        self, model: torch.nn.Module, inputs: Tree, targets: Tree
    ) -> Mapping[str, torch.Tensor]:
        """The function's values for each record, shape ``(B,)``, by name."""
        try:
            found = self._function(model, inputs, targets)
        except FederationError:
            raise
        except Exception as error:
            # Foreign code may raise anything. This translates and does not continue.
            raise UserCodeError(self._name, error, place_of(error)) from error
        if not isinstance(found, Mapping) or found.keys() != self._bounds.keys():
            names = list(found) if isinstance(found, Mapping) else type(found).__name__
            raise _misfit(
                f"{self._name} must return a dict of {list(self._bounds)}: name its "
                "metrics in training.metrics",
                f"it returned {names}",
            )
        shape = (num_records(inputs),)
        for name, values in found.items():
            if not isinstance(values, torch.Tensor) or values.shape != shape:
                raise _misfit(
                    f"{self._name} must return {name!r} as a tensor with one value per "
                    "record: do not call mean() or sum() over the records",
                    f"it returned {_describe(values)} instead of shape {shape}",
                )
            if values.is_complex():
                raise SiteError(
                    f"{self._name} returned {name!r} as complex numbers: return their "
                    "absolute values, or the real and imaginary parts under separate "
                    "names"
                )
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
        return torch.stack([v.double() for v in values.values()], dim=1)

    def _bounded_sum(self, name: str, values_b: torch.Tensor) -> torch.Tensor:
        metric: Metric = self._bounds[name]
        exact = values_b.detach().double()
        if metric != Metric():
            # NaN counts as the worst, so that nothing is infinitely good.
            exact = exact.nan_to_num(nan=metric.high).clamp(metric.low, metric.high)
        return exact.sum()


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
    if isinstance(objective, UserObjective):
        return partial(objective.by_record, gradients=gradients)
    by_window = training.task == "causal_lm"
    return lambda model, batch: model(batch[0][:, :-1] if by_window else batch[0])


def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, max_loss: float | None
) -> BatchLoss:
    """Sum of the cross-entropies; one that is not a number counts ``max_loss``."""
    try:
        losses = functional.cross_entropy(
            logits, targets, reduction="sum" if max_loss is None else "none"
        )
    except IndexError as error:  # Which a GPU cannot raise.
        raise classes_misfit(logits.shape[1], targets) from error
    total = losses
    if max_loss is not None:
        total = losses.nan_to_num(nan=max_loss).clamp(max=max_loss).sum()
    correct = (logits.argmax(1) == targets).sum()
    return BatchLoss(total, targets.numel(), total.detach(), {"correct": correct})


def classes_misfit(num_classes: int, targets: torch.Tensor) -> SiteError:
    """Classes that the model has no output for."""
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
    return _misfit(
        fault,
        f"there are classes from {targets.min()} to {targets.max()}",
    )


def _misfit(fault: str, found: str) -> SiteError:
    """What was found may count or quote records, and stays at the site."""
    return SiteError(f"{fault}; {found}", outside=fault)


def _one_tensor(values: Tree, what: str) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        raise SiteError(f"{what} are {_describe(values)}, but must be one tensor")
    return values


def _logits(model: torch.nn.Module, inputs: Tree) -> torch.Tensor:
    """Apply the model; losses are taken with float32 at least."""
    try:
        logits = model(inputs)
    except Exception as error:
        error.add_note(_advice(model, inputs))  # Notes stay where the error is.
        raise
    if not isinstance(logits, torch.Tensor):
        raise SiteError(
            f"the model returned a {type(logits).__name__} and not a tensor of logits: "
            "make its factory return a module that returns only the logits"
        )
    return logits if logits.dtype is torch.float64 else logits.float()


def _advice(model: torch.nn.Module, inputs: Tree) -> str:
    parts = list(leaves(inputs))
    shapes = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
    said = f"the model (model.factory) received inputs {shapes}"
    if not isinstance(inputs, torch.Tensor):
        said += (
            f" as a {type(inputs).__name__}: a list becomes one tensor per item; make "
            "it an array to get a single tensor"
        )
    if not all(part.is_floating_point() for part in parts):
        said += (
            "; integer inputs are tokens and stay integers: scale images to floating "
            "point in the data function, for example x / 255"
        )
    if num_records(inputs) == 1 and model.training and _compares_records(model):
        said += (
            "; batch normalisation needs two records or more: change "
            "training.batch_size, so that no batch has a single record, or use "
            "torch.nn.GroupNorm"
        )
    return said


def _compares_records(model: torch.nn.Module) -> bool:
    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    return any(isinstance(part, kinds) for part in model.modules())


def _describe(values: Any) -> str:
    if isinstance(values, torch.Tensor):
        return f"a tensor of shape {tuple(values.shape)}"
    return f"a {type(values).__name__}"

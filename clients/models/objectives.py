"""What local training minimises, as functions of a model and a batch.

Each returns tensors, so that nothing waits for the device inside the loop.
Shape suffixes: B batch, K classes, T tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from federation.errors import SiteError


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """Loss of a batch.

    Attributes:
        total: Sum of the losses of all predictions, in nats; carries the gradient.
        count: Number of predictions.
        correct: How many were right, as a tensor.
    """

    total: torch.Tensor
    count: int
    correct: torch.Tensor


class Objective(Protocol):
    """A loss. With ``max_loss`` that of each prediction is clipped to so many nats."""

    def __call__(
        self,
        model: torch.nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor | None,
        /,
        *,
        max_loss: float | None = None,
    ) -> BatchLoss:
        """Apply the model to a batch and compare it with the targets."""
        ...


def classification(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor | None,
    /,
    *,
    max_loss: float | None = None,
) -> BatchLoss:
    """Cross-entropy of one label per example: ``model(inputs)`` gives ``(B, K)``.

    Raises:
        SiteError: Labels or logits have another shape or type.
    """
    if labels is None:
        raise SiteError("classification needs targets, and the data has none")
    if labels.ndim != 1 or labels.is_floating_point():
        raise SiteError(
            "classification needs one integer class per example; the targets are "
            f"{labels.dtype} of shape {tuple(labels.shape)}"
        )
    logits_bk = _logits(model, inputs)
    if logits_bk.ndim != 2 or len(logits_bk) != len(labels):  # noqa: PLR2004
        raise SiteError(
            f"classification needs logits of shape ({len(labels)}, classes); the "
            f"model gave {tuple(logits_bk.shape)}"
        )
    total = _total(logits_bk, labels, max_loss)
    correct = (logits_bk.argmax(1) == labels).sum()
    return BatchLoss(total, len(labels), correct)


def causal_lm(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    _: torch.Tensor | None,
    /,
    *,
    max_loss: float | None = None,
) -> BatchLoss:
    """Cross-entropy of each next token: windows ``(B, T+1)``, logits ``(B, T, V)``.

    Raises:
        SiteError: Tokens or logits have another shape or type.
    """
    if tokens.ndim != 2 or tokens.shape[1] < 2 or tokens.is_floating_point():  # noqa: PLR2004
        raise SiteError(
            "causal_lm needs windows of at least two integer tokens; the inputs are "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    inputs_bt, targets_bt = tokens[:, :-1], tokens[:, 1:]
    logits_btv = _logits(model, inputs_bt)
    if logits_btv.ndim != 3 or logits_btv.shape[:2] != targets_bt.shape:  # noqa: PLR2004
        raise SiteError(
            f"causal_lm needs logits of shape {tuple(targets_bt.shape)} and the "
            f"vocabulary; the model gave {tuple(logits_btv.shape)}"
        )
    targets = targets_bt.reshape(-1)
    logits = logits_btv.flatten(0, 1)
    total = _total(logits, targets, max_loss)
    correct = (logits.argmax(1) == targets).sum()
    return BatchLoss(total, targets.numel(), correct)


def _total(
    logits: torch.Tensor, targets: torch.Tensor, max_loss: float | None
) -> torch.Tensor:
    """Sum of the cross-entropies; one that is not a number counts ``max_loss``."""
    if max_loss is None:
        return functional.cross_entropy(logits, targets, reduction="sum")
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return losses.nan_to_num(nan=max_loss).clamp(max=max_loss).sum()


def _logits(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Apply the model; losses are taken with float32 at least."""
    logits = model(inputs)
    if not isinstance(logits, torch.Tensor):
        raise SiteError(
            f"the model gave a {type(logits).__name__} and not a tensor of logits: "
            "let its factory return a module that gives the logits alone"
        )
    return logits if logits.dtype is torch.float64 else logits.float()


def inputs_of_model(task: str, inputs: torch.Tensor) -> torch.Tensor:
    """What an objective applies the model to: of a window, all tokens but the last."""
    return inputs[:, :-1] if task == "causal_lm" else inputs


OBJECTIVES: dict[str, Objective] = {
    "classification": classification,
    "causal_lm": causal_lm,
}

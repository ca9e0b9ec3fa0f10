"""Built-in objectives that make one prediction per record.

Each is a function of model, inputs and targets, with the options of the job, that
returns tensors of shape ``(B,)`` by name, as an objective of a user's does: the loss,
the metrics of ``federation.job.metrics``, and the sums of ``measures`` where a job asks
for them.
Shape suffixes: B batch, L labels, K outputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.nn import functional

from clients.models.applying import (
    apply_model,
    describe,
    logits_of,
    misfit,
    one_tensor,
)
from federation.errors import SiteError
from federation.job.metrics import AUC_BINS, CALIBRATION_BINS, LOSS
from federation.tree import Tree

Values = Mapping[str, torch.Tensor]
_PAIR = 2
_GAP_STEPS = 1 << 24  # of a gap of 1; sums of 2^29 such gaps are exact in float64


def regression(
    model: torch.nn.Module,
    inputs: Tree,
    targets: Tree,
    *,
    loss: str = "mse",
    delta: float = 1.0,
) -> Values:
    """Numbers: ``model(inputs)`` and targets are ``(B,)`` or ``(B, ...)``.

    Several numbers of a record count by their mean.

    Args:
        model: Called with the inputs.
        inputs: Inputs of the batch.
        targets: Floating point, in the same shape as the model's result.
        loss: ``mse``, ``mae`` or ``huber``.
        delta: Error from which on ``huber`` is linear, in units of the targets.

    Raises:
        SiteError: Shapes differ.
    """
    found, wanted = _alike("regression", logits_of(model, inputs), targets)
    errors_bk = (found - wanted).flatten(1)
    square_b, absolute_b = errors_bk.square().mean(1), errors_bk.abs().mean(1)
    if loss == "huber":
        zero = torch.zeros_like(errors_bk)
        each_bk = functional.huber_loss(errors_bk, zero, reduction="none", delta=delta)
        loss_b = each_bk.mean(1)
    else:
        loss_b = square_b if loss == "mse" else absolute_b
    return {LOSS: loss_b, "absolute_error": absolute_b, "squared_error": square_b}


def binary(
    model: torch.nn.Module,
    inputs: Tree,
    targets: Tree,
    *,
    positive_weight: float = 1.0,
    measures: Sequence[str] = (),
) -> Values:
    """Yes or no: one logit per record, ``(B,)`` or ``(B, 1)``, and targets 0 or 1.

    Args:
        model: Called with the inputs.
        inputs: Inputs of the batch.
        targets: Integers or floating point.
        positive_weight: What the loss of a record with target 1 counts.
        measures: ``auc`` and ``calibration``.

    Raises:
        SiteError: Shapes differ, or a target is neither 0 nor 1.
    """
    logits_b, targets_b = _alike("binary", logits_of(model, inputs), targets)
    if logits_b.numel() != len(logits_b):
        raise misfit(
            "binary needs one logit per record: use multi_label for several labels",
            f"the model returned {tuple(logits_b.shape)}",
        )
    logits_b, targets_b = logits_b.flatten(), targets_b.flatten()
    _check_zero_one(targets_b)
    weight = logits_b.new_tensor(positive_weight)
    loss_b = functional.binary_cross_entropy_with_logits(
        logits_b, targets_b, pos_weight=weight, reduction="none"
    )
    values = {LOSS: loss_b, **_found((logits_b > 0)[:, None], targets_b[:, None] > 0)}
    for measure in measures:
        score_b = torch.sigmoid(logits_b)
        if measure == "auc":
            values |= _auc_counts(score_b, targets_b > 0)
        else:
            # Of the class that is predicted, as for several classes.
            confidence_b = torch.maximum(score_b, 1 - score_b)
            values |= _calibration(measure, confidence_b, values["correct"])
    return values


def multi_label(model: torch.nn.Module, inputs: Tree, targets: Tree) -> Values:
    """Several labels per record: logits and targets ``(B, L)``, targets 0 or 1.

    The loss is a mean over the labels. A record is correct if all of its labels are.

    Raises:
        SiteError: Shapes differ, or a target is neither 0 nor 1.
    """
    logits, wanted = _alike("multi_label", logits_of(model, inputs), targets)
    logits_bl, wanted_bl = logits.flatten(1), wanted.flatten(1)
    _check_zero_one(wanted_bl)
    losses_bl = functional.binary_cross_entropy_with_logits(
        logits_bl, wanted_bl, reduction="none"
    )
    return {LOSS: losses_bl.mean(1), **_found(logits_bl > 0, wanted_bl > 0)}


def contrastive(
    model: torch.nn.Module,
    inputs: Tree,
    _: Tree,
    *,
    temperature: float = 0.07,
    measures: Sequence[str] = (),
) -> Values:
    """Two towers: each record's pair against the other records of the batch.

    ``model(inputs)`` returns two tensors ``(B, D)``, whose rows of one place belong
    together. The loss is the mean of both directions of InfoNCE on cosines (Radford et
    al. 2021, arXiv:2103.00020, figure 3); hits count from the first to the second.

    Args:
        model: Called with the inputs.
        inputs: Inputs of the batch.
        temperature: What cosines are divided by.
        measures: ``recall_at_K`` among the records of the batch.

    Raises:
        SiteError: The model returned something else.
    """
    found = apply_model(model, inputs)
    pair = list(found.values()) if isinstance(found, Mapping) else found
    is_pair = isinstance(pair, tuple | list) and len(pair) == _PAIR
    if not is_pair or not all(isinstance(part, torch.Tensor) for part in pair):
        raise SiteError(
            "contrastive needs a model that returns two tensors of embeddings, but "
            f"this one returned {describe(found)}"
        )
    first, second = (part.float() for part in pair)
    if first.ndim != _PAIR or first.shape != second.shape:
        raise misfit(
            "contrastive needs two tensors of shape (records, values)",
            f"the model returned {tuple(first.shape)} and {tuple(second.shape)}",
        )
    first, second = functional.normalize(first), functional.normalize(second)
    logits_bb = first @ second.t() / temperature
    places = torch.arange(len(logits_bb), device=logits_bb.device)
    loss_b = sum(
        functional.cross_entropy(each, places, reduction="none") / _PAIR
        for each in (logits_bb, logits_bb.t())
    )
    assert isinstance(loss_b, torch.Tensor)  # noqa: S101 -- of two, not of none
    values = {LOSS: loss_b, "correct": (logits_bb.argmax(1) == places).float()}
    return {**values, **recalls(logits_bb, places, measures)}


def ranking(model: torch.nn.Module, inputs: Tree, _: Tree) -> Values:
    """Pairs whose first is to get the higher score: inputs are ``(better, worse)``.

    ``model(better)`` and ``model(worse)`` return a score per record. The loss is
    ``log(1 + exp(worse - better))`` (Burges et al. 2005, "Learning to Rank using
    Gradient Descent", with the target probability 1).

    Raises:
        SiteError: Inputs are no pair, or scores have another shape.
    """
    if not isinstance(inputs, tuple | list) or len(inputs) != _PAIR:
        raise SiteError(
            "ranking needs inputs (better, worse): a tuple of two parts, each of which "
            f"the model takes; these are {describe(inputs)}"
        )
    better_b, worse_b = (logits_of(model, part) for part in inputs)
    for scores in (better_b, worse_b):
        if scores.numel() != len(scores):
            raise misfit(
                "ranking needs one score per record",
                f"the model returned {tuple(scores.shape)}",
            )
    margin_b = better_b.flatten() - worse_b.flatten()
    return {LOSS: functional.softplus(-margin_b), "correct": (margin_b > 0).float()}


TASKS: Mapping[str, Callable[..., Values]] = {
    "regression": regression,
    "binary": binary,
    "multi_label": multi_label,
    "contrastive": contrastive,
    "ranking": ranking,
}


def calibration_gaps(confidence_b: torch.Tensor, correct_b: torch.Tensor) -> Values:
    """Confidence less hits, by bin of the confidence.

    The expected calibration error is the sum of the absolute sums over the number of
    records (Guo et al. 2017, arXiv:1706.04599, equation 3, whose bins these are).

    Each record is in one bin, whatever the model makes of it, and NaN counts as a gap
    of 1. Gaps are multiples of 2^-24, so that sums in float64 do not depend on the
    order: noise on them is made for a record that changes one of them.
    """
    bins_b = _bins(confidence_b)
    exact_b = (confidence_b.double() - correct_b.double()).nan_to_num(nan=1.0)
    gap_b = (exact_b.clamp(-1, 1) * _GAP_STEPS).round() / _GAP_STEPS
    return {
        f"calibration_{number}": gap_b * chosen_b
        for number, chosen_b in _members(bins_b, CALIBRATION_BINS)
    }


def _bins(confidence_b: torch.Tensor) -> torch.Tensor:
    """Bins are open below and closed above."""
    return (confidence_b * CALIBRATION_BINS).ceil().long() - 1


def _calibration(
    measure: str, confidence_b: torch.Tensor, correct_b: torch.Tensor
) -> Values:
    """The gaps, and for a reliability diagram each bin's records and hits too."""
    values = dict(calibration_gaps(confidence_b, correct_b))
    if measure == "reliability":
        for what, of_b in (("count", torch.ones_like(correct_b)), ("hits", correct_b)):
            for number, chosen_b in _members(_bins(confidence_b), CALIBRATION_BINS):
                values[f"bin_{what}_{number}"] = of_b * chosen_b
    return values


def of_logits(logits_bk: torch.Tensor, labels_b: torch.Tensor, measure: str) -> Values:
    """Each record's values of one of ``training.measures``, by the name of their sum.

    Raises:
        SiteError: ``auc`` of more than two classes.
    """
    if measure in {"calibration", "reliability"}:
        score_b, label_b = logits_bk.double().softmax(1).max(1)
        return _calibration(measure, score_b, (label_b == labels_b).double())
    if measure != "auc":
        return recalls(logits_bk, labels_b, [measure])
    if logits_bk.shape[1] != _PAIR:
        raise misfit(
            "auc needs one logit per record, or one each for no and yes",
            f"there are {logits_bk.shape[1]}",
        )
    return _auc_counts(logits_bk.softmax(1)[:, 1], labels_b > 0)


def recalls(
    scores_bk: torch.Tensor, labels_b: torch.Tensor, measures: Sequence[str]
) -> Values:
    """Whether a label is among the ``K`` largest scores, for each ``recall_at_K``.

    Equal scores count as larger: a model that does not tell records apart has no hit.
    """
    own_b1 = scores_bk.gather(1, labels_b[:, None])
    rank_b = (scores_bk >= own_b1).sum(1)
    return {
        name: (rank_b <= int(name.rpartition("_")[2])).float()
        for name in measures
        if name.startswith("recall_at_")
    }


def _auc_counts(score_b: torch.Tensor, is_positive_b: torch.Tensor) -> Values:
    """Histograms of the scores of records with target 1 and with target 0."""
    bins_b = (score_b * AUC_BINS).long()
    sides = {"pos": is_positive_b, "neg": ~is_positive_b}
    return {
        f"auc_{side}_{number}": (chosen_b & of_side_b).float()
        for side, of_side_b in sides.items()
        for number, chosen_b in _members(bins_b, AUC_BINS)
    }


def _members(bins_b: torch.Tensor, num_bins: int) -> Iterator[tuple[int, torch.Tensor]]:
    bins_b = bins_b.clamp(0, num_bins - 1)
    return ((number, bins_b == number) for number in range(num_bins))


def _found(predicted_bl: torch.Tensor, wanted_bl: torch.Tensor) -> Values:
    return {
        "correct": (predicted_bl == wanted_bl).all(1).float(),
        "tp": (predicted_bl & wanted_bl).float().mean(1),
        "fp": (predicted_bl & ~wanted_bl).float().mean(1),
        "fn": (~predicted_bl & wanted_bl).float().mean(1),
    }


def _alike(
    task: str, found: torch.Tensor, targets: Tree
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and targets as ``(B, K)``; ``(B,)`` and ``(B, 1)`` are the same."""
    if targets is None:
        raise SiteError(f"{task} needs targets, and the data has none")
    targets = one_tensor(targets, f"targets of {task}").to(found.dtype)
    shapes = [tuple(part.shape) for part in (found, targets)]
    bare = [shape[:-1] if shape[1:] == (1,) else shape for shape in shapes]
    if bare[0] != bare[1]:
        raise misfit(
            f"{task} needs a model that returns the shape of the targets: broadcasting "
            "would compare each record with all others",
            f"the model returned {shapes[0]} for targets {shapes[1]}",
        )
    size = len(targets)
    return found.reshape(size, -1), targets.reshape(size, -1)


def _check_zero_one(targets: torch.Tensor) -> None:
    # Only where looking does not make the device wait.
    if targets.device.type != "cpu":
        return
    if bool(((targets != 0) & (targets != 1)).any()):
        raise misfit(
            "targets of yes or no must be 0 or 1: renumber them",
            f"there are values from {targets.min():g} to {targets.max():g}",
        )

"""Learn from predictions instead of weights: logit tables, distillation, ensembles.

Sites whose models differ in architecture have no weights to average, but can agree on
predictions for a public set of records: FedMD (Li and Wang 2019, arXiv:1910.03581) and
FedDF (Lin et al. 2020, arXiv:2006.07242). Their mean is a run whose model is a table of
logits; a model then learns from the table.

Shape suffixes: B batch, K classes, M members.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from clients.factories import call_factory, import_factory
from clients.models import weight_files
from clients.models.applying import describe, logits_of, misfit
from federation.errors import JobError
from federation.job.metrics import LOSS
from federation.tree import Tree


def logit_table(records: int, classes: int) -> nn.Module:
    """Logits of each record of a public set, from its number, zero at first.

    Args:
        records: Size of the public set.
        classes: Number of classes.
    """
    table = nn.Embedding(records, classes)
    nn.init.zeros_(table.weight)
    return table


def match_logits(
    model: nn.Module, inputs: Tree, targets: Tree
) -> Mapping[str, torch.Tensor]:
    """An objective: half the squared distance of logits.

    A step of plain SGD on each public record once, with ``lr`` equal to the number of
    records, sets a ``logit_table`` to the targets.

    Args:
        model: From ``logit_table``.
        inputs: Numbers of public records, ``(B,)``.
        targets: Logits of the site's own model, ``(B, K)``.

    Raises:
        SiteError: They are not.
    """
    found_bk = logits_of(model, inputs)
    if not isinstance(targets, torch.Tensor) or targets.shape != found_bk.shape:
        raise misfit(
            "match_logits needs the logits of the site's own model, one for each class",
            f"targets are {describe(targets)}, not of shape {tuple(found_bk.shape)}",
        )
    return {LOSS: (found_bk - targets).square().sum(1) / 2}


def distill(
    model: nn.Module, inputs: Tree, targets: Tree, *, temperature: float = 1.0
) -> Mapping[str, torch.Tensor]:
    """An objective: learn from a teacher's logits; labels only measure.

    ``T^2 KL(softmax(teacher / T) || softmax(student / T))``: Hinton et al. 2015,
    arXiv:1503.02531, section 2, up to a constant. Returns ``loss`` and ``accuracy``.

    Args:
        model: The student: logits ``(B, K)``.
        inputs: Inputs of the batch.
        targets: The teacher's logits ``(B, K)``, floating point; or classes ``(B,)``,
            which count by their cross-entropy.
        temperature: T above, > 0.

    Raises:
        JobError: The temperature is not above 0.
        SiteError: Targets are neither.
    """
    if not 0 < temperature < math.inf:
        raise JobError(
            f"is {temperature}: give a number above 0",
            key="training.options.temperature",
        )
    student_bk = logits_of(model, inputs)
    if not isinstance(targets, torch.Tensor):
        raise misfit("distill needs one tensor of targets", "targets are nested")
    if not targets.is_floating_point():
        loss_b = functional.cross_entropy(student_bk, targets, reduction="none")
        return {LOSS: loss_b, "accuracy": (student_bk.argmax(1) == targets).float()}
    if targets.shape != student_bk.shape:
        raise misfit(
            "distill needs a teacher's logits in the shape of the student's",
            f"targets are {tuple(targets.shape)}, not {tuple(student_bk.shape)}",
        )
    log_student_bk = (student_bk / temperature).log_softmax(1)
    log_teacher_bk = (targets / temperature).log_softmax(1)
    terms_bk = functional.kl_div(
        log_student_bk, log_teacher_bk, reduction="none", log_target=True
    )
    agrees_b = student_bk.argmax(1) == targets.argmax(1)
    return {LOSS: temperature**2 * terms_bk.sum(1), "accuracy": agrees_b.float()}


class Ensemble(nn.Module):
    """Trained models, frozen, and how much each of them counts."""

    def __init__(self, members: list[nn.Module]) -> None:
        """Let all count the same."""
        super().__init__()
        self.members = nn.ModuleList(members)
        self.mixture = nn.Parameter(torch.zeros(len(members)))

    def train(self, mode: bool = True) -> "Ensemble":  # noqa: FBT001, FBT002 -- torch's
        """Keep the members in evaluation mode."""
        super().train(mode)
        self.members.eval()
        return self

    def forward(self, inputs: Tree) -> torch.Tensor:
        """Logarithm of the weighted mean of the members' probabilities, ``(B, K)``."""
        each_mbk = torch.stack(
            [logits_of(member, inputs).log_softmax(-1) for member in self.members]
        )
        weights_m = self.mixture.log_softmax(0)
        return (each_mbk + weights_m[:, None, None]).logsumexp(0)


def ensemble(members: Sequence[Mapping[str, Any]]) -> nn.Module:
    """Make one model of those of earlier runs: the mean of their probabilities.

    All that a job trains of it is one number per member, the logarithm of its weight up
    to a constant, shape ``(M,)``.

    Args:
        members: For each: ``factory``, its ``options``, and ``weights``, the folder of
            a run or an export, or a safetensors file; at least two. All sites need
            the same files.

    Raises:
        JobError: A member lacks a key, or its weights do not fit.
    """
    if len(members) < 2:  # noqa: PLR2004
        raise JobError("give at least 2 members", key="model.options.members")
    return Ensemble([_member(each, number) for number, each in enumerate(members)])


def _member(given: Mapping[str, Any], number: int) -> nn.Module:
    key = f"model.options.members[{number}]"
    if not {"factory", "weights"} <= given.keys() <= {"factory", "options", "weights"}:
        raise JobError(
            "give factory and weights, and options if the factory needs some", key=key
        )
    factory = import_factory(given["factory"], key=f"{key}.factory")
    member = call_factory(factory, given.get("options", {}), key=f"{key}.options")
    return weight_files.load(member, given["weights"], key=f"{key}.weights")

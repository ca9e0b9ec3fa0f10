"""Several models in one, of which each site trains and uses the one that fits it best.

IFCA (Ghosh et al. 2020, arXiv:2006.04088, Algorithm 1): each site receives all models,
chooses the one with the smallest loss on its own training data, and trains that. Here
the models are one module, and an update is zero outside of the chosen one. So a model's
step is divided by all sites of the round, as in the algorithm's gradient averaging, and
a sum hides who chose what.

A site's choice follows from running means of losses, which the job must keep personal:
``personal = ["choice.*"]``. Models that are new differ by chance: often one of them has
the smaller loss at every site, is the only one to be trained, and stays the best. So
the first round trains nothing. Its result is the mean loss of each model over the
sites, and a site compares its own losses with these.

Shape suffixes: B batch, C clusters, K classes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from clients.factories import call_factory, import_factory
from clients.models.applying import logits_of
from clients.models.tasks import TASKS, Values
from federation.errors import JobError
from federation.job.metrics import LOSS
from federation.tree import Tree

_DECAY = 0.9  # Of the running means: the losses of about the last ten batches.


class Clusters(nn.Module):
    """Models of one architecture, and which of them fits this site best.

    Attributes:
        members: The models.
        choice: What this site knows of them.
        typical: Mean loss of each model over the sites, before any of them was trained;
            zeros in the first round. Shape ``(C,)``.
        measures: Whether this round only measures. Not a part of the state: every
            round begins with False.
    """

    typical: torch.Tensor
    measures: torch.Tensor

    def __init__(self, members: list[nn.Module]) -> None:
        """Begin with the first one."""
        super().__init__()
        self.members = nn.ModuleList(members)
        self.choice = _MemberLosses(len(members))
        self.register_buffer("typical", torch.zeros(len(members)))
        self.register_buffer("measures", torch.tensor(False), persistent=False)  # noqa: FBT003 -- torch's

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Apply the chosen model."""
        return self.chosen()(*inputs, **named)

    def chosen(self) -> nn.Module:
        """The model that has a smaller loss here than at other sites."""
        return self.members[int((self.choice.losses - self.typical).argmin())]

    @torch.no_grad()
    def note(self, losses_c: torch.Tensor) -> bool:
        """Take the mean losses of a training batch, shape ``(C,)``.

        Returns:
            Whether this is the first round, which only measures.
        """
        if not self.typical.any():
            self.measures.fill_(True)  # noqa: FBT003 -- torch's
        self.choice.note(losses_c)
        if self.measures:  # Buffers are averaged: the next round has the mean.
            self.typical.copy_(self.choice.losses)
        return bool(self.measures)


class _MemberLosses(nn.Module):
    """Running means of the models' losses on this site's training batches."""

    losses: torch.Tensor
    weight: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("losses", torch.zeros(size))
        self.register_buffer("weight", torch.zeros(()))

    def note(self, losses_c: torch.Tensor) -> None:
        self.weight.mul_(_DECAY).add_(1)
        self.losses.add_((losses_c - self.losses) / self.weight)


def clusters(
    number: int, factory: str, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """Make several models of one architecture.

    Args:
        number: How many; each adds its size to every message.
        factory: ``module:function`` of one of them.
        options: Its keyword arguments.

    Raises:
        JobError: There are fewer than two, or ``factory`` cannot be called.
    """
    if number < 2:  # noqa: PLR2004
        raise JobError(
            f"number is {number}: give at least 2 clusters", key="model.options.number"
        )
    make = import_factory(factory, key="model.options.factory")
    members = [
        call_factory(make, dict(options or {}), key="model.options.options")
        for _ in range(number)
    ]
    if all(map(torch.equal, *(list(m.parameters()) for m in members[:2]))):
        raise JobError(
            "makes equal models, of which every site would choose the first: draw "
            "their weights at random",
            key="model.options.factory",
        )
    return Clusters(members)


def best_cluster(
    model: nn.Module, inputs: Tree, targets: Tree, *, task: str = "classification"
) -> Values:
    """An objective: in training, choose the model to train; otherwise use the choice.

    Held-out records are evaluated with the choice that training records led to.

    Args:
        model: From ``clusters``.
        inputs: Inputs of the batch.
        targets: Targets of the batch.
        task: ``classification``, which returns ``loss`` and ``accuracy``, or a
            built-in task with one prediction per record.

    Raises:
        JobError: The model is another one, or the task is.
    """
    if not isinstance(model, Clusters):
        raise JobError(
            "best_cluster trains models of clients.models:clusters: use that",
            key="model.factory",
        )
    objective = by_record(task)
    if model.training:
        model.members.eval()  # What is only measured leaves no statistics.
        with torch.no_grad():
            found = [objective(m, inputs, targets)[LOSS].mean() for m in model.members]
        model.members.train()
        if model.note(torch.stack(found)):
            values = objective(model.chosen(), inputs, targets)
            return {**values, LOSS: values[LOSS].detach() + 0 * values[LOSS]}
    return objective(model.chosen(), inputs, targets)


def by_record(task: str) -> Callable[[nn.Module, Tree, Tree], Values]:
    """Find a built-in task that another objective is around.

    Raises:
        JobError: It is unknown, or does not give a value for each record.
    """
    if task == "classification":
        return _classification
    if task not in TASKS:
        raise JobError(
            f"{task!r} cannot be used here: choose classification or "
            f"{', '.join(TASKS)}",
            key="training.options.task",
        )
    return TASKS[task]


def _classification(model: nn.Module, inputs: Tree, targets: Tree) -> Values:
    logits_bk = logits_of(model, inputs)
    loss_b = functional.cross_entropy(logits_bk, targets, reduction="none")
    return {LOSS: loss_b, "accuracy": (logits_bk.argmax(1) == targets).float()}

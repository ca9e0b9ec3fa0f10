"""Elastic weight consolidation: learn new data without forgetting the old.

Kirkpatrick et al. 2017, arXiv:1612.00796, equation 3: the loss on new data plus
``strength / 2 * sum_i F_i (x_i - x*_i)^2``, where x* are the weights of an earlier run
and F is the diagonal of its Fisher information. F is a sum over records, so it is a run
of one round: its model is F, and its update adds the squared gradient of each record.
The labels are those of the records (the empirical Fisher information).
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from clients.factories import call_factory, import_factory
from clients.models import weight_files
from clients.models.clusters import by_record
from federation.errors import JobError
from federation.job.metrics import LOSS
from federation.tree import Tree

_ANCHOR, _FISHER = "model.", "fisher."
_KEY = "training.options"

Tensors = Mapping[str, torch.Tensor]


class Fisher(nn.Module):
    """A trained model, frozen, and its Fisher information, zero at first."""

    def __init__(self, model: nn.Module) -> None:
        """Measure the parameters of ``model``."""
        super().__init__()
        self.model = model
        self.fisher = nn.ParameterDict(
            {
                _mangled(name): nn.Parameter(torch.zeros_like(value))
                for name, value in model.named_parameters()
            }
        )

    def train(self, mode: bool = True) -> "Fisher":  # noqa: FBT001, FBT002 -- torch's
        """Keep layers as they predict: a batch is one record, and none is left out."""
        super().train(mode)
        for part in self.model.modules():
            if isinstance(part, (_BatchNorm, _DropoutNd)):
                part.eval()
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Apply the model; its gradients go to ``fisher``, whatever that holds."""
        values = {}
        for name, value in self.model.named_parameters():
            zero = self.fisher[_mangled(name)]
            values[name] = value + (zero - zero.detach())
        return functional_call(self.model, values, inputs, named)


def fisher(
    factory: str, weights: str, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """Make the model of a run that measures the Fisher information of another one.

    Its optimiser is ``squared_gradients``, and its batches hold one record.

    Args:
        factory: ``module:function`` of the trained model.
        weights: Folder of its run or export, or a safetensors file, at every site.
        options: Keyword arguments of ``factory``.

    Raises:
        JobError: The weights are not here, or do not fit.
    """
    make = import_factory(factory, key="model.options.factory")
    model = call_factory(make, dict(options or {}), key="model.options.options")
    return Fisher(weight_files.load(model, weights, key="model.options.weights"))


def squared_gradients(
    parameters: Iterable[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """An optimiser whose steps add ``lr`` times the squared gradient.

    With ``lr`` equal to 1 / ``local_steps``, a site's update is a mean over records.
    """
    return _SquaredGradients(parameters, {"lr": lr})


class _SquaredGradients(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.square(), alpha=group["lr"])


def consolidated(
    model: nn.Module,
    inputs: Tree,
    targets: Tree,
    *,
    memory: str,
    sha256: str,
    strength: float = 1.0,
    task: str = "classification",
) -> Tensors:
    """An objective: another one, and in training the penalty above.

    Args:
        model: Model of the architecture that ``memory`` was made with.
        inputs: Inputs of the batch.
        targets: Targets of the batch.
        memory: Folder of the run of ``fisher``, or its file, at every site.
        sha256: Digest of that file, so that all sites have the same.
        strength: How much the old data counts; at least 0.
        task: ``classification``, which returns ``loss`` and ``accuracy``, or a
            built-in task with one prediction per record.

    Raises:
        JobError: The file is not here, is another one, or does not fit the model; or an
            option is wrong.
    """
    if not 0 <= strength < math.inf:
        raise JobError(
            f"is {strength}: give a number of at least 0", key=f"{_KEY}.strength"
        )
    values = by_record(task)(model, inputs, targets)
    if not model.training:
        return values
    penalty = strength / 2 * _distance(model, _memory(memory, sha256))
    return {**values, LOSS: values[LOSS] + penalty}


def _distance(model: nn.Module, memory: Tensors) -> torch.Tensor:
    total: torch.Tensor | None = None
    for name, value in model.named_parameters():
        fisher = memory.get(_FISHER + _mangled(name))
        if fisher is None or fisher.shape != value.shape:
            raise JobError(
                f"the file was made with another model: it has no {name!r} of shape "
                f"{tuple(value.shape)}",
                key=f"{_KEY}.memory",
            )
        anchor = memory[_ANCHOR + name]
        far = fisher.to(value) * (value - anchor.to(value)).square()
        total = far.sum() if total is None else total + far.sum()
    assert total is not None  # noqa: S101 -- a model that is trained has parameters
    return total


@lru_cache(maxsize=4)
def _memory(name: str, sha256: str) -> Tensors:
    path = weight_files.find(name, key=f"{_KEY}.memory")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise JobError(
            f"{path} has SHA-256 {found}, and the job names {sha256}: copy the file "
            "of the run that measured it",
            key=f"{_KEY}.sha256",
        )
    return weight_files.read(name, key=f"{_KEY}.memory")


def _mangled(name: str) -> str:
    """Name of a parameter in a ``ParameterDict``, whose keys have no dots."""
    return name.replace(".", "/")

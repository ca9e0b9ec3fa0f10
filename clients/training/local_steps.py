"""Parts of a local step: optimiser, learning rate, gradient of the proximal term."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from clients.data.datasets import Indices
from federation.job.spec import JobSpec, LearningRateSpec, OptimizerSpec


def learning_rate(spec: LearningRateSpec, lr: float, step: int, steps: int) -> float:
    """Learning rate at a local step of the run.

    Args:
        spec: The schedule.
        lr: The optimiser's learning rate.
        step: 0 for the first step of the first round.
        steps: Local steps of the whole run; of no account to ``constant``.
    """
    if step < spec.warmup_steps:
        return lr * (step + 1) / spec.warmup_steps
    if spec.name == "constant":
        return lr
    progress = (step - spec.warmup_steps) / max(steps - spec.warmup_steps, 1)
    left = (
        1 - progress
        if spec.name == "linear"
        else (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    )
    return lr * (spec.final_fraction + (1 - spec.final_fraction) * max(left, 0.0))


def set_learning_rate(
    optimizer: torch.optim.Optimizer, job: JobSpec, step: int
) -> None:
    """Give the optimiser the learning rate of a step, counted over the run."""
    training = job.training
    steps = job.rounds * (training.local_steps or 0)
    rate = learning_rate(training.learning_rate, training.optimizer.lr, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = rate


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    """Make a fresh optimiser, as the job's ``training.optimizer`` says."""
    if spec.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=spec.lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            weight_decay=spec.weight_decay,
        )
    algorithm: type[torch.optim.Adam]
    algorithm = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    first, second = spec.betas
    return algorithm(
        parameters, lr=spec.lr, betas=(first, second), weight_decay=spec.weight_decay
    )


def groups(items: Iterator[Indices], size: int) -> Iterator[list[Indices]]:
    """Cut a stream of batches into the batches of one optimiser step."""
    while group := list(islice(items, size)):
        yield group


@torch.no_grad()
def add_proximal(
    parameters: Sequence[torch.nn.Parameter], anchor: Sequence[torch.Tensor], mu: float
) -> None:
    """Add the gradient of ``mu/2 |x - anchor|^2``: arXiv:1812.06127, equation 2."""
    for parameter, origin in zip(parameters, anchor, strict=True):
        if parameter.grad is None:  # No batch of this step has used it.
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.add_(parameter - origin, alpha=mu)

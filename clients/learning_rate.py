"""The learning rate of a local step."""

import math
from functools import partial

from clients.factories import call_factory, import_factory
from federation.errors import JobError
from federation.job.code_files import unpinned
from federation.job.metrics import is_function
from federation.job.spec import JobSpec, LearningRateSpec


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


def rate_of(job: JobSpec, step: int) -> float:
    """Learning rate of a job at a step, counted over the run from 0.

    Every step of a site reads as many examples, so the schedule follows tokens, too.

    Raises:
        JobError: A schedule of the user's gave something else than a number.
        UserCodeError: It failed.
    """
    training = job.training
    steps = job.rounds * (training.local_steps or 0)
    spec, lr = training.learning_rate, training.optimizer.lr
    if not is_function(spec.name):
        return learning_rate(spec, lr, step, steps)
    key = "training.learning_rate.name"
    function = import_factory(spec.name, key=key)
    factor = call_factory(
        partial(function, step, steps), spec.options, key=f"{key[:-5]}.options"
    )
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise JobError(
            f"{unpinned(spec.name)} returned {factor!r:.80} at step {step}: return the "
            "factor of the learning rate, a number of at least 0",
            key=key,
        )
    return lr * factor

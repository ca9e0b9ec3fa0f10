"""What a job must not request whose local steps differ from the usual ones."""

from collections.abc import Iterator

from federation.errors import JobError
from federation.job.metrics import TRAINER
from federation.job.spec import JobSpec, ScheduleSpec

_FACTOR = 2
_PAIR = 2


def check_local_work(job: JobSpec) -> None:
    """Refuse ranges that leave no choice, and work that must be planned.

    With twice the fewest steps allowed, the steps of a run always divide into rounds
    that are neither too short nor too long, and rounds can differ enough to measure.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    schedule, low = job.schedule, job.training.local_steps
    if schedule.local_work == "fixed":
        _check_unused(schedule)
        return
    if low is None:
        raise JobError(
            "'auto' chooses a number of steps: use training.local_steps, the fewest, "
            "instead of local_epochs",
            key="schedule.local_work",
        )
    if job.privacy.differential_privacy.enabled:
        raise JobError(
            "with differential privacy the steps of every round are planned and "
            "charged before the run, so they cannot follow the lines: use 'fixed'",
            key="schedule.local_work",
        )
    if any(site.flower_app is not None for site in job.sites):
        raise JobError(
            "an app of Flower does its own number of steps: use 'fixed'",
            key="schedule.local_work",
        )
    if schedule.max_local_steps is None or schedule.max_local_steps < _FACTOR * low:
        raise JobError(
            f"'auto' needs room to choose: set at least {_FACTOR * low}, twice "
            "training.local_steps",
            key="schedule.max_local_steps",
        )


def _check_unused(schedule: ScheduleSpec) -> None:
    default = ScheduleSpec()
    for name in ("max_local_steps", "training_share"):
        if getattr(schedule, name) != getattr(default, name):
            raise JobError(
                "has no effect with local_work = 'fixed': use 'auto', or remove this "
                "key",
                key=f"schedule.{name}",
            )


def check_larger_steps(job: JobSpec) -> None:
    """Refuse steps of more batches where every step must be like the others.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    training = job.training
    if not training.accumulate_from:
        return
    for reason in _reasons_for_equal_steps(job):
        raise JobError(reason, key="training.accumulate_from")
    before = 1
    for index, pair in enumerate(training.accumulate_from):
        key = f"training.accumulate_from[{index}]"
        if len(pair) != _PAIR or pair[1] < 1:
            raise JobError(
                "must be [first round, batches of a step], with at least 1 batch",
                key=key,
            )
        if not before < pair[0] <= job.rounds:
            raise JobError(
                f"round {pair[0]} must be after round {before} and at most the last "
                f"one, {job.rounds}",
                key=key,
            )
        before = pair[0]


def _reasons_for_equal_steps(job: JobSpec) -> Iterator[str]:
    training, private = job.training, job.privacy.differential_privacy
    if training.local_steps is None:
        yield "counts batches of steps: use training.local_steps, not local_epochs"
    if private.clips_gradients and private.in_sum:
        yield (
            f'with unit = "{private.unit}" all sites plan the noise of their sum for '
            "one sampling rate each, which a larger step would raise: remove this key, "
            "and lower the learning rate instead (training.learning_rate)"
        )
    if job.schedule.local_work != "fixed":
        yield (
            'the number of steps of a round is chosen with local_work = "auto", so '
            "that the batches before it are not known: use 'fixed'"
        )
    if training.overlap_steps:
        yield (
            "steps that are taken ahead have the size of their round, and sites would "
            "wait for them: remove training.overlap_steps, or this key"
        )
    if training.task == TRAINER:
        yield (
            "the Trainer of model.factory has one gradient_accumulation_steps: remove "
            "this key, or name another task"
        )
    if any(site.flower_app is not None for site in job.sites):
        yield "an app of Flower takes its own steps: remove this key"

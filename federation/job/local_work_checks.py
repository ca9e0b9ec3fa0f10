"""What a job whose local steps are chosen round by round must not request."""

from federation.errors import JobError
from federation.job.spec import JobSpec, ScheduleSpec

_FACTOR = 2


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

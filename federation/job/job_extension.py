"""Which changes of its job a started run allows: more rounds, and no others."""

from collections.abc import Collection, Mapping
from typing import Any

from federation.errors import CheckpointMismatch
from federation.job import job_digest
from federation.job.job_file import differences
from federation.job.spec import JobSpec


def check_same(
    mine: Mapping[str, Any],
    kept: Mapping[str, Any],
    *,
    where: str,
    rounds_before: Collection[int] = (),
) -> None:
    """Check that a run is resumed with the job that it was started with.

    Args:
        mine: The job that resumes it, as ``job_digest.deciding`` returns it.
        kept: The job that is kept with the run, without irrelevant keys too.
        where: The file that keeps it.
        rounds_before: Numbers of rounds that the job had before it was extended.

    Raises:
        CheckpointMismatch: They differ; the message names every key that does.
    """
    if kept.get("rounds") in rounds_before:
        kept = {**kept, "rounds": mine.get("rounds")}
    found = differences(mine, kept)
    if found:
        raise CheckpointMismatch(
            f"the run was started with a different job: {'; '.join(found)} (there: "
            f"{where}). Set these keys back to resume, extend the run (--extend "
            "ROUNDS) if it is to have more rounds, or start a new run"
        )


def check_extension(before: JobSpec, after: JobSpec) -> None:
    """Check that a job differs from that of its run in nothing but more rounds.

    Raises:
        CheckpointMismatch: It differs in another key, or has as many rounds or fewer;
            or what was done in earlier rounds depends on how many there are.
    """
    same_rounds = {**job_digest.deciding(before), "rounds": after.rounds}
    changes = differences(job_digest.deciding(after), same_rounds)
    if changes:
        raise CheckpointMismatch(
            "the run was started from another job, and only its rounds can be "
            f"extended: {'; '.join(changes)}. Set these keys back, or start a new run"
        )
    if after.rounds <= before.rounds:
        raise CheckpointMismatch(
            f"rounds: the run's job has {before.rounds} already, so it cannot be "
            f"extended to {after.rounds}; choose more"
        )
    for key, reason in _dependents(after).items():
        raise CheckpointMismatch(
            f"a run with {key} cannot be extended: {reason}. Start a new run from its "
            "model instead (model.weights)"
        )


def _dependents(job: JobSpec) -> dict[str, str]:
    """Keys whose meaning depends on the number of rounds, each with how."""
    found = {}
    if job.privacy.differential_privacy.enabled:
        found["differential privacy"] = (
            "its noise and each site's promise in the ledger are for the rounds that "
            "it began with"
        )
    schedule = job.training.learning_rate.name
    if schedule != "constant":
        found[f"training.learning_rate.name = {schedule!r}"] = (
            "the schedule ends with the last round, so rounds already trained would "
            "have had other learning rates"
        )
    return found

"""Which changes of its job a started run allows: more rounds and sites, no others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from federation.errors import CheckpointMismatch
from federation.events import RunExtended
from federation.job import job_digest
from federation.job.job_file import differences
from federation.job.method_checks import things
from federation.job.spec import JobSpec
from federation.methods.joining import JOINING


def check_same(
    mine: Mapping[str, Any],
    kept: Mapping[str, Any],
    *,
    where: str,
    extensions: Sequence[RunExtended] = (),
) -> None:
    """Check that a run is resumed with the job that it was started with.

    Args:
        mine: The job that resumes it, as ``job_digest.deciding`` returns it.
        kept: The job that is kept with the run, without irrelevant keys too.
        where: The file that keeps it.
        extensions: How the job was extended since, in order.

    Raises:
        CheckpointMismatch: They differ; the message names every key that does.
    """
    found = min((differences(one, kept) for one in _before(mine, extensions)), key=len)
    if found:
        raise CheckpointMismatch(
            f"the run was started with a different job: {'; '.join(found)} (there: "
            f"{where}). Set these keys back to resume, extend the run (--extend "
            "ROUNDS) if it is to have more rounds or sites, or start a new run"
        )


def _before(
    job: Mapping[str, Any], extensions: Sequence[RunExtended]
) -> Iterator[Mapping[str, Any]]:
    """Yield a job, and what it was before each of its extensions, the newest first."""
    yield job
    for one in reversed(extensions):
        sites = [site for site in job["sites"] if site["name"] not in one.joined]
        job = {**job, "rounds": one.rounds_before, "sites": sites}
        yield job


def check_extension(before: JobSpec, after: JobSpec) -> tuple[str, ...]:
    """Check that a job has more rounds or sites than that of its run, and no other key.

    Returns:
        The sites that join.

    Raises:
        CheckpointMismatch: It differs in another key, has fewer rounds or nothing more;
            what was done in earlier rounds depends on how many there are, or on who
            takes part; or its sites have agreed on others that may join.
    """
    known = {site.name for site in before.sites}
    joined = tuple(site.name for site in after.sites if site.name not in known)
    rest = replace(after, sites=tuple(s for s in after.sites if s.name in known))
    same_rounds = {**job_digest.deciding(before), "rounds": after.rounds}
    changes = differences(job_digest.deciding(rest), same_rounds)
    if changes:
        raise CheckpointMismatch(
            "the run was started from another job, and only its rounds can be "
            f"extended, and its sites: {'; '.join(changes)}. Set these keys back, or "
            "start a new run"
        )
    if after.rounds < before.rounds or (after.rounds == before.rounds and not joined):
        raise CheckpointMismatch(
            f"rounds: the run's job has {before.rounds} already, so it cannot be "
            f"extended to {after.rounds}; choose more"
        )
    fixed = _dependents(after) if after.rounds > before.rounds else {}
    for key, reason in fixed.items():
        raise CheckpointMismatch(
            f"a run with {key} cannot be extended: {reason}. Start a new run from its "
            "model instead (model.weights)"
        )
    agreed = before.schedule.open_to
    for site in joined if agreed else ():
        if not any(fnmatchcase(site, pattern) for pattern in agreed):
            raise CheckpointMismatch(
                f"{site!r} cannot join: the sites of the run have agreed on "
                f"{', '.join(agreed)} alone (schedule.open_to)"
            )
    for key, reason in (_of_members(after) if joined else {}).items():
        raise CheckpointMismatch(
            f"{joined[0]!r} cannot join a run with {key}: {reason}. Start a new run "
            "from its model instead (model.weights)"
        )
    return joined


def may_have_more_rounds(job: JobSpec) -> bool:
    """Whether a run of the job can be extended by rounds."""
    return not _dependents(job)


def joining_fault(before: JobSpec, after: JobSpec) -> str:
    """Why a site may not join a run while it trains; empty if it may."""
    try:
        check_extension(before, after)
    except CheckpointMismatch as error:
        return str(error)
    if before.schedule.open_to:
        return ""
    return "the run's sites have agreed on no others: its job has no schedule.open_to"


def _of_members(job: JobSpec) -> dict[str, str]:
    """What rests on the sites that a run began with, each with how."""
    asked = things(job)
    return {thing: why for thing, why in JOINING.excluded.items() if asked[thing]}


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

"""Extend a run: record that its job has more rounds or sites, before anyone works."""

from dataclasses import replace

from federation.errors import CheckpointMismatch
from federation.event_log import EventWriter
from federation.events import RunExtended
from federation.job import job_digest
from federation.job.job_extension import check_extension
from federation.job.spec import JobSpec
from federation.protocols import Clock
from federation.rounds.local_work import is_auto
from monitoring.runs.run_folder import RunFolder


def check(job: JobSpec, run: RunFolder) -> RunExtended | None:
    """Check that a run can be extended to a job's number of rounds, and by its sites.

    Returns:
        What its record lacks; None if it was extended to this job before.

    Raises:
        CheckpointMismatch: The job differs in more than that, or a result depends on
            the number of rounds or on who takes part.
        RunNotFound: There is no run, or its job file is missing.
        CorruptObject: The record is damaged.
    """
    before = run.read_spec()
    old, new = job_digest.digest(before).hex(), job_digest.digest(job).hex()
    if old == new and any(one.job == new for one in run.extensions()):
        return None
    joined = check_extension(before, job)
    if joined and not run.is_submitted():
        _check_dealt(job, joined[0])
    view = run.view()
    if view.selected is not None and view.selected.stopped_early:
        raise CheckpointMismatch(
            "the run stopped early, by selection.patience, so more rounds would not "
            "run: start a new run from its model instead (model.weights)"
        )
    last = max((row.index for row in view.rounds), default=0)
    # With secure aggregation a site answers each number once, and the evaluation of
    # the final model has used up the one after the last round. A run that chooses its
    # local steps may have ended after any of them.
    secure = job.privacy.secure_aggregation.enabled
    ended = last >= before.rounds or is_auto(before)
    spent = secure and job.evaluation.every > 0 and ended
    first = last + 1 + spent
    if last >= job.rounds:
        raise CheckpointMismatch(
            f"rounds: the run has ended after {last}, and nobody can join it: choose "
            "more"
        )
    if first > job.rounds:
        raise CheckpointMismatch(
            f"rounds: extend this run to at least {first}: with secure aggregation the "
            f"number {last + 1} was used up to evaluate its model"
        )
    return RunExtended(
        at=0.0,
        last_round=last,
        first_round=first,
        rounds_before=before.rounds,
        rounds=job.rounds,
        job_before=old,
        job=new,
        joined=joined,
    )


def _check_dealt(job: JobSpec, name: str) -> None:
    """Refuse another site where a simulation deals the job's data to all of them.

    Raises:
        CheckpointMismatch: It would deal other records to those of the run.
    """
    if any(site.data is None for site in job.sites):
        raise CheckpointMismatch(
            f"{name!r} cannot join this run: its sites share the job's data, and would "
            "get other records with another number of sites. Give each site its own "
            "(sites.data) and start a new run"
        )


def record(job: JobSpec, run: RunFolder, clock: Clock) -> None:
    """Extend a run that no other process works on; see ``check``.

    Raises:
        StoreUnavailable: The record cannot be written.
    """
    event = check(job, run)
    if event is None:
        return
    with EventWriter(run.events) as write:
        write(replace(event, at=clock.now()))
    run.flush_events()
    run.write_job(job)

"""The job of a deployment at its aggregator: submitted, resumed or found."""

from collections.abc import Sequence

from deploy.aggregator_host import run_queue
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.parties import Parties, check
from deploy.aggregator_host.run_queue import QueuedRun
from deploy.exit_codes import DONE
from deploy.fleet.deployment import Deployment
from deploy.fleet.roles import Tell
from federation.errors import JobError
from federation.ids import new_run_id
from federation.job import job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from privacy.keystream import RandomBytes
from privacy.secagg.agreement import roster

STOP = "stop"


def older_runs(deployment: Deployment, job: JobSpec) -> Sequence[QueuedRun]:
    """Unfinished runs of a deployment that a new run of its job would wait for.

    Empty if none is submitted, since the job's newest run continues or is completed.
    """
    runs = run_queue.handed_over(deployment.aggregator / "runs").runs
    newest = _newest(runs, job)
    if newest is not None and not _is_another(job, newest.run):
        outcome = newest.outcome
        if outcome is None or outcome.code == DONE:
            return ()
    return [
        one
        for one in runs
        if one.outcome is None and (not one.stop or run_queue.is_pause(one.run))
    ]


def check_older(deployment: Deployment, job: JobSpec, choice: str) -> None:
    """Have a person decide about older runs, before a machine is started.

    One whose sites the deployment no longer has waits for them, and the new run for
    it, while all machines are paid for.

    Args:
        deployment: Its record of runs is read.
        job: What would be submitted.
        choice: As ``crossfed up --older``; empty if it was not given.

    Raises:
        JobError: There are older runs, and no choice.
    """
    found = older_runs(deployment, job)
    if found and not choice:
        raise JobError(
            f"{_named(found)} of this deployment did not end, and the new run would "
            "wait: --older stop ends each after its current round, --older keep lets "
            "them end first",
            key="--older",
        )


def _named(runs: Sequence[QueuedRun]) -> str:
    return ", ".join(
        f"run {one.run.path.name} ({one.run.path.parent.name}, {one.status}, "
        f"{one.rounds} rounds completed)"
        for one in runs
    )


def _settle(deployment: Deployment, job: JobSpec, older: str, tell: Tell) -> None:
    """Stop older runs if asked to, and name them."""
    found = older_runs(deployment, job)
    for one in found if older == STOP else ():
        run_queue.ask_to_stop(one.run)
    if found:
        then = "is stopped after its current round" if older == STOP else "ends first"
        tell(f"{_named(found)} {then}")


def hand_over(
    deployment: Deployment,
    config: AggregatorConfig,
    job: JobSpec,
    random_bytes: RandomBytes,
    tell: Tell,
    *,
    older: str = "",
) -> RunFolder | None:
    """Submit the job, or resume or find its newest run.

    Args:
        deployment: Its aggregator serves already.
        config: Its aggregator.
        job: Read from the file that the deployment names.
        random_bytes: ``os.urandom``.
        tell: Called with a word about what was done.
        older: ``stop`` to stop the runs that a new one would wait for.

    Returns:
        The run, which may have ended; None if sites of the job have yet to enrol.

    Raises:
        JobError: The job cannot be run so.
    """
    known = roster.load(config.folder / "roster.toml")
    enrolled = {entry.site for entry in known.sites}
    missing = [site.name for site in job.sites if site.name not in enrolled]
    if missing:
        tell(
            f"the job waits for {', '.join(missing)} to enrol: invite each with "
            "crossfed aggregator invite SITE --config "
            f"{config.folder}/aggregator.toml, then run this command again"
        )
        return None
    _settle(deployment, job, older, tell)
    newest = _newest(run_queue.handed_over(config.runs).runs, job)
    if newest is not None and not _is_another(job, newest.run):
        if newest.outcome is None:
            return newest.run
        if newest.outcome.code == DONE:
            tell(
                f"run {newest.run.path.name} is completed; crossfed run "
                f"{deployment.plan.job} --aggregator {config.folder}/aggregator.toml "
                "starts another"
            )
            return newest.run
        run = _resumed(deployment, config, job)
        tell(f"run {run.path.name} is resumed")
        return run
    run = _submitted(deployment, config, job, random_bytes)
    tell(f"run {run.path.name} is submitted")
    return run


def _resumed(
    deployment: Deployment, config: AggregatorConfig, job: JobSpec
) -> RunFolder:
    """Have the aggregator take up the job's newest run, which ended early."""
    run = run_queue.find_ended(job, config.runs)
    check(job, Parties.of_run(config.folder, run), resumed=run.run_id() is not None)
    run_queue.take_up(run, at=deployment.clock.now())
    return run


def _submitted(
    deployment: Deployment,
    config: AggregatorConfig,
    job: JobSpec,
    random_bytes: RandomBytes,
) -> RunFolder:
    """Hand a new run of the job to the aggregator."""
    check(job, Parties.load(config.folder))
    if job.model.weights is not None:  # The coordinator looks for it there.
        from clients.models import starting_weights  # noqa: PLC0415 -- imports torch

        starting_weights.find(job, config.folder)
    now = deployment.clock.now()
    run = RunFolder(config.runs / job.name / new_run_id(now, random_bytes(3)))
    run_queue.submit(job, run, at=now)
    return run


def _newest(runs: Sequence[QueuedRun], job: JobSpec) -> QueuedRun | None:
    own = [one for one in runs if one.run.path.parent.name == job.name]
    return own[-1] if own else None


def _is_another(job: JobSpec, run: RunFolder) -> bool:
    kept = job_file.document(run.read_spec())
    return bool(job_file.differences(kept, job_file.document(job)))

"""``crossfed up``: start what a deployment lacks, and hand its job over.

Every step looks at what is there, does what is missing and can be done again: a command
that was killed is given once more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from deploy.aggregator_host import run_queue
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.parties import Parties, check, submitted
from deploy.aggregator_host.run_queue import QueuedRun
from deploy.exit_codes import DONE
from deploy.fleet import cloud_sites, local_parties, preflight, reconcile
from deploy.fleet.loop import NodesByPool, fill
from deploy.fleet.machine_spec import LOCAL
from deploy.fleet.preflight import check_moved
from deploy.fleet.reconcile import AGGREGATOR
from deploy.fleet.roster_operator import Operator
from deploy.fleet.spec import Tell
from deploy.fleet.state import Deployment
from deploy.fleet.wanted import AGGREGATOR_FILE, Known, wanted
from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from privacy.secagg.agreement import roster

STOP = "stop"


def older_runs(deployment: Deployment, job: JobSpec) -> Sequence[QueuedRun]:
    """Unfinished runs of a deployment that a new run of its job would wait for.

    Empty if none is submitted, since the job's newest run continues or is completed.
    """
    runs = run_queue.handed_over(deployment.plan.aggregator / "runs").runs
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
        run_queue.ask_to_stop(one.run, at=deployment.clock.now())
    if found:
        then = "is stopped after its current round" if older == STOP else "ends first"
        tell(f"{_named(found)} {then}")


def hand_over(
    deployment: Deployment,
    config: AggregatorConfig,
    job: JobSpec,
    tell: Tell,
    *,
    older: str = "",
) -> RunFolder | None:
    """Submit the job, or resume or find its newest run.

    Args:
        deployment: Its aggregator serves already.
        config: Its aggregator.
        job: Read from the file that the deployment names.
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
    now, random_bytes = deployment.clock.now(), deployment.random_bytes
    run = submitted(job, config.folder, config.runs, at=now, random_bytes=random_bytes)
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


def _newest(runs: Sequence[QueuedRun], job: JobSpec) -> QueuedRun | None:
    own = [one for one in runs if one.run.path.parent.name == job.name]
    return own[-1] if own else None


def _is_another(job: JobSpec, run: RunFolder) -> bool:
    kept = job_file.document(run.read_spec())
    return bool(job_file.differences(kept, job_file.document(job)))


def bring_up(
    deployment: Deployment,
    job: JobSpec,
    *,
    tell: Tell,
    accept: str = "",
    older: str = "",
) -> RunFolder | None:
    """Start every node of a deployment that does not run, and hand its job over.

    Args:
        deployment: What is wanted, and what is known of it.
        job: Its job, which ``preflight.check_before`` has passed.
        tell: Called with a word about every step.
        accept: Digits of the digest of a roster with sites of other operators, which
            machines of clouds may trust; a person has compared it.
        older: As ``crossfed up --older``.

    Returns:
        The run, which may have ended; None if sites of the job have yet to enrol.

    Raises:
        JobError: The job cannot be run so.
        CorruptObject: The aggregator is lost that sites have enrolled with.
        ComputeError: A node could not be launched, is another folder's, or has not
            enrolled in time.
        RosterRefused: The aggregator's roster names keys that no site has shown.
        EnrolmentRefused: A site could not be enrolled.
    """
    plan, listed = deployment.plan, deployment.listed()
    for nodes in listed.values():
        reconcile.check_owner(nodes, deployment.owner, deployment.name)
    check_moved(deployment, listed)
    gpus = preflight.check_gpus(deployment)
    preflight.check_routes(deployment, tell)
    _end_unwanted(deployment, listed, tell)
    config, operator, known = _parties(deployment, gpus)
    requests = wanted(plan, known)
    here = [each for each in plan.file.sites if each.provider == LOCAL]
    local_parties.start_aggregator(
        deployment, config, requests[AGGREGATOR], known.address, tell
    )
    for site in here:
        local_parties.enroll(
            deployment,
            config,
            site,
            requests[site.role],
            address=known.address,
            tell=tell,
        )
    signed = None
    if operator is not None:
        signed = cloud_sites.bring_up(
            deployment,
            config,
            operator,
            requests,
            address=known.address,
            accept=accept,
            tell=tell,
        )
    for site in here:
        local_parties.accept_roster(deployment, site, signed)
    for site in here:
        fill(deployment, requests[site.role], tell)
    return hand_over(deployment, config, job, tell, older=older)


def _parties(
    deployment: Deployment, gpus: Mapping[str, int]
) -> tuple[AggregatorConfig, Operator | None, Known]:
    """Have the aggregator's folder, and the operator of sites that are not here."""
    plan = deployment.plan
    config = local_parties.make_aggregator(deployment)
    known = Known(
        address=plan.file.aggregator.address or config.address,
        settings=(plan.aggregator / AGGREGATOR_FILE).read_bytes(),
        gpus=gpus,
    )
    if all(each.provider == LOCAL for each in plan.file.sites):
        return config, None, known
    operator = cloud_sites.operator_of(deployment, config)
    return config, operator, trusting(known, operator)


def trusting(known: Known, operator: Operator) -> Known:
    """Have machines of clouds and pods trust what an operator signs."""
    return replace(
        known, authority=operator.authority, signer=operator.key.public.key.hex()
    )


def _end_unwanted(deployment: Deployment, listed: NodesByPool, tell: Tell) -> None:
    """End nodes of sites that the deployment file no longer has."""
    roles = reconcile.roles(site.name for site in deployment.plan.file.sites)
    for name, nodes in listed.items():
        found = reconcile.unwanted(nodes, roles)
        for node in found:
            tell(f"{node.name}: no longer in the file; {node.id} is ended")
        if found:
            deployment.pools[name].terminate({node.id for node in found})

"""``crossfed up``: start what a deployment lacks, and hand its job over.

Every step looks at what is there, does what is missing and can be done again: a command
that was killed is given once more.
"""

from deploy.fleet import reconcile
from deploy.fleet.bringing_up import (
    cloud_checks,
    cloud_sites,
    local_aggregator,
    local_sites,
)
from deploy.fleet.bringing_up.hand_over import hand_over
from deploy.fleet.bringing_up.start_checks import check_moved
from deploy.fleet.deployment import Deployment
from deploy.fleet.roles import NodesByPool, Tell, fill
from deploy.fleet.tables.providers import LOCAL
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from privacy.keystream import RandomBytes


def bring_up(
    deployment: Deployment,
    job: JobSpec,
    *,
    random_bytes: RandomBytes,
    tell: Tell,
    accept: str = "",
    older: str = "",
) -> RunFolder | None:
    """Start every node of a deployment that does not run, and hand its job over.

    Args:
        deployment: What is wanted, and what is known of it.
        job: Its job, which ``start_checks.check_before`` has passed.
        random_bytes: ``os.urandom``.
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
    listed = deployment.listed()
    for nodes in listed.values():
        reconcile.check_owner(nodes, deployment.owner, deployment.name)
    check_moved(deployment, listed)
    cloud_checks.check_gpus(deployment)
    cloud_checks.check_routes(deployment, tell)
    _end_unwanted(deployment, listed, tell)
    config = local_aggregator.start(deployment, random_bytes, tell)
    sites = [each for each in deployment.plan.file.sites if each.provider == LOCAL]
    for site in sites:
        local_sites.enroll(deployment, config, site, random_bytes, tell)
    signed = cloud_sites.bring_up(
        deployment,
        config,
        local_aggregator.address_of(deployment, config),
        accept=accept,
        random_bytes=random_bytes,
        tell=tell,
    )
    for site in sites:
        local_sites.accept_roster(deployment, site, signed)
    for site in sites:
        fill(deployment, local_sites.request(deployment, site), tell)
    return hand_over(deployment, config, job, random_bytes, tell, older=older)


def _end_unwanted(deployment: Deployment, listed: NodesByPool, tell: Tell) -> None:
    """End nodes of sites that the deployment file no longer has."""
    plan = deployment.plan
    sites = [site.name for site in plan.file.sites]
    for name, nodes in listed.items():
        found = reconcile.unwanted(nodes, sites, is_head=plan.is_head)
        for node in found:
            tell(f"{node.name}: no longer in the file; {node.id} is ended")
        if found:
            deployment.pools[name].terminate({node.id for node in found})

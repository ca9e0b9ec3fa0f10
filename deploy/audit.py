"""Attack a job's own training: the function behind ``crossfed audit``.

1. A run with canaries: how many of them an attacker tells apart bounds epsilon from
   below.
2. A run without: how well the loss tells training records from held-out ones.

Both are runs of their own, in memory: no ledger, run folder or model of the job is
touched. Secure aggregation and rehearsed faults are off, for the attacker is who sees
every update of a site, and this is whom record-level privacy protects against.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from clients.canaries import MAX_CANARIES
from deploy import wiring
from deploy.audit_jobs import in_the_open
from deploy.audit_runs import Attack, CanaryRun, PlainRun, Plans, throwaway_id
from deploy.private_sites import PrivateSites
from deploy.wiring import Federation
from federation.clock import SystemClock
from federation.errors import JobError
from federation.events import Emit
from federation.ids import SiteId
from federation.job import JobSpec
from monitoring.audit_findings import Findings

LEAST_CANARIES = 100


def audit(
    job: JobSpec,
    attack: Attack,
    *,
    listeners: Sequence[Emit] = (),
    plans: Plans | None = None,
) -> Findings:
    """Audit a job.

    Args:
        job: The job; its unit of privacy is ``record`` or ``none``.
        attack: How.
        listeners: Called with the events of both runs.
        plans: What each site does to keep its promise; by default what it does in a
            run of the job. Epsilon is counted by their ``round_event``.

    Returns:
        What was found; ``Findings.broken`` names the sites whose promise did not hold.

    Raises:
        JobError: The job cannot be audited, or ``attack`` names no such site.
        SiteError: A site did not take part.
    """
    _check(job, attack)
    clock = SystemClock()
    start = clock.monotonic()
    job = in_the_open(job)
    with ExitStack() as stack:
        stack.enter_context(wiring.torch_threads(job))
        federation = wiring.build_federation(job)
        if plans is None:
            plans = _plans(federation)
        names = [SiteId(name) for name in attack.sites] or list(federation.site_data)
        first = CanaryRun(federation, plans, attack, names)
        first.run(listeners)
        second = PlainRun(federation, plans, names)
        second.run(listeners)
    return Findings(
        job_name=job.name,
        unit=job.privacy.differential_privacy.unit,
        rounds=job.rounds,
        seconds=clock.monotonic() - start,
        sites=[first.findings(name, second.membership(name)) for name in names],
    )


def _check(job: JobSpec, attack: Attack) -> None:
    unit = job.privacy.differential_privacy.unit
    if unit not in {"none", "record"}:
        raise JobError(
            f"an audit puts the promise to single records of one site to the test, and "
            f'unit = "{unit}" promises something else: only "record" and "none" can be '
            "audited",
            key="privacy.differential_privacy.unit",
        )
    known = [site.name for site in job.sites]
    for name in attack.sites:
        if name not in known:
            raise JobError(f"the job has no site {name!r}; it has {', '.join(known)}")
    if not LEAST_CANARIES <= attack.canaries <= MAX_CANARIES:
        raise JobError(
            f"an audit takes {LEAST_CANARIES} to {MAX_CANARIES} canaries, not "
            f"{attack.canaries}"
        )
    if not 0 < attack.confidence < 1:
        raise JobError(
            f"a confidence lies between 0 and 1, which {attack.confidence} does not"
        )


def _plans(federation: Federation) -> Plans:
    if federation.job.privacy.differential_privacy.unit == "none":
        return {}
    run_id, clock = throwaway_id(), SystemClock()
    return PrivateSites(federation, run_id=run_id, folder=None, clock=clock).plans

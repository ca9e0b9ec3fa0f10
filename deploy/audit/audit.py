"""Attack a job's own training: the function behind ``crossfed audit``.

1. A run with canaries: how many of them an attacker tells apart bounds epsilon from
   below.
2. A run without: how well the loss tells training records from held-out ones.

Both are runs of their own, in memory: no ledger, run folder or model of the job is
touched. The attacker sees what the promise holds against: under ``record`` and
``person`` every update of a site, so secure aggregation is off; under ``joint`` the
sums that it opens, with the noise of as few sites as the accounting counts on.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from clients.audit.canaries import MAX_CANARIES
from clients.privacy import standardise
from clients.privacy.site_plans import PrivateSites
from clients.training.local_federation import Federation
from deploy.audit.jobs import PlanSites, as_attacked, is_summed
from deploy.audit.plain_run import PlainRun
from deploy.audit.rounds import throwaway_id
from deploy.audit.runs import Attack, CanaryRun
from deploy.wiring import parts as wiring
from federation.clock import SystemClock
from federation.errors import JobError
from federation.events import Emit
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.protocols import Clock
from federation.rounds.local_work import is_auto
from monitoring.audit_findings import AuditFindings
from privacy.dp.auditing import epsilon_lower_bound
from privacy.dp.budget import default_delta

LEAST_CANARIES = 100

_TASKS = ("classification", "causal_lm")


def plan_sites(federation: Federation, clock: Clock) -> PrivateSites | None:
    """Plan how each site keeps its promise, as in a run of the job.

    Args:
        federation: The job, its model and its data.
        clock: Dates what ledgers note.

    Raises:
        JobError: The promise cannot be kept.
    """
    if not federation.job.privacy.differential_privacy.enabled:
        return None
    return PrivateSites(federation, run_id=throwaway_id(), folder=None, clock=clock)


def audit(
    job: JobSpec,
    attack: Attack,
    *,
    listeners: Sequence[Emit] = (),
    plan_sites: PlanSites = plan_sites,
    clock: Clock | None = None,
) -> AuditFindings:
    """Audit a job.

    Args:
        job: The job; its unit of privacy is ``record``, ``person``, ``joint`` or
            ``none``.
        attack: How.
        listeners: Called with the events of both runs.
        plan_sites: What sites do to keep their promise, and what their ledgers are
            told of it, by default as in a run of the job. It is asked twice: for the
            job's model, and for that with canaries.
        clock: Measures how long it takes; the system's by default.

    Returns:
        ``AuditFindings.broken`` names the sites whose promise did not hold.

    Raises:
        JobError: The job cannot be audited, or ``attack`` names no such site.
        SiteError: A site did not take part.
    """
    _check(job, attack)
    clock = SystemClock() if clock is None else clock
    start = clock.monotonic()
    job = as_attacked(job)
    with ExitStack() as stack:
        stack.enter_context(wiring.torch_threads(job))
        federation = _standardised(wiring.build_federation(job))
        names = [SiteId(name) for name in attack.sites] or list(federation.site_data)
        second = PlainRun(federation, plan_sites, names, clock)
        first = CanaryRun(federation, plan_sites, attack, names, clock)
        first.run(listeners)
        second.run(listeners)
    return AuditFindings(
        job_name=job.name,
        unit=job.privacy.differential_privacy.unit,
        num_sites=len(job.sites),
        noise_shares=first.noise_shares,
        rounds=job.rounds,
        seconds=clock.monotonic() - start,
        sites=[first.findings(name, second.membership(name)) for name in names],
    )


def _standardised(federation: Federation) -> Federation:
    """Standardise the records, if the job does.

    Canaries are not in the statistics: what is tested is what the steps cost.
    """
    job = federation.job
    if job.privacy.differential_privacy.standardise is None:
        return federation
    site_data = {}
    for name, (train, held_out) in federation.site_data.items():
        statistics = standardise.release(job, train)
        site_data[name] = statistics.apply(train), statistics.apply(held_out)
    return replace(federation, site_data=site_data)


def _check(job: JobSpec, attack: Attack) -> None:
    wiring.check_sites_are_here(job)
    if not 0 < attack.confidence < 1:
        raise JobError(
            f"the confidence must be between 0 and 1, not {attack.confidence}"
        )
    _check_model(job)
    _check_unit(job, attack)
    known = [site.name for site in job.sites]
    for name in attack.sites:
        if name not in known:
            raise JobError(f"the job has no site {name!r}; it has {', '.join(known)}")
    if not LEAST_CANARIES <= attack.canaries <= MAX_CANARIES:
        raise JobError(
            f"an audit needs {LEAST_CANARIES} to {MAX_CANARIES} canaries, not "
            f"{attack.canaries}"
        )
    if is_summed(job) and attack.canaries * len(attack.sites or known) > MAX_CANARIES:
        raise JobError(
            f"{attack.canaries} canaries at each of {len(attack.sites or known)} sites "
            f"are more than the {MAX_CANARIES} that one sum can hold: use fewer, or "
            "audit fewer sites with --site"
        )


def _check_unit(job: JobSpec, attack: Attack) -> None:
    if job.privacy.differential_privacy.unit == "site":
        raise JobError(
            _why_not_sites(job, attack.confidence),
            key="privacy.differential_privacy.unit",
        )


def _check_model(job: JobSpec) -> None:
    if is_auto(job):
        raise JobError(
            "'auto' measures lines, and the runs of an audit have none: set it to "
            "'fixed', without max_local_steps and training_share; an audit with "
            "training.local_steps = max_local_steps tests the longest rounds",
            key="schedule.local_work",
        )
    if job.training.task not in _TASKS:
        raise JobError(
            "canaries and their scores work only with the cross-entropy of one class "
            f"or of each next token: use {' or '.join(_TASKS)}",
            key="training.task",
        )
    if job.model.personal:
        raise JobError(
            "an audit scores the model that leaves the sites, which is not whole "
            "without their personal parts: remove this key to audit the job",
            key="model.personal",
        )


def _why_not_sites(job: JobSpec, confidence: float) -> str:
    """Say what an audit could show if a canary is a whole site."""
    private, num_sites = job.privacy.differential_privacy, len(job.sites)
    delta = default_delta(num_sites) if private.delta is None else private.delta
    most = epsilon_lower_bound(
        num_sites, num_sites, num_sites, delta=delta, confidence=confidence
    )
    text = (
        'with unit = "site" a canary is a whole site, so one run has only as many '
        f"guesses as sites: {num_sites} right ones show an epsilon of {most:.2f} at "
        f"delta {delta:g} and confidence {confidence:.0%}, and no audit of one run can "
        "show more"
    )
    target = private.target_epsilon
    if target is not None and most < target:
        return f"{text}; the job's {target:g} cannot be tested"
    return (
        f"{text}; that exceeds the job's target, but only nearly perfect guesses would "
        "show it, so this audit is not run"
    )

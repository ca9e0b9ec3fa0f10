"""One run at a site: what it knows of it, and what answers its tasks."""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from clients.privacy import dataset_name
from clients.privacy.cohorts import DOCUMENT as COHORTS, Cohort, CohortRule
from clients.privacy.groups import group_rule
from clients.privacy.ledger_memory import (
    LifetimeBudget,
    Reservation,
    adopt,
    known_anchor,
)
from clients.privacy.level_seal import seal_of
from clients.privacy.policy_spec import PolicySpec
from clients.privacy.questions import exact_moments, note_places, note_question
from clients.privacy.ring_seal import Protection
from clients.privacy.site_memory import (
    ConfirmedMemory,
    FileMemory,
    SiteMemory,
    fresh_secret,
)
from clients.privacy.site_plans import (
    ROUNDS,
    LedgerContext,
    PrivateSites,
    check_budget,
    plan_of,
)
from clients.privacy.site_policy import (
    Faults,
    check_delta,
    contract_policy,
    weakness_of,
)
from clients.privacy.sum_plan import SumPrivacy, delta_of_records, delta_of_sites
from clients.training.local_federation import Federation, SiteData
from clients.training.site import Seal
from cloud_adapters.storage.disk.store import LocalStore
from deploy.site_host import data as site_data, ranks as site_ranks
from deploy.site_host.config import SiteConfig, SiteFile
from federation.errors import CorruptObject, JobError
from federation.events import SitePrivacy
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.adapter_ranks import contributors
from federation.job.evaluation_job import evaluates_only
from federation.job.spec import JobSpec
from federation.messages import NO_ANCHOR, Energy, LedgerAnchor
from federation.protocols import Clock, SiteHandler, Trainer
from federation.resources import CLOCK, PROCESS
from federation.rounds.local_work import is_by_capacity
from federation.vectors import Layout
from privacy.dp.errors import LedgerDamaged
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file
from privacy.secagg.agreement.identity import Identity, Label
from privacy.secagg.agreement.policy import LocalPolicy
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.errors import CohortRefused
from privacy.secagg.protocol.of_job import check_layout
from privacy.secagg.protocol.round_memory import FileRounds
from privacy.secagg.protocol.train import most_evaluated

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProposedRun:
    """A run that was proposed to a site, with model and data.

    Attributes:
        sealed: Its proposal, as the aggregator signed it.
        federation: Its job and model, and only this site's data.
        config: The operator's ``site.toml``, as it was when the run began here.
        roster: Whom the site trusts in this run.
        anchor: How many charges the aggregator knows the site's ledger to hold.
        reserved: What the runs at work on the same data have planned to spend.
    """

    run_id: RunId
    sealed: bytes
    federation: Federation
    config: SiteConfig
    roster: Roster
    anchor: LedgerAnchor = NO_ANCHOR
    reserved: tuple[Reservation, ...] = ()

    @property
    def job(self) -> JobSpec:
        """The job."""
        return self.federation.job


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that a site takes part in.

    Attributes:
        met: What the site knows of the run.
        handler: Answers its tasks.
        promise: What it has promised; None without differential privacy.
        stack: Closed when the site leaves the run: keys go, and ledgers are closed.
        reservation: What it has planned to spend; None without differential privacy.
    """

    met: ProposedRun
    handler: SiteHandler
    promise: SitePrivacy | None
    stack: ExitStack
    reservation: Reservation | None = None


def open_run(
    met: ProposedRun,
    *,
    identity: Identity,
    folder: Path,
    clock: Clock,
    stated: Mapping[SiteId, float] | None,
    energy: Callable[[], Energy],
    stack: ExitStack,
) -> OpenRun:
    """Plan what the site promises, open its ledger and build what answers tasks.

    Args:
        met: The run.
        identity: The site's key.
        folder: What the site keeps of this run.
        clock: Clock of the ledger.
        stated: What all sites have stated that they need; None unless noise is in the
            sum.
        energy: What this machine has taken so far.
        stack: Closes what was opened.

    Raises:
        FederationError: The site does not or cannot take part.
    """
    job, config, name = met.job, met.config, SiteId(met.config.file.name)
    private: PrivateSites | None = None
    if job.privacy.differential_privacy.enabled:
        adopt_ledgers(config, met.run_id)
        private = private_sites(
            met, identity=identity, folder=folder, clock=clock, stated=stated
        )
        stack.enter_context(private)
    promise = None if private is None else _promise(private, config.file.policy)
    _check_moments(met)
    _note_question(met, promise)
    make_trainer = _trainer_maker(met.federation, private, config.file, stack)
    if private is not None:  # And its ledger is open.
        data = met.federation.site_data[name]
        site_data.note_changes(config.file, data, site_memory(config))
    seal = None
    if job.privacy.secure_aggregation.enabled:
        in_sum = None if private is None else private.in_sum
        seal = _ring_seal(
            met, identity=identity, folder=folder, promise=promise, in_sum=in_sum
        )
    # Ranks are children, which no meter of this process sees.
    meter = PROCESS if config.file.compute.ranks == 1 else CLOCK
    if config.file.policy.report_energy:
        meter = replace(meter, energy=energy)
    handler = met.federation.site(
        name,
        make_trainer=make_trainer,
        store=LocalStore(folder),
        clock=clock,
        meter=meter,
        seal=seal,
        tells_all=False,
        works_ahead=True,
    )
    stack.callback(handler.close)
    return OpenRun(
        met=met,
        handler=handler,
        promise=promise,
        stack=stack,
        reservation=None if private is None else private.reservation(name),
    )


def _promise(private: PrivateSites, policy: PolicySpec) -> SitePrivacy:
    """Check the promise of the site's plan against the policy."""
    (promise,) = private.promises()
    check_delta(policy, SiteId(promise.site), promise.delta)
    return promise


def _check_moments(met: ProposedRun) -> None:
    """Refuse to train privately on moments that may be exact ones of the records.

    Where the operator accepts training without privacy, the log says so instead.

    Raises:
        JobError: The site has answered exact questions about these columns.
        StoreError: The site's memory cannot be read.
    """
    job, config, name = met.job, met.config, met.config.file.name
    training = job.training
    if not training.moments_privacy or evaluates_only(job):
        return
    epsilon, delta = training.moments_privacy
    _LOG.info(
        "site %s: records are standardised by moments of a run with epsilon %.3g at "
        "delta %.1e, by the aggregator's word; this job's epsilon does not include it",
        *(name, epsilon, delta),
    )
    if not job.privacy.differential_privacy.enabled:
        return
    exact = exact_moments(site_memory(config), name_data(config), job)
    if not exact:
        return
    why = (
        f"site {name!r} has answered exact statistics of {', '.join(exact)}, so it "
        "cannot tell whether the job's moments of these columns are noised"
    )
    if config.file.policy.demands_privacy:
        raise JobError(
            f"{why}: leave the columns out (training.inputs), or set "
            "privacy.differential_privacy.standardise",
            key="training.standardise",
        )
    _LOG.warning("%s: epsilon may not cover what they show of a record", why)


def _note_question(met: ProposedRun, promise: SitePrivacy | None) -> None:
    """Remember exact statistics, or noised ones that the operator counts as exact.

    Raises:
        JobError: The site has answered as many as it may, or noise is too weak to hide
            small cells, which are not left out with noise.
        StoreError: The site's memory cannot be read or written.
    """
    job, config = met.job, met.config
    policy = config.file.policy
    weakness = "" if promise is None else weakness_of(job, policy, promise.delta)
    if job.statistics is None or (promise is not None and not weakness):
        return
    least = policy.statistics.min_count
    if weakness and least > 1:
        raise JobError(
            f"this site shows no cell of fewer than {least} of its records "
            f"(policy.statistics.min_count), and this noise does not hide one: "
            f"{weakness}: ask with more noise, or without any",
            key="privacy.differential_privacy",
        )
    train, _ = met.federation.site_data[SiteId(config.file.name)]
    most = policy.statistics.exact_questions
    note_question(site_memory(config), name_data(config), job, train, most=most)


def places_noted(config: SiteConfig, job: JobSpec) -> Callable[[Sequence[int]], None]:
    """What remembers where exact statistics look for quantiles, before the answer.

    Args:
        config: The operator's ``site.toml``.
        job: The job of statistics.
    """
    most = config.file.policy.statistics.exact_questions

    def note(places: Sequence[int]) -> None:
        memory, dataset = site_memory(config), name_data(config)
        note_places(memory, dataset, job, places, most=most)

    return note


def note_limits(
    faults: Faults,
    run_id: RunId,
    data: SiteData,
    config: SiteConfig,
    reserved: tuple[Reservation, ...] = (),
) -> None:
    """Note which limits of the site's operator a private run would exceed.

    ``open_run`` checks them, too; but a job that is refused for another reason does not
    get there, and its model may be one that the site must not build.

    Args:
        faults: Note them.
        run_id: The run that was proposed.
        data: The site's training and held-out data.
        config: The operator's ``site.toml``.
        reserved: What the runs at work on the same data have planned to spend.
    """
    job, policy, name = faults.job, config.file.policy, faults.site
    private = job.privacy.differential_privacy
    with faults.noted():
        if not private.by_itself:
            by_sites = private.unit == "site"
            delta = delta_of_sites(job) if by_sites else delta_of_records(job, *data)
            check_delta(policy, name, delta)
            return
        # The model's size decides only whether the noise fits its grid.
        context = _ledger_context(config, job, reserved)
        plan = plan_of(job, name, data, num_trained=1, max_delta=context.max_delta)
        if policy.total_epsilon is not None:
            check_budget(job, run_id, name, plan, context)


def _trainer_maker(
    federation: Federation,
    private: PrivateSites | None,
    file: SiteFile,
    stack: ExitStack,
) -> Callable[[], Trainer]:
    if private is None:
        return site_ranks.trainer_of(federation, file, stack)
    make = site_ranks.private_maker(federation, file, stack)
    trainer = private.trainer(SiteId(file.name), make)
    return lambda: trainer


def _ring_seal(
    met: ProposedRun,
    *,
    identity: Identity,
    folder: Path,
    promise: SitePrivacy | None,
    in_sum: SumPrivacy | None,
) -> Seal:
    config, name = met.config, SiteId(met.config.file.name)
    check_layout(met.job, met.federation.pool.layout)
    cohorts = _cohort_rule(met, config, promise)
    groups = group_rule(
        met.job,
        site=name,
        roster=met.roster,
        memory=site_memory(config),
        dataset=name_data(config),
        random_bytes=os.urandom,
    )

    def policy_of(layout: Layout) -> LocalPolicy:
        return contract_policy(
            met.job,
            layout,
            run_id=met.run_id,
            policy=config.file.policy,
            roster=met.roster,
            noise_share=None if in_sum is None else in_sum.share,
        )

    return seal_of(
        met.job,
        name,
        Protection(
            identity=identity,
            policy_of=policy_of,
            memory=FileRounds(folder / "sites" / name / ROUNDS),
            random_bytes=os.urandom,
            cohorts=cohorts,
            noise=None if in_sum is None else in_sum.noise,
            groups=groups,
            threads=met.job.training.threads,
            most_evaluated=most_evaluated(met.job),
            by_capacity=is_by_capacity(met.job),
        ),
    )


@dataclass(frozen=True, slots=True)
class LedgerKey:
    """A site's identity, which signs the heads of its ledgers."""

    identity: Identity

    def sign(self, body: bytes) -> bytes:
        """See ``HeadKey.sign``."""
        return self.identity.sign(Label.LEDGER, body)

    def verify(self, body: bytes, signature: bytes) -> None:
        """See ``HeadKey.verify``."""
        self.identity.public.verify(Label.LEDGER, body, signature, who="this site")


def private_sites(
    met: ProposedRun,
    *,
    identity: Identity,
    folder: Path,
    clock: Clock,
    stated: Mapping[SiteId, float] | None,
) -> PrivateSites:
    """Plan what a site promises in a run with differential privacy.

    Arguments as for ``open_run``.

    Raises:
        JobError: The promise cannot be kept.
    """
    context = _ledger_context(met.config, met.job, met.reserved)
    found = PrivateSites(
        met.federation,
        run_id=met.run_id,
        folder=folder,
        clock=clock,
        stated=stated,
        keeping=lambda _name: replace(context, key=LedgerKey(identity)),
    )
    found.expect({SiteId(met.config.file.name): met.anchor})
    return found


def _ledger_context(
    config: SiteConfig, job: JobSpec, reserved: tuple[Reservation, ...]
) -> LedgerContext:
    """What the site keeps beside a run's ledger, without the key of its heads."""
    policy = config.file.policy
    return LedgerContext(
        memory=site_memory(config),
        budget=lifetime_budget(config),
        lineage=_records(config, job),
        max_delta=policy.max_delta if policy.demands_privacy else 1.0,
        reserved=reserved,
    )


def lifetime_budget(config: SiteConfig) -> LifetimeBudget:
    """The operator's budget for all runs on the site's data together."""
    return LifetimeBudget(
        dataset=name_data(config),
        epsilon=config.file.policy.total_epsilon,
        delta=config.file.policy.total_delta,
    )


def adopt_ledgers(config: SiteConfig, run_id: RunId) -> None:
    """Add every ledger in the folders of other runs to the site's memory.

    It knows them already, unless the memory was lost or restored from a backup.

    Raises:
        PrivacyError: One that it does not know is damaged, so that what it spent is
            not known.
        StoreError: One cannot be read, or the memory cannot be written.
    """
    memory, dataset = site_memory(config), name_data(config)
    for folder in sorted(runs_folder(config).glob(f"*/sites/{config.file.name}")):
        path = folder / LEDGER_NAME
        other = folder.parents[1].name
        if other == run_id or not path.exists() or not path.stat().st_size:
            continue
        try:
            found = read_file(path)
        except LedgerDamaged:
            if known_anchor(memory, RunId(other)) == NO_ANCHOR:
                raise
        else:
            adopt(memory, dataset, found.terms, found.charges)


def runs_folder(config: SiteConfig) -> Path:
    """The parent folder of a site's run folders."""
    return config.folder / "runs"


def site_memory(config: SiteConfig) -> SiteMemory:
    """The site's memory over all runs: in its own folder, and in its home if any."""
    return ConfirmedMemory(FileMemory(config.folder / "memory"), config.confirm)


def order_seed(config: SiteConfig, job: JobSpec, sealed: bytes) -> int | None:
    """Draw the seed of the order in which a site goes through its examples in a run.

    Were it the job's, two runs of one job would train on the same batches, and the
    difference of their sums would be a site's update to the last bit. So it follows
    from a secret of the site and from the run's proposal, in which the aggregator's
    nonce is fresh: it is the same after a restart of the site, and no other's.

    Args:
        config: The operator's ``site.toml``.
        job: Says whether secure aggregation is on.
        sealed: The run's proposal, as the aggregator signed it.

    Returns:
        A number below 2^256; None without secure aggregation, where everybody may see
        an update.

    Raises:
        StoreError: The secret cannot be read or made durable.
    """
    if not job.privacy.secure_aggregation.enabled:
        return None
    secret = fresh_secret(site_memory(config), "order-of-examples", "secret")
    parts = hashlib.sha256(
        b"crossfed/order\0" + secret + hashlib.sha256(sealed).digest()
    )
    return int.from_bytes(parts.digest(), "big")


def name_data(config: SiteConfig) -> str:
    """Return the operator's name for the site's data, which never changes.

    Raises:
        JobError: They had another name before.
        StoreError: The site's memory cannot be read or written.
    """
    data = config.file.data
    return dataset_name.dataset_name(
        site_memory(config), data.name, source=data.source, options=data.options
    )


def _records(config: SiteConfig, job: JobSpec) -> str:
    """Name a site's training data: its own, or its share of a rehearsal's."""
    data = config.file.data
    dealt = None if data.source else job_file.document(job)
    own = dataset_name.lineage(dataset=data.source, options=data.options)
    return dataset_name.lineage(dataset=data.name, options={"own": own, "dealt": dealt})


def _check_sums_known(config: SiteConfig) -> None:
    """Refuse further sums if run folders show sums that the memory lacks.

    A site notes the sites of a sum before it answers a round.

    Raises:
        CorruptObject: The memory knows no sum, and a run has rounds.
        StoreError: The memory cannot be read.
    """
    answered = runs_folder(config).glob(f"*/sites/{config.file.name}/{ROUNDS}/*.round")
    runs = sorted({path.parents[3].name for path in answered})
    if runs and not site_memory(config).read(COHORTS):
        raise CorruptObject(
            f"{config.folder}/memory/{COHORTS}.json is missing or empty, but this site "
            f"has answered rounds of {', '.join(runs)}: it no longer knows with which "
            "sites it was summed, so another sum could single it out. Restore the "
            "file. If there is no copy, this site's operator can accept the risk: a "
            "run with policy.min_group = 1 starts a new file"
        )


def _sum_fault(rule: CohortRule, job: JobSpec, name: str) -> tuple[str, str]:
    """Find what a job's own sums reveal of a site: the key, and why; or nothing."""
    if job.has_free_cohorts and not rule.is_private:
        return "schedule.groups", "sums over whoever is ready reveal single updates"
    together, fewest = job.summed_with(name), job.fewest_with(name)
    fault = rule.threshold_fault(len(together), fewest)
    return "privacy.secure_aggregation.threshold", fault


def _cohort_rule(
    met: ProposedRun, config: SiteConfig, promise: SitePrivacy | None
) -> CohortRule:
    """Check the sites of a job against the sums that this site joined before.

    Raises:
        JobError: Together they would single out too few sites.
        StoreError: The site's memory cannot be read, or has lost the sums.
    """
    policy, job = config.file.policy, met.job
    weakness = "" if promise is None else weakness_of(met.job, policy, promise.delta)
    smallest = policy.smallest_group(job.smallest_cohort)
    if smallest > 1:  # Otherwise the operator has given the rule up.
        _check_sums_known(config)
    rule = CohortRule(
        memory=site_memory(config),
        lineage=name_data(config),
        smallest=smallest,
        accept_dropouts=policy.accept_dropouts,
        is_private=promise is not None and not weakness,
        parts=contributors(met.job),
    )
    if job.privacy.secure_aggregation.groups is not None:
        return rule  # With whom this site is summed, the offer of a contract says.
    together = job.summed_with(config.file.name)
    if job.has_free_cohorts:  # Whoever is ready: all sums may single out each site.
        together = [config.file.name]
    cohort: Cohort = frozenset(map(SiteId, together))
    key, fault = "sites", ""
    try:
        rule.check(cohort)
    except CohortRefused as error:
        fault = str(error)
    if not fault:
        key, fault = _sum_fault(rule, job, config.file.name)
    if fault:
        if weakness:
            fault += f". The run counts as one without differential privacy: {weakness}"
        raise JobError(f"site {config.file.name!r}: {fault}", key=key)
    return rule

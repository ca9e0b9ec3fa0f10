"""Secure aggregation in a simulation: identities, roster, contract and sites.

A simulation makes the identities of the aggregator and of all sites afresh: it
rehearses the protocol, message for message, and protects nobody, since all parties
live in one process. From the rehearsed contract follows what a run will send.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from clients.privacy.cohorts import CohortRule, singled_out
from clients.privacy.groups import GroupRule, group_rule
from clients.privacy.level_seal import seal_of
from clients.privacy.policy_spec import PolicySpec
from clients.privacy.ring_seal import Protection
from clients.privacy.site_memory import FileMemory, InMemory, SiteMemory
from clients.privacy.site_plans import PrivateSites
from clients.privacy.site_policy import check_job
from clients.privacy.sum_plan import SumPrivacy
from clients.training.local_federation import Federation
from clients.training.site import Seal
from deploy.wiring.run import SecureContext
from federation.errors import JobError
from federation.events import CostPredicted
from federation.ids import RunId, SiteId
from federation.job import job_digest
from federation.job.adapter_ranks import contributors, fewest_alike
from federation.job.spec import JobSpec
from federation.rounds import cost
from federation.rounds.local_work import is_by_capacity, moves_data
from federation.rounds.traffic import SecureSizes, SiteFacts, Traffic
from federation.vectors import Layout
from privacy.keystream import RandomBytes
from privacy.secagg.agreement.code_hash import code_hash
from privacy.secagg.agreement.contract import Contract, colluding_tolerated
from privacy.secagg.agreement.groups import group_contract, named_groups
from privacy.secagg.agreement.identity import Identity, generate
from privacy.secagg.agreement.policy import Group, LocalPolicy
from privacy.secagg.agreement.roster import RELAY, SITE, Roster, RosterEntry
from privacy.secagg.protocol.of_job import check_layout, contract_of, header_slots
from privacy.secagg.protocol.round_memory import (
    FileRounds,
    InMemoryRounds,
    RoundMemory,
)
from privacy.secagg.protocol.sizes import sizes
from privacy.secagg.protocol.train import most_evaluated

NOTHING_STATED: Mapping[SiteId, SiteFacts] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """All parties of one simulated run.

    Attributes:
        federation: Model and data.
        contract: What everybody agrees to.
        aggregator: The aggregator's identity.
        identities: The sites' identities.
        roster: What pins them.
        in_sum: Noise that adds up inside the secure sum; None if there is none.
        relays: The relays' identities.
        random_bytes: Where the sites' keys, rounding and noise come from.
        memories: What sites without a folder remember of rounds, here and not in the
            sites, so that it outlives their restarts.
        sums: What sites remember of this run's sums and groups, likewise.
    """

    federation: Federation
    contract: Contract
    aggregator: Identity
    identities: Mapping[SiteId, Identity]
    roster: Roster
    in_sum: SumPrivacy | None
    relays: Mapping[SiteId, Identity] = field(default_factory=dict)
    random_bytes: RandomBytes = field(default=os.urandom, repr=False)
    memories: dict[SiteId, RoundMemory] = field(default_factory=dict)
    sums: dict[SiteId, SiteMemory] = field(default_factory=dict)

    @property
    def secret(self) -> SecureContext:
        """The aggregator's half."""
        return SecureContext(
            identity=self.aggregator, contract=self.contract, relays=self.relays
        )

    def seal(self, name: SiteId, folder: Path | None) -> Seal:
        """Make a site's seal; in ``folder`` it remembers rounds after a restart."""
        if folder is None:
            memory = self.memories.setdefault(name, InMemoryRounds())
        else:
            memory = FileRounds(folder / "sites" / name / "rounds")
        return seal_of(
            self.federation.job,
            name,
            Protection(
                identity=self.identities[name],
                policy_of=self._policy,
                memory=memory,
                random_bytes=self.random_bytes,
                noise=None if self.in_sum is None else self.in_sum.noise,
                cohorts=self._cohorts(name),
                groups=self._groups(name, folder),
                threads=self.federation.job.training.threads,
                most_evaluated=most_evaluated(self.federation.job),
                by_capacity=is_by_capacity(self.federation.job),
            ),
        )

    def _cohorts(self, name: SiteId) -> CohortRule:
        """The rule on sums over different sites, for one run: dropouts are accepted."""
        return CohortRule(
            memory=self.sums.setdefault(name, InMemory()),
            lineage="simulation",
            # All are one operator's: groups are as large as the job makes them.
            smallest=min(
                self.federation.job.sites_in_sum, fewest_alike(self.federation.job)
            ),
            accept_dropouts=True,
            is_private=not self.contract.differential_privacy.is_none,
            parts=contributors(self.federation.job),
        )

    def _groups(self, name: SiteId, folder: Path | None) -> GroupRule | Group | None:
        """Draw the groups by the job's seed: a rehearsal can be repeated."""
        job = self.federation.job
        memory: SiteMemory = self.sums.setdefault(name, InMemory())
        if folder is not None:  # A run that is resumed has the groups of before.
            memory = FileMemory(folder / "sites" / name / "memory")
        seed = f"crossfed/simulated draw/{job.seed}/{name}".encode()
        return group_rule(
            job,
            site=name,
            roster=self.roster,
            memory=memory,
            dataset="simulation",
            random_bytes=lambda size: hashlib.shake_256(seed).digest(size),
        )

    def _policy(self, layout: Layout) -> LocalPolicy:
        """Require exactly what the job says, since its user is every operator."""
        contract, job = self.contract, self.federation.job
        return LocalPolicy(
            roster=self.roster,
            run_id=contract.run_id,
            job_digest=job_digest.digest(job),
            code_hashes=frozenset({code_hash()}),
            layout_digest=bytes.fromhex(layout.digest),
            num_values=layout.size,
            min_sites=job.sites_in_sum,
            colluding=max(
                0, min(1, colluding_tolerated(job.smallest_cohort, job.sites_in_sum))
            ),
            max_clip_norm=contract.clip_norm,
            max_element_bound=contract.element_bound,
            privacy_profiles=frozenset({contract.differential_privacy.profile}),
            epsilon_cap=contract.differential_privacy.largest_epsilon,
            max_delta=contract.differential_privacy.largest_delta,
            max_rounds=contract.max_rounds,
            header_slots=header_slots(job),
            noise_share=None if self.in_sum is None else self.in_sum.share,
            require_hybrid=contract.hybrid,
            accept_two_sites=contract.two_site_waiver,
        )


def rehearse(
    federation: Federation, run_id: RunId, private: PrivateSites | None
) -> Rehearsal:
    """Make all parties of a run.

    Args:
        federation: Model and data.
        run_id: ID of the run, which contracts contain.
        private: What the sites promise; None without differential privacy.

    Raises:
        JobError: The model has tensors that masked sums cannot aggregate.
    """
    job, layout = federation.job, federation.pool.layout
    check_layout(job, layout)
    aggregator = generate(os.urandom)
    identities = {SiteId(site.name): generate(os.urandom) for site in job.sites}
    relays = {SiteId(relay.name): generate(os.urandom) for relay in job.relays}
    roster = Roster(
        serial=1,
        aggregator_organisation="simulation",
        aggregator_key=aggregator.public.key,
        sites=tuple(
            RosterEntry(
                site=name,
                organisation=name,
                public_key=identity.public.key,
                role=RELAY if name in relays else SITE,
            )
            for name, identity in sorted((identities | relays).items())
        ),
    )
    return Rehearsal(
        federation=federation,
        relays=relays,
        contract=_contract(federation, run_id, roster, private),
        aggregator=aggregator,
        identities=identities,
        roster=roster,
        in_sum=None if private is None else private.in_sum,
    )


def _contract(
    federation: Federation,
    run_id: RunId,
    roster: Roster,
    private: PrivateSites | None,
) -> Contract:
    sizes = [len(train) for train, _ in federation.site_data.values()]
    return contract_of(
        federation.job,
        federation.pool.layout,
        run_id=run_id,
        roster=roster,
        promises=() if private is None else private.promises(),
        ring_noise_std=_ring_noise_std(private),
        max_examples=max(sizes),
    )


def dropout_notice(job: JobSpec) -> str:
    """Say what sums reveal that differ by single sites; empty if none do.

    Under differential privacy noise bounds what any sums together give away.
    """
    absent = job.most_absent
    secure = job.privacy.secure_aggregation.enabled
    if not secure or job.privacy.differential_privacy.enabled:
        return ""
    if is_by_capacity(job):
        return (
            "sites take different numbers of local steps (schedule.allocation). Sums "
            "of different rounds reveal something about the updates of sites whose "
            "number has changed or that were absent: each site's operator must accept "
            "that (policy.accept_dropouts)"
        )
    if not absent:
        return ""
    return (
        f"sums may be opened without up to {absent} of their sites "
        "(privacy.secure_aggregation.threshold). Sums before and after an absence "
        "reveal something about the absent sites' updates and results: each site's "
        "operator must accept that (policy.accept_dropouts), unless at least "
        "policy.min_group sites are absent together"
    )


def cohort_notice(job: JobSpec, before: Iterable[JobSpec]) -> str:
    """Say what deployed sites would refuse: exact statistics that differ by few sites.

    Args:
        job: What is about to run.
        before: The jobs of statistics that were simulated before.

    Returns:
        A warning; empty if there is nothing to warn of.
    """

    def cohorts(each: JobSpec) -> set[frozenset[SiteId]]:
        exact = not each.privacy.differential_privacy.enabled
        is_sum = each.statistics is not None and each.privacy.secure_aggregation.enabled
        return (
            {frozenset(SiteId(s.name) for s in each.sites)} if exact & is_sum else set()
        )

    known = (
        set[frozenset[SiteId]]().union(*map(cohorts, before)) if cohorts(job) else ()
    )
    smallest = PolicySpec(privacy="none").smallest_group(job.smallest_cohort)
    found = singled_out({*known, *cohorts(job)}, smallest=smallest)
    if not found:
        return ""
    few = " and ".join(", ".join(sorted(group)) for group in found)
    return (
        f"the exact sums of this run and of earlier runs here differ by {few}: "
        "subtracting one from the other gives the sums of those sites. Deployed sites "
        "would refuse this run (policy.min_group), if their data are the same: ask the "
        "same sites as before, or use privacy.differential_privacy"
    )


def statistics_notice(job: JobSpec) -> str:
    """Say how deployed sites answer exact statistics otherwise than a simulation.

    Returns:
        A warning; empty if there is nothing to warn of.
    """
    if job.statistics is None or job.privacy.differential_privacy.enabled:
        return ""
    policy = PolicySpec(privacy="none")
    text = (
        'deployed sites give exact statistics only with policy.privacy = "none". They '
        f"leave out cells of fewer than {policy.statistics.min_count} of their records "
        "(policy.statistics.min_count), which a simulation shows"
    )
    try:
        check_job(job, policy, SiteId(job.sites[0].name), has_data=True)
    except JobError as error:
        why = " ".join(str(error).split())  # A warning is one line.
        text += f". By the defaults of a policy they refuse this job: {why}"
    return text


def _ring_noise_std(private: PrivateSites | None) -> float:
    if private is None or private.in_sum is None:
        return 0.0
    return private.in_sum.ring.noise_std


def traffic_of(
    federation: Federation,
    contract: Contract | None,
    *,
    measured: bool = True,
    stated: Mapping[SiteId, SiteFacts] = NOTHING_STATED,
) -> Traffic | None:
    """Size a job's messages.

    Args:
        federation: The job, its model and its data.
        contract: Between its sites, if it has secure aggregation.
        measured: Whether its sites measure more than time.
        stated: What deployed sites hold, whose data are not here.

    Returns:
        None for sums over groups that the sites draw or that form of whoever is ready,
        and with sites that run apps of Flower, whose answers are unknown here.
    """
    job = federation.job
    facts = stated or {
        site: SiteFacts(len(train), len(held_out))
        for site, (train, held_out) in federation.site_data.items()
    }
    is_drawn = job.privacy.secure_aggregation.groups is not None
    if is_drawn or job.has_free_cohorts or len(facts) < len(job.sites):
        return None
    named, grouped = named_groups(job.schedule.groups), dict[SiteId, SecureSizes]()
    if contract is not None:
        for group in named.groups:
            own = sizes(group_contract(contract, group, named.digest))
            grouped |= dict.fromkeys(group, own)
    if moves_data(job):  # Each can read all of it, and has a part.
        facts = {s: replace(f, train=f.train // len(facts)) for s, f in facts.items()}
    return Traffic(
        job=job,
        layout=federation.pool.layout,
        facts=facts,
        secure=(
            None
            if contract is None
            else sizes(contract, by_capacity=is_by_capacity(job))
        ),
        grouped=grouped,
        measured=measured,
        reports_energy=bool(stated),
    )


def predicted(traffic: Traffic, *, at: float, virtual: bool) -> CostPredicted:
    """Predict a run; only virtual time has stated speeds and prices."""
    down, up = traffic.of_run()
    found, speeds = None, cost.virtual_speeds(traffic.job)
    if virtual:
        found = cost.of_run(traffic, speeds)
    return CostPredicted(
        at=at,
        bytes_down=(down.low, down.high),
        bytes_up=(up.low, up.high),
        seconds=found.seconds if found else None,
        dollars=found.total if found and speeds.has_prices else None,
    )

"""Secure aggregation in a simulation: identities, roster, contract and sites.

A simulation makes the identities of the aggregator and of all sites afresh: it
rehearses the protocol, message for message, and protects nobody, since all parties
live in one process.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aggregator.group_sums import GroupGather
from aggregator.secure_sum import SecureGather
from clients.cohorts import CohortRule
from clients.groups import GroupRule
from clients.kept_integers import KeptIntegers
from clients.secure_site import Protection, SecureSite
from clients.site_memory import FileMemory, InMemory, SiteMemory
from deploy.private_sites import PrivateSites
from deploy.sum_privacy import SumPrivacy
from deploy.wiring import Federation
from federation import job_digest
from federation.errors import JobError
from federation.events import SitePrivacy
from federation.gather import Gather
from federation.ids import RunId, SiteId
from federation.job import JobSpec
from federation.protocols import Grid, ObjectStore, Trainer
from federation.vectors import Layout, Role
from privacy.counts import coarse
from privacy.secagg.contract import Contract, members_of
from privacy.secagg.floor import LocalFloor
from privacy.secagg.groups import draw_of
from privacy.secagg.identity import Identity, RandomBytes, generate
from privacy.secagg.ring import RingSpec
from privacy.secagg.roster import Roster, RosterEntry
from privacy.secagg.round_memory import FileRounds, InMemoryRounds, RoundMemory
from privacy.secagg.terms import NO_PRIVACY, PrivacyTerms
from privacy.secagg.thresholds import colluding_tolerated
from privacy.secagg.train import ADAPTIVE_SLOTS, HEADER_SLOTS

_MECHANISMS = {"record": "dp-sgd", "joint": "dp-sgd", "site": "gaussian-sum"}

# What a site computes from its data. A site plans its noise in `deploy`, by its own
# release: if the aggregator's plans otherwise, the site refuses the contract.
_CODE = ("federation", "privacy", "clients")


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
    random_bytes: RandomBytes = field(default=os.urandom, repr=False)
    memories: dict[SiteId, RoundMemory] = field(default_factory=dict)
    sums: dict[SiteId, SiteMemory] = field(default_factory=dict)

    def gather(self, grid: Grid) -> Gather:
        """Make the aggregator's half."""
        return secure_gather(
            self.federation.job,
            layout=self.federation.pool.layout,
            grid=grid,
            identity=self.aggregator,
            contract=self.contract,
        )

    def site(
        self,
        name: SiteId,
        *,
        make_trainer: Callable[[], Trainer],
        store: ObjectStore,
        folder: Path | None,
    ) -> SecureSite:
        """Make one site; ``folder`` is where it remembers rounds beyond a restart."""
        federation = self.federation
        if folder is None:
            memory = self.memories.setdefault(name, InMemoryRounds())
        else:
            memory = FileRounds(folder / "sites" / name / "rounds")
        return SecureSite(
            name,
            make_trainer=make_trainer,
            kept=KeptIntegers(name, federation.pool.layout, store),
            protection=Protection(
                identity=self.identities[name],
                floor_of=self._floor,
                memory=memory,
                random_bytes=self.random_bytes,
                noise=None if self.in_sum is None else self.in_sum.noise,
                cohorts=self._cohorts(name),
                groups=self._groups(name, folder),
                threads=federation.job.training.threads,
            ),
        )

    def _cohorts(self, name: SiteId) -> CohortRule:
        """The rule on sums over different sites, for one run: dropouts are accepted."""
        return CohortRule(
            memory=self.sums.setdefault(name, InMemory()),
            lineage="simulation",
            smallest=self.federation.job.sites_in_sum,
            accept_dropouts=True,
            is_private=not self.contract.differential_privacy.is_none,
        )

    def _groups(self, name: SiteId, folder: Path | None) -> GroupRule | None:
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

    def _floor(self, layout: Layout) -> LocalFloor:
        """Demand just what the job says: whoever runs the job is every operator."""
        contract, job = self.contract, self.federation.job
        groups = job.privacy.secure_aggregation.groups
        num_sites = contract.num_sites if groups is None else job.sites_in_sum
        return LocalFloor(
            roster=self.roster,
            run_id=contract.run_id,
            job_digest=job_digest.digest(job),
            code_hashes=frozenset({code_hash()}),
            layout_digest=bytes.fromhex(layout.digest),
            num_values=layout.size,
            min_sites=job.sites_in_sum,
            colluding=max(0, min(1, colluding_tolerated(num_sites, job.sites_in_sum))),
            max_clip_norm=contract.clip_norm,
            max_element_bound=contract.element_bound,
            privacy_profiles=frozenset({contract.differential_privacy.profile}),
            max_epsilon=contract.differential_privacy.largest_epsilon,
            max_delta=contract.differential_privacy.largest_delta,
            max_rounds=contract.max_rounds,
            header_slots=header_slots(job),
            noise_share=None if self.in_sum is None else self.in_sum.share,
            require_hybrid=contract.hybrid,
            accept_two_sites=contract.two_site_waiver,
        )


def secure_gather(
    job: JobSpec,
    *,
    layout: Layout,
    grid: Grid,
    identity: Identity,
    contract: Contract,
) -> Gather:
    """Make the aggregator's half: for one sum over all sites, or sums over groups."""
    by_group = job.privacy.secure_aggregation.groups is not None
    make = GroupGather if by_group else SecureGather
    return make(job, layout=layout, grid=grid, identity=identity, contract=contract)


def group_rule(
    job: JobSpec,
    *,
    site: SiteId,
    roster: Roster,
    memory: SiteMemory,
    dataset: str,
    random_bytes: RandomBytes,
) -> GroupRule | None:
    """Make a site's part in drawing the groups of a job; None if it has none."""
    num_groups = job.privacy.secure_aggregation.groups
    if num_groups is None:
        return None
    return GroupRule(
        site=site,
        memory=memory,
        dataset=dataset,
        draw=draw_of(
            roster,
            [SiteId(spec.name) for spec in job.sites],
            num_groups=num_groups,
        ),
        random_bytes=random_bytes,
    )


def rehearse(
    federation: Federation, run_id: RunId, private: PrivateSites | None
) -> Rehearsal:
    """Make all parties of a run.

    Args:
        federation: Model and data.
        run_id: The run.
        private: What the sites promise; None without differential privacy.

    Raises:
        JobError: The model has what cannot be summed in secret.
    """
    job, layout = federation.job, federation.pool.layout
    check_layout(layout)
    aggregator = generate(os.urandom)
    identities = {SiteId(site.name): generate(os.urandom) for site in job.sites}
    roster = Roster(
        serial=1,
        aggregator_organisation="simulation",
        aggregator_key=aggregator.public.key,
        sites=tuple(
            RosterEntry(site=name, organisation=name, public_key=identity.public.key)
            for name, identity in sorted(identities.items())
        ),
    )
    return Rehearsal(
        federation=federation,
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


def contract_of(
    job: JobSpec,
    layout: Layout,
    *,
    run_id: RunId,
    roster: Roster,
    promises: Sequence[SitePrivacy],
    ring_noise_std: float = 0.0,
    max_examples: int | None = None,
) -> Contract:
    """Write down what all parties of a run agree to.

    Args:
        job: The job.
        layout: Layout of its model.
        run_id: The run.
        roster: Pins the parties.
        promises: What the sites promise; empty without differential privacy.
        ring_noise_std: Noise of one site inside the sum, in steps of the grid.
        max_examples: Most examples of a site, where the job does not say.

    Raises:
        JobError: The job's numbers do not fit into the ring, or the job must say how
            many examples a site has at most.
    """
    terms = _privacy_terms(job, promises, ring_noise_std)
    ring = _ring(job, terms)
    return Contract(
        run_id=run_id,
        code_hash=code_hash(),
        layout_digest=bytes.fromhex(layout.digest),
        job_digest=job_digest.digest(job),
        num_values=layout.size,
        roster_serial=roster.serial,
        roster_digest=roster.digest,
        members=members_of(roster, {SiteId(site.name) for site in job.sites}),
        aggregator_key=roster.aggregator_key,
        threshold=job.minimum_sites,
        min_sites=job.minimum_sites,  # All that are in a sum: t, or N.
        scale=ring.scale,
        amplitude=ring.amplitude,
        header_slots=header_slots(job),
        differential_privacy=terms,
        **terms_of_job(job, max_examples),
    )


def terms_of_job(job: JobSpec, max_examples: int | None = None) -> dict[str, Any]:
    """Fields of a contract that follow from the job, whoever is in the sum.

    Args:
        job: The job.
        max_examples: Most examples of a site, where the job does not say.

    Raises:
        JobError: The job must say how many examples a site has at most.
    """
    secure = job.privacy.secure_aggregation
    return {
        "ring_bits": secure.ring_bits,
        "clip_norm": job.update_clip_norm,
        "element_bound": secure.element_bound,
        "clip_elements": secure.clip_elements,
        "weight_rule": job.aggregation.weights,
        "max_examples": _max_examples(job, max_examples),
        "max_rounds": job.rounds + 1,  # The last is for evaluation alone.
        "hybrid": secure.hybrid,
        "two_site_waiver": secure.two_sites_waiver,
    }


def dropout_notice(job: JobSpec) -> str:
    """Say what it costs that a job's rounds may go on without sites; empty for nothing.

    Under differential privacy noise bounds what any sums together give away.
    """
    absent = len(job.sites) - job.minimum_sites
    secure = job.privacy.secure_aggregation.enabled
    if not (secure and absent) or job.privacy.differential_privacy.enabled:
        return ""
    return (
        f"rounds may go on without up to {absent} of {len(job.sites)} sites "
        "(privacy.secure_aggregation.threshold). Sums before and after an absence "
        "tell of the absent sites' updates and results: each site's operator must "
        "accept that (floor.accept_dropouts) unless as many are absent as "
        "floor.min_group says"
    )


def _ring_noise_std(private: PrivateSites | None) -> float:
    if private is None or private.in_sum is None:
        return 0.0
    return private.in_sum.ring.noise_std


def _ring(job: JobSpec, terms: PrivacyTerms) -> RingSpec:
    secure = job.privacy.secure_aggregation
    try:
        return RingSpec(
            bits=secure.ring_bits,
            num_sites=len(job.sites),
            clip_norm=job.update_clip_norm,
            element_bound=secure.element_bound,
            clip_elements=secure.clip_elements,
            noise_std=terms.ring_noise_std,
        )
    except ValueError as error:  # Too small a bound, or too much noise.
        raise JobError(str(error), key="privacy.secure_aggregation") from None


def header_slots(job: JobSpec) -> tuple[str, ...]:
    """Slots of the header that a site of this job sends."""
    adapts = job.privacy.differential_privacy.adaptive_clip
    return ADAPTIVE_SLOTS if adapts else HEADER_SLOTS


def _privacy_terms(
    job: JobSpec, promises: Sequence[SitePrivacy], ring_noise_std: float
) -> PrivacyTerms:
    """What the contract claims of differential privacy: what holds for every site."""
    if not promises:
        return NO_PRIVACY
    asked = job.privacy.differential_privacy
    return PrivacyTerms(
        profile=asked.unit,
        mechanism=_MECHANISMS[asked.unit],
        noise_multiplier=min(site.noise_multiplier for site in promises),
        sampling_rate=max(site.sampling_rate for site in promises),
        steps_per_round=max(site.steps_per_round for site in promises),
        delta=max(site.delta for site in promises),
        epsilon_cap=max(site.epsilon_cap for site in promises),
        clip_norm=asked.clip_norm,
        ring_noise_std=ring_noise_std,
    )


def _max_examples(job: JobSpec, largest: int | None) -> int:
    if job.aggregation.weights == "uniform":
        return 1
    allowed = job.privacy.secure_aggregation.max_examples
    if allowed is None:
        allowed = largest
    if allowed is None:
        raise JobError(
            "is missing: no site tells how many examples it has, so the job must say "
            "the most; or set aggregation.weights to uniform",
            key="privacy.secure_aggregation.max_examples",
        )
    # Whether a site has more, and declines, would otherwise be a question about its
    # number, and a few of them would find that.
    return coarse(allowed)


def check_layout(layout: Layout) -> None:
    """Refuse a model that has what cannot be summed in secret.

    Raises:
        JobError: It has.
    """
    for spec in layout.tensors:
        if spec.role is Role.MAX:
            raise JobError(
                f"the largest {spec.name!r} of any site cannot be found without seeing "
                "each site's; give it the role keep or from_server",
                key="model.integer_buffers",
            )


@cache
def code_hash() -> bytes:
    """SHA-256 of the code that computes from a site's data."""
    digest = hashlib.sha256(b"crossfed/code")
    for package in _CODE:
        spec = find_spec(package)
        folders = (spec.submodule_search_locations or []) if spec else []
        for folder in folders:
            for path in sorted(Path(folder).rglob("*.py")):
                name = f"{package}/{path.relative_to(folder).as_posix()}"
                digest.update(hashlib.sha256(name.encode()).digest())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()

"""The contract that follows from a job."""

from collections.abc import Sequence
from typing import Any

from federation.compression.rotation import BLOCK_VALUES, num_blocks
from federation.errors import JobError
from federation.events import SitePrivacy
from federation.ids import RunId, SiteId
from federation.job import job_digest
from federation.job.metrics import cells_of, metrics_of
from federation.job.spec import JobSpec
from federation.vectors import Layout, Role
from privacy.counts import coarse
from privacy.secagg.agreement.code_hash import code_hash
from privacy.secagg.agreement.contract import (
    Contract,
    RelayMember,
    members_of,
)
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.agreement.terms import NO_PRIVACY, PrivacyTerms
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.errors import RosterRefused
from privacy.secagg.protocol.train import slots_of

MOST_EVALUATIONS = 16  # Attempts of a run that only evaluates.

_MECHANISMS = {
    "record": "dp-sgd",
    "person": "dp-sgd",
    "joint": "dp-sgd",
    "site": "gaussian-sum",
}


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
        job: Its digest is part of the contract.
        layout: Layout of its model.
        run_id: ID of the run that the contract is for.
        roster: Pins the parties, relays among them.
        promises: What the sites promise; empty without differential privacy.
        ring_noise_std: Noise of one site inside the sum, in steps of the grid.
        max_examples: Most examples of a site, where the job does not say.

    Raises:
        JobError: The roster does not pin a relay. Or the job's numbers do not fit into
            the ring, or the job must say how many examples a site has at most.
    """
    terms = _privacy_terms(job, promises, ring_noise_std)
    ring = _ring(job, terms)
    members = members_of(roster, {SiteId(site.name) for site in job.sites})
    return Contract(
        run_id=run_id,
        code_hash=code_hash(),
        layout_digest=bytes.fromhex(layout.digest),
        job_digest=job_digest.digest(job),
        num_values=layout.size,
        roster_serial=roster.serial,
        roster_digest=roster.digest,
        members=members,
        relays=relays_of(job, roster),
        aggregator_key=roster.aggregator_key,
        threshold=job.minimum_sites,
        min_sites=job.minimum_sites,  # All that are in a sum: t, or N.
        scale=ring.scale,
        amplitude=ring.amplitude,
        header_slots=header_slots(job),
        differential_privacy=terms,
        **terms_of_job(job, max_examples),
    )


def relays_of(job: JobSpec, roster: Roster) -> tuple[RelayMember, ...]:
    """The relays of a contract, with the keys that the roster pins.

    Raises:
        JobError: The roster does not have one of them.
    """
    check_roles(job, roster)
    members = members_of(roster, {SiteId(site.name) for site in job.sites})
    pinned = {entry.site: entry.public_key for entry in roster.sites}
    found = []
    for relay in sorted(job.relays, key=lambda relay: relay.name):
        name = SiteId(relay.name)
        if name not in pinned:
            raise JobError(
                f"relay {relay.name!r} is not in the roster: enrol it, invited with "
                "--relay",
                key="relays",
            )
        numbers = tuple(m.number for m in members if m.site in relay.sites)
        found.append(RelayMember(name=name, public_key=pinned[name], numbers=numbers))
    return tuple(found)


def check_roles(job: JobSpec, roster: Roster) -> None:
    """Refuse a job that counts relays of the roster as sites, or sites as relays.

    Raises:
        JobError: It does.
    """
    try:
        roster.check_roles(
            {site.name for site in job.sites}, {relay.name for relay in job.relays}
        )
    except RosterRefused as error:
        raise JobError(str(error), key="sites") from None


def terms_of_job(job: JobSpec, max_examples: int | None = None) -> dict[str, Any]:
    """Fields of a contract that follow from the job, with any members of the sum.

    Args:
        job: A job with secure aggregation.
        max_examples: Most examples of a site, where the job does not say.

    Raises:
        JobError: The job must say how many examples a site has at most.
    """
    secure = job.privacy.secure_aggregation
    return {
        "ring_bits": secure.ring_bits,
        "levels": secure.levels or 0,
        "fragments": job.communication.fragments,
        "clip_norm": job.update_clip_norm,
        "element_bound": secure.element_bound,
        "clip_elements": secure.clip_elements,
        "weight_rule": job.aggregation.weights,
        "max_examples": max_examples_of(job, max_examples),
        # The last is only for evaluation; a run without others may be resumed.
        "max_rounds": job.rounds + 1 if job.rounds else MOST_EVALUATIONS,
        "hybrid": secure.hybrid,
        "two_site_waiver": secure.two_sites_waiver,
    }


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
    training = job.training
    levels = job.privacy.secure_aggregation.levels is not None
    return slots_of(
        metrics_of(training), cells_of(training), adapts=adapts, levels=levels
    )


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


def max_examples_of(job: JobSpec, largest: int | None) -> int:
    """Return the most examples that a site of a contract may have.

    Args:
        job: Its ``max_examples`` is used if it is set.
        largest: The largest site's number, if it is known; deployed sites keep theirs.

    Raises:
        JobError: Neither the job nor the sites say it.
    """
    if job.aggregation.weights == "uniform":
        return 1
    allowed = job.privacy.secure_aggregation.max_examples
    if allowed is None:
        allowed = largest
    if allowed is None:
        raise JobError(
            "is missing: sites do not reveal how many examples they have, so give an "
            "upper limit, or set aggregation.weights to uniform",
            key="privacy.secure_aggregation.max_examples",
        )
    # Whether a site has more, and declines, would otherwise be a question about its
    # number, and a few of them would find that.
    return coarse(allowed)


def check_layout(job: JobSpec, layout: Layout) -> None:
    """Refuse a model with tensors that masked sums of a job cannot aggregate.

    Raises:
        JobError: It has.
    """
    levels, blocks = job.privacy.secure_aggregation.levels, num_blocks(layout.size)
    if job.communication.fragments > blocks:
        raise JobError(
            f"is at most {blocks}, not {job.communication.fragments}: it counts parts "
            f"of whole blocks of {BLOCK_VALUES:,} values, and the model has "
            f"{layout.size:,} values",
            key="communication.fragments",
        )
    for spec in layout.tensors:
        if spec.role is Role.MAX:
            raise JobError(
                f"the maximum of {spec.name!r} cannot be computed without seeing each "
                "site's value; give it the role keep or from_server",
                key="model.integer_buffers",
            )
        if spec.role is Role.BUFFER and levels is not None:
            raise JobError(
                f"{spec.name!r} is a running statistic, which {levels} levels would "
                "round too coarsely: use a model without such buffers (GroupNorm or "
                "LayerNorm in place of BatchNorm), or remove this key",
                key="privacy.secure_aggregation.levels",
            )

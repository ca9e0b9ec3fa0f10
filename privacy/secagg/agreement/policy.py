"""A site's policy: its operator's requirements of every contract, and the check.

The aggregator writes contracts; this is where a site says no. The policy lives in
the site's own configuration and no message can change it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from federation.ids import RunId, SiteId
from federation.job.privacy_job import LEVELS
from privacy.secagg.agreement.contract import (
    WEIGHT_RULES,
    Contract,
    RelayMember,
    colluding_tolerated,
    members_of,
)
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.agreement.terms import PROFILES
from privacy.secagg.arithmetic.noise_shares import NoiseShare
from privacy.secagg.arithmetic.ring import RING_BITS
from privacy.secagg.errors import ContractRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The group that a site has drawn with all others, or that the job names.

    Attributes:
        sites: Those of the group, this one among them.
        partition: Digest of all groups, ``groups.Outcome.digest``.
        threshold: Fewest updates that its sums hold; 0 for those of all its sites.
    """

    sites: frozenset[SiteId]
    partition: bytes
    threshold: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPolicy:
    """A site operator's requirements of every contract.

    Attributes:
        roster: The newest roster that this site trusts.
        run_id: The run that was proposed to this site.
        job_digest: h_job of the job that was proposed to this site, computed here
            from the job that it will work on; never taken from a message.
        code_hashes: SHA-256 of the releases that this site runs.
        layout_digest: Digest of the layout of the site's own model.
        num_values: Length d of that model.
        approved: Hashes h_Q that the operator has approved, or None to accept any
            contract within this policy.
        sites: Sites of the job that was proposed: without groups all of them must
            be members. None for any of the roster.
        terms: Fields of the contract, by name, that follow from the job that was
            proposed: sums may reveal about a site only what its operator has seen.
        min_sites: Fewest updates in a sum, in a run of two as in any other.
        colluding: Other sites that may collude with the aggregator, n_C.
        ring_bits: Rings that are accepted.
        levels: Numbers of levels that are accepted, where updates are rounded to few.
        max_clip_norm: Largest clip norm, in weight units.
        max_element_bound: Largest bound of an element, in weight units; None for
            all that the clip norm allows.
        weight_rules: Weight rules that are accepted.
        max_rounds: Most rounds of a run.
        header_slots: Slots of the header that this site's code sends, in their
            order; no other header is accepted.
        privacy_profiles: Profiles of differential privacy that are accepted.
        epsilon_cap: Largest epsilon cap of a run. Any finite number refuses a run
            without differential privacy.
        max_delta: Largest delta where whole sites are the unit; below 1 it refuses a
            run without differential privacy too.
        require_hybrid: Whether pair secrets must rest on ML-KEM-768 too.
        noise_share: What this site counts on where noise adds up inside the sum;
            None if it has planned none, and then no such run is accepted.
        accept_two_sites: Whether a run of two sites without record-level
            differential privacy is accepted: the other site learns this one's
            update.
        group: Who is in the sum, where sites have drawn groups; None where all sites
            of the job are in one sum.
        relays: Who may add up masked words of which sites; None for any.
    """

    roster: Roster
    run_id: RunId
    job_digest: bytes
    code_hashes: frozenset[bytes]
    layout_digest: bytes
    num_values: int
    approved: frozenset[bytes] | None = None
    sites: frozenset[SiteId] | None = None
    terms: Mapping[str, object] = field(default_factory=dict)
    min_sites: int = 3
    colluding: int = 0
    ring_bits: frozenset[int] = frozenset(RING_BITS)
    levels: frozenset[int] = frozenset(LEVELS)
    max_clip_norm: float
    max_element_bound: float | None = None
    weight_rules: frozenset[str] = frozenset(WEIGHT_RULES)
    max_rounds: int
    header_slots: tuple[str, ...]
    privacy_profiles: frozenset[str] = frozenset(PROFILES)
    epsilon_cap: float = math.inf
    max_delta: float = 1.0
    noise_share: NoiseShare | None = None
    require_hybrid: bool = True
    accept_two_sites: bool = False
    group: Group | None = None
    relays: tuple[RelayMember, ...] | None = None


def check_against_policy(contract: Contract, policy: LocalPolicy) -> None:
    """Check that a contract meets the requirements of a site's operator.

    Guarantee:
        A site that joins only contracts that pass takes part in no sum that its
        policy forbids, whatever the aggregator says later.

    Raises:
        StaleRoster: The contract rests on an older roster than the site's.
        ContractRefused: A field is against the policy; ``key`` names the first.
    """
    policy.roster.check_current(contract.roster_serial)
    for rules in (
        _pin_faults,
        _relay_faults,
        _proposal_faults,
        _group_faults,
        _strength_faults,
        _privacy_faults,
        _exposure_faults,
        _term_faults,
    ):
        for key, fault in rules(contract, policy):
            raise ContractRefused(fault, key=key)


class _Fault(NamedTuple):
    key: str
    text: str


_Faults = Iterator[_Fault]
_PAIR = 2


def _above(key: str, value: float, most: float) -> _Faults:
    if value > most:
        yield _Fault(key, f"{value} is above this site's {most}")


def _proposal_faults(q: Contract, policy: LocalPolicy) -> _Faults:
    """What was proposed to this site, and what it is to agree to."""
    if q.run_id != policy.run_id:
        yield _Fault(
            "run_id",
            f"it is {q.run_id!r}, but this site takes part in {policy.run_id!r}",
        )
    if q.job_digest != policy.job_digest:
        yield _Fault(
            "job_digest",
            f"it belongs to a different job ({q.job_digest.hex()[:16]}...) than the "
            f"one proposed to this site ({policy.job_digest.hex()[:16]}...): the "
            "aggregator sent different jobs to the sites, or changed the job after "
            "proposing it",
        )


def _term_faults(q: Contract, policy: LocalPolicy) -> _Faults:
    """What the job settles; its digest alone does not say that the contract keeps it.

    A site that has more examples than the contract allows declines, and so does one
    with a larger element: if the aggregator could set these bounds as it liked, it
    could ask until it knows the numbers.
    """
    for name, value in policy.terms.items():
        given = getattr(q, name)
        if given != value:
            yield _Fault(
                name,
                f"it is {given!r}, but the job that was proposed to this site gives "
                f"{value!r}",
            )


def _group_faults(q: Contract, policy: LocalPolicy) -> _Faults:
    """With which sites this site is summed, if they were drawn."""
    group = policy.group
    if q.partition != (b"" if group is None else group.partition):
        yield _Fault(
            "partition",
            "it is based on different groups than this site's",
        )
    members = {member.site for member in q.members}
    if group is not None and members != group.sites:
        yield _Fault(
            "members",
            f"this site's group is {', '.join(sorted(group.sites))}",
        )
    fewest = 0 if group is None else group.threshold or len(group.sites)
    if group is not None and (q.threshold, q.min_sites) != (fewest, fewest):
        yield _Fault(
            "threshold",
            f"a sum may hold {min(q.threshold, q.min_sites)} updates, but the job that "
            f"was proposed to this site gives {fewest}",
        )
    if group is None and policy.sites is not None and members != policy.sites:
        yield _Fault("members", "they are not the sites of the job that was proposed")


def _pin_faults(q: Contract, policy: LocalPolicy) -> _Faults:
    """What must be equal."""
    if policy.approved is not None and q.digest not in policy.approved:
        yield _Fault(
            "approval",
            f"contract {q.digest.hex()[:16]}... of run {q.run_id} has not been "
            "approved at this site",
        )
    if q.code_hash not in policy.code_hashes:
        yield _Fault("code_hash", "this site runs different code")
    if (q.layout_digest, q.num_values) != (policy.layout_digest, policy.num_values):
        yield _Fault("layout_digest", "this site has a different model")
    if q.roster_serial != policy.roster.serial:
        yield _Fault(
            "roster_serial",
            f"it is {q.roster_serial}, but this site has roster "
            f"{policy.roster.serial}: get the new one from the aggregator's operator",
        )
    if q.roster_digest != policy.roster.digest:
        yield _Fault(
            "roster_digest", "this site has a different roster with the same serial"
        )
    # Which sites of the roster take part is the job's: what a sum of few reveals is
    # bounded by `colluding`, `min_sites` and the rule for two.
    if q.members != members_of(policy.roster, {member.site for member in q.members}):
        yield _Fault(
            "members", "they are not sites of the roster with its keys, in its order"
        )
    if q.aggregator_key != policy.roster.aggregator_key:
        yield _Fault("aggregator_key", "it is not the aggregator of the roster")


def _relay_faults(q: Contract, policy: LocalPolicy) -> _Faults:
    """Who adds up masked words."""
    if policy.relays is not None and q.relays != policy.relays:
        yield _Fault(
            "relays",
            "they are not those of the job that was proposed, with the roster's keys",
        )


def _strength_faults(q: Contract, policy: LocalPolicy) -> _Faults:
    """How well the sum hides an update."""
    tolerated = colluding_tolerated(q.num_sites, q.threshold)
    if tolerated < policy.colluding:
        yield _Fault(
            "threshold",
            f"{q.threshold} of {q.num_sites} tolerates {tolerated} colluding sites, "
            f"but this site requires {policy.colluding}",
        )
    hidden = policy.accept_two_sites or q.differential_privacy.hides_records_alone
    if q.num_sites == _PAIR and not hidden:
        yield _Fault(
            "two_site_waiver",
            "this site does not take part in a run of two without record-level "
            "differential privacy",
        )
    if q.min_sites < policy.min_sites:
        yield _Fault(
            "min_sites",
            f"a sum may hold only {q.min_sites} updates, but this site requires "
            f"{policy.min_sites}",
        )
    if policy.require_hybrid and not q.hybrid:
        yield _Fault("hybrid", "this site requires the post-quantum hybrid")


def _privacy_faults(q: Contract, policy: LocalPolicy) -> _Faults:
    """What the contract claims for single records or sites.

    Its delta is the largest of all sites. Where records or persons are the unit, that
    says nothing about this site: its own accountant composes its own sampling rate with
    noise that it draws, or that ``noise_share`` counts on, at the delta of its own
    number of records. Another site with fewer records, so a larger delta, changes none
    of these; noise inside the sum is planned for whoever needs most. The site has
    checked its own delta before it promised it. Whole sites have one delta together.
    """
    terms, table = q.differential_privacy, "differential_privacy"
    if terms.profile not in policy.privacy_profiles:
        yield _Fault(f"{table}.profile", f"this site does not accept {terms.profile!r}")
    yield from _above(f"{table}.epsilon_cap", terms.largest_epsilon, policy.epsilon_cap)
    if terms.profile in {"none", "site"}:
        yield from _above(f"{table}.delta", terms.largest_delta, policy.max_delta)
    yield from _noise_faults(q, policy)


def _noise_faults(q: Contract, policy: LocalPolicy) -> _Faults:
    """Whether the noise inside the sum is what this site's accountant assumes."""
    key = "differential_privacy.ring_noise_std"
    profile, share = q.differential_privacy.profile, policy.noise_share
    if profile not in {"joint", "site"}:
        return
    if share is None:
        yield _Fault(key, "this site has planned no noise inside the sum")
        return
    for fault in share.faults(q.ring()):
        yield _Fault(key, fault)
    if q.threshold < share.threshold:
        yield _Fault(
            "threshold",
            f"{q.threshold} updates in a sum have less noise than the "
            f"{share.threshold} that this site relies on",
        )
    if profile == "site" and q.clip_norm > share.sensitivity:
        yield _Fault(
            "clip_norm",
            f"{q.clip_norm} is above the {share.sensitivity} that the noise is "
            "calibrated for",
        )
    if q.weight_rule != "uniform":
        yield _Fault(
            "weight_rule", "this site's weight would reveal what the noise must hide"
        )
    if q.element_bound is not None:
        # Whether a site declines, or how it clips, is not what was accounted for.
        yield _Fault(
            "element_bound", "the noise is calibrated for the grid that clip_norm sets"
        )


def _exposure_faults(q: Contract, policy: LocalPolicy) -> _Faults:
    """How much is summed, and how often."""
    if q.ring_bits not in policy.ring_bits:
        yield _Fault("ring_bits", f"this site does not accept {q.ring_bits}")
    if q.levels and q.levels not in policy.levels:
        yield _Fault("levels", f"this site does not accept {q.levels}")
    yield from _above("clip_norm", q.clip_norm, policy.max_clip_norm)
    if policy.max_element_bound is not None:
        yield from _above("element_bound", q.ring().bound, policy.max_element_bound)
    if q.weight_rule not in policy.weight_rules:
        yield _Fault("weight_rule", f"this site does not accept {q.weight_rule!r}")
    yield from _above("max_rounds", q.max_rounds, policy.max_rounds)
    if q.header_slots != policy.header_slots:
        yield _Fault(
            "header_slots",
            f"it asks for {list(q.header_slots)}, but this site reports "
            f"{list(policy.header_slots)}",
        )

"""The contract of a run: what every site agrees to before anything is trained.

Q in SECURE_AGGREGATION.md, section 2.1. Its hash h_Q enters every signature and
every mask key, so the aggregator can lower nothing afterwards: two sites that hold
different contracts have masks that do not cancel. What a site
asks before it joins, whether this is at least what its operator demands, is in
``policy``.

Two settings, chosen by the threshold t of N sites:

* P1, ``t = N``: one exchange a round, every site must answer. A sum hides a site
  among the N - n_C sites that do not collude; nothing else is assumed.
* P2, ``t < N``: a round survives N - t dropouts.

The section on differential privacy is in ``terms``.

Thresholds (the protocol, section 2.1): N sites, threshold t, n_C sites that collude
with the aggregator. ``2 t > N + n_C`` keeps a lying aggregator from opening two
different sums of one round (Bonawitz et al., eprint 2017/281, section 6.3).
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, ClassVar

from federation.compression.rotation import num_blocks
from federation.ids import RunId, SiteId, check_name
from federation.job.privacy_job import LEVELS, MAX_FRAGMENTS
from privacy.secagg.agreement.canonical import (
    MAX_U64,
    Reader,
    fields,
    float64,
    numbers,
    u64,
)
from privacy.secagg.agreement.identity import KEY_BYTES
from privacy.secagg.agreement.message import (
    DIGEST_BYTES,
    FLAG,
    FLOAT,
    NAME,
    Digest,
    FieldCodec,
    Message,
    listed,
    octets,
    record,
    text,
    whole,
)
from privacy.secagg.agreement.roster import MAX_ORGANISATION_BYTES, SITE, Roster
from privacy.secagg.agreement.terms import NO_PRIVACY, PrivacyTerms
from privacy.secagg.arithmetic.digits import WORD_BYTES
from privacy.secagg.arithmetic.ring import RING_BITS, RingSpec
from privacy.secagg.errors import ContractRefused, UnknownSite


def smallest_threshold(num_sites: int) -> int:
    """Smallest threshold allowed, t = floor(2N/3) + 1 (section 2.1)."""
    return 2 * num_sites // 3 + 1


def colluding_tolerated(num_sites: int, threshold: int) -> int:
    """Most sites n_C that may collude with the aggregator (section 2.1).

    P1: all but two, since at least two honest updates must be in the sum.
    P2: largest n_C with ``2 t > N + n_C``; t - n_C honest updates are in every sum.
    """
    if threshold == num_sites:
        return num_sites - 2
    return 2 * threshold - num_sites - 1


SUITE = "xsa-v2"

# At 64 sites a round costs each site 133 kB of shares; nothing above was measured.
MAX_MEMBERS = 64
MAX_HEADER_SLOTS = 2048  # A confusion matrix of 32 classes has 1024.
# The key ratchet walks through skipped rounds one by one, 3 microseconds a pair.
MAX_ROUNDS = 1 << 20
WEIGHT_RULES = ("examples", "uniform")

_PAIR = 2


class Setting(StrEnum):
    """How a round deals with a site that does not answer."""

    P1 = "P1"  # the round is lost
    P2 = "P2"  # the others open the sum without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A site that takes part in the run.

    Attributes:
        number: Its client number, from 1; its x in secret sharing.
        site: Its name.
        organisation: Who answers for it.
        public_key: Its pinned Ed25519 key, 32 bytes.
    """

    number: int
    site: SiteId
    organisation: str
    public_key: bytes


def members_of(
    roster: Roster, sites: Collection[SiteId] | None = None
) -> tuple[Member, ...]:
    """Number sites of a roster, which relays are not, from 1 by their names.

    Args:
        roster: Pins the sites.
        sites: Those of the run; all of the roster's by default. Others than the
            roster's are left out.
    """
    entries = [
        each
        for each in roster.sites
        if each.role == SITE and (sites is None or each.site in sites)
    ]
    return tuple(
        Member(
            number=number,
            site=entry.site,
            organisation=entry.organisation,
            public_key=entry.public_key,
        )
        for number, entry in enumerate(entries, start=1)
    )


def _write_members(members: Sequence[Member]) -> bytes:
    return u64(len(members)) + b"".join(
        fields(m.site.encode(), m.organisation.encode(), m.public_key) for m in members
    )


def _read_members(reader: Reader, name: str) -> tuple[Member, ...]:
    count = reader.u64(f"count of {name}", high=MAX_MEMBERS)
    return tuple(
        Member(
            number=number,
            site=SiteId(reader.name("member")),
            organisation=reader.text("organisation", limit=MAX_ORGANISATION_BYTES),
            public_key=reader.field("public_key", size=KEY_BYTES),
        )
        for number in range(1, count + 1)
    )


_MEMBERS = FieldCodec(_write_members, _read_members)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayMember:
    """A relay that adds up masked words of some sites.

    Attributes:
        public_key: Its pinned Ed25519 key, 32 bytes.
        numbers: The client numbers of its sites, increasing.
    """

    name: SiteId
    public_key: bytes
    numbers: tuple[int, ...]


def _write_relays(relays: Sequence[RelayMember]) -> bytes:
    if not relays:
        return b""  # As contracts were before there were relays.
    return u64(len(relays)) + b"".join(
        fields(relay.name.encode(), relay.public_key) + numbers(relay.numbers)
        for relay in relays
    )


def _read_relays(reader: Reader, name: str) -> tuple[RelayMember, ...]:
    if reader.is_at_end:
        return ()
    return tuple(
        RelayMember(
            name=SiteId(reader.name("relay")),
            public_key=reader.field("public_key", size=KEY_BYTES),
            numbers=reader.numbers("relay's sites", limit=MAX_MEMBERS),
        )
        for _ in range(reader.u64(f"count of {name}", low=1, high=MAX_MEMBERS))
    )


_RELAYS = FieldCodec(_write_relays, _read_relays)
# No bound can be 0.
_BOUND = FieldCodec(
    lambda bound: float64(bound or 0.0),
    lambda reader, name: reader.float64(name) or None,
)


@dataclass(frozen=True, kw_only=True)
class Contract(Message):
    """Q: everything that a run's privacy rests on.

    Its encoding has the attributes in this order.

    Attributes:
        suite: Protocol and primitives; ``xsa-v2``.
        code_hash: SHA-256 of the code that sites run.
        layout_digest: SHA-256 of the model's layout (names, shapes, roles).
        job_digest: h_job, ``federation.job.job_digest.digest`` of the job: everything
            that decides what a site computes and what may be learned from it.
        num_values: Length d of the update.
        roster_serial: Serial of the roster that pins the keys.
        roster_digest: SHA-256 of that roster.
        differential_privacy: What is claimed of it; nothing by default.
        members: The sites, in the order of their numbers 1..N. The cohort of every
            round is all of them: a change is a new contract.
        aggregator_key: Pinned Ed25519 key of the aggregator, 32 bytes.
        threshold: t, answers without which no sum is opened.
        min_sites: n_min, updates that a sum must hold.
        ring_bits: b; sums are modulo 2^b.
        clip_norm: C, largest norm of an update, in weight units.
        element_bound: Largest value of an element of the weighted update, in weight
            units, at most C; None for C.
        clip_elements: Whether a site clips larger elements; it declines otherwise.
        scale: s, ring units per weight unit. It must be that of ``ring()``.
        amplitude: Largest magnitude of an encoded value, in ring units. It must be
            that of ``ring()``.
        weight_rule: ``examples`` or ``uniform``.
        max_examples: n_max, divisor of the weights under ``examples``; else 1.
        max_rounds: Rounds that the run may have.
        header_slots: Names of the 64-bit sums that travel masked beside the update.
        hybrid: Whether pair secrets also rest on ML-KEM-768.
        two_site_waiver: Whether two sites may run although each can compute the
            other's update from the sum. Not needed with record-level privacy.
        partition: ``groups.Outcome.digest`` where ``members`` are one of several
            groups of a job's sites, each of which has its own sum; else empty.
        levels: L, where updates are rounded to few levels and packed as digits
            (``arithmetic.levels``); 0 where each value is a word of the ring. Clip
            norm, scale and amplitude say the same in both.
        fragments: Fragments of the model, which rounds take in turn; 1 for the whole.
        relays: Who adds up masked words of which members, in the order of their names;
            written only if there are any. The aggregator takes a sum of several sites
            from nobody else.

    Raises:
        ContractRefused: The fields contradict one another; ``key`` names the first.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/contract"
    run_id: Annotated[RunId, NAME]
    suite: Annotated[str, text(64)] = SUITE
    code_hash: Digest
    layout_digest: Digest
    job_digest: Digest
    num_values: Annotated[int, whole()]
    roster_serial: Annotated[int, whole()]
    roster_digest: Digest
    differential_privacy: Annotated[PrivacyTerms, record(PrivacyTerms)] = NO_PRIVACY
    members: Annotated[tuple[Member, ...], _MEMBERS]
    aggregator_key: Annotated[bytes, octets(size=KEY_BYTES)]
    threshold: Annotated[int, whole()]
    min_sites: Annotated[int, whole()]
    ring_bits: Annotated[int, whole()]
    clip_norm: Annotated[float, FLOAT]
    element_bound: Annotated[float | None, _BOUND] = None
    clip_elements: Annotated[bool, FLAG] = False
    scale: Annotated[float, FLOAT]
    amplitude: Annotated[int, whole()]
    weight_rule: Annotated[str, text(64)]
    max_examples: Annotated[int, whole()]
    max_rounds: Annotated[int, whole()]
    header_slots: Annotated[
        tuple[str, ...], listed(NAME, MAX_HEADER_SLOTS, named="header slot")
    ]
    hybrid: Annotated[bool, FLAG] = True
    two_site_waiver: Annotated[bool, FLAG] = False
    partition: Annotated[bytes, octets(limit=DIGEST_BYTES)] = b""
    levels: Annotated[int, whole()] = 0
    fragments: Annotated[int, whole()] = 1
    relays: Annotated[tuple[RelayMember, ...], _RELAYS] = ()

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        for rules in _RULES:
            for key, fault in rules(self):
                raise ContractRefused(fault, key=key)

    @property
    def num_sites(self) -> int:
        """N."""
        return len(self.members)

    @property
    def setting(self) -> Setting:
        """P1 if every site must answer, else P2."""
        return Setting.P1 if self.threshold == self.num_sites else Setting.P2

    @property
    def quorum(self) -> int:
        """Survivors that a round needs: max(t, n_min)."""
        return max(self.threshold, self.min_sites)

    @property
    def word_bits(self) -> int:
        """Bits of a masked word, which wraps: of the ring, or of packed digits."""
        return 8 * WORD_BYTES if self.levels else self.ring_bits

    @property
    def cohort(self) -> tuple[int, ...]:
        """The numbers of all members: U_r of every round."""
        return tuple(range(1, self.num_sites + 1))

    def ring(self) -> RingSpec:
        """Derive the ring that both halves work in.

        From every field but ``scale`` and ``amplitude``, which are compared with it
        when the contract is made: a contract that exists has been checked.

        Raises:
            ValueError: The fields leave no room for an update.
        """
        return RingSpec(
            bits=self.ring_bits,
            num_sites=self.num_sites,
            clip_norm=self.clip_norm,
            element_bound=self.element_bound,
            clip_elements=self.clip_elements,
            noise_std=self.differential_privacy.ring_noise_std,
        )

    @cached_property
    def digest(self) -> bytes:
        """h_Q, SHA-256 of the canonical encoding."""
        return hashlib.sha256(self.to_bytes()).digest()

    def member(self, number: int) -> Member:
        """Find a member by its number.

        Raises:
            UnknownSite: There is no such number.
        """
        if not 1 <= number <= self.num_sites:
            raise UnknownSite(
                f"client {number} is not in the contract of run {self.run_id}, which "
                f"has {self.num_sites}"
            )
        return self.members[number - 1]

    def member_named(self, site: SiteId) -> Member:
        """Find a member by its name.

        Raises:
            UnknownSite: The contract does not have it.
        """
        for member in self.members:
            if member.site == site:
                return member
        raise UnknownSite(f"site {site!r} is not in the contract of run {self.run_id}")

    def relay_named(self, name: SiteId) -> RelayMember:
        """Find a relay by its name.

        Raises:
            UnknownSite: The contract does not have it.
        """
        for relay in self.relays:
            if relay.name == name:
                return relay
        raise UnknownSite(f"relay {name!r} is not in the contract of run {self.run_id}")


_Faults = Iterator[tuple[str, str]]


def _identity_faults(q: Contract) -> _Faults:
    """Who takes part."""
    if q.suite != SUITE:
        yield "suite", f"{q.suite[:64]!r} is not supported, only {SUITE!r}"
    for key in (
        "code_hash",
        "layout_digest",
        "job_digest",
        "roster_digest",
        "aggregator_key",
    ):
        if len(getattr(q, key)) != DIGEST_BYTES:
            yield key, f"it must have {DIGEST_BYTES} bytes"
    yield from _name_faults(q)
    if not 2 <= q.num_sites <= MAX_MEMBERS:  # noqa: PLR2004
        yield "members", f"a run has 2 to {MAX_MEMBERS} sites, not {q.num_sites}"
    if [m.number for m in q.members] != list(q.cohort):
        yield "members", "they must be numbered 1, 2, 3 and so on"
    names = [m.site for m in q.members]
    if names != sorted(set(names)):
        yield "members", "they must be distinct and in the order of their names"
    keys = {q.aggregator_key, *(m.public_key for m in q.members)}
    if len(keys) != q.num_sites + 1:
        yield "members", "two parties have the same public key"
    yield from _relay_faults(q, keys)


def _relay_faults(q: Contract, keys: set[bytes]) -> _Faults:
    """Whether each site has at most one relay, and each relay a key of its own."""
    relays = [relay.name for relay in q.relays]
    if relays != sorted(set(relays)) or {m.site for m in q.members} & {*relays}:
        yield "relays", "they must be distinct and in the order of their names"
    behind = [number for relay in q.relays for number in relay.numbers]
    if len(behind) != len(set(behind)) or not {*behind} <= {*q.cohort}:
        yield "relays", "a site is behind two of them, or is no member"
    if not all(relay.numbers for relay in q.relays):
        yield "relays", "one has no sites"
    if len(keys | {r.public_key for r in q.relays}) != len(keys) + len(relays):
        yield "relays", "two parties have the same public key"
    if q.partition and q.relays:
        yield "relays", "sums of groups have none"


def _name_faults(q: Contract) -> _Faults:
    for key, name in [
        ("run_id", q.run_id),
        *(("members", m.site) for m in q.members),
        *(("header_slots", slot) for slot in q.header_slots),
    ]:
        try:
            check_name(name)
        except ValueError as error:
            yield key, str(error)


def _threshold_faults(q: Contract) -> _Faults:
    """How many must take part."""
    lowest = smallest_threshold(q.num_sites)
    if not lowest <= q.threshold <= q.num_sites:
        yield (
            "threshold",
            (
                f"{q.threshold} of {q.num_sites} is not safe: use {lowest} to "
                f"{q.num_sites}"
            ),
        )
    if not 2 <= q.min_sites <= q.num_sites:  # noqa: PLR2004
        yield "min_sites", f"{q.min_sites} of {q.num_sites} is impossible"
    hidden = q.two_site_waiver or q.differential_privacy.hides_records_alone
    if q.num_sites == _PAIR and not hidden:
        yield (
            "two_site_waiver",
            (
                "with two sites each learns the other's update from the sum: add a "
                "site, make training private for records, or waive it explicitly"
            ),
        )
    if not 1 <= q.max_rounds <= MAX_ROUNDS:
        yield "max_rounds", f"{q.max_rounds} is not in 1..{MAX_ROUNDS}"


def _arithmetic_faults(q: Contract) -> _Faults:
    """How it is summed."""
    if q.ring_bits not in RING_BITS:
        yield "ring_bits", f"{q.ring_bits} is not in {RING_BITS}"
    for key in ("clip_norm", "scale"):
        value = getattr(q, key)
        if not (math.isfinite(value) and value > 0):
            yield key, f"{value} is not a positive number"
    if q.element_bound is not None and not 0 < q.element_bound <= q.clip_norm:
        yield (
            "element_bound",
            f"{q.element_bound} is not above 0 and at most the clip norm {q.clip_norm}",
        )
    if q.clip_elements and q.element_bound is None:
        yield "clip_elements", "there is no element_bound to clip to"
    for key, fault in q.differential_privacy.faults():
        yield f"differential_privacy.{key}", fault
    yield from _ring_faults(q)
    yield from _level_faults(q)


def _level_faults(q: Contract) -> _Faults:
    """Whether few levels are summed soundly."""
    most = min(MAX_FRAGMENTS, num_blocks(q.num_values)) if q.levels else 1
    if not 1 <= q.fragments <= most:
        yield "fragments", f"{q.fragments} is not in 1..{most}"
    if not q.levels:
        return
    if q.levels not in LEVELS:
        yield "levels", f"{q.levels} is not in {LEVELS}"
    if q.differential_privacy.ring_noise_std:
        yield "levels", "few levels leave no room for noise inside the sum"
    if q.element_bound is not None:
        yield "element_bound", "levels have a bound of their own"
    if q.partition:
        yield "levels", "sums of groups have no steps to share"


def _ring_faults(q: Contract) -> _Faults:
    """Whether scale and amplitude follow; the other fields are sound by now."""
    try:
        ring = q.ring()
    except ValueError as error:
        yield "ring_bits", str(error)
        return
    for key, value, derived in (
        ("amplitude", q.amplitude, ring.amplitude),
        ("scale", q.scale, ring.scale),
    ):
        if value != derived:
            yield (
                key,
                (
                    f"it is {value}, but its ring of {q.ring_bits} bits, {q.num_sites} "
                    f"sites, bound and noise give {derived}"
                ),
            )


def _content_faults(q: Contract) -> _Faults:
    """What is summed."""
    if len(q.partition) not in {0, DIGEST_BYTES}:
        yield "partition", f"it must have {DIGEST_BYTES} bytes, or none"
    if not 1 <= q.roster_serial <= MAX_U64:
        yield "roster_serial", "serials start at 1"
    if not 1 <= q.num_values <= MAX_U64:
        yield "num_values", "an update must have at least one value"
    if q.weight_rule not in WEIGHT_RULES:
        yield "weight_rule", f"{q.weight_rule[:64]!r} is not in {WEIGHT_RULES}"
    if q.max_examples < 1 or (q.weight_rule == "uniform" and q.max_examples != 1):
        yield "max_examples", "it must be at least 1, and exactly 1 for uniform weights"
    slots = q.header_slots
    if len(slots) > MAX_HEADER_SLOTS or len(set(slots)) != len(slots):
        yield "header_slots", f"give at most {MAX_HEADER_SLOTS} distinct names"


_RULES = (_identity_faults, _threshold_faults, _arithmetic_faults, _content_faults)

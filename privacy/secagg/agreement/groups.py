"""Groups of sites that are summed separately, drawn by all sites together.

Those of buffered rounds are named in the job; here only their digest is made. Robust
rules compare sums of groups with each other, so who is in which group decides
what a sum hides and whom a liar can spoil. Nobody may choose it. Each site commits to
a secret before it sees any other's, and reveals it once all have committed::

    aggregator                                                      each site i
        |-- commit, without sites X --------------------------------->|
        |<-- Commitment: H(secret_i), signed -------------------------|
        |-- all commitments ----------------------------------------->|  noted for good
        |<-- Reveal: secret_i ----------------------------------------|
        |-- all secrets, with the offer of the group's contract ----->|

The groups follow from all secrets, so one honest site makes them random. What a site
commits to, and to whose commitments it has revealed its secret, it keeps for all runs
on the same data (``clients.privacy.groups``). SHA-256 binds, so for each site there
is one outcome of the draw: to begin again gives the same groups or none. A site that
has seen all secrets answers the first step with the whole draw, so that nobody else's
memory is needed any more.

A site that does not open its commitment gets no say in it: the others draw again
without it, with new secrets, ``MAX_DRAWS`` times in all. Who wants another outcome pays
for each with a site, and has no more of them than that.

The digest of the outcome is in each group's contract, hence in every mask key.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from federation.ids import SiteId
from privacy.secagg.agreement.canonical import (
    Reader,
    byte_map,
    fields,
    lp,
    numbers,
    u64,
)
from privacy.secagg.agreement.contract import (
    MAX_MEMBERS,
    Contract,
    Member,
    members_of,
)
from privacy.secagg.agreement.identity import Identity, Label
from privacy.secagg.agreement.message import Digest, SignedMessage, whole
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.errors import DrawRefused, OutOfOrder, TooFewSites

SECRET_BYTES = 32
MIN_GROUPS = 3  # Of two that differ, it cannot be known which is wrong.
MAX_DRAWS = 3  # Outcomes that anyone may choose from, on the same data.

_MAX_COMMITMENT_BYTES = 512
MAX_OFFER_BYTES = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The draw's parameters. Each party takes them from its own job.

    Attributes:
        members: All sites of the job with their pinned keys, numbered from 1.
        num_groups: Into how many groups they are divided.
    """

    members: tuple[Member, ...]
    num_groups: int

    def __post_init__(self) -> None:
        """Refuse groups that are too few or too small."""
        if not MIN_GROUPS <= self.num_groups <= len(self.members) // 2:
            raise ValueError(
                f"cannot form {self.num_groups} groups from {len(self.members)} sites"
            )

    @property
    def sites(self) -> tuple[SiteId, ...]:
        """Names of the members."""
        return tuple(member.site for member in self.members)

    def without(self, left_out: Collection[SiteId]) -> "Draw":
        """The same without some sites.

        Raises:
            ValueError: The others do not make so many groups.
        """
        kept = [member for member in self.members if member.site not in left_out]
        members = tuple(replace(m, number=at) for at, m in enumerate(kept, start=1))
        return replace(self, members=members)

    @property
    def context(self) -> bytes:
        """SHA-256 of what is drawn; keys are not in it, since a site may renew its."""
        names = [lp(site.encode()) for site in self.sites]
        head = lp(b"xsa-v2/draw") + u64(self.num_groups)
        return hashlib.sha256(head + u64(len(names)) + b"".join(names)).digest()

    def commitment(self, number: int, secret: bytes) -> bytes:
        """The value with which a site of this number commits to a secret."""
        head = fields(b"xsa-v2/draw secret", self.context)
        return hashlib.sha256(head + u64(number) + lp(secret)).digest()


def draw_of(roster: Roster, sites: Sequence[SiteId], *, num_groups: int) -> Draw:
    """What is drawn for some sites of a roster."""
    members = members_of(roster, set(sites))
    return Draw(members=members, num_groups=num_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawResult:
    """Groups that were drawn.

    Attributes:
        groups: Names of the sites of each, in their order; the groups in the order of
            their first names. Sizes differ by one at most.
        digest: SHA-256 over the draw, all commitments, all secrets and the groups.
    """

    groups: tuple[tuple[SiteId, ...], ...]
    digest: bytes

    def group_of(self, site: SiteId) -> tuple[SiteId, ...]:
        """The group that a site is in."""
        return next(group for group in self.groups if site in group)


def divide(
    sites: Sequence[SiteId], num_groups: int, seed: bytes
) -> tuple[tuple[SiteId, ...], ...]:
    """Divide sites by chance into groups whose sizes differ by one at most.

    Args:
        sites: Distinct names, in any order.
        num_groups: How many groups.
        seed: Decides; each division is as likely as any other.
    """
    shuffled = sorted(
        sites,
        key=lambda site: hashlib.sha256(
            fields(b"xsa-v2/draw order", seed, site.encode())
        ).digest(),
    )
    dealt = (tuple(sorted(shuffled[at::num_groups])) for at in range(num_groups))
    return tuple(sorted(dealt))


def outcome_of(
    draw: Draw, commitments: Mapping[int, bytes], secrets: Mapping[int, bytes]
) -> DrawResult:
    """Compute the groups from all secrets.

    Args:
        draw: What is drawn.
        commitments: Commitment of each member, by its number.
        secrets: Secret of each member, likewise.

    Raises:
        DrawRefused: A secret is missing, or is not the one committed to.
    """
    _check_numbers(draw, secrets, "secrets")
    for member in draw.members:
        if (
            draw.commitment(member.number, secrets[member.number])
            != (commitments[member.number])
        ):
            raise DrawRefused(
                f"the secret of {member.site!r} does not match its commitment"
            )
    bound = fields(b"xsa-v2/draw seed", draw.context) + byte_map(commitments)
    seed = hashlib.sha256(bound + byte_map(secrets)).digest()
    groups = divide(draw.sites, draw.num_groups, seed)
    head = fields(b"xsa-v2/groups", seed)
    digest = hashlib.sha256(head + _listed(groups)).digest()
    return DrawResult(groups=groups, digest=digest)


def named_groups(groups: Sequence[Sequence[str]]) -> DrawResult:
    """The groups that a job names; nobody draws them."""
    named = tuple(tuple(sorted(map(SiteId, group))) for group in groups)
    digest = hashlib.sha256(fields(b"xsa-v2/named groups") + _listed(named)).digest()
    return DrawResult(groups=named, digest=digest)


def _listed(groups: Sequence[Sequence[SiteId]]) -> bytes:
    return b"".join(
        u64(len(group)) + b"".join(lp(site.encode()) for site in group)
        for group in groups
    )


def group_contract(
    whole: Contract, group: Sequence[SiteId], partition: bytes, threshold: int = 0
) -> Contract:
    """Write the contract of one group.

    Args:
        whole: That of all sites.
        group: Names of the sites of the group.
        partition: ``DrawResult.digest``.
        threshold: Fewest updates that its sums hold; 0 for those of all its sites.
    """
    chosen = [member for member in whole.members if member.site in group]
    members = tuple(replace(m, number=at) for at, m in enumerate(chosen, start=1))
    ring = RingSpec(
        bits=whole.ring_bits,
        num_sites=len(members),
        clip_norm=whole.clip_norm,
        element_bound=whole.element_bound,
        clip_elements=whole.clip_elements,
    )
    return replace(
        whole,
        members=members,
        threshold=threshold or len(members),
        min_sites=threshold or len(members),
        scale=ring.scale,
        amplitude=ring.amplitude,
        partition=partition,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Commitment(SignedMessage):
    """Site to aggregator, and on to all sites: its commitment.

    Attributes:
        context: ``Draw.context``.
        number: The site's number among all sites of the job.
        value: ``Draw.commitment`` of its secret.
    """

    TAG: ClassVar[bytes] = b"xsa-v2/draw commitment"
    LABEL: ClassVar[Label] = Label.DRAW
    context: Digest
    number: Annotated[int, whole(1, MAX_MEMBERS)]
    value: Digest


def commit(draw: Draw, number: int, secret: bytes, identity: Identity) -> bytes:
    """Sign a site's commitment; an encoded ``Commitment``."""
    value = draw.commitment(number, secret)
    message = Commitment(context=draw.context, number=number, value=value)
    return message.signed_by(identity).to_bytes()


def read_commitment(draw: Draw, data: bytes) -> Commitment:
    """Read and check one site's commitment.

    Raises:
        BadSignature: The site did not sign it.
        DrawRefused: It is for another draw, or of no site of this one.
        MalformedMessage: The bytes are no commitment.
    """
    message = Commitment.from_bytes(data)
    if message.number > len(draw.members):
        raise DrawRefused(f"there is no site number {message.number} in this draw")
    member = draw.members[message.number - 1]
    message.verify(member.public_key, who=f"site {member.site!r}")
    if message.context != draw.context:
        raise DrawRefused(
            f"site {member.site!r} takes part in a different draw: other sites, or "
            "another number of groups"
        )
    return message


_START = b"xsa-v2/draw start"
_FINISHED = b"xsa-v2/draw finished"
_COMMITMENTS = b"xsa-v2/draw commitments"
_REVEAL = b"xsa-v2/draw reveal"
_GROUP_OFFER = b"xsa-v2/group offer"


def write_start(draw: Draw, left_out: Collection[SiteId]) -> bytes:
    """Ask for a commitment; ``left_out`` are sites of the draw of all."""
    shown = [member.number for member in draw.members if member.site in left_out]
    return lp(_START) + numbers(shown)


def read_start(draw: Draw, data: bytes) -> Draw:
    """What is drawn, by a draw of all sites and ``write_start``.

    Raises:
        DrawRefused: Too few sites are left, or strangers are left out.
        MalformedMessage: The bytes are no start.
    """
    reader = Reader(data, _START)
    shown = reader.numbers("left out", limit=MAX_MEMBERS)
    reader.end()
    if not set(shown) <= {member.number for member in draw.members}:
        raise DrawRefused(f"there are no sites {list(shown)} in this draw to leave out")
    try:
        return draw.without({m.site for m in draw.members if m.number in shown})
    except ValueError as error:
        raise DrawRefused(str(error)) from error


def write_finished(
    number: int, commitments: Mapping[int, bytes], secrets: Mapping[int, bytes]
) -> bytes:
    """Answer the start of a draw that is over for this site: what everyone did."""
    return lp(_FINISHED) + u64(number) + byte_map(commitments) + byte_map(secrets)


def _read_finished(data: bytes) -> tuple[int, dict[int, bytes], dict[int, bytes]]:
    reader = Reader(data, _FINISHED)
    number = reader.u64("number", low=1, high=MAX_MEMBERS)
    values, secrets = (
        reader.byte_map(name, max_entries=MAX_MEMBERS, size=SECRET_BYTES)
        for name in ("commitments", "secrets")
    )
    reader.end()
    return number, values, secrets


def write_commitments(commitments: Mapping[int, bytes]) -> bytes:
    """Encode all sites' encoded commitments, by number."""
    return lp(_COMMITMENTS) + byte_map(commitments)


def read_commitments(draw: Draw, data: bytes) -> dict[int, bytes]:
    """Read and check all sites' commitments.

    Returns:
        What each site has committed itself with, by its number.

    Raises:
        ProtocolError: As ``read_commitment``; or they are not of all sites of the
            draw, each once.
    """
    reader = Reader(data, _COMMITMENTS)
    listed = reader.byte_map(
        "commitments", max_entries=MAX_MEMBERS, limit=_MAX_COMMITMENT_BYTES
    )
    reader.end()
    _check_numbers(draw, listed, "commitments")
    values = {}
    for number, encoded in listed.items():
        message = read_commitment(draw, encoded)
        if message.number != number:
            raise DrawRefused(f"commitment {message.number} is shown as {number}")
        values[number] = message.value
    return values


def write_reveal(number: int, secret: bytes) -> bytes:
    """Encode a site's secret; the commitment says whose it is."""
    return lp(_REVEAL) + u64(number) + lp(secret)


def read_reveal(data: bytes) -> tuple[int, bytes]:
    """Decode ``write_reveal``; raises ``MalformedMessage``."""
    reader = Reader(data, _REVEAL)
    number = reader.u64("number", low=1, high=MAX_MEMBERS)
    secret = reader.field("secret", size=SECRET_BYTES)
    reader.end()
    return number, secret


def write_group_offer(secrets: Mapping[int, bytes], offer: bytes) -> bytes:
    """Encode the offer of a group's contract with what the group follows from."""
    return lp(_GROUP_OFFER) + byte_map(secrets) + lp(offer)


def read_group_offer(data: bytes) -> tuple[dict[int, bytes], bytes]:
    """Decode ``write_group_offer``; raises ``MalformedMessage``."""
    reader = Reader(data, _GROUP_OFFER)
    secrets = reader.byte_map("secrets", max_entries=MAX_MEMBERS, size=SECRET_BYTES)
    offer = reader.field("offer", limit=MAX_OFFER_BYTES)
    reader.end()
    return secrets, offer


class AggregatorDraw:
    """The aggregator's half of a draw.

    Args:
        draw: What is drawn.
    """

    def __init__(self, draw: Draw) -> None:
        """Wait for commitments."""
        self._draw = draw
        self._commitments: dict[int, bytes] = {}
        self._values: dict[int, bytes] = {}
        self._secrets: dict[int, bytes] = {}
        # Of sites that know all: commitments and secrets, by number.
        self._known: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = {}

    def on_commitment(self, data: bytes) -> SiteId:
        """Take a site's commitment, or the whole draw, and return its name.

        Raises:
            OutOfOrder: The site has committed itself already.
            ProtocolError: As ``read_commitment`` or ``outcome_of``.
        """
        if data.startswith(lp(_FINISHED)):
            number, values, secrets = _read_finished(data)
            outcome_of(self._draw, values, secrets)
            self._known[number] = values, secrets
            self._values[number] = values[number]
            return self._draw.members[number - 1].site
        message = read_commitment(self._draw, data)
        member = self._draw.members[message.number - 1]
        if message.number in self._values:
            raise OutOfOrder(f"site {member.site!r} has already committed")
        self._commitments[message.number] = bytes(data)
        self._values[message.number] = message.value
        return member.site

    def is_known(self) -> bool:
        """Whether most sites have made this draw before; then no secret is needed.

        Who brings another draw than most others is not believed: its own commitment,
        or its word for theirs, is a later one.
        """
        ballots = Counter(repr(sorted(v.items())) for v, _ in self._known.values())
        if not ballots:
            return False
        most = ballots.most_common(1)[0][0]
        values, secrets = next(
            (v, s) for v, s in self._known.values() if repr(sorted(v.items())) == most
        )
        agree = [n for n, value in self._values.items() if values[n] == value]
        if 2 * len(agree) <= len(self._draw.members):
            return False
        self._values, self._secrets = values, secrets
        return True

    def missing(self) -> tuple[SiteId, ...]:
        """Sites whose commitment, or after all of them whose secret, is awaited."""
        members = self._draw.members
        seen = self._values if len(self._values) < len(members) else self._secrets
        return tuple(member.site for member in members if member.number not in seen)

    def commitments(self) -> bytes:
        """All commitments, for every site.

        Raises:
            TooFewSites: One is missing.
        """
        self._check_complete(self._commitments, "commitment")
        return write_commitments(self._commitments)

    def on_reveal(self, data: bytes) -> SiteId:
        """Take a site's secret and return its name.

        Raises:
            DrawRefused: It is not the one that the site committed to.
            MalformedMessage: The bytes are no reveal.
        """
        number, secret = read_reveal(data)
        if self._values.get(number) != self._draw.commitment(number, secret):
            raise DrawRefused("revealed a secret that does not match its commitment")
        self._secrets[number] = secret
        return self._draw.members[number - 1].site

    @property
    def secrets(self) -> Mapping[int, bytes]:
        """All secrets, by number."""
        return self._secrets

    def outcome(self) -> DrawResult:
        """The groups.

        Raises:
            TooFewSites: A secret is missing.
        """
        self._check_complete(self._secrets, "secret")
        return outcome_of(self._draw, self._values, self._secrets)

    def _check_complete(self, seen: Mapping[int, bytes], what: str) -> None:
        missing = [m.site for m in self._draw.members if m.number not in seen]
        if missing:
            raise TooFewSites(
                f"all sites draw the groups together, but the {what} of "
                f"{', '.join(missing)} is missing"
            )


def _check_numbers(draw: Draw, shown: Mapping[int, bytes], what: str) -> None:
    if set(shown) != {member.number for member in draw.members}:
        raise DrawRefused(
            f"the {what} are of sites {sorted(shown)}, but the draw has sites 1 to "
            f"{len(draw.members)}"
        )

"""The handshake before a run: a coordinator's proposal and a site's introduction.

Before the first round the coordinator proposes the run to every node: its job, the
release and the hash of the code that it runs, signed by the aggregator's identity. A
site checks it against the roster and its own policy, builds model and data, and answers
who it is and what it promises, signed by its identity and bound to the proposal by its
digest. Nothing is sent of records but what differential privacy makes public anyway.

Where noise adds up inside the secure sum, no site can promise anything before it knows
what the others need. Its introduction then states what it needs itself; the aggregator
passes all of them on, as they were signed, and the promise is the answer to that.
"""

import base64
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TypeVar

from federation.errors import ProtocolError
from federation.events import SitePrivacy
from federation.ids import RunId, SiteId
from federation.messages import NO_ANCHOR, LedgerAnchor, join_anchors
from federation.typed_json import decode, encode, refuse_constant
from federation.wire import frame as wire
from privacy.secagg.agreement.identity import (
    SIGNATURE_BYTES,
    Identity,
    Label,
    PublicIdentity,
)
from privacy.secagg.agreement.roster import Roster

VERSION = 2
MAX_BYTES = 1 << 21  # a job file has at most half of it
# How a run ends: ``exhausted`` is out of privacy budget.
OUTCOMES = ("completed", "stopped", "exhausted", "failed")
_WHAT = "what noise it needs"
# No signature begins so.
_BUNDLE = b"crossfed: introductions of a relay and its sites\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteAnchor:
    """How many charges a site's ledger of the run must hold, as the aggregator knows.

    Attributes:
        anchor: The largest that it has answered with.
    """

    site: str
    anchor: LedgerAnchor


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The run that the aggregator proposes to a site.

    Attributes:
        version: Version of this message.
        job: Text of the job file.
        release: Release of crossfed at the aggregator.
        code_hash: Of the code that computes from a site's data; 64 hexadecimal digits.
        nonce: Fresh for every start of a coordinator; 32 hexadecimal digits.
        anchors: Anchors of the sites that have charged something in this run.
        num_values: Float values of the model, for relays, which do not build it.
        roster_serial: Serial of the roster that the run's contracts rest on.
        roster_digest: Its digest, hexadecimal; empty if the aggregator does not say.
        audit_head: Digest of the newest entry of the aggregator's audit log, which the
            site notes in its own: an entry that others know cannot be removed unseen.
    """

    version: int
    run_id: str
    job: str
    release: str
    code_hash: str
    nonce: str
    anchors: tuple[SiteAnchor, ...] = ()
    num_values: int = 0
    roster_serial: int = 0
    roster_digest: str = ""
    audit_head: str = ""

    def anchor_of(self, site: SiteId) -> LedgerAnchor:
        """Return the minimum that a site's ledger must hold."""
        known = ({SiteId(each.site): each.anchor} for each in self.anchors)
        return join_anchors(*known).get(site, NO_ANCHOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements:
    """The answers of all sites of a run to its proposal, passed on to each.

    Attributes:
        version: Version of this message.
        introductions: As they were signed, in base64.
    """

    version: int
    run_id: str
    introductions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Tells sites that no more tasks of a run will come.

    Attributes:
        version: Version of this message.
        ended: ID of the run.
        reason: Why a site that enrolled meanwhile cannot join it; empty for others.
        outcome: One of ``OUTCOMES``; empty with a reason, since the run goes on.
    """

    version: int
    ended: str
    reason: str = ""
    outcome: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """A site's answer to a proposal.

    Attributes:
        version: Version of this message.
        site: Its name.
        proposal: SHA-256 of the proposal, or of the statements, that this answers; 64
            hexadecimal digits.
        release: Release of crossfed at the site.
        refused: Why it does not take part; empty if it does.
        privacy: What it promises for its records; None without differential privacy,
            and before it knows what the others need.
        num_examples: Training examples that it holds; 0 if that is not to leave it.
        num_held_out: Examples that it evaluates on; likewise.
        needs: Noise multiplier that its own records need, where noise adds up inside
            the secure sum; else None.
        temporary: Whether the reason of a refusal may pass, so that the aggregator
            asks again while it waits for sites.
        max_runs: How many runs the site keeps at work at once.
        memory_mib: Memory that they may take together; 0 for no limit.
        gpu_memory_mib: The same of its GPUs' memory.
    """

    version: int
    site: str
    proposal: str
    release: str
    refused: str
    privacy: SitePrivacy | None
    num_examples: int
    num_held_out: int = 0
    needs: float | None = None
    temporary: bool = False
    max_runs: int = 1
    memory_mib: int = 0
    gpu_memory_mib: int = 0


@functools.cache
def release() -> str:
    """The release that this process runs.

    Read once: installing another beside a running agent changes the files that name the
    release, and not the agent.
    """
    return metadata.version("crossfed")


def seal_proposal(proposal: Proposal, aggregator: Identity) -> bytes:
    """Sign a proposal."""
    return _seal(proposal, aggregator, Label.PROPOSAL)


def open_proposal(sealed: bytes, roster: Roster) -> Proposal:
    """Check and read a proposal.

    Raises:
        ProtocolError: It is not from the roster's aggregator, or not well formed.
    """
    _verify_aggregator(sealed, roster, Label.PROPOSAL)
    return kept_proposal(sealed)


def kept_proposal(sealed: bytes) -> Proposal:
    """Read a proposal without checking its signature, where that was done before.

    Raises:
        ProtocolError: It is damaged.
    """
    return _parse(_body(sealed), Proposal)


def seal_statements(
    run_id: RunId, introductions: Mapping[SiteId, bytes], aggregator: Identity
) -> bytes:
    """Sign what sites have answered, to pass it on to all of them.

    Args:
        run_id: ID of the run that the statements are for.
        introductions: What each site has sent, under its own signature.
        aggregator: Signs.
    """
    ordered = sorted(introductions.items())
    texts = (base64.b64encode(each).decode() for _, each in ordered)
    made = Statements(version=VERSION, run_id=run_id, introductions=tuple(texts))
    return _seal(made, aggregator, Label.STATEMENTS)


def open_statements(sealed: bytes, roster: Roster) -> Statements:
    """Check that statements are from the aggregator, and read them.

    Raises:
        ProtocolError: They are not, or are not well formed.
    """
    _verify_aggregator(sealed, roster, Label.STATEMENTS)
    return _parse(_body(sealed), Statements)


def are_statements(sealed: bytes) -> bool:
    """Whether bytes claim to be statements; nothing of them has been checked.

    Raises:
        ProtocolError: They are no message.
    """
    # In a text, such as that of a job, the quotes would be escaped.
    return b'"introductions": [' in _body(sealed)


def seal_end(
    run_id: RunId, aggregator: Identity, *, outcome: str = "", reason: str = ""
) -> bytes:
    """Sign how a run has ended, or why a site cannot join it."""
    end = End(version=VERSION, ended=run_id, reason=reason, outcome=outcome)
    return _seal(end, aggregator, Label.END)


def open_end(sealed: bytes, roster: Roster) -> End:
    """Check that the aggregator says that a run is over for this site, and read it.

    Raises:
        ProtocolError: It does not, or the message is not well formed.
    """
    _verify_aggregator(sealed, roster, Label.END)
    end = _parse(_body(sealed), End)
    if end.outcome not in ({""} if end.reason else OUTCOMES):
        raise ProtocolError(f"no run ends as {end.outcome!r:.30}")
    return end


def is_end(sealed: bytes) -> bool:
    """Whether bytes claim to end a run. See ``are_statements``."""
    return b'"ended": "' in _body(sealed)


def stated_needs(
    statements: Statements, *, proposal: bytes, roster: Roster
) -> Mapping[SiteId, float]:
    """Check every site's own signature, and read the noise that it needs.

    Args:
        statements: What the aggregator passes on.
        proposal: The sealed proposal that all of them must be an answer to.
        roster: Pins the sites' keys.

    Returns:
        The noise multiplier that each site has stated.

    Raises:
        ProtocolError: One of them is not signed by its site, answers another
            proposal, states nothing or is there twice.
    """
    found: dict[SiteId, float] = {}
    for text in statements.introductions:
        try:
            sealed = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise ProtocolError(f"a malformed statement: {error}") from error
        each = open_introduction(sealed, roster, proposal)
        if each.needs is None:
            raise ProtocolError(f"site {each.site!r} does not state {_WHAT}")
        if each.site in found:
            raise ProtocolError(f"site {each.site!r} states {_WHAT} more than once")
        found[SiteId(each.site)] = each.needs
    return found


def seal_introduction(introduction: Introduction, site: Identity) -> bytes:
    """Sign an introduction."""
    return _seal(introduction, site, Label.PROMISE)


def open_introduction(sealed: bytes, roster: Roster, proposal: bytes) -> Introduction:
    """Check and read a site's introduction.

    Args:
        sealed: What a node answered.
        roster: Pins the sites' keys.
        proposal: What it must be an answer to: a sealed proposal, or statements.

    Raises:
        ProtocolError: The site is not in the roster, its signature is wrong, or it
            answers another proposal.
    """
    claimed = _parse(_body(sealed), Introduction)
    entry = roster.entry(SiteId(claimed.site))
    key = PublicIdentity(entry.public_key)
    _verify(sealed, key, Label.PROMISE, who=f"site {entry.site!r}")
    if claimed.proposal != digest(proposal):
        raise ProtocolError(f"site {entry.site!r} answers a different proposal")
    if claimed.privacy is not None and claimed.privacy.site != claimed.site:
        raise ProtocolError(f"site {entry.site!r} makes a promise for another site")
    _check_numbers(claimed)
    return claimed


def bundle(relay: bytes, sites: Sequence[bytes]) -> bytes:
    """Put a relay's introduction and those of its sites into one message.

    Each is sealed by who it is of.
    """
    texts = [base64.b64encode(each).decode() for each in (relay, *sites)]
    return _BUNDLE + json.dumps(texts).encode()


def open_bundle(data: bytes) -> tuple[bytes, Sequence[bytes]] | None:
    """Take them out again; nothing of them has been checked.

    Returns:
        The relay's and those of its sites; None if the message is no bundle.

    Raises:
        ProtocolError: It is malformed.
    """
    if not data.startswith(_BUNDLE):
        return None
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"{len(data)} bytes of introductions are too many")
    try:
        texts = json.loads(data.removeprefix(_BUNDLE))
        relay, *sites = [base64.b64decode(text, validate=True) for text in texts]
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"a malformed bundle of introductions: {error}") from error
    return relay, sites


def kept_introduction(sealed: bytes) -> Introduction:
    """Read an introduction without checking it, where that was done before.

    Raises:
        ProtocolError: It is damaged.
    """
    return _parse(_body(sealed), Introduction)


def _check_numbers(claimed: Introduction) -> None:
    """Refuse impossible numbers, which would go into the contract."""
    counts = claimed.num_examples, claimed.num_held_out
    if not all(0 <= count <= wire.MAX_COUNT for count in counts):
        raise ProtocolError(
            f"site {claimed.site!r} states an impossible number of examples, beyond 0 "
            f"to {wire.MAX_COUNT}"
        )
    if not 1 <= claimed.max_runs <= wire.MAX_COUNT:
        raise ProtocolError(
            f"site {claimed.site!r} states an impossible number of runs at once, "
            f"beyond 1 to {wire.MAX_COUNT}"
        )
    if not all(
        0 <= mib <= wire.MAX_COUNT
        for mib in (claimed.memory_mib, claimed.gpu_memory_mib)
    ):
        raise ProtocolError(f"site {claimed.site!r} states an impossible memory")
    numbers: list[float] = []
    if claimed.needs is not None:
        numbers.append(claimed.needs)
    promise = claimed.privacy
    if promise is not None:
        numbers += [promise.epsilon_cap, promise.delta, promise.noise_multiplier]
        numbers += [promise.sampling_rate, promise.steps_per_round]
        if promise.held_out_noise is not None:
            numbers.append(promise.held_out_noise)
    if not all(0.0 < number < math.inf for number in numbers):
        raise ProtocolError(
            f"site {claimed.site!r} states impossible numbers: {promise or numbers}"
        )


def digest(sealed: bytes) -> str:
    """SHA-256 of a sealed message, 64 hexadecimal digits."""
    return hashlib.sha256(sealed).hexdigest()


_Message = TypeVar("_Message", Proposal, Statements, End, Introduction)


def _seal(
    value: Proposal | Statements | End | Introduction, identity: Identity, label: Label
) -> bytes:
    body = json.dumps(encode(value), allow_nan=False).encode()
    return identity.sign(label, body) + body


def _body(sealed: bytes) -> bytes:
    if not SIGNATURE_BYTES < len(sealed) <= MAX_BYTES:
        raise ProtocolError(f"{len(sealed)} bytes are not a signed message")
    return sealed[SIGNATURE_BYTES:]


def _verify_aggregator(sealed: bytes, roster: Roster, label: Label) -> None:
    key = PublicIdentity(roster.aggregator_key)
    _verify(sealed, key, label, who="the aggregator")


def _verify(sealed: bytes, key: PublicIdentity, label: Label, *, who: str) -> None:
    key.verify(label, _body(sealed), sealed[:SIGNATURE_BYTES], who=who)


def _parse(body: bytes, kind: type[_Message]) -> _Message:
    try:
        found = json.loads(body, parse_constant=refuse_constant)
        version = found.get("version") if isinstance(found, dict) else None
        if version != VERSION:
            raise ProtocolError(
                f"the message has version {version!r:.20}, but this side uses version "
                f"{VERSION}: install the same release of crossfed on both sides"
            )
        value = decode(found, kind, where=kind.__name__)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a malformed {kind.__name__}: {error}") from error
    if not isinstance(value, kind):
        raise ProtocolError(f"this is not a {kind.__name__}")
    return value

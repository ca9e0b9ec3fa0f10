"""Sites that deal, dispute or release shares as no honest site does.

Whatever they send is signed with their own key and sealed under the right one: only
the commitments can show what is wrong.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from support.secagg_parties import DIGEST, Run, alter, site_name

from privacy.keystream import Mask, apply_masks_
from privacy.secagg.errors import ProtocolError  # type: ignore[attr-defined]
from privacy.secagg.protocol.commitments import commit, dealt_digests
from privacy.secagg.protocol.key_schedule import (
    RoundMasks,
    channel_data,
    seal,
    unseal,
)
from privacy.secagg.protocol.messages import Head, MaskedAnswer, Shares
from privacy.secagg.protocol.server import AggregatorRound

SHARE = 33

Bytes = Callable[[bytes], bytes]
Release = Callable[[Shares], Shares]


def flipped(data: bytes, bit: int = 0) -> bytes:
    """The same with one bit changed."""
    at, mask = divmod(bit % (8 * len(data)), 8)
    return data[:at] + bytes([data[at] ^ 1 << mask]) + data[at + 1 :]


@dataclass
class Dealer:
    """What a site does otherwise than the protocol; nothing, as it is made.

    Attributes:
        bundles: How the shares for a holder are changed before they are sealed, by
            holder; the commitments stay those of the right shares.
        committed: The same, with commitments to the changed shares.
        sealed: How what is sealed for a holder is changed.
        rows: How the commitments for a holder are changed, before they are signed.
        release: How its own released shares are changed, before they are signed.
    """

    bundles: Mapping[int, Bytes] = field(default_factory=dict)
    committed: Mapping[int, Bytes] = field(default_factory=dict)
    sealed: Mapping[int, Bytes] = field(default_factory=dict)
    rows: Mapping[int, Bytes] = field(default_factory=dict)
    release: Release = lambda shares: shares

    def deal(self, run: Run, number: int, data: bytes) -> bytes:
        """A masked answer as this site sends it."""
        masked = MaskedAnswer.from_bytes(data)
        head = Head.from_bytes(masked.head)
        sealed, rows = dict(masked.sealed), dict(masked.rows)
        changes = {**self.bundles, **self.committed}
        for holder, change in changes.items():
            if not _takes_part(run, holder, head.context):
                continue  # Its key is with it alone.
            bundle = change(_opened(run, number, holder, head.context, sealed))
            if holder in self.committed:
                rows[holder] = commit(
                    bundle,
                    context=head.context,
                    dealer=number,
                    holder=holder,
                    cohort=run.contract.cohort,
                )
            if holder in sealed:
                key = _channel(run, number, holder)
                about = channel_data(head.context, number, holder)
                sealed[holder] = seal(key, bytearray(bundle), about)
        for holder, change in self.sealed.items():
            sealed[holder] = change(sealed[holder])
        for holder, change in self.rows.items():
            rows[holder] = change(rows[holder])
        dealt = dealt_digests(sealed, rows)
        signed = alter(head, dealt=dealt).signed_by(run.parties.sites[number])
        session = run.sessions[number]
        assert session._round is not None
        session._round.head = signed.to_bytes()
        return MaskedAnswer(head=signed.to_bytes(), sealed=sealed, rows=rows).to_bytes()

    def released(self, run: Run, number: int, data: bytes) -> bytes:
        """Its shares as this site sends them."""
        shares = self.release(Shares.from_bytes(data))
        return shares.signed_by(run.parties.sites[number]).to_bytes()


def _takes_part(run: Run, holder: int, context: bytes) -> bool:
    current = run.sessions[holder]._round
    return current is not None and current.context == context


def _channel(run: Run, dealer: int, holder: int) -> object:
    current = run.sessions[holder]._round
    assert current is not None
    return current.shared.receive[dealer]


def _opened(
    run: Run, dealer: int, holder: int, context: bytes, sealed: Mapping[int, bytes]
) -> bytes:
    if holder == dealer:
        current = run.sessions[dealer]._round
        assert current is not None
        return bytes(current.shared.own)
    about = channel_data(context, dealer, holder)
    key = _channel(run, dealer, holder)
    return bytes(unseal(key, sealed[holder], about, who="a dealer"))


@dataclass
class Played:
    """A round and what came of it.

    Attributes:
        server: The aggregator's half.
        total: The opened sum of the sites' values.
        masks: What opens the sum; None if nothing does.
        error: Why.
        refused: Whose shares were refused.
        shares: What was released, by site.
    """

    server: AggregatorRound
    total: list[int] = field(default_factory=list)
    masks: RoundMasks | None = None
    error: ProtocolError | None = None
    refused: set[int] = field(default_factory=set)
    shares: dict[int, Shares] = field(default_factory=dict)


def play(
    run: Run,
    dealers: Mapping[int, Dealer],
    *,
    round_index: int = 1,
    absent: Collection[int] = (),
    silent: Collection[int] = (),
) -> Played:
    """Play a round of P2 in which some sites do not do as they should.

    Args:
        run: The sites after a setup.
        dealers: What they do instead.
        round_index: Number of the round, from 1.
        absent: Who does not answer at all.
        silent: Who answers, consents, and releases nothing.
    """
    server = run.aggregator_round(round_index)
    cohort = [i for i in run.contract.cohort if i not in absent]
    played = Played(server)
    total = np.zeros(len(value_of(1)), np.uint64)
    answers = {i: _masked(run, i, round_index) for i in cohort}
    for i, (words, data) in answers.items():
        dealt = dealers.get(i, Dealer()).deal(run, i, data)
        digest = hashlib.sha256(words).digest()
        try:
            server.on_masked(dealt, vector_digest=DIGEST, header_digest=digest)
        except ProtocolError:
            played.refused.add(i)
        else:
            total += words
    cohort = [i for i in cohort if i not in played.refused]
    try:
        server.close_masked()
        heads = server.survivors()
        for i in cohort:
            server.on_consent(run.sessions[i].on_survivors(heads))
        server.close_consents()
        for i in [i for i in cohort if i not in silent]:
            data = run.sessions[i].on_reveal(server.reveal(site_name(i)))
            data = dealers.get(i, Dealer()).released(run, i, data)
            played.shares[i] = Shares.from_bytes(data)
            try:
                server.on_shares(data)
            except ProtocolError:
                played.refused.add(i)
        played.masks = server.corrections()
        apply_masks_(total, masks_of(played.masks))
        played.total = total.tolist()
    except ProtocolError as error:
        played.error = error
    return played


def value_of(number: int) -> list[int]:
    """What a site adds to the sum."""
    return [number, 10**number]


def _masked(run: Run, number: int, round_index: int) -> tuple[np.ndarray, bytes]:
    """A site's masked value, and the message that goes with it."""
    session = run.sessions[number]
    masks = session.begin_round(run.facts(round_index))
    words = np.array(value_of(number), np.uint64)
    apply_masks_(words, masks_of(masks))
    digest = hashlib.sha256(words).digest()
    return words, session.finish_masked(vector_digest=DIGEST, header_digest=digest)


def masks_of(masks: RoundMasks) -> list[Mask]:
    """The header's streams."""
    return [Mask(key=s.key, sign=s.sign) for s in masks.header]


def in_bundle(at: int, change: Bytes = flipped) -> Bytes:
    """Change one share of a bundle; the first is of the self mask."""

    def changed(bundle: bytes) -> bytes:
        piece = slice(SHARE * at, SHARE * (at + 1))
        return bundle[: piece.start] + change(bundle[piece]) + bundle[piece.stop :]

    return changed


def wrong_share(dealer: int, change: Bytes = flipped) -> Release:
    """Release another share of a dealer's self mask than the right one."""

    def release(shares: Shares) -> Shares:
        wrong = {**shares.self_shares, dealer: change(shares.self_shares[dealer])}
        return alter(shares, self_shares=wrong)

    return release


def disputing(*dealers: int) -> Release:
    """Dispute what some sites have dealt, whatever it is."""

    def release(shares: Shares) -> Shares:
        kept = [j for j in shares.self_shares if j not in dealers]
        return alter(
            shares,
            self_shares={j: shares.self_shares[j] for j in kept},
            pair_shares={j: shares.pair_shares[j] for j in kept},
            disputed=tuple(sorted({*shares.disputed, *dealers})),
        )

    return release

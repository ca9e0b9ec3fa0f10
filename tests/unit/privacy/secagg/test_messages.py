"""The one encoding of every message."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from support.examples import few
from support.secagg_parties import Parties, site_name, start

from federation.errors import ProtocolError
from privacy.secagg.errors import MalformedMessage
from privacy.secagg.protocol.messages import (
    Advert,
    Book,
    Confirm,
    Confirms,
    Consent,
    Decline,
    Head,
    MaskedAnswer,
    Offer,
    Reveal,
    Shares,
    Survivors,
)
from privacy.secagg.protocol.setup import AggregatorSetup

KINDS = (
    Offer,
    Advert,
    Book,
    Confirm,
    Confirms,
    Head,
    MaskedAnswer,
    Decline,
    Survivors,
    Consent,
    Reveal,
    Shares,
)


def samples() -> dict[type[Any], bytes]:
    """One real message of each kind."""
    parties = Parties(4)
    run = start(4)
    book = Book.from_bytes(run.record.book)
    confirms = Confirms.from_bytes(run.record.confirms)
    aggregator = AggregatorSetup(identity=parties.aggregator, contract=run.contract)
    run.sessions[4].begin_round(run.facts())
    found = {
        Offer: aggregator.offer(),
        Book: run.record.book,
        Confirms: run.record.confirms,
        Advert: book.adverts[2],
        Confirm: confirms.confirms[2],
        Decline: run.sessions[4].decline(),
    }
    server = run.collect((1, 2, 3))
    found[MaskedAnswer] = run.masked(4, 2)
    found[Head] = MaskedAnswer.from_bytes(found[MaskedAnswer]).head
    server.close_masked()
    found[Survivors] = server.survivors()
    for i in (1, 2, 3):
        found[Consent] = run.sessions[i].on_survivors(found[Survivors])
        server.on_consent(found[Consent])
    server.close_consents()
    found[Reveal] = server.reveal(site_name(1))
    found[Shares] = run.sessions[1].on_reveal(found[Reveal])
    return found


SAMPLES = samples()


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: type[Any]):
    """What is read encodes to the same bytes."""
    assert SAMPLES[kind] == kind.from_bytes(SAMPLES[kind]).to_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_and_every_tail_is_refused(kind: type[Any]):
    """A message ends where it ends."""
    data = SAMPLES[kind]
    for end in {*range(0, len(data), max(1, len(data) // 97)), len(data) - 1}:
        with pytest.raises(MalformedMessage):
            kind.from_bytes(data[:end])
    with pytest.raises(MalformedMessage):
        kind.from_bytes(data + b"\0")


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_told_apart(kind: type[Any]):
    """No message is read as another kind."""
    for other, data in SAMPLES.items():
        if other is not kind:
            with pytest.raises(MalformedMessage):
                kind.from_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
@few(40)
@given(data=st.data())
def test_changed_bytes_are_refused_or_canonical(kind: type[Any], data: st.DataObject):
    """Any changed byte is a typed error or another message's one encoding."""
    changed = bytearray(SAMPLES[kind])
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] = data.draw(st.integers(0, 255))
    try:
        message = kind.from_bytes(bytes(changed))
    except ProtocolError:
        return
    assert bytes(changed) == message.to_bytes()


def test_shares_are_not_printed():
    """The text of a message with shares shows none."""
    shares = Shares.from_bytes(SAMPLES[Shares])
    assert shares.self_shares[1].hex() not in repr(shares)
    assert "self_shares" not in repr(shares)

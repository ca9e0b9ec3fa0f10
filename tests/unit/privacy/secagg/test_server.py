"""The aggregator's round: wrong messages are refused and change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
from support.secagg_parties import (
    DIGEST,
    HEADER,
    Run,
    alter,
    site_name,
    start,
)

from federation.errors import ProtocolError
from federation.ids import SiteId
from privacy.secagg.errors import (
    BadShare,
    BadSignature,
    InconsistentSurvivors,
    MalformedMessage,
    OutOfOrder,
    TooFewSites,
    UnknownSite,
    WrongCohort,
    WrongContext,
)
from privacy.secagg.protocol.commitments import dealt_digests
from privacy.secagg.protocol.messages import (
    Consent,
    Decline,
    Head,
    MaskedAnswer,
    Shares,
)
from privacy.secagg.protocol.server import AggregatorRound


def resigned(
    run: Run, data: bytes, signer: int, kind: type[Any], **changes: Any
) -> bytes:
    message = alter(kind.from_bytes(data), **changes)
    return message.signed_by(run.parties.sites[signer]).to_bytes()


def with_sealed(run: Run, data: bytes, sealed: dict[int, bytes]) -> bytes:
    """A masked answer with other sealed shares, signed by site 2."""
    masked = MaskedAnswer.from_bytes(data)
    dealt = dealt_digests(sealed, masked.rows)
    head = resigned(run, masked.head, 2, Head, dealt=dealt)
    return alter(masked, head=head, sealed=sealed).to_bytes()


def take(server: AggregatorRound, data: bytes) -> SiteId:
    return server.on_masked(data, vector_digest=DIGEST, header_digest=HEADER)


def cut_head(run: Run, data: bytes) -> bytes:
    masked = MaskedAnswer.from_bytes(data)
    return alter(masked, head=masked.head[:-1]).to_bytes()


def head_of_another(run: Run, data: bytes) -> bytes:
    masked = MaskedAnswer.from_bytes(data)
    return alter(masked, head=resigned(run, masked.head, 3, Head)).to_bytes()


def stranger(run: Run, data: bytes) -> bytes:
    masked = MaskedAnswer.from_bytes(data)
    return alter(masked, head=resigned(run, masked.head, 2, Head, number=6)).to_bytes()


def other_round(run: Run, data: bytes) -> bytes:
    return run.masked(2, 9)


def other_vector(run: Run, data: bytes) -> bytes:
    masked = MaskedAnswer.from_bytes(data)
    head = resigned(run, masked.head, 2, Head, vector_digest=bytes(32))
    return alter(masked, head=head).to_bytes()


def bundle_missing(run: Run, data: bytes) -> bytes:
    sealed = dict(MaskedAnswer.from_bytes(data).sealed)
    del sealed[1]
    return with_sealed(run, data, sealed)


def bundle_for_itself(run: Run, data: bytes) -> bytes:
    sealed = MaskedAnswer.from_bytes(data).sealed
    return with_sealed(run, data, {**sealed, 2: sealed[1]})


def bundle_too_short(run: Run, data: bytes) -> bytes:
    sealed = MaskedAnswer.from_bytes(data).sealed
    return with_sealed(run, data, {**sealed, 1: sealed[1][1:]})


def bundle_exchanged(run: Run, data: bytes) -> bytes:
    masked = MaskedAnswer.from_bytes(data)
    swapped = {**masked.sealed, 1: masked.sealed[3]}
    return alter(masked, sealed=swapped).to_bytes()


@pytest.mark.parametrize(
    ("attack", "error"),
    [
        (cut_head, MalformedMessage),
        (head_of_another, BadSignature),
        (stranger, UnknownSite),
        (other_round, WrongContext),
        (other_vector, WrongContext),
        (bundle_missing, BadShare),
        (bundle_for_itself, BadShare),
        (bundle_too_short, BadShare),
        (bundle_exchanged, BadShare),
    ],
)
def test_wrong_answer_is_refused(
    attack: Callable[[Run, bytes], bytes], error: type[ProtocolError]
):
    """The site counts as silent until a right answer comes."""
    run = start(5)
    server = run.aggregator_round()
    right = run.masked(2)
    with pytest.raises(error):
        take(server, attack(run, right))
    assert len(server._heads) == 0
    assert take(server, right) == site_name(2)


def test_vector_must_be_the_signed_one():
    """Neither another vector nor another header may be added."""
    run = start(3)
    server, data = run.aggregator_round(), run.masked(1)
    for digests in ((HEADER, HEADER), (DIGEST, DIGEST)):
        with pytest.raises(WrongContext, match="one that it signed"):
            server.on_masked(data, vector_digest=digests[0], header_digest=digests[1])


def test_site_answers_once():
    """Neither twice nor after it declined."""
    run = start(5)
    server = run.aggregator_round()
    data = run.masked(1)
    take(server, data)
    with pytest.raises(OutOfOrder, match="already"):
        take(server, data)
    run.sessions[2].begin_round(run.facts())
    decline = run.sessions[2].decline()
    assert server.on_decline(decline) == site_name(2)
    with pytest.raises(OutOfOrder, match="already"):
        server.on_decline(decline)
    assert len(server._heads) == 1


def test_decline_must_be_signed_for_this_round():
    """Nobody can decline for another, or replay an old word."""
    run = start(5)
    server = run.aggregator_round(2)
    run.sessions[2].begin_round(run.facts(1))
    old = run.sessions[2].decline()
    with pytest.raises(WrongContext):
        server.on_decline(old)
    with pytest.raises(BadSignature):
        server.on_decline(resigned(run, old, 3, Decline))


def test_late_answer_is_refused():
    """Once A is fixed, a late vector stays hidden by its self mask."""
    run = start(5)
    server = run.collect((1, 2, 3, 4))
    assert server.close_masked() == tuple(map(site_name, (1, 2, 3, 4)))
    with pytest.raises(OutOfOrder, match="not due"):
        take(server, run.masked(5))


@pytest.mark.parametrize(("num_sites", "answers"), [(3, (1, 2)), (5, (1, 2, 3))])
def test_too_few_answers_end_the_round(num_sites: int, answers: tuple[int, ...]):
    """The missing sites are named and nothing can be opened."""
    server = start(num_sites).collect(answers)
    with pytest.raises(TooFewSites, match=f"missing: site-0{answers[-1] + 1}"):
        server.close_masked()
    for step in (server.survivors, server.corrections):
        with pytest.raises(OutOfOrder, match="lost"):
            step()


def consented(run: Run) -> tuple[AggregatorRound, dict[int, bytes]]:
    """A round in R2, with the consents of the survivors, not yet taken."""
    server = run.collect((1, 2, 3, 4))
    server.close_masked()
    request = server.survivors()
    return server, {i: run.sessions[i].on_survivors(request) for i in (1, 2, 3, 4)}


def test_wrong_consents_are_refused():
    """Another list, another signer, another round, a stranger, a second one."""
    run = start(5)
    server, consents = consented(run)
    for signer, changes, error in [
        (1, {"survivors": (1, 2, 3)}, InconsistentSurvivors),
        (2, {}, BadSignature),
        (1, {"context": bytes(32)}, WrongContext),
        (5, {"number": 5}, InconsistentSurvivors),
    ]:
        with pytest.raises(error):
            server.on_consent(resigned(run, consents[1], signer, Consent, **changes))
    server.on_consent(consents[1])
    with pytest.raises(OutOfOrder, match="already"):
        server.on_consent(consents[1])
    with pytest.raises(TooFewSites, match="1 consents"):
        server.close_consents()


def shared(run: Run) -> tuple[AggregatorRound, dict[int, bytes]]:
    """A round in R3, with the survivors' shares, not yet taken."""
    server, consents = consented(run)
    for data in consents.values():
        server.on_consent(data)
    sites = server.close_consents()
    assert sites == tuple(map(site_name, (1, 2, 3, 4)))
    answers = {
        i: run.sessions[i].on_reveal(server.reveal(site_name(i))) for i in (1, 2, 3, 4)
    }
    return server, answers


def test_wrong_shares_are_refused():
    """Missing, extra, cut, out of range, unsigned or of another round."""
    run = start(5)
    server, answers = shared(run)
    good = Shares.from_bytes(answers[1])
    large = b"\xff" * 33
    for signer, changes, error in [
        (1, {"self_shares": {1: good.self_shares[1]}}, BadShare),
        (1, {"pair_shares": {}}, BadShare),
        (1, {"self_shares": {**good.self_shares, 5: large}}, BadShare),
        (1, {"self_shares": {**good.self_shares, 2: large}}, BadShare),
        (1, {"pair_shares": {**good.pair_shares, 2: b""}}, BadShare),
        (1, {"pair_shares": {**good.pair_shares, 2: large}}, BadShare),
        (1, {"context": bytes(32)}, WrongContext),
        (2, {}, BadSignature),
        (5, {"number": 5}, InconsistentSurvivors),
    ]:
        with pytest.raises(error):
            server.on_shares(resigned(run, answers[1], signer, Shares, **changes))
    server.on_shares(answers[1])
    with pytest.raises(OutOfOrder, match="already"):
        server.on_shares(answers[1])
    with pytest.raises(TooFewSites, match="1 sets of shares"):
        server.corrections()


def test_corrections_are_what_the_survivors_left():
    """One self mask a survivor, one pair a survivor and dropped site; given once."""
    server, answers = shared(start(5))
    for data in answers.values():
        server.on_shares(data)
    masks = server.corrections()
    # Site 5 is above everybody: the survivors added its streams.
    assert [s.sign for s in masks.vector] == [-1] * 8
    assert len({bytes(s.key) for s in (*masks.vector, *masks.header)}) == 16
    masks.erase()
    assert not any(any(s.key) for s in masks.vector)
    with pytest.raises(OutOfOrder):
        server.corrections()


def test_one_exchange_needs_no_corrections():
    """P1: the accumulator is the sum."""
    run = start(3)
    server = run.collect()
    with pytest.raises(OutOfOrder):
        server.corrections()
    server.close_masked()
    masks = server.corrections()
    assert (masks.vector, masks.header) == ((), ())
    with pytest.raises(OutOfOrder):
        server.survivors()


def test_steps_have_an_order():
    """No step before its time."""
    run = start(5)
    server = run.collect((1, 2, 3, 4))
    for step in (server.survivors, server.close_consents, server.corrections):
        with pytest.raises(OutOfOrder):
            step()
    for take_message in (server.on_consent, server.on_shares):
        with pytest.raises(OutOfOrder):
            take_message(b"")
    with pytest.raises(OutOfOrder):
        server.reveal(site_name(1))


def test_reveal_is_for_survivors():
    """A site that dropped out gets no inbox."""
    run = start(5)
    server, _ = shared(run)
    with pytest.raises(InconsistentSurvivors):
        server.reveal(site_name(5))
    with pytest.raises(UnknownSite):
        server.reveal(SiteId("nobody"))


def test_cohort_is_the_contracts():
    """Sites would refuse another one."""
    run = start(5)
    with pytest.raises(WrongCohort):
        AggregatorRound(setup=run.record, facts=run.facts(cohort=(1, 2, 3, 4)))

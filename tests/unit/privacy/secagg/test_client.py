"""A site against an aggregator that lies: it aborts before a share leaves."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from support.secagg_parties import (
    DIGEST,
    HEADER,
    Run,
    alter,
    entropy,
    site_name,
    start,
)

from federation.errors import ProtocolError, StoreUnavailable
from privacy.secagg.errors import (
    BadShare,
    BadSignature,
    InconsistentSurvivors,
    MalformedMessage,
    OutOfOrder,
    ReplayedRound,
    TooFewSites,
    UnknownSite,
    WrongCohort,
    WrongContext,
)
from privacy.secagg.protocol.client import SiteSession
from privacy.secagg.protocol.key_schedule import RoundFacts
from privacy.secagg.protocol.messages import (
    Consent,
    Head,
    MaskedAnswer,
    Reveal,
    Shares,
    Survivors,
)
from privacy.secagg.protocol.round_memory import InMemoryRounds
from privacy.secagg.protocol.server import AggregatorRound

OTHER_MODEL = hashlib.sha256(b"crafted").digest()


@dataclasses.dataclass
class Game:
    """A P2 round of five sites in which site 5 dropped out; site 1 is watched."""

    run: Run
    server: AggregatorRound
    heads: dict[int, bytes]
    masked: dict[int, MaskedAnswer]

    @property
    def site(self) -> SiteSession:
        return self.run.sessions[1]

    def survivors(self, heads: dict[int, bytes] | None = None) -> bytes:
        return Survivors(heads=self.heads if heads is None else heads).to_bytes()

    def consents(self) -> dict[int, bytes]:
        """Every survivor signs the true list."""
        data = self.survivors()
        return {i: self.run.sessions[i].on_survivors(data) for i in self.heads}

    def inbox(self, number: int = 1) -> dict[int, bytes]:
        return {j: m.sealed[number] for j, m in self.masked.items() if j != number}

    def reveal(self, number: int = 1) -> Reveal:
        rows = {j: m.rows[number] for j, m in self.masked.items() if j != number}
        return Reveal(consents=self.consents(), inbox=self.inbox(number), rows=rows)

    def resign(
        self, data: bytes, signer: int, kind: type[Any], **changes: Any
    ) -> bytes:
        message = alter(kind.from_bytes(data), **changes)
        return message.signed_by(self.run.parties.sites[signer]).to_bytes()


def game(round_index: int = 1) -> Game:
    run = start(5)
    answers = {i: run.masked(i, round_index) for i in run.sessions}
    server = run.aggregator_round(round_index)
    masked = {i: MaskedAnswer.from_bytes(answers[i]) for i in (1, 2, 3, 4)}
    for i in masked:
        server.on_masked(answers[i], vector_digest=DIGEST, header_digest=HEADER)
    server.close_masked()
    return Game(run, server, {i: m.head for i, m in masked.items()}, masked)


def aborted(site: SiteSession) -> None:
    """Nothing is left of the round, and nothing more is answered in it."""
    current = site._round
    assert current is not None
    assert all(key.erased for key in current.shared.receive.values())
    assert not any(current.shared.own)
    for step in (site.on_survivors, site.on_reveal):
        with pytest.raises(OutOfOrder):
            step(b"")


# Round facts.


@pytest.mark.parametrize(
    ("round_index", "error"),
    [(3, ReplayedRound), (2, ReplayedRound), (0, ReplayedRound), (51, ReplayedRound)],
)
def test_rounds_are_answered_once(round_index: int, error: type[ProtocolError]):
    """No replay, no earlier round, none beyond the contract."""
    run = start(3)
    run.masked(1, 3)
    with pytest.raises(error):
        run.sessions[1].begin_round(run.facts(round_index))


@pytest.mark.parametrize("num_sites", [3, 5])
@pytest.mark.parametrize(
    "cohort", [(1, 2), (1, 2, 3, 4), (2, 3, 4), (1, 1, 2), (3, 2, 1), (1, 2, 6), ()]
)
def test_retry_with_a_subset_is_refused(num_sites: int, cohort: tuple[int, ...]):
    """The cohort is the contract's: no differencing by leaving somebody out."""
    run = start(num_sites)
    with pytest.raises(WrongCohort):
        run.sessions[1].begin_round(run.facts(cohort=cohort))
    # The refused round was not recorded: the honest one is still answered.
    run.masked(1, 1)


def test_refused_round_leaves_the_current_one():
    """A replayed task does not cost the round that is under way."""
    run = start(3)
    run.sessions[1].begin_round(run.facts(2))
    with pytest.raises(ReplayedRound):
        run.sessions[1].begin_round(run.facts(2))
    run.sessions[1].finish_masked(vector_digest=DIGEST, header_digest=HEADER)


def test_nothing_is_derived_before_the_round_is_recorded():
    """A site that cannot write its memory makes no key."""

    class Broken:
        def advance(self, *_: object) -> None:
            raise StoreUnavailable("full")

    run = start(3)
    session = SiteSession(
        contract=run.contract,
        identity=run.parties.sites[1],
        secrets=run.secrets[1],
        memory=Broken(),
        random_bytes=entropy("x"),
    )
    with pytest.raises(StoreUnavailable):
        session.begin_round(run.facts())
    assert {pair.round_index for pair in run.secrets[1].roots.values()} == {1}
    with pytest.raises(OutOfOrder):
        session.finish_masked(vector_digest=DIGEST, header_digest=HEADER)


def test_snapshot_cannot_answer_again():
    """A copy of the memory's keys is stopped by the recorded number."""
    run, again = start(3), start(3)
    memory = InMemoryRounds()
    for each in (run, again):
        each.sessions[1].memory = memory
    run.masked(1, 4)
    with pytest.raises(ReplayedRound):
        again.masked(1, 4)


def test_secrets_belong_to_one_contract():
    """Secrets of one contract do not serve another."""
    run = start(3)
    with pytest.raises(WrongContext):
        SiteSession(
            contract=run.parties.contract(max_rounds=49),
            identity=run.parties.sites[1],
            secrets=run.secrets[1],
            memory=InMemoryRounds(),
            random_bytes=entropy("x"),
        )


# R2: the list of survivors.


def tampered_head(g: Game) -> dict[int, bytes]:
    head = alter(Head.from_bytes(g.heads[2]), vector_digest=bytes(32))
    return {**g.heads, 2: head.to_bytes()}


def other_own_head(g: Game) -> dict[int, bytes]:
    changed = g.resign(g.heads[1], 1, Head, vector_digest=bytes(32))
    return {**g.heads, 1: changed}


def head_of_other_context(g: Game) -> dict[int, bytes]:
    return {**g.heads, 2: g.resign(g.heads[2], 2, Head, context=bytes(32))}


def head_of_other_model(g: Game) -> dict[int, bytes]:
    """Site 2 was shown another model and answered in good faith."""
    other = start(5)
    other.sessions[2].begin_round(other.facts(model_digest=OTHER_MODEL))
    data = other.sessions[2].finish_masked(vector_digest=DIGEST, header_digest=HEADER)
    return {**g.heads, 2: MaskedAnswer.from_bytes(data).head}


def head_of_other_round(g: Game) -> dict[int, bytes]:
    return {**g.heads, 2: MaskedAnswer.from_bytes(start(5).masked(2, 2)).head}


def head_shown_twice(g: Game) -> dict[int, bytes]:
    return {**g.heads, 5: g.heads[4]}


@pytest.mark.parametrize(
    ("heads", "error"),
    [
        (lambda g: {i: g.heads[i] for i in (1, 2, 3)}, TooFewSites),
        (lambda _: {}, InconsistentSurvivors),
        (lambda g: {i: g.heads[i] for i in (2, 3, 4)}, InconsistentSurvivors),
        (lambda g: {**g.heads, 6: g.heads[4]}, InconsistentSurvivors),
        (head_shown_twice, InconsistentSurvivors),
        (tampered_head, BadSignature),
        (other_own_head, InconsistentSurvivors),
        (head_of_other_context, WrongContext),
        (head_of_other_model, WrongContext),
        (head_of_other_round, WrongContext),
        (lambda g: {**g.heads, 2: g.heads[2][:-1]}, MalformedMessage),
    ],
)
def test_wrong_survivors_are_not_signed(
    heads: Callable[[Game], dict[int, bytes]], error: type[ProtocolError]
):
    """A below t, without me, with strangers, duplicates or false heads."""
    g = game()
    with pytest.raises(error):
        g.site.on_survivors(g.survivors(heads(g)))
    aborted(g.site)


def test_duplicates_in_the_list_have_no_spelling():
    """Not even the encoding admits a number twice, or out of order."""
    g = game()
    data = g.survivors()
    entry = data[-(len(g.heads[4]) + 16) :]
    doubled = data.replace((4).to_bytes(8, "big"), (5).to_bytes(8, "big"), 1) + entry
    with pytest.raises(MalformedMessage, match="increasing"):
        g.site.on_survivors(doubled)
    aborted(g.site)


def test_second_list_is_not_signed():
    """Not the same list, and not a longer or shorter one."""
    g = game()
    g.site.on_survivors(g.survivors())
    with pytest.raises(OutOfOrder):
        g.site.on_survivors(g.survivors())


# R3: consents and inbox.


def too_few_consents(g: Game, reveal: Reveal) -> Reveal:
    return alter(reveal, consents={i: reveal.consents[i] for i in (1, 2, 3)})


def consent_over_other_list(g: Game, reveal: Reveal) -> Reveal:
    other = g.resign(reveal.consents[2], 2, Consent, survivors=(1, 2, 3, 4, 5))
    return alter(reveal, consents={**reveal.consents, 2: other})


def forged_consent(g: Game, reveal: Reveal) -> Reveal:
    forged = g.resign(reveal.consents[2], 3, Consent, number=2)
    return alter(reveal, consents={**reveal.consents, 2: forged})


def consent_of_other_context(g: Game, reveal: Reveal) -> Reveal:
    other = g.resign(reveal.consents[2], 2, Consent, context=bytes(32))
    return alter(reveal, consents={**reveal.consents, 2: other})


def consent_of_the_dropped(g: Game, reveal: Reveal) -> Reveal:
    other = g.resign(reveal.consents[2], 5, Consent, number=5)
    return alter(reveal, consents={**reveal.consents, 5: other})


def consent_counted_twice(g: Game, reveal: Reveal) -> Reveal:
    kept = {i: reveal.consents[i] for i in (1, 2, 3)}
    return alter(reveal, consents={**kept, 4: reveal.consents[3]})


def own_consent_counted_twice(g: Game, reveal: Reveal) -> Reveal:
    kept = {i: reveal.consents[i] for i in (1, 2, 3)}
    return alter(reveal, consents={**kept, 4: reveal.consents[1]})


def another_consent_of_this_site(g: Game, reveal: Reveal) -> Reveal:
    forged = g.resign(reveal.consents[1], 2, Consent, number=1)
    return alter(reveal, consents={**reveal.consents, 1: forged})


def sealed_share_changed(g: Game, reveal: Reveal) -> Reveal:
    data = bytearray(reveal.inbox[2])
    data[40] ^= 1
    return alter(reveal, inbox={**reveal.inbox, 2: bytes(data)})


def sealed_shares_swapped(g: Game, reveal: Reveal) -> Reveal:
    inbox = {**reveal.inbox, 2: reveal.inbox[3], 3: reveal.inbox[2]}
    return alter(reveal, inbox=inbox)


def shares_for_another_site(g: Game, reveal: Reveal) -> Reveal:
    return alter(reveal, inbox={**reveal.inbox, 2: g.masked[2].sealed[3]})


def own_shares_reflected(g: Game, reveal: Reveal) -> Reveal:
    return alter(reveal, inbox={**reveal.inbox, 2: g.masked[1].sealed[2]})


def shares_of_an_earlier_round(g: Game, reveal: Reveal) -> Reveal:
    old = MaskedAnswer.from_bytes(start(5).masked(2, 2)).sealed[1]
    return alter(reveal, inbox={**reveal.inbox, 2: old})


def sealed_share_cut(g: Game, reveal: Reveal) -> Reveal:
    return alter(reveal, inbox={**reveal.inbox, 2: b"short"})


def inbox_without_a_survivor(g: Game, reveal: Reveal) -> Reveal:
    return alter(reveal, inbox={j: reveal.inbox[j] for j in (2, 3)})


def inbox_with_the_dropped(g: Game, reveal: Reveal) -> Reveal:
    """Both secrets of site 5: its pairs follow from A, its b_5 must not."""
    return alter(reveal, inbox={**reveal.inbox, 5: reveal.inbox[4]})


@pytest.mark.parametrize(
    ("attack", "error"),
    [
        (too_few_consents, TooFewSites),
        (consent_over_other_list, InconsistentSurvivors),
        (forged_consent, BadSignature),
        (consent_of_other_context, WrongContext),
        (consent_of_the_dropped, InconsistentSurvivors),
        (consent_counted_twice, InconsistentSurvivors),
        (own_consent_counted_twice, InconsistentSurvivors),
        (another_consent_of_this_site, BadSignature),
        (sealed_share_changed, BadShare),
        (sealed_shares_swapped, BadShare),
        (shares_for_another_site, BadShare),
        (own_shares_reflected, BadShare),
        (shares_of_an_earlier_round, BadShare),
        (sealed_share_cut, BadShare),
        (inbox_without_a_survivor, InconsistentSurvivors),
        (inbox_with_the_dropped, InconsistentSurvivors),
    ],
)
def test_wrong_reveal_releases_no_share(
    attack: Callable[[Game, Reveal], Reveal], error: type[ProtocolError]
):
    """Whatever is wrong with the consents or the inbox, no share leaves."""
    g = game()
    reveal = attack(g, g.reveal())
    with pytest.raises(error):
        g.site.on_reveal(reveal.to_bytes())
    aborted(g.site)


def test_unknown_number_in_a_reveal_is_refused():
    """Numbers beyond the contract are malformed or strangers."""
    g = game()
    reveal = g.reveal()
    for number in (6, 65):
        data = alter(reveal, consents={**reveal.consents, number: reveal.consents[4]})
        with pytest.raises((UnknownSite, InconsistentSurvivors, OutOfOrder)):
            g.site.on_reveal(data.to_bytes())


def test_both_secrets_cannot_be_asked_for():
    """A request that names secrets has no encoding: trailing bytes are refused."""
    g = game()
    reveal = g.reveal().to_bytes()
    with pytest.raises(MalformedMessage, match="follow its end"):
        g.site.on_reveal(reveal + (5).to_bytes(8, "big"))
    aborted(g.site)


def test_shares_are_given_once():
    """The second time there is nothing left to give."""
    g = game()
    reveal = g.reveal().to_bytes()
    shares = Shares.from_bytes(g.site.on_reveal(reveal))
    assert set(shares.self_shares) == set(g.heads)
    assert {len(joined) for joined in shares.pair_shares.values()} == {33}
    assert g.site._round is None
    with pytest.raises(OutOfOrder, match="no round"):
        g.site.on_reveal(reveal)


# Order and erasure.


def test_steps_have_an_order():
    """Early, late and repeated calls raise and give nothing."""
    run = start(5)
    session = run.sessions[1]
    for step in (session.on_survivors, session.on_reveal):
        with pytest.raises(OutOfOrder, match="no round"):
            step(b"")
    with pytest.raises(OutOfOrder):
        session.decline()
    session.begin_round(run.facts())
    with pytest.raises(OutOfOrder, match="expected: 'masked'"):
        session.on_reveal(b"")
    session.finish_masked(vector_digest=DIGEST, header_digest=HEADER)
    with pytest.raises(OutOfOrder, match="expected: 'survivors'"):
        session.finish_masked(vector_digest=DIGEST, header_digest=HEADER)
    with pytest.raises(OutOfOrder):
        session.decline()


def test_one_exchange_has_no_second():
    """P1: after the answer there is no round in which shares could be asked."""
    run = start(3)
    masked = MaskedAnswer.from_bytes(run.masked(1))
    assert masked.sealed == {}
    for step in (run.sessions[1].on_survivors, run.sessions[1].on_reveal):
        with pytest.raises(OutOfOrder, match="no round"):
            step(b"")


def test_digests_have_32_bytes():
    """A caller's bad argument is its own error and costs nothing."""
    run = start(3)
    run.sessions[1].begin_round(run.facts())
    with pytest.raises(ValueError, match="32 bytes"):
        run.sessions[1].finish_masked(vector_digest=b"", header_digest=HEADER)
    with pytest.raises(ValueError, match="32 bytes"):
        RoundFacts(
            round_index=1, cohort=(1, 2), model_digest=b"", task_digest=bytes(32)
        )
    with pytest.raises(ValueError, match="32 bytes"):
        RoundFacts(
            round_index=1, cohort=(1, 2), model_digest=bytes(32), task_digest=b""
        )


@pytest.mark.parametrize("num_sites", [3, 5])
def test_masks_are_overwritten_when_the_answer_is_signed(num_sites: int):
    """The caller's streams hold zeros afterwards."""
    run = start(num_sites)
    masks = run.sessions[1].begin_round(run.facts())
    assert all(any(s.key) for s in (*masks.vector, *masks.header))
    run.sessions[1].finish_masked(vector_digest=DIGEST, header_digest=HEADER)
    assert not any(any(s.key) for s in (*masks.vector, *masks.header))


@pytest.mark.parametrize("end", ["decline", "next", "close", "setup", "later"])
def test_unfinished_round_is_erased(end: str):
    """Giving up, moving on and leaving all overwrite the masks, as does word of it."""
    run = start(5)
    session = run.sessions[1]
    masks = session.begin_round(run.facts(1))
    current = session._round
    assert current is not None
    if end == "decline":
        session.decline()
    elif end == "next":
        session.begin_round(run.facts(2))
    elif end == "close":
        session.close()
    else:
        session.expire(1)  # Its own: it goes on.
        assert not any(key.erased for key in current.shared.receive.values())
        session.expire(0 if end == "setup" else 2)
    assert not any(any(s.key) for s in (*masks.vector, *masks.header))
    assert not any(current.shared.own)
    assert all(key.erased for key in current.shared.receive.values())


def test_closed_session_has_no_roots():
    """After the run nothing can be derived at this site."""
    run = start(3)
    run.sessions[1].close()
    with pytest.raises(OutOfOrder, match="ended"):
        run.sessions[1].begin_round(run.facts())


def test_earlier_rounds_cannot_be_derived():
    """The ratchet has no way back, even for the site itself."""
    run = start(3)
    run.masked(1, 3)
    pair = run.secrets[1].roots[2]
    assert pair.round_index == 4
    with pytest.raises(OutOfOrder, match="erased"):
        pair.take_round(3, bytes(32))


def test_number_is_the_contracts():
    """A session knows who it is."""
    run = start(3)
    assert {i: s.number for i, s in run.sessions.items()} == {1: 1, 2: 2, 3: 3}
    assert run.contract.member(1).site == site_name(1)

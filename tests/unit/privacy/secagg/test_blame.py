"""Sites that deal or release wrong shares are named, and others are not."""

from collections.abc import Mapping

import pytest
from support.dealers import (
    Dealer,
    Played,
    disputing,
    flipped,
    in_bundle,
    play,
    value_of,
    wrong_share,
)
from support.secagg_parties import DIGEST, HEADER, Run, alter, site_name, start

from privacy.secagg.errors import BadShare, TooFewSites
from privacy.secagg.protocol.commitments import SECRET
from privacy.secagg.protocol.messages import MaskedAnswer, Reveal


def keys_of(played: Played) -> set[bytes]:
    """The streams that open the sum, which is right."""
    assert played.masks is not None
    rows = [value_of(i) for i in played.server._survivors]
    assert played.total == [sum(column) for column in zip(*rows, strict=True)]
    return {bytes(s.key) for s in (*played.masks.vector, *played.masks.header)}


def expected(*, absent: tuple[int, ...] = ()) -> set[bytes]:
    """The same, of a round in which all sites are honest."""
    return keys_of(play(start(5, hybrid=False), {}, absent=absent))


def faulty(played: Played) -> set[str]:
    return set(played.server.faults)


def lie(dealers: Mapping[int, Dealer], absent: tuple[int, ...] = ()) -> Played:
    """A round of five sites, of which four are enough."""
    return play(start_alike(), dealers, absent=absent)


def start_alike() -> Run:
    """A run that is the same each time, so that masks can be compared."""
    return start(5, hybrid=False)


def test_honest_sites_are_never_named():
    """Nobody, with everyone there and with one site absent."""
    for absent in ((), (3,)):
        played = lie({}, absent)
        assert played.masks is not None
        assert (played.server.faults, played.server.disputes) == ({}, [])
        assert all(not shares.disputed for shares in played.shares.values())


@pytest.mark.parametrize("bit", [0, 7, 33 * 8 - 1])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_flipped_bit_in_a_dealt_share_is_disputed(at: int, bit: int):
    """Its holder releases nothing of that dealer, and four others open the sum."""
    spoilt = in_bundle(at, lambda share: flipped(share, bit))
    played = lie({2: Dealer(bundles={1: spoilt})})
    assert keys_of(played) == expected()
    assert played.server.disputes == [(site_name(1), site_name(2))]
    assert not faulty(played)
    assert 2 not in played.shares[1].self_shares
    assert set(played.shares[1].self_shares) == {1, 3, 4, 5}


def test_flipped_bit_in_what_was_sealed_is_disputed():
    """The dealer signed it, so it was the dealer or its holder."""
    played = lie({2: Dealer(sealed={1: flipped})})
    assert keys_of(played) == expected()
    assert played.server.disputes == [(site_name(1), site_name(2))]


def test_flipped_bit_in_a_commitment_is_disputed():
    """A right share with another commitment is no better."""
    played = lie({2: Dealer(rows={1: flipped})})
    assert keys_of(played) == expected()
    assert played.server.disputes == [(site_name(1), site_name(2))]


def test_shares_of_another_length_are_refused():
    """Its answer does not count, and its site is named like everyone who fails."""
    played = lie({2: Dealer(bundles={1: lambda bundle: bundle[:-33]})})
    assert played.refused == {2}
    assert keys_of(played) == expected(absent=(2,))
    assert not faulty(played)


@pytest.mark.parametrize("bit", [0, 100, 33 * 8 - 1])
def test_flipped_bit_in_a_released_share_names_its_holder(bit: int):
    """It was checked on receipt: the one that released it made it wrong."""
    release = wrong_share(4, lambda share: flipped(share, bit))
    played = lie({3: Dealer(release=release)})
    assert keys_of(played) == expected()
    assert played.refused == {3}
    assert faulty(played) == {site_name(3)}
    assert "'site-03'" in played.server.faults[site_name(3)]
    assert "'site-04'" in played.server.faults[site_name(3)]


def test_flipped_bit_in_a_released_share_of_a_pair_names_its_holder():
    """Where a site is absent, with all four others needed: the round is lost."""

    def release(shares: object) -> object:
        pairs = shares.pair_shares  # type: ignore[attr-defined]
        return alter(shares, pair_shares={**pairs, 4: flipped(pairs[4])})

    played = lie({2: Dealer(release=release)}, absent=(5,))  # type: ignore[arg-type]
    assert isinstance(played.error, TooFewSites)
    assert faulty(played) == {site_name(2)}


def test_own_share_is_released_as_it_was_committed_to():
    """A site's share of its own secret is no exception."""
    played = lie({3: Dealer(release=wrong_share(3))})
    assert keys_of(played) == expected()
    assert faulty(played) == {site_name(3)}


def test_share_of_another_holder_is_not_accepted():
    """A colluding site's share, in the place of one's own."""
    run = start_alike()
    first = play(run, {})
    other = first.shares[5].self_shares[4]
    again = lie({3: Dealer(release=wrong_share(4, lambda _: other))})
    assert faulty(again) == {site_name(3)}


def test_shares_that_do_not_meet_in_the_secret_name_their_dealer():
    """All are as committed to, and no polynomial goes through them."""
    played = lie({2: Dealer(committed={1: in_bundle(0)})})
    assert isinstance(played.error, BadShare)
    assert faulty(played) == {site_name(2)}
    assert played.server.disputes == []


def test_secret_that_was_not_dealt_names_its_dealer():
    """The shares meet, but not in what was committed to as the secret."""
    played = lie({2: Dealer(rows={SECRET: flipped})})
    assert isinstance(played.error, BadShare)
    assert faulty(played) == {site_name(2)}


def test_all_dealers_at_fault_are_named_at_once():
    """So that a run does not lose one round for each of them."""
    wrong = Dealer(rows={SECRET: flipped})
    assert faulty(lie({2: wrong, 5: wrong})) == {site_name(2), site_name(5)}


def test_false_accusation_costs_the_accused_nothing_in_its_round():
    """The sum is open without the accuser's share; the dispute names both."""
    played = lie({1: Dealer(release=disputing(4))})
    assert keys_of(played) == expected()
    assert played.server.disputes == [(site_name(1), site_name(4))]
    assert not faulty(played)


def test_false_accusation_cannot_be_combined_with_a_share():
    """Who disputes a share cannot release it: it would have to be right."""
    played = lie({1: Dealer(release=lambda s: alter(s, disputed=(4,)))})
    assert faulty(played) == {site_name(1)}
    assert played.server.disputes == []


@pytest.mark.parametrize("dealer", [1, 6])
def test_nobody_disputes_itself_or_a_stranger(dealer: int):
    """That is no complaint but a fault."""
    played = lie({1: Dealer(release=lambda s: alter(s, disputed=(dealer,)))})
    assert faulty(played) == {site_name(1)}


def test_nobody_withholds_its_own_share_by_a_dispute():
    """A site knows what it has dealt itself."""
    played = lie({1: Dealer(release=disputing(1))})
    assert keys_of(played) == expected()
    assert faulty(played) == {site_name(1)}
    assert played.server.disputes == []


def test_too_many_disputes_lose_the_round():
    """Three shares open nothing where four are needed, and no pair is left out."""
    spoilt = {x: in_bundle(0) for x in (1, 3)}
    played = lie({2: Dealer(bundles=spoilt)})
    assert isinstance(played.error, TooFewSites)
    assert "'site-02'" in str(played.error)
    assert played.server.disputes == [
        (site_name(1), site_name(2)),
        (site_name(3), site_name(2)),
    ]


def test_dispute_opens_no_share():
    """No share that the accused dealt to the accuser leaves it, and no key."""
    played = lie({2: Dealer(bundles={1: in_bundle(3)})}, absent=(5,))
    shares = played.shares[1]
    assert set(shares.self_shares) == set(shares.pair_shares) == {1, 3, 4}
    assert shares.disputed == (2,)


@pytest.mark.parametrize("field", ["inbox", "rows"])
def test_what_the_aggregator_changed_accuses_nobody(field: str):
    """Sealed shares and commitments are those that the dealer signed, or refused."""
    run = start_alike()
    server = run.collect()
    server.close_masked()
    heads = server.survivors()
    for session in run.sessions.values():
        server.on_consent(session.on_survivors(heads))
    server.close_consents()
    reveal = Reveal.from_bytes(server.reveal(site_name(1)))
    shown = getattr(reveal, field)
    changed = alter(reveal, **{field: {**shown, 2: flipped(shown[2])}})
    with pytest.raises(BadShare, match="the aggregator shows"):
        run.sessions[1].on_reveal(changed.to_bytes())
    assert run.sessions[1].disputes == []


@pytest.mark.parametrize("field", ["sealed", "rows"])
def test_what_was_damaged_on_its_way_up_is_refused(field: str):
    """Its site has signed other bytes: the answer does not count, nobody is named."""
    run = start_alike()
    server = run.aggregator_round()
    masked = MaskedAnswer.from_bytes(run.masked(2))
    shown = getattr(masked, field)
    damaged = alter(masked, **{field: {**shown, 1: flipped(shown[1])}})
    with pytest.raises(BadShare, match="those that it signed"):
        server.on_masked(damaged.to_bytes(), vector_digest=DIGEST, header_digest=HEADER)
    assert not server.faults
    assert len(server._heads) == 0


def test_commitments_of_two_rounds_have_nothing_in_common():
    """Neither do those of two holders, or of two secrets."""
    run = start_alike()
    seen: list[bytes] = []
    for round_index in (1, 2):
        for number in run.sessions:
            rows = MaskedAnswer.from_bytes(run.masked(number, round_index)).rows
            for row in rows.values():
                seen += [row[at : at + 32] for at in range(0, len(row), 32)]
    assert len(seen) == len(set(seen)) == 2 * 5 * 6 * 5

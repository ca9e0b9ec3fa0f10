"""Groups of sites: what they follow from, and what a draw refuses."""

import hashlib
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from support.secagg_parties import Parties, entropy, site_name

from federation.errors import ProtocolError
from privacy.secagg.agreement.certificate import (
    Certificate,
    ModelTrail,
    OpenedRound,
    certify,
    without_sum,
)
from privacy.secagg.agreement.contract import Contract, Setting
from privacy.secagg.agreement.groups import (
    AggregatorDraw,
    Commitment,
    Draw,
    commit,
    divide,
    draw_of,
    group_contract,
    outcome_of,
    read_commitment,
    read_commitments,
    read_group_offer,
    read_reveal,
    write_commitments,
    write_group_offer,
    write_reveal,
)
from privacy.secagg.agreement.policy import Group, check_against_policy
from privacy.secagg.errors import (
    BadSignature,
    CertificateRefused,
    ContractRefused,
    DrawRefused,
    MalformedMessage,
    OutOfOrder,
    TooFewSites,
)

PARTIES = Parties(10)
DRAW = draw_of(
    PARTIES.roster,
    list(map(site_name, range(1, 11))),
    num_groups=3,
)
SECRETS = {i: hashlib.sha256(f"secret {i}".encode()).digest() for i in range(1, 11)}
VALUES = {i: DRAW.commitment(i, secret) for i, secret in SECRETS.items()}
WHOLE = PARTIES.contract(weight_rule="uniform", max_examples=1)


def commitments(draw: Draw = DRAW) -> dict[int, bytes]:
    """Everybody's encoded commitment."""
    return {
        i: commit(draw, i, secret, PARTIES.sites[i]) for i, secret in SECRETS.items()
    }


@pytest.mark.parametrize(
    ("num_sites", "num_groups", "sizes"),
    [
        (9, 3, [3, 3, 3]),
        (10, 3, [3, 3, 4]),
        (11, 3, [3, 4, 4]),
        (64, 5, [12] + [13] * 4),
    ],
)
def test_groups_are_of_equal_size_but_for_one(
    num_sites: int, num_groups: int, sizes: list[int]
):
    """Each site is in one of them."""
    sites = [site_name(i) for i in range(num_sites)]
    groups = divide(sites, num_groups, b"seed")
    assert sizes == sorted(map(len, groups))
    assert sorted(sites) == sorted(site for group in groups for site in group)


def test_groups_follow_from_the_seed_and_not_from_the_order():
    """Every party comes to the same, whatever order it knows the sites in."""
    sites = [site_name(i) for i in range(9)]
    assert divide(sites, 3, b"seed") == divide(sites[::-1], 3, b"seed")
    assert divide(sites, 3, b"seed") != divide(sites, 3, b"other")


def test_any_two_sites_are_together_as_often_as_any_others():
    """In 2,000 divisions of 9 sites each pair is together 500 times, give or take 100.

    A deviation of 100 is above five standard deviations, for each of 36 pairs.
    """
    sites = [site_name(i) for i in range(9)]
    together: Counter[frozenset[str]] = Counter()
    for seed in range(2000):
        for group in divide(sites, 3, str(seed).encode()):
            together.update(map(frozenset, combinations(group, 2)))
    assert len(together) == 36
    assert all(400 <= count <= 600 for count in together.values())


@pytest.mark.parametrize("number", range(1, 11))
def test_outcome_depends_on_every_secret(number: int):
    """So one honest site makes the groups random."""
    secrets = {**SECRETS, number: bytes(32)}
    values = {**VALUES, number: DRAW.commitment(number, bytes(32))}
    other = outcome_of(DRAW, values, secrets)
    assert outcome_of(DRAW, VALUES, SECRETS).digest != other.digest


def test_outcome_is_frozen():
    """Sites of two releases must come to the same groups."""
    outcome = outcome_of(DRAW, VALUES, SECRETS)
    numbers = [[int(site[-2:]) for site in group] for group in outcome.groups]
    assert numbers == [[1, 3, 7], [2, 4, 6], [5, 8, 9, 10]]
    expected = "8fde315877c5c07746ef6f06000b29ae2b481ce67513b2d5f937eabad74457af"
    assert expected == outcome.digest.hex()


def test_secret_that_was_not_committed_to_is_refused():
    """Whoever has seen all others cannot choose any more."""
    with pytest.raises(DrawRefused, match=r"'site-04' .*match its commitment"):
        outcome_of(DRAW, VALUES, {**SECRETS, 4: bytes(32)})
    with pytest.raises(DrawRefused, match="secrets are of sites"):
        outcome_of(DRAW, VALUES, {i: SECRETS[i] for i in range(1, 10)})


def test_secret_of_another_site_or_draw_does_not_fit():
    """A commitment that was copied commits to nothing that its copier knows."""
    copied = {**VALUES, 2: VALUES[1]}
    with pytest.raises(DrawRefused, match="'site-02'"):
        outcome_of(DRAW, copied, {**SECRETS, 2: SECRETS[1]})
    assert VALUES[1] != replace(DRAW, num_groups=4).commitment(1, SECRETS[1])


@pytest.mark.parametrize("num_groups", [0, 2, 6])
def test_too_few_groups_or_too_small_ones_are_not_drawn(num_groups: int):
    """Of two groups that differ nobody can say which is wrong."""
    with pytest.raises(ValueError, match="from 10 sites"):
        replace(DRAW, num_groups=num_groups)


def test_messages_round_trip():
    """What was written is what is read."""
    encoded = commitments()
    assert read_commitments(DRAW, write_commitments(encoded)) == VALUES
    assert Commitment.from_bytes(encoded[1]).to_bytes() == encoded[1]
    assert read_reveal(write_reveal(3, SECRETS[3])) == (3, SECRETS[3])
    assert read_group_offer(write_group_offer(SECRETS, b"offer")) == (SECRETS, b"offer")
    for read in (read_reveal, read_group_offer, Commitment.from_bytes):
        with pytest.raises(MalformedMessage):
            read(b"nonsense")


def test_commitments_of_others_are_refused():
    """They must be of all sites, each by its pinned key, for this draw."""
    encoded = commitments()
    forged = commit(DRAW, 4, SECRETS[4], PARTIES.sites[5])
    other = commit(replace(DRAW, num_groups=4), 4, SECRETS[4], PARTIES.sites[4])
    refused: list[tuple[dict[int, bytes], type[ProtocolError], str]] = [
        ({**encoded, 4: forged}, BadSignature, "site-04"),
        (
            {**encoded, 4: other},
            DrawRefused,
            "'site-04' takes part in a different draw",
        ),
        ({**encoded, 4: encoded[5]}, DrawRefused, "commitment 5 is shown as 4"),
        (
            {i: encoded[i] for i in range(1, 10)},
            DrawRefused,
            "the draw has sites 1 to 10",
        ),
    ]
    for shown, error, text in refused:
        with pytest.raises(error, match=text):
            read_commitments(DRAW, write_commitments(shown))
    stranger = commit(DRAW, 11, SECRETS[1], PARTIES.sites[1])
    with pytest.raises(DrawRefused, match="no site number 11"):
        read_commitment(DRAW, stranger)


def test_aggregator_draws_with_all_sites():
    """It waits for every commitment, then for every secret."""
    half = AggregatorDraw(DRAW)
    with pytest.raises(TooFewSites, match="commitment of site-01"):
        half.commitments()
    for data in commitments().values():
        half.on_commitment(data)
    with pytest.raises(OutOfOrder, match="has already committed"):
        half.on_commitment(commitments()[1])
    assert half.commitments() == write_commitments(commitments())
    with pytest.raises(DrawRefused, match="not match its commitment"):
        half.on_reveal(write_reveal(1, SECRETS[2]))
    with pytest.raises(TooFewSites, match="secret of site-01"):
        half.outcome()
    for i, secret in SECRETS.items():
        assert half.on_reveal(write_reveal(i, secret)) == site_name(i)
    assert half.outcome() == outcome_of(DRAW, VALUES, SECRETS)
    assert half.secrets == SECRETS


def of_group() -> tuple[Contract, Group]:
    """The contract of a group of three, and what its sites have drawn."""
    outcome = outcome_of(DRAW, VALUES, SECRETS)
    chosen = outcome.groups[1]
    contract = group_contract(WHOLE, chosen, outcome.digest)
    return contract, Group(sites=frozenset(chosen), partition=outcome.digest)


def test_contract_of_a_group_is_of_its_sites_alone():
    """All of them must answer, and nothing else differs from that of all."""
    contract, group = of_group()
    assert {member.site for member in contract.members} == group.sites
    assert contract.setting is Setting.P1
    assert contract.min_sites == contract.num_sites
    same = {
        "members": WHOLE.members,
        "threshold": WHOLE.threshold,
        "min_sites": WHOLE.min_sites,
        "scale": WHOLE.scale,
        "amplitude": WHOLE.amplitude,
        "partition": b"",
    }
    assert replace(contract, **same) == WHOLE
    assert Contract.from_bytes(contract.to_bytes()) == contract
    check_against_policy(contract, PARTIES.policy(group=group))


def test_contract_of_other_groups_is_refused():
    """By its digest, by its members, and where no groups are drawn or none are told."""
    contract, group = of_group()
    outcome = outcome_of(DRAW, VALUES, SECRETS)
    for other, policy, key in [
        (replace(contract, partition=bytes(32)), group, "partition"),
        (contract, None, "partition"),
        (WHOLE, group, "partition"),
        (group_contract(WHOLE, outcome.groups[2], outcome.digest), group, "members"),
    ]:
        with pytest.raises(ContractRefused) as caught:
            check_against_policy(other, PARTIES.policy(group=policy))
        assert caught.value.key == key


def test_group_of_another_threshold_than_the_jobs_is_refused():
    """Whoever may be missing from a sum is the job's to say, not the aggregator's."""
    outcome = outcome_of(DRAW, VALUES, SECRETS)
    partition = outcome.digest
    five = [member.site for member in WHOLE.members][:5]
    lowered, all_ = (group_contract(WHOLE, five, partition, t) for t in (4, 0))
    assert (lowered.setting, lowered.quorum) == (Setting.P2, 4)
    assert all_.setting is Setting.P1
    for contract, threshold in ((lowered, 4), (all_, 0)):
        group = Group(sites=frozenset(five), partition=partition, threshold=threshold)
        check_against_policy(contract, PARTIES.policy(group=group))
        other = replace(group, threshold=4 - threshold)
        with pytest.raises(ContractRefused) as caught:
            check_against_policy(contract, PARTIES.policy(group=other))
        assert caught.value.key == "threshold"
    fewer = replace(all_, min_sites=4)
    with pytest.raises(ContractRefused, match="may hold 4 updates"):
        check_against_policy(
            fewer,
            PARTIES.policy(group=Group(sites=frozenset(five), partition=partition)),
        )


def test_group_against_a_sites_policy_is_refused():
    """What an operator demands of a sum holds for the sum of a group."""
    contract, group = of_group()
    with pytest.raises(ContractRefused, match="may hold only 3 updates"):
        check_against_policy(contract, PARTIES.policy(group=group, min_sites=4))


def test_model_made_without_a_group_has_a_certificate():
    """A group whose sum is left out continues; where all are in one sum nobody may."""
    contract, _ = of_group()
    model = hashlib.sha256(b"after round 3").digest()
    data = certify(without_sum(3), model, PARTIES.aggregator)
    trail = ModelTrail(contract, number=1, setup_hash=bytes(32))
    trail.check(data, round_index=4, model_digest=model)
    whole = ModelTrail(WHOLE, number=1, setup_hash=bytes(32))
    with pytest.raises(CertificateRefused, match="contract does not allow"):
        whole.check(data, round_index=4, model_digest=model)
    assert isinstance(Certificate.from_bytes(data).opened, OpenedRound)


def test_commitment_hides_the_secret():
    """Nothing of it is in what others are shown."""
    secret = entropy("draw")(32)
    assert secret not in commit(DRAW, 1, secret, PARTIES.sites[1])

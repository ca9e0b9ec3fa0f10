"""A site's policy: which contracts it signs, and the first reason why not."""

import dataclasses
import hashlib
from typing import Any

import pytest
from support.secagg_parties import RECORD, Parties

from federation.ids import SiteId
from privacy.secagg.agreement.contract import Contract, members_of
from privacy.secagg.agreement.policy import check_against_policy
from privacy.secagg.agreement.terms import NO_PRIVACY, PrivacyTerms
from privacy.secagg.arithmetic.noise_shares import NoiseShare
from privacy.secagg.errors import ContractRefused, StaleRoster

PARTIES = Parties(5)
CONTRACT = PARTIES.contract()
OTHER = hashlib.sha256(b"other").digest()


def test_good_contract_passes():
    """At the policy exactly, and when its hash has been approved."""
    check_against_policy(CONTRACT, PARTIES.policy())
    approved = PARTIES.policy(approved=frozenset({CONTRACT.digest}))
    check_against_policy(CONTRACT, approved)


@pytest.mark.parametrize(
    ("key", "terms", "demands"),
    [
        ("approval", {}, {"approved": frozenset({OTHER})}),
        ("threshold", {}, {"colluding": 3}),
        ("min_sites", {"min_sites": 2}, {}),
        ("min_sites", {}, {"min_sites": 4}),
        ("ring_bits", {"ring_bits": 16}, {"ring_bits": {32}}),
        ("levels", {"levels": 3}, {"levels": {4, 8}}),
        ("levels", {"levels": 3}, {"levels": set()}),
        ("element_bound", {"element_bound": 0.2}, {"max_element_bound": 0.1}),
        ("element_bound", {}, {"max_element_bound": 0.1}),
        ("weight_rule", {}, {"weight_rules": frozenset({"uniform"})}),
        ("header_slots", {"header_slots": ("weight", "age")}, {}),
        ("header_slots", {"header_slots": ("loss", "weight")}, {}),
    ],
)
def test_contract_against_the_policy_is_refused(
    key: str, terms: dict[str, Any], demands: dict[str, Any]
):
    """What only a policy sees; `test_lowered_contract.py` has every field."""
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(PARTIES.contract(**terms), PARTIES.policy(**demands))
    assert key == caught.value.key


@pytest.mark.parametrize(
    ("key", "changes", "demands"),
    [
        ("profile", {}, {"privacy_profiles": frozenset({"joint", "site"})}),
        ("epsilon_cap", {}, {"epsilon_cap": 3.9}),
        ("delta", {"profile": "site"}, {"max_delta": 9e-7}),
        ("profile", None, {"privacy_profiles": frozenset({"record"})}),
        ("epsilon_cap", None, {"epsilon_cap": 1e9}),
        ("delta", None, {"max_delta": 0.99}),
    ],
)
def test_weaker_differential_privacy_is_refused(
    key: str, changes: dict[str, Any] | None, demands: dict[str, Any]
):
    """Without any, epsilon is infinite and delta is 1."""
    terms = NO_PRIVACY if changes is None else dataclasses.replace(RECORD, **changes)
    contract = PARTIES.contract(differential_privacy=terms)
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(contract, PARTIES.policy(**demands))
    assert caught.value.key == f"differential_privacy.{key}"


def test_older_roster_is_refused_as_stale():
    """A key that was withdrawn cannot come back."""
    with pytest.raises(StaleRoster):
        check_against_policy(PARTIES.contract(roster_serial=2), PARTIES.policy())


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (6, {"site": SiteId("zz"), "public_key": OTHER}),
        (5, {"public_key": OTHER}),
        (5, {"organisation": "another"}),
        (5, {"site": SiteId("zz")}),
    ],
    ids=["sybil", "key", "organisation", "name"],
)
def test_members_are_in_the_roster(number: int, changes: dict[str, Any]):
    """As it pins them, and nobody else."""
    last = CONTRACT.members[min(number, 5) - 1]
    stranger = dataclasses.replace(last, number=number, **changes)
    contract = PARTIES.contract(
        members=(*CONTRACT.members[: number - 1], stranger), threshold=number
    )
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(contract, PARTIES.policy())
    assert caught.value.key == "members"


def test_members_stand_in_the_order_of_the_roster():
    """One list of sites has one numbering: a number is a point of the sharing."""
    first, second, *others = CONTRACT.members
    swapped = (
        dataclasses.replace(second, number=1),
        dataclasses.replace(first, number=2),
        *others,
    )
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(PARTIES.contract(members=swapped), PARTIES.policy())
    assert caught.value.key == "members"


def test_a_run_may_be_of_some_sites_of_the_roster():
    """As long as a sum of them hides what the policy wants hidden."""
    sites = {member.site for member in CONTRACT.members[1:4]}
    members = members_of(PARTIES.roster, sites)
    assert [(m.number, m.site) for m in members] == list(enumerate(sorted(sites), 1))
    contract = PARTIES.contract(members=members, threshold=3, min_sites=3)
    check_against_policy(contract, PARTIES.policy())
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(contract, PARTIES.policy(min_sites=4))
    assert caught.value.key == "min_sites"


def test_two_sites_need_both_waivers():
    """The contract's waiver binds nobody who has not given one."""
    two = Parties(2)
    contract = two.contract()
    assert contract.members == members_of(two.roster)
    check_against_policy(contract, two.policy())
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(contract, two.policy(accept_two_sites=False))
    assert caught.value.key == "two_site_waiver"


def test_two_sites_with_private_records_need_no_waiver():
    """At the site as in the contract."""
    two = Parties(2)
    contract = two.contract(two_site_waiver=False, differential_privacy=RECORD)
    check_against_policy(contract, two.policy(accept_two_sites=False))


def test_colluders_are_counted_with_the_threshold():
    """A higher threshold passes a stricter policy."""
    check_against_policy(PARTIES.contract(threshold=4), PARTIES.policy(colluding=2))
    with pytest.raises(ContractRefused, match="tolerates 2"):
        check_against_policy(PARTIES.contract(threshold=4), PARTIES.policy(colluding=3))
    check_against_policy(PARTIES.contract(threshold=5), PARTIES.policy(colluding=3))


JOINT = dataclasses.replace(RECORD, profile="joint", steps_per_round=1)
SHARE = NoiseShare(multiplier=1.1, sensitivity=1.0, size=1000, threshold=4, colluding=1)
RING = SHARE.ring_spec(bits=32, num_sites=5, clip_norm=1.0)


def _with_noise(profile: str, std: float = RING.noise_std, **changes: Any) -> Contract:
    terms = dataclasses.replace(JOINT, profile=profile, ring_noise_std=std)
    usual = {
        "differential_privacy": terms,
        "weight_rule": "uniform",
        "max_examples": 1,
        "threshold": 4,
    }
    return PARTIES.contract(**(usual | changes))


@pytest.mark.parametrize("profile", ["joint", "site"])
def test_noise_at_the_limit_passes(profile: str):
    """The planned share exactly, more of it, and more updates in a sum."""
    policy = PARTIES.policy(noise_share=SHARE)
    check_against_policy(_with_noise(profile), policy)
    check_against_policy(_with_noise(profile, RING.noise_std * 1.01), policy)
    check_against_policy(_with_noise(profile, threshold=5), policy)


@pytest.mark.parametrize("profile", ["record", "person", "joint"])
def test_delta_of_a_site_with_fewer_records_weakens_no_other(profile: str):
    """Each accounts for its own records at its own delta, which it has checked."""
    std = RING.noise_std if profile == "joint" else 0.0
    policy = PARTIES.policy(noise_share=SHARE, max_delta=1e-9)
    check_against_policy(_with_noise(profile, std), policy)


@pytest.mark.parametrize("profile", ["joint", "site"])
@pytest.mark.parametrize(
    ("key", "text", "changes", "demands"),
    [
        (
            "differential_privacy.ring_noise_std",
            r"noise multiplier of 1\.09",
            {"std": RING.noise_std * (1 - 1e-6)},
            {},
        ),
        (
            "differential_privacy.ring_noise_std",
            "fewer than 4",
            {"std": 3.99},
            {"noise_share": dataclasses.replace(SHARE, multiplier=1e-12)},
        ),
        (
            "differential_privacy.ring_noise_std",
            "planned no noise inside",
            {},
            {"noise_share": None},
        ),
        (
            "threshold",
            r"4 updates .*noise than the 5",
            {},
            {"noise_share": dataclasses.replace(SHARE, threshold=5)},
        ),
        (
            # As many shares of others, as long as only one site colludes.
            "threshold",
            r"4 updates .*noise than the 5",
            {},
            {"noise_share": dataclasses.replace(SHARE, threshold=5, colluding=2)},
        ),
        (
            "weight_rule",
            "what the noise must",
            {"weight_rule": "examples", "max_examples": 10},
            {},
        ),
        (
            "element_bound",
            "the grid that clip_norm sets",
            {"element_bound": 0.999, "std": RING.noise_std * 1.01},
            {},
        ),
    ],
)
def test_contract_with_less_than_the_planned_noise_is_refused(
    profile: str,
    key: str,
    text: str,
    changes: dict[str, Any],
    demands: dict[str, Any],
):
    """Whatever the aggregator takes away from what the site accounts for."""
    policy = PARTIES.policy(**({"noise_share": SHARE} | demands))
    with pytest.raises(ContractRefused, match=text) as caught:
        check_against_policy(_with_noise(profile, **changes), policy)
    assert key == caught.value.key


def test_larger_clip_norm_than_planned_is_refused_where_sites_are_the_unit():
    """A whole update changes by it; a step over records by its sensitivity alone."""
    share = dataclasses.replace(SHARE, sensitivity=0.5)
    policy = PARTIES.policy(noise_share=share)
    check_against_policy(_with_noise("joint"), policy)
    with pytest.raises(ContractRefused, match="noise is calibrated for"):
        check_against_policy(_with_noise("site"), policy)


@pytest.mark.parametrize("terms", [NO_PRIVACY, RECORD], ids=["waived", "private"])
def test_two_sites_are_no_exception_to_the_fewest_in_a_sum(terms: PrivacyTerms):
    """An aggregator may choose so few that the operator's number means nothing."""
    sites = {member.site for member in CONTRACT.members[:2]}
    contract = PARTIES.contract(
        members=members_of(PARTIES.roster, sites),
        threshold=2,
        min_sites=2,
        two_site_waiver=True,
        differential_privacy=terms,
    )
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(contract, PARTIES.policy(min_sites=3))
    assert caught.value.key == "min_sites"


def test_members_are_the_sites_of_the_job():
    """A sum of fewer would be another run than the operator has accepted."""
    sites = frozenset(member.site for member in CONTRACT.members)
    check_against_policy(CONTRACT, PARTIES.policy(sites=sites))
    fewer = members_of(PARTIES.roster, {m.site for m in CONTRACT.members[:4]})
    contract = PARTIES.contract(members=fewer, threshold=4)
    with pytest.raises(ContractRefused) as caught:
        check_against_policy(contract, PARTIES.policy(sites=sites))
    assert caught.value.key == "members"

"""A site's floor: which contracts it signs, and the first reason why not."""

import dataclasses
import hashlib
from typing import Any

import pytest
from support.secagg_parties import RECORD, Parties

from federation.ids import SiteId
from privacy.secagg.contract import members_of
from privacy.secagg.errors import ContractRefused, StaleRoster
from privacy.secagg.floor import check_against_floor
from privacy.secagg.terms import NO_PRIVACY

PARTIES = Parties(5)
CONTRACT = PARTIES.contract()
OTHER = hashlib.sha256(b"other").digest()


def test_good_contract_passes():
    """At the floor exactly, and when its hash has been approved."""
    check_against_floor(CONTRACT, PARTIES.floor())
    approved = PARTIES.floor(approved=frozenset({CONTRACT.digest}))
    check_against_floor(CONTRACT, approved)


@pytest.mark.parametrize(
    ("key", "terms", "demands"),
    [
        ("approval", {}, {"approved": frozenset({OTHER})}),
        ("code_hash", {"code_hash": OTHER}, {}),
        ("layout_digest", {"layout_digest": OTHER}, {}),
        ("layout_digest", {"num_values": 999}, {}),
        ("roster_serial", {"roster_serial": 4}, {}),
        ("roster_digest", {"roster_digest": OTHER}, {}),
        ("aggregator_key", {"aggregator_key": OTHER}, {}),
        ("threshold", {}, {"colluding": 3}),
        ("min_sites", {"min_sites": 2}, {}),
        ("min_sites", {}, {"min_sites": 4}),
        ("hybrid", {"hybrid": False}, {}),
        ("ring_bits", {"ring_bits": 16}, {"ring_bits": {32}}),
        ("clip_norm", {"clip_norm": 1.01}, {}),
        ("element_bound", {"element_bound": 0.2}, {"max_element_bound": 0.1}),
        ("element_bound", {}, {"max_element_bound": 0.1}),
        ("weight_rule", {}, {"weight_rules": frozenset({"uniform"})}),
        ("max_rounds", {"max_rounds": 51}, {}),
        ("header_slots", {"header_slots": ("weight", "age")}, {}),
        ("header_slots", {"header_slots": ("weight",)}, {}),
        ("header_slots", {"header_slots": ("loss", "weight")}, {}),
    ],
)
def test_contract_below_the_floor_is_refused(
    key: str, terms: dict[str, Any], demands: dict[str, Any]
):
    """Whatever the aggregator lowers is named."""
    with pytest.raises(ContractRefused) as caught:
        check_against_floor(PARTIES.contract(**terms), PARTIES.floor(**demands))
    assert key == caught.value.key


@pytest.mark.parametrize(
    ("key", "changes", "demands"),
    [
        ("profile", {}, {"privacy_profiles": frozenset({"joint", "site"})}),
        ("epsilon_cap", {}, {"max_epsilon": 3.9}),
        ("delta", {}, {"max_delta": 9e-7}),
        ("profile", None, {"privacy_profiles": frozenset({"record"})}),
        ("epsilon_cap", None, {"max_epsilon": 1e9}),
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
        check_against_floor(contract, PARTIES.floor(**demands))
    assert caught.value.key == f"differential_privacy.{key}"


def test_differential_privacy_at_the_floor_passes():
    """At the largest epsilon and delta exactly."""
    floor = PARTIES.floor(
        privacy_profiles=frozenset({"record"}), max_epsilon=4.0, max_delta=1e-6
    )
    check_against_floor(PARTIES.contract(differential_privacy=RECORD), floor)


def test_element_bound_at_the_floor_passes():
    """As large as it may be."""
    floor = PARTIES.floor(max_element_bound=0.1)
    check_against_floor(PARTIES.contract(element_bound=0.1), floor)


def test_older_roster_is_refused_as_stale():
    """A key that was withdrawn cannot come back."""
    with pytest.raises(StaleRoster):
        check_against_floor(PARTIES.contract(roster_serial=2), PARTIES.floor())


def test_members_are_the_roster():
    """Neither a sybil, nor a missing site, nor another key."""
    extra = dataclasses.replace(
        CONTRACT.members[0], number=6, site=SiteId("zz"), public_key=OTHER
    )
    renamed = dataclasses.replace(CONTRACT.members[4], public_key=OTHER)
    for members in (
        (*CONTRACT.members, extra),
        CONTRACT.members[:4],
        (*CONTRACT.members[:4], renamed),
    ):
        contract = PARTIES.contract(
            members=members, threshold=len(members), min_sites=3
        )
        with pytest.raises(ContractRefused) as caught:
            check_against_floor(contract, PARTIES.floor())
        assert caught.value.key == "members"


def test_two_sites_need_both_waivers():
    """The contract's waiver binds nobody who has not given one."""
    two = Parties(2)
    contract = two.contract()
    assert contract.members == members_of(two.roster)
    check_against_floor(contract, two.floor())
    with pytest.raises(ContractRefused) as caught:
        check_against_floor(contract, two.floor(accept_two_sites=False))
    assert caught.value.key == "two_site_waiver"


def test_two_sites_with_private_records_need_no_waiver():
    """At the site as in the contract."""
    two = Parties(2)
    contract = two.contract(two_site_waiver=False, differential_privacy=RECORD)
    check_against_floor(contract, two.floor(accept_two_sites=False))


def test_colluders_are_counted_with_the_threshold():
    """A higher threshold passes a stricter floor."""
    check_against_floor(PARTIES.contract(threshold=4), PARTIES.floor(colluding=2))
    with pytest.raises(ContractRefused, match="withstands 2"):
        check_against_floor(PARTIES.contract(threshold=4), PARTIES.floor(colluding=3))
    check_against_floor(PARTIES.contract(threshold=5), PARTIES.floor(colluding=3))

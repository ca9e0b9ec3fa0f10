"""The contract: its encoding, its thresholds and what it refuses."""

import dataclasses
from typing import Any

import pytest
from support.secagg_parties import Parties

from federation.ids import SiteId
from privacy.secagg import contract as contracts
from privacy.secagg.contract import Contract, Setting
from privacy.secagg.errors import ContractRefused, MalformedMessage, UnknownSite

PARTIES = Parties(5)
CONTRACT = PARTIES.contract()


@pytest.mark.parametrize(
    ("num_sites", "threshold", "dropouts", "colluding"),
    [
        (2, 2, 0, 0),
        (3, 3, 0, 1),
        (4, 3, 1, 1),
        (5, 4, 1, 2),
        (6, 5, 1, 3),
        (8, 6, 2, 3),
        (16, 11, 5, 5),
        (32, 22, 10, 11),
        (64, 43, 21, 21),
    ],
)
def test_table_of_thresholds(
    num_sites: int, threshold: int, dropouts: int, colluding: int
):
    """The table of SECURE_AGGREGATION.md, section 2.1."""
    assert threshold == contracts.smallest_threshold(num_sites)
    assert dropouts == contracts.dropouts_tolerated(num_sites, threshold)
    assert colluding == contracts.colluding_tolerated(num_sites, threshold)


@pytest.mark.parametrize("num_sites", range(2, 65))
def test_colluders_cannot_open_two_sums(num_sites: int):
    """2t > N + n_C, and two honest updates at least are in every sum."""
    for t in range(contracts.smallest_threshold(num_sites), num_sites + 1):
        colluding = contracts.colluding_tolerated(num_sites, t)
        assert 0 <= colluding < t
        assert 2 * t > num_sites + colluding
        assert t - colluding >= 2


def test_encoding_round_trip():
    """A contract comes back with the same hash."""
    data = CONTRACT.to_bytes()
    again = Contract.from_bytes(data)
    assert again == CONTRACT
    assert again.digest == CONTRACT.digest
    assert again.to_bytes() == data


def test_hash_is_frozen():
    """h_Q of a known contract: a change breaks every run under way."""
    expected = "5f23ca6a6c3e3d724625a491f25fa711d656d59b9d1cd30ed1ffd45a9e94f6a0"
    assert expected == CONTRACT.digest.hex()


def test_hash_depends_on_every_field():
    """No field can be changed behind a site's back."""
    changes: dict[str, Any] = {
        "run_id": "run-2",
        "code_hash": bytes(32),
        "layout_digest": bytes(32),
        "num_values": 1001,
        "roster_serial": 4,
        "roster_digest": bytes(32),
        "members": (*CONTRACT.members[:-1], altered_member(organisation="x")),
        "aggregator_key": b"\x02" * 32,
        "threshold": 5,
        "min_sites": 4,
        "ring_bits": 32,
        "clip_norm": 0.5,
        "scale": 2.0,
        "amplitude": 7,
        "weight_rule": "uniform",
        "max_examples": 11,
        "max_rounds": 51,
        "header_slots": ("loss", "weight"),
        "hybrid": False,
        "two_site_waiver": True,
    }
    changes["ring_bits"] = 24
    digests = {CONTRACT.digest}
    for key, value in changes.items():
        other = {key: value}
        if key == "weight_rule":
            other["max_examples"] = 1
        if key == "ring_bits":
            other["amplitude"] = 9
        digests.add(dataclasses.replace(CONTRACT, **other).digest)
    assert len(digests) == len(changes) + 1
    fields = {field.name for field in dataclasses.fields(Contract)}
    assert fields - set(changes) == {"suite", "differential_privacy"}


def altered_member(**changes: Any) -> contracts.Member:
    return dataclasses.replace(CONTRACT.members[-1], **changes)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("suite", {"suite": "xsa-v2"}),
        ("run_id", {"run_id": "Run 1"}),
        ("code_hash", {"code_hash": b""}),
        ("layout_digest", {"layout_digest": bytes(31)}),
        ("roster_digest", {"roster_digest": bytes(33)}),
        ("aggregator_key", {"aggregator_key": bytes(31)}),
        ("roster_serial", {"roster_serial": 0}),
        ("members", {"members": CONTRACT.members[:1]}),
        ("members", {"members": CONTRACT.members[1:]}),
        ("members", {"members": (*CONTRACT.members[:4], altered_member(site="a"))}),
        ("members", {"members": (*CONTRACT.members[:4], altered_member(site="A"))}),
        (
            "members",
            {
                "members": (
                    *CONTRACT.members[:4],
                    altered_member(public_key=CONTRACT.aggregator_key),
                )
            },
        ),
        ("threshold", {"threshold": 3}),
        ("threshold", {"threshold": 6}),
        ("min_sites", {"min_sites": 1}),
        ("min_sites", {"min_sites": 6}),
        ("max_rounds", {"max_rounds": 0}),
        ("max_rounds", {"max_rounds": contracts.MAX_ROUNDS + 1}),
        ("num_values", {"num_values": 0}),
        ("ring_bits", {"ring_bits": 31}),
        ("clip_norm", {"clip_norm": 0.0}),
        ("clip_norm", {"clip_norm": float("nan")}),
        ("scale", {"scale": float("inf")}),
        ("scale", {"scale": -1.0}),
        ("amplitude", {"amplitude": 0}),
        ("amplitude", {"amplitude": ((1 << 31) - 1) // 5 + 1}),
        ("weight_rule", {"weight_rule": "dynamic"}),
        ("max_examples", {"max_examples": 0}),
        ("max_examples", {"weight_rule": "uniform", "max_examples": 2}),
        ("header_slots", {"header_slots": ("a", "a")}),
        ("header_slots", {"header_slots": ("A",)}),
        ("header_slots", {"header_slots": tuple(f"s{i}" for i in range(65))}),
    ],
)
def test_contradictions_are_refused(key: str, changes: dict[str, Any]):
    """The first wrong field is named."""
    with pytest.raises(ContractRefused, match=rf"contract\.{key}: ") as caught:
        dataclasses.replace(CONTRACT, **changes)
    assert key == caught.value.key


def test_two_sites_need_a_waiver():
    """Without differential privacy each of two learns the other's update."""
    with pytest.raises(ContractRefused, match="learns the other's update"):
        Parties(2).contract(two_site_waiver=False)
    assert Parties(2).contract(two_site_waiver=True).setting is Setting.P1


@pytest.mark.parametrize(
    ("threshold", "setting", "quorum"), [(4, Setting.P2, 4), (5, Setting.P1, 5)]
)
def test_setting_follows_the_threshold(threshold: int, setting: Setting, quorum: int):
    """P1 if every site must answer."""
    contract = PARTIES.contract(threshold=threshold, min_sites=3)
    assert (setting, quorum) == (contract.setting, contract.quorum)


def test_amplitudes_of_all_sites_fit_in_the_ring():
    """The largest accepted amplitude times N does not wrap."""
    for bits in contracts.RING_BITS:
        highest = ((1 << (bits - 1)) - 1) // 5
        contract = PARTIES.contract(ring_bits=bits, amplitude=highest)
        assert contract.num_sites * contract.amplitude < 1 << (bits - 1)
        with pytest.raises(ContractRefused, match="could wrap"):
            PARTIES.contract(ring_bits=bits, amplitude=highest + 1)


def test_members_are_found():
    """By number and by name; strangers are named in the error."""
    assert CONTRACT.member(2) == CONTRACT.member_named(CONTRACT.members[1].site)
    for number in (0, 6):
        with pytest.raises(UnknownSite, match=f"client {number}"):
            CONTRACT.member(number)
    with pytest.raises(UnknownSite, match="'nobody'"):
        CONTRACT.member_named(SiteId("nobody"))


def test_every_cut_is_refused():
    """No prefix of a contract, and no longer text, is a contract."""
    data = CONTRACT.to_bytes()
    for end in range(0, len(data), 7):
        with pytest.raises(MalformedMessage):
            Contract.from_bytes(data[:end])
    with pytest.raises(MalformedMessage):
        Contract.from_bytes(data + b"\0")

"""The contract: its encoding, its thresholds and what it refuses."""

import dataclasses
import math
from typing import Any

import pytest
from support.secagg_parties import RECORD, Parties

from federation.ids import SiteId
from privacy.secagg.agreement import contract, contract as contracts
from privacy.secagg.agreement.contract import Contract, RelayMember, Setting
from privacy.secagg.agreement.terms import PrivacyTerms
from privacy.secagg.arithmetic.ring import RingSpec
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
    assert threshold == contract.smallest_threshold(num_sites)
    assert dropouts == num_sites - threshold
    assert colluding == contract.colluding_tolerated(num_sites, threshold)


def test_colluders_cannot_open_two_sums():
    """2t > N + n_C, and two honest updates at least are in every sum."""
    for num_sites in range(2, 65):
        for t in range(contract.smallest_threshold(num_sites), num_sites + 1):
            colluding = contract.colluding_tolerated(num_sites, t)
            assert 0 <= colluding < t, num_sites
            assert 2 * t > num_sites + colluding
            assert t - colluding >= 2, (num_sites, t)


def test_encoding_round_trip():
    """A contract comes back with the same hash."""
    data = CONTRACT.to_bytes()
    again = Contract.from_bytes(data)
    assert again == CONTRACT
    assert again.digest == CONTRACT.digest
    assert again.to_bytes() == data


def test_hash_is_frozen():
    """h_Q of a known contract: a change breaks every run under way."""
    expected = "5a2d99f650d92293d8d9ee002a5081c62a236aa30214a952b6307e55d5c032a7"
    assert expected == CONTRACT.digest.hex()


def test_hash_depends_on_every_field():
    """No field can be changed behind a site's back."""
    changes: dict[str, Any] = {
        "run_id": "run-2",
        "code_hash": bytes(32),
        "layout_digest": bytes(32),
        "job_digest": bytes(32),
        "num_values": 1001,
        "roster_serial": 4,
        "roster_digest": bytes(32),
        "members": (*CONTRACT.members[:-1], altered_member(organisation="x")),
        "aggregator_key": b"\x02" * 32,
        "threshold": 5,
        "min_sites": 4,
        "ring_bits": 24,
        "clip_norm": 0.5,
        "element_bound": 0.5,
        "clip_elements": True,
        "weight_rule": "uniform",
        "max_examples": 11,
        "max_rounds": 51,
        "header_slots": ("loss", "weight"),
        "differential_privacy": RECORD,
        "hybrid": False,
        "two_site_waiver": True,
        "partition": bytes(32),
        "levels": 4,
        "fragments": 2,
        "relays": (RelayMember(name=SiteId("x"), public_key=bytes(32), numbers=(1,)),),
    }
    together: dict[str, dict[str, Any]] = {
        "weight_rule": {"max_examples": 1},
        "clip_elements": {"element_bound": 0.5},
        "fragments": {"levels": 4, "num_values": 10_000},
    }
    digests = {CONTRACT.digest}
    for key, value in changes.items():
        changed = PARTIES.contract(**{key: value}, **together.get(key, {}))
        assert changed == Contract.from_bytes(changed.to_bytes())
        digests.add(changed.digest)
    assert len(digests) == len(changes) + 1
    fields = {field.name for field in dataclasses.fields(Contract)}
    # Only one suite is spoken; scale and amplitude follow from the others.
    assert fields - set(changes) == {"suite", "scale", "amplitude"}


@pytest.mark.parametrize("key", [f.name for f in dataclasses.fields(PrivacyTerms)])
def test_hash_depends_on_every_privacy_term(key: str):
    """Nor can the section on differential privacy."""
    joint = dataclasses.replace(
        RECORD, profile="joint", steps_per_round=1, ring_noise_std=4.0
    )
    base = RECORD if key == "steps_per_round" else joint
    new = {"profile": "site", "mechanism": "x", "steps_per_round": 3}.get(key, 0.25)
    other = dataclasses.replace(base, **{key: new})
    digests = {
        PARTIES.contract(differential_privacy=terms).digest for terms in (base, other)
    }
    assert len(digests) == 2


def altered_member(**changes: Any) -> contracts.Member:
    return dataclasses.replace(CONTRACT.members[-1], **changes)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("suite", {"suite": "xsa-v1"}),
        ("run_id", {"run_id": "Run 1"}),
        ("code_hash", {"code_hash": b""}),
        ("layout_digest", {"layout_digest": bytes(31)}),
        ("partition", {"partition": bytes(31)}),
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
        ("fragments", {"levels": 4, "fragments": 0}),
        ("fragments", {"levels": 4, "fragments": 65}),
        ("fragments", {"fragments": 2}),
        ("levels", {"levels": 2}),
        ("levels", {"levels": 5}),
        ("levels", {"levels": 257}),
        ("levels", {"levels": 4, "partition": bytes(32)}),
        ("clip_norm", {"clip_norm": 0.0}),
        ("clip_norm", {"clip_norm": float("nan")}),
        ("scale", {"scale": float("inf")}),
        ("scale", {"scale": -1.0}),
        ("amplitude", {"amplitude": 0}),
        ("amplitude", {"amplitude": CONTRACT.amplitude - 1}),
        ("amplitude", {"amplitude": CONTRACT.amplitude + 1}),
        ("scale", {"scale": math.nextafter(CONTRACT.scale, 0)}),
        ("amplitude", {"ring_bits": 24}),
        ("scale", {"clip_norm": 0.5}),
        ("scale", {"element_bound": 0.5}),
        ("element_bound", {"element_bound": 1.5}),
        ("element_bound", {"element_bound": -0.5}),
        ("element_bound", {"element_bound": 0.0}),
        ("element_bound", {"element_bound": float("nan")}),
        ("clip_elements", {"clip_elements": True}),
        ("ring_bits", {"clip_norm": 1e-320}),
        (
            "differential_privacy.delta",
            {"differential_privacy": dataclasses.replace(RECORD, delta=0.0)},
        ),
        ("weight_rule", {"weight_rule": "dynamic"}),
        ("max_examples", {"max_examples": 0}),
        ("max_examples", {"weight_rule": "uniform", "max_examples": 2}),
        ("header_slots", {"header_slots": ("a", "a")}),
        ("header_slots", {"header_slots": ("A",)}),
        ("header_slots", {"header_slots": tuple(f"s{i}" for i in range(2049))}),
    ],
)
def test_contradictions_are_refused(key: str, changes: dict[str, Any]):
    """The first wrong field is named."""
    with pytest.raises(ContractRefused, match=rf"contract\.{key}: ") as caught:
        dataclasses.replace(CONTRACT, **changes)
    assert key == caught.value.key


def test_few_levels_have_neither_noise_inside_the_sum_nor_a_bound_of_elements():
    """There is no room for the one, and the other is not needed."""
    joint = dataclasses.replace(
        RECORD, profile="joint", steps_per_round=1, ring_noise_std=4.0
    )
    PARTIES.contract(levels=4, differential_privacy=RECORD)
    with pytest.raises(
        ContractRefused, match=r"contract\.levels: .* no room for noise"
    ):
        PARTIES.contract(levels=4, differential_privacy=joint)
    with pytest.raises(ContractRefused, match=r"contract\.element_bound: levels have"):
        PARTIES.contract(levels=4, element_bound=0.5)


def test_two_sites_need_a_waiver():
    """Without differential privacy each of two learns the other's update."""
    with pytest.raises(ContractRefused, match="learns the other's update"):
        Parties(2).contract(two_site_waiver=False)
    assert Parties(2).contract(two_site_waiver=True).setting is Setting.P1


def test_two_sites_with_private_records_need_no_waiver():
    """Each site's own noise hides its records from the other; joint noise does not."""
    Parties(2).contract(two_site_waiver=False, differential_privacy=RECORD)
    joint = dataclasses.replace(
        RECORD, profile="joint", steps_per_round=1, ring_noise_std=4.0
    )
    with pytest.raises(ContractRefused, match="learns the other's update"):
        Parties(2).contract(two_site_waiver=False, differential_privacy=joint)


@pytest.mark.parametrize(
    ("threshold", "setting", "quorum"), [(4, Setting.P2, 4), (5, Setting.P1, 5)]
)
def test_setting_follows_the_threshold(threshold: int, setting: Setting, quorum: int):
    """P1 if every site must answer."""
    contract = PARTIES.contract(threshold=threshold, min_sites=3)
    assert (setting, quorum) == (contract.setting, contract.quorum)


@pytest.mark.parametrize("num_sites", [2, 5, 16, 17, 64])
@pytest.mark.parametrize("bits", contracts.RING_BITS)  # type: ignore[attr-defined]
def test_amplitudes_of_all_sites_fit_in_the_ring(bits: int, num_sites: int):
    """N times the amplitude does not wrap; the specification's section 3."""
    if bits == 16 and num_sites > 16:
        with pytest.raises(ContractRefused, match="16 bits are too coarse"):
            Parties(num_sites).contract(ring_bits=bits)
        return
    contract = Parties(num_sites).contract(ring_bits=bits)
    assert contract.amplitude == ((1 << (bits - 1)) - 1) // num_sites
    assert num_sites * contract.amplitude < 1 << (bits - 1)


def test_scale_and_amplitude_that_do_not_follow_are_named():
    """With what the contract says and what follows from its other fields."""
    ring = CONTRACT.ring()
    assert (CONTRACT.scale, CONTRACT.amplitude) == (ring.scale, ring.amplitude)
    with pytest.raises(ContractRefused, match=rf"is 9, but .* give {ring.amplitude}"):
        PARTIES.contract(amplitude=9)
    with pytest.raises(ContractRefused, match=rf"is 2.0, but .* give {ring.scale}"):
        PARTIES.contract(scale=2.0)


def test_ring_is_that_of_the_contract():
    """Every field of it, the noise inside the sum included."""
    noisy = dataclasses.replace(
        RECORD, profile="joint", steps_per_round=1, ring_noise_std=1000.0
    )
    contract = PARTIES.contract(
        ring_bits=24,
        clip_norm=3.0,
        element_bound=0.5,
        clip_elements=True,
        differential_privacy=noisy,
    )
    expected = RingSpec(
        bits=24,
        num_sites=5,
        clip_norm=3.0,
        element_bound=0.5,
        clip_elements=True,
        noise_std=1000.0,
    )
    assert expected == contract.ring()
    assert contract.amplitude == (2**23 - 1 - math.ceil(12_000 * 5**0.5)) // 5


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

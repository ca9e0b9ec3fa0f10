"""A contract that was lowered ends at the site, before any key exists.

The aggregator signs it with its true key: it is the aggregator who lowers.
"""

import dataclasses
import hashlib
from typing import Any

import pytest
from support.secagg_parties import RECORD, Parties, entropy

from federation.errors import ProtocolError
from privacy.secagg.agreement.canonical import float64, u64
from privacy.secagg.agreement.identity import Label
from privacy.secagg.agreement.terms import NO_PRIVACY
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.errors import ContractRefused, OutOfOrder, StaleRoster
from privacy.secagg.protocol.messages import Offer
from privacy.secagg.protocol.setup import SiteSetup

PARTIES = Parties(5)
AGREED = PARTIES.contract(
    element_bound=0.01, differential_privacy=RECORD, threshold=5, min_sites=4
)
OTHER = hashlib.sha256(b"other").digest()


class _Drawn:
    """A source of keys that counts what is drawn from it."""

    def __init__(self) -> None:
        self.count = 0
        self._source = entropy("run keys")

    def __call__(self, count: int) -> bytes:
        self.count += count
        return self._source(count)


def _site(drawn: _Drawn, **policy: Any) -> SiteSetup:
    """A site whose operator demands what was agreed, and no less."""
    demands: dict[str, Any] = {
        "colluding": 3,
        "min_sites": 4,
        "ring_bits": frozenset({32}),
        "levels": frozenset({16}),
        "max_element_bound": 0.01,
        "weight_rules": frozenset({"examples"}),
        "privacy_profiles": frozenset({"record"}),
        "epsilon_cap": 4.0,
    }
    return PARTIES.site_setup(
        1, policy=PARTIES.policy(**(demands | policy)), random_bytes=drawn
    )


def _offer(contract: bytes) -> bytes:
    signature = PARTIES.aggregator.sign(Label.OFFER, contract)
    return Offer(contract=contract, signature=signature).to_bytes()


def _assert_refused(key: str | None, contract: bytes, **policy: Any) -> None:
    """With a typed error, no key drawn, and the setup over."""
    drawn = _Drawn()
    site = _site(drawn, **policy)
    with pytest.raises(ProtocolError) as caught:
        site.on_offer(_offer(contract))
    if key is None:
        assert isinstance(caught.value, StaleRoster)
    else:
        assert isinstance(caught.value, ContractRefused)
        assert caught.value.key == key
    assert drawn.count == 0
    with pytest.raises(OutOfOrder):
        site.on_offer(_offer(AGREED.to_bytes()))


def test_what_was_agreed_is_accepted():
    """The same site, the same policy."""
    drawn = _Drawn()
    assert _site(drawn).on_offer(_offer(AGREED.to_bytes()))
    assert drawn.count > 0


@pytest.mark.parametrize(
    ("key", "lowered"),
    [
        ("code_hash", {"code_hash": OTHER}),
        ("layout_digest", {"layout_digest": OTHER}),
        ("layout_digest", {"num_values": 999}),
        (None, {"roster_serial": 2}),
        ("roster_serial", {"roster_serial": 4}),
        ("roster_digest", {"roster_digest": OTHER}),
        ("aggregator_key", {"aggregator_key": OTHER}),
        ("threshold", {"threshold": 4}),
        ("min_sites", {"min_sites": 3}),
        ("ring_bits", {"ring_bits": 24}),
        ("levels", {"levels": 3, "element_bound": None}),
        ("clip_norm", {"clip_norm": 1.01}),
        ("element_bound", {"element_bound": 0.0101}),
        ("element_bound", {"element_bound": None}),
        ("weight_rule", {"weight_rule": "uniform", "max_examples": 1}),
        ("max_rounds", {"max_rounds": 51}),
        ("header_slots", {"header_slots": ("weight", "loss", "age")}),
        ("header_slots", {"header_slots": ("weight",)}),
        ("hybrid", {"hybrid": False}),
        ("differential_privacy.profile", {"differential_privacy": NO_PRIVACY}),
        ("differential_privacy.epsilon_cap", {"epsilon_cap": 4.1}),
    ],
)
def test_lowered_field_ends_the_setup(key: str | None, lowered: dict[str, Any]):
    """Every field that a contract's protection rests on."""
    values = {
        "element_bound": 0.01,
        "differential_privacy": RECORD,
        "threshold": 5,
        "min_sites": 4,
    }
    if key == "differential_privacy.epsilon_cap":
        lowered = {"differential_privacy": dataclasses.replace(RECORD, **lowered)}
    _assert_refused(key, PARTIES.contract(**(values | lowered)).to_bytes())


def test_contract_that_nobody_approved_ends_the_setup():
    """Though it is no lower than the one that was."""
    other = PARTIES.contract(
        run_id="run-2",
        element_bound=0.01,
        differential_privacy=RECORD,
        threshold=5,
        min_sites=4,
    )
    approved = frozenset({AGREED.digest})
    assert _site(_Drawn(), approved=approved).on_offer(_offer(AGREED.to_bytes()))
    _assert_refused("approval", other.to_bytes(), approved=approved)


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("scale", float64(AGREED.scale), float64(AGREED.scale / 2)),
        ("amplitude", u64(AGREED.amplitude), u64(AGREED.amplitude + 1)),
        ("amplitude", u64(AGREED.amplitude), u64(AGREED.amplitude // 2)),
        ("element_bound", float64(0.01), float64(2.0)),
        ("element_bound", float64(0.01), float64(-0.01)),
        ("scale", float64(0.01), float64(0.02)),
    ],
)
def test_arithmetic_that_does_not_follow_ends_the_setup(
    key: str, before: bytes, after: bytes
):
    """Bytes that no honest ``Contract`` encodes to, under a true signature."""
    data = AGREED.to_bytes()
    # The sampling rate is 0.01 as well, and stands before the element bound.
    at = data.rindex(before)
    _assert_refused(key, data[:at] + after + data[at + len(before) :])


def test_ring_too_coarse_for_its_sites_ends_the_setup():
    """16 bits for 17 sites, with the numbers that would belong to them."""
    parties = Parties(17)
    good = parties.contract(ring_bits=24)
    fine = RingSpec(bits=16, num_sites=16, clip_norm=1.0)
    data = good.to_bytes()
    at = data.rindex(u64(24) + float64(1.0))
    tail = data[at + 48 :]
    number = float64(0.0) + u64(0) + float64(fine.scale) + u64(fine.amplitude)
    data = data[:at] + u64(16) + float64(1.0) + number + tail
    signature = parties.aggregator.sign(Label.OFFER, data)
    drawn = _Drawn()
    site = parties.site_setup(1, random_bytes=drawn)
    with pytest.raises(ContractRefused, match=r"16 bits .*for 17 sites"):
        site.on_offer(Offer(contract=data, signature=signature).to_bytes())
    assert drawn.count == 0

"""Sums of masked words that a relay makes, and what a contract says of relays."""

from dataclasses import replace

import numpy as np
import pytest
from support.secagg_parties import Parties

from federation.ids import SiteId
from privacy.secagg.agreement.contract import Contract, RelayMember
from privacy.secagg.agreement.policy import check_against_policy
from privacy.secagg.arithmetic.accumulator import sum_words
from privacy.secagg.errors import ContractRefused

PARTIES = Parties(5)
CONTRACT = PARTIES.contract()


@pytest.mark.parametrize("bits", [16, 24, 32, 64])
@pytest.mark.parametrize("num_values", [1, 1000, 70_000])
def test_sum_is_exact_modulo_the_word(bits: int, num_values: int):
    rng, width = np.random.default_rng(bits), bits // 8
    sites = [rng.integers(0, 256, width * num_values, np.uint8) for _ in range(5)]
    found = sum_words(sites, size=width * num_values, bits=bits)
    for place in (0, num_values // 2, num_values - 1):
        where = slice(width * place, width * place + width)
        wanted = sum(int.from_bytes(each[where].tobytes(), "little") for each in sites)
        assert int.from_bytes(found[where].tobytes(), "little") == wanted % (1 << bits)


def test_words_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"8 bytes of masked words .*16"):
        sum_words([np.zeros(8, np.uint8)], size=16, bits=32)


def relay(name: str, *numbers: int, key: int = 200) -> RelayMember:
    return RelayMember(name=SiteId(name), public_key=bytes([key]) * 32, numbers=numbers)


def test_relays_are_a_part_of_the_contract():
    """They change its hash; a contract without them is written as before."""
    plain = CONTRACT
    with_one = replace(plain, relays=(relay("cloud", 1, 2),))
    assert Contract.from_bytes(with_one.to_bytes()) == with_one
    assert with_one.to_bytes().startswith(plain.to_bytes())
    assert with_one.digest != plain.digest


@pytest.mark.parametrize(
    "relays",
    [
        (relay("a", 1), relay("b", 1, key=201)),
        (relay("a", 99),),
        (relay("a"),),
        (relay("b", 1), relay("a", 2, key=201)),
        (relay("a", 1), relay("b", 2)),
    ],
)
def test_contradictions_are_refused(relays: tuple[RelayMember, ...]):
    with pytest.raises(ContractRefused, match="relays"):
        replace(CONTRACT, relays=relays)


def test_site_accepts_only_the_relays_of_job_and_roster():
    """With another key, or with another site behind it, nothing may be added up."""
    own = relay("cloud", 1, 2)
    contract = replace(CONTRACT, relays=(own,))
    policy = PARTIES.policy(relays=(own,))
    check_against_policy(contract, policy)
    check_against_policy(contract, PARTIES.policy())
    for other in (relay("cloud", 1, 2, key=201), relay("cloud", 1), relay("x", 1, 2)):
        with pytest.raises(ContractRefused, match="those of the job") as caught:
            check_against_policy(replace(contract, relays=(other,)), policy)
        assert caught.value.key == "relays"
    with pytest.raises(ContractRefused, match="those of the job"):
        check_against_policy(CONTRACT, policy)

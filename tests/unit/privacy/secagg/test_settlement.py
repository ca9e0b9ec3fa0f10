"""How a site knows that its update of a round is not in the sum: by a signature."""

from typing import Any

import pytest
from support.secagg_parties import MODEL, Parties

from privacy.secagg.agreement.certificate import (
    ModelTrail,
    OpenedRound,
    before_rounds,
    certify,
)
from privacy.secagg.errors import BadSignature, CertificateRefused

PARTIES = Parties(4)
SETUP, CONTEXT, SUM = bytes(32), bytes([1]) * 32, bytes([2]) * 32


def trail(*, threshold: int = 3, number: int = 1) -> ModelTrail:
    contract = PARTIES.contract(threshold=threshold, levels=4)
    return ModelTrail(contract, number=number, setup_hash=SETUP)


def opened(round_index: int, *survivors: int) -> OpenedRound:
    return OpenedRound(
        round_index=round_index,
        context=CONTEXT,
        survivors=survivors,
        sum_digest=SUM,
        header_digest=SUM,
    )


def show(to: ModelTrail, one: OpenedRound, *, at: int, by: Any = None) -> None:
    data = certify(one, MODEL, by or PARTIES.aggregator)
    to.check(data, round_index=at, model_digest=MODEL)


def test_a_certificate_says_who_is_in_the_sum_of_its_own_round():
    """Of other rounds it says nothing: what was sent in these counts as spent."""
    one = opened(2, 2, 3, 4)
    assert one.leaves_out(2, 1)
    assert not one.leaves_out(2, 3)
    assert not one.leaves_out(1, 1)
    assert not before_rounds(SETUP).leaves_out(2, 1)


def test_certificate_of_something_else_is_refused():
    """Of a stranger, of another model, of too few sites, or of the round itself."""
    found = trail()
    with pytest.raises(BadSignature):
        show(found, opened(1, 2, 3, 4), at=2, by=PARTIES.sites[2])
    with pytest.raises(CertificateRefused):
        show(found, opened(1, 2, 3), at=2)
    with pytest.raises(CertificateRefused):
        show(found, opened(2, 2, 3, 4), at=2)
    data = certify(opened(1, 2, 3, 4), MODEL, PARTIES.aggregator)
    with pytest.raises(CertificateRefused):
        found.check(data, round_index=2, model_digest=bytes(32))


def test_where_all_must_answer_nobody_is_left_out():
    """An aggregator cannot have an update sent twice by saying so."""
    found = trail(threshold=4)
    with pytest.raises(CertificateRefused, match="contract does not allow"):
        show(found, opened(1, 2, 3, 4), at=2)


def test_list_that_a_site_signed_binds_the_aggregator():
    """The site is in that list: no other can be certified to it."""
    found = trail()
    found.note_consent(1, (1, 2, 3, 4))
    with pytest.raises(CertificateRefused, match="list that this site"):
        show(found, opened(1, 2, 3, 4), at=2)
    show(found, opened(1, 1, 2, 3, 4), at=2)


def test_second_certificate_of_a_round_is_refused():
    """Two lists of one round contradict each other, and both are signed."""
    found = trail()
    show(found, opened(1, 1, 2, 3), at=2)
    with pytest.raises(CertificateRefused, match="contradicts"):
        show(found, opened(1, 2, 3, 4), at=3)

"""The setup against an aggregator that lies: no keys leave a wrong setup."""

from collections.abc import Callable
from typing import Any

import pytest
from support.secagg_parties import (
    Parties,
    alter,
    confirms_with,
    entropy,
    site_name,
    start,
)

from federation.errors import ProtocolError
from privacy.secagg.agreement import identity as identities
from privacy.secagg.agreement.identity import Label
from privacy.secagg.errors import (
    BadSignature,
    BookRefused,
    ContractRefused,
    MalformedMessage,
    OutOfOrder,
    TooFewSites,
    UnknownSite,
    WeakKey,
    WrongContext,
)
from privacy.secagg.protocol.key_schedule import PublicRunKeys, Secret
from privacy.secagg.protocol.messages import (
    Advert,
    Book,
    Confirm,
    Confirms,
    Offer,
)
from privacy.secagg.protocol.setup import AggregatorSetup, SiteSetup

PARTIES = Parties(4)
CONTRACT = PARTIES.contract()


def offer(parties: Parties = PARTIES, **changes: Any) -> bytes:
    """An offer that the aggregator really signed."""
    contract = parties.contract(**changes).to_bytes()
    signature = parties.aggregator.sign(Label.OFFER, contract)
    return Offer(contract=contract, signature=signature).to_bytes()


def advertised(
    seed: str = "run keys",
) -> tuple[dict[int, SiteSetup], dict[int, bytes]]:
    """All sites after S1, and their adverts."""
    setups = {
        i: PARTIES.site_setup(i, random_bytes=entropy(f"{seed} {i}"))
        for i in PARTIES.sites
    }
    return setups, {i: setup.on_offer(offer()) for i, setup in setups.items()}


def resigned(data: bytes, number: int, **changes: Any) -> bytes:
    """An advert with other fields, signed anew by the key of a site."""
    message = alter(Advert.from_bytes(data), **changes)
    return message.signed_by(PARTIES.sites[number]).to_bytes()


def with_keys(data: bytes, **changes: bytes) -> PublicRunKeys:
    return alter(Advert.from_bytes(data).keys, **changes)


def refuses_book(
    adverts: dict[int, bytes], setup: SiteSetup, error: type[ProtocolError]
) -> None:
    """Site 1 refuses a book, and the setup is over for it."""
    with pytest.raises(error):
        setup.on_book(Book(adverts=adverts).to_bytes())
    with pytest.raises(OutOfOrder, match="aborted"):
        setup.on_book(Book(adverts=adverts).to_bytes())
    assert setup._keys is None
    assert setup._exchanges == {}


def exchanged(setup: SiteSetup) -> list[Secret]:
    """What a setup has exchanged with others, and not yet turned into roots."""
    pairs = [*setup._exchanges.values()]
    return [*(each for pair in pairs for each in pair), *setup._kem_secrets.values()]


@pytest.mark.parametrize("end", ["complete", "refused", "closed"])
def test_exchanged_secrets_are_overwritten(end: str):
    """Of masks, of channels and of ML-KEM, however the setup ends."""
    setups, confirms = confirmed()
    setup = setups[2]
    secrets = exchanged(setup)
    assert len(secrets) == 2 * 3 + 2
    if end == "complete":
        setup.on_confirms(Confirms(confirms=confirms).to_bytes())
    elif end == "refused":
        with pytest.raises(BookRefused):
            setup.on_confirms(Confirms(confirms={}).to_bytes())
    else:
        setup.close()
    assert all(secret.erased for secret in secrets)
    with pytest.raises(OutOfOrder):
        setup.on_confirms(Confirms(confirms=confirms).to_bytes())


@pytest.mark.parametrize("num_sites", [2, 3, 5])
def test_pairs_agree_and_nobody_else_does(num_sites: int):
    """Both ends of a pair derive the same roots, and no two pairs the same."""
    run = start(num_sites)
    roots: dict[bytes, set[frozenset[int]]] = {}
    for i, secrets in run.secrets.items():
        assert set(secrets.roots) == set(run.secrets) - {i}
        for j, pair in secrets.roots.items():
            for root in (pair._mask, pair._channel):
                key = bytes(root.buffer)
                roots.setdefault(key, set()).add(frozenset({i, j}))
    assert len(roots) == num_sites * (num_sites - 1)
    assert all(len(pairs) == 1 for pairs in roots.values())


def test_setup_keys_are_gone_after_it():
    """Forward secrecy starts when the roots exist."""
    for setup in start(3).setups.values():
        assert setup._keys is None
        assert (setup._exchanges, setup._kem_secrets) == ({}, {})


def test_offer_must_be_the_pinned_aggregators():
    """Another signer, or a changed contract under an old signature."""
    impostor = PARTIES.sites[2]
    data = CONTRACT.to_bytes()
    other = PARTIES.contract(max_rounds=49).to_bytes()
    for contract, signer in [(data, impostor), (other, PARTIES.aggregator)]:
        message = Offer(contract=contract, signature=signer.sign(Label.OFFER, data))
        with pytest.raises(BadSignature, match="aggregator"):
            PARTIES.site_setup(1).on_offer(message.to_bytes())


def test_site_checks_its_own_place():
    """Its own name must stand in the contract with its own key."""
    with pytest.raises(UnknownSite):
        PARTIES.site_setup(1, site="stranger").on_offer(offer())
    with pytest.raises(ContractRefused, match="a different key"):
        PARTIES.site_setup(1, identity=PARTIES.sites[2]).on_offer(offer())


def swapped_key(adverts: dict[int, bytes]) -> None:
    """The aggregator puts its own X25519 key in and signs with its own identity."""
    message = alter(Advert.from_bytes(adverts[2]), keys=with_keys(adverts[3]))
    adverts[2] = message.signed_by(PARTIES.aggregator).to_bytes()


def unsigned_key(adverts: dict[int, bytes]) -> None:
    message = alter(Advert.from_bytes(adverts[2]), keys=with_keys(adverts[3]))
    adverts[2] = message.to_bytes()


def other_contract(adverts: dict[int, bytes]) -> None:
    adverts[2] = resigned(adverts[2], 2, contract_hash=bytes(32))


def other_own_advert(adverts: dict[int, bytes]) -> None:
    """A replayed advert of the site itself, with a valid signature."""
    adverts[1] = PARTIES.site_setup(1, random_bytes=entropy("old")).on_offer(offer())


def too_few_sites(adverts: dict[int, bytes]) -> None:
    del adverts[3], adverts[4]


def without_itself(adverts: dict[int, bytes]) -> None:
    del adverts[1]


def extra_site(adverts: dict[int, bytes]) -> None:
    adverts[5] = adverts[4]


def renumbered(adverts: dict[int, bytes]) -> None:
    adverts[2], adverts[3] = adverts[3], adverts[2]


def same_keys(adverts: dict[int, bytes]) -> None:
    adverts[2] = resigned(adverts[2], 2, keys=with_keys(adverts[3]))


def own_keys_reflected(adverts: dict[int, bytes]) -> None:
    adverts[2] = resigned(adverts[2], 2, keys=with_keys(adverts[1]))


def one_key_for_two_purposes(adverts: dict[int, bytes]) -> None:
    mask = Advert.from_bytes(adverts[2]).keys.mask
    adverts[2] = resigned(adverts[2], 2, keys=with_keys(adverts[2], channel=mask))


def same_nonce(adverts: dict[int, bytes]) -> None:
    nonce = Advert.from_bytes(adverts[3]).nonce
    adverts[2] = resigned(adverts[2], 2, nonce=nonce)


def no_kem_key(adverts: dict[int, bytes]) -> None:
    adverts[2] = resigned(adverts[2], 2, keys=with_keys(adverts[2], kem=b""))


def zero_point(adverts: dict[int, bytes]) -> None:
    adverts[2] = resigned(adverts[2], 2, keys=with_keys(adverts[2], mask=bytes(32)))


def small_order_point(adverts: dict[int, bytes]) -> None:
    point = "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"
    keys = with_keys(adverts[2], channel=bytes.fromhex(point))
    adverts[2] = resigned(adverts[2], 2, keys=keys)


def bad_kem_key(adverts: dict[int, bytes]) -> None:
    keys = with_keys(adverts[2], kem=b"\xff" * 1184)
    adverts[2] = resigned(adverts[2], 2, keys=keys)


def cut_advert(adverts: dict[int, bytes]) -> None:
    adverts[2] = adverts[2][:-1]


@pytest.mark.parametrize(
    ("attack", "error"),
    [
        (swapped_key, BadSignature),
        (unsigned_key, BadSignature),
        (other_contract, WrongContext),
        (other_own_advert, BookRefused),
        (too_few_sites, BookRefused),
        (without_itself, BookRefused),
        (extra_site, BookRefused),
        (renumbered, BookRefused),
        (same_keys, BookRefused),
        (own_keys_reflected, BookRefused),
        (one_key_for_two_purposes, BookRefused),
        (same_nonce, BookRefused),
        (no_kem_key, BookRefused),
        (zero_point, WeakKey),
        (small_order_point, WeakKey),
        (bad_kem_key, WeakKey),
        (cut_advert, MalformedMessage),
    ],
)
def test_wrong_book_ends_the_setup(
    attack: Callable[[dict[int, bytes]], None], error: type[ProtocolError]
):
    """Whatever the aggregator does to the book, no confirm leaves the site."""
    setups, adverts = advertised()
    attack(adverts)
    refuses_book(adverts, setups[1], error)


def confirmed(
    seed: str = "run keys",
) -> tuple[dict[int, SiteSetup], dict[int, bytes]]:
    """All sites after S2, and their confirms."""
    setups, adverts = advertised(seed)
    book = Book(adverts=adverts).to_bytes()
    return setups, {i: setup.on_book(book) for i, setup in setups.items()}


def resign_confirm(data: bytes, signer: int, **changes: Any) -> bytes:
    message = alter(Confirm.from_bytes(data), **changes)
    return message.signed_by(PARTIES.sites[signer]).to_bytes()


def forged_confirm(confirms: dict[int, bytes]) -> None:
    message = alter(Confirm.from_bytes(confirms[1]), setup_hash=bytes(32))
    confirms[1] = message.to_bytes()


def other_book(confirms: dict[int, bytes]) -> None:
    confirms[1] = resign_confirm(confirms[1], 1, setup_hash=bytes(32))


def own_confirm_changed(confirms: dict[int, bytes]) -> None:
    ciphertexts = dict.fromkeys((3, 4), bytes(1088))
    confirms[2] = resign_confirm(confirms[2], 2, ciphertexts=ciphertexts)


def confirm_missing(confirms: dict[int, bytes]) -> None:
    del confirms[4]


def confirms_exchanged(confirms: dict[int, bytes]) -> None:
    confirms[1], confirms[3] = confirms[3], confirms[1]


def no_ciphertext_for_me(confirms: dict[int, bytes]) -> None:
    old = Confirm.from_bytes(confirms[1]).ciphertexts
    kept = {j: old[j] for j in (3, 4)}
    confirms[1] = resign_confirm(confirms[1], 1, ciphertexts=kept)


@pytest.mark.parametrize(
    ("attack", "error"),
    [
        (forged_confirm, BadSignature),
        (other_book, WrongContext),
        (own_confirm_changed, BookRefused),
        (confirm_missing, BookRefused),
        (confirms_exchanged, BookRefused),
        (no_ciphertext_for_me, BookRefused),
    ],
)
def test_wrong_confirms_end_the_setup(
    attack: Callable[[dict[int, bytes]], None], error: type[ProtocolError]
):
    """A site that saw a different book, or a forged word of it, gives no secrets."""
    setups, confirms = confirmed()
    attack(confirms)
    setup = setups[2]
    with pytest.raises(error):
        setup.on_confirms(Confirms(confirms=confirms).to_bytes())
    with pytest.raises(OutOfOrder, match="aborted"):
        setup.on_confirms(Confirms(confirms=confirms).to_bytes())
    assert setup._exchanges == {}


def test_replayed_advert_of_a_peer_is_found_by_its_confirm():
    """Site 1 cannot tell an old advert of site 2; site 2 signs another h_U."""
    setups, adverts = advertised()
    old = PARTIES.site_setup(2, random_bytes=entropy("old")).on_offer(offer())
    lie = setups[1].on_book(Book(adverts={**adverts, 2: old}).to_bytes())
    book = Book(adverts=adverts).to_bytes()
    truth = {i: setups[i].on_book(book) for i in (2, 3, 4)}
    confirms = Confirms(confirms={1: lie, **truth}).to_bytes()
    for i in PARTIES.sites:
        with pytest.raises(WrongContext, match="a different book"):
            setups[i].on_confirms(confirms)


def test_confirms_of_an_earlier_setup_are_refused():
    """Fresh adverts make a fresh h_U, so nothing of an old setup fits."""
    _, old = confirmed("yesterday")
    setups, confirms = confirmed()
    with pytest.raises(WrongContext):
        setups[1].on_confirms(Confirms(confirms={**old, 1: confirms[1]}).to_bytes())


def test_site_steps_have_an_order():
    """Calling a step early or twice changes nothing but raises."""
    setup = PARTIES.site_setup(1)
    with pytest.raises(OutOfOrder, match="no contract"):
        _ = setup.contract
    with pytest.raises(OutOfOrder, match="expected: 'offer'"):
        setup.on_book(b"")
    with pytest.raises(OutOfOrder):
        setup.on_confirms(b"")
    setup.on_offer(offer())
    with pytest.raises(OutOfOrder, match="expected: 'book'"):
        setup.on_offer(offer())


def test_finished_setup_takes_nothing_more():
    """The roots are handed out once."""
    run = start(3)
    with pytest.raises(OutOfOrder, match="over"):
        run.setups[1].on_confirms(run.record.confirms)


def test_aggregator_steps_have_an_order():
    """And a wrong message is refused without harm to the setup."""
    aggregator = AggregatorSetup(identity=PARTIES.aggregator, contract=CONTRACT)
    setups, adverts = advertised()
    with pytest.raises(OutOfOrder):
        aggregator.on_confirm(b"")
    with pytest.raises(OutOfOrder):
        aggregator.result()
    for i in (1, 2, 3):
        assert aggregator.on_advert(adverts[i]) == site_name(i)
    with pytest.raises(TooFewSites, match="site-04"):
        aggregator.book()
    with pytest.raises(OutOfOrder, match="already"):
        aggregator.on_advert(adverts[1])
    with pytest.raises(BadSignature):
        aggregator.on_advert(
            alter(Advert.from_bytes(adverts[4]), nonce=bytes(32)).to_bytes()
        )
    aggregator.on_advert(adverts[4])
    book = aggregator.book()
    with pytest.raises(OutOfOrder, match="closed"):
        aggregator.on_advert(adverts[4])
    aggregator.on_confirm(setups[1].on_book(book))
    assert aggregator.missing() == tuple(map(site_name, (2, 3, 4)))
    with pytest.raises(TooFewSites, match="site-02, site-03, site-04"):
        aggregator.result()


def test_aggregator_refuses_confirms_of_other_books():
    """It would be told at every site anyway, and later."""
    aggregator = AggregatorSetup(identity=PARTIES.aggregator, contract=CONTRACT)
    setups, adverts = advertised()
    for data in adverts.values():
        aggregator.on_advert(data)
    confirm = setups[1].on_book(aggregator.book())
    for change, error in [
        ({"setup_hash": bytes(32)}, WrongContext),
        ({"ciphertexts": {}}, BookRefused),
    ]:
        with pytest.raises(error):
            aggregator.on_confirm(resign_confirm(confirm, 1, **change))
    with pytest.raises(UnknownSite):
        aggregator.on_confirm(resign_confirm(confirm, 1, number=5))


def test_aggregator_offers_only_its_own_contracts():
    """Another aggregator's contract would be refused by every site."""
    other = identities.generate(entropy("other aggregator"))
    with pytest.raises(ContractRefused, match="aggregator_key"):
        AggregatorSetup(identity=other, contract=CONTRACT)


def test_exchanged_confirm_in_a_record_is_noticed():
    """The record that goes out with the first round is checked again there."""
    run = start(3)
    setup = Parties(3).site_setup(2)
    with pytest.raises(OutOfOrder):
        setup.on_confirms(confirms_with(run.record, 1, b""))


def set_up_without(left_out: int) -> tuple[AggregatorSetup, dict[int, SiteSetup]]:
    """An aggregator and the other sites, all of them confirmed."""
    aggregator = AggregatorSetup(
        identity=PARTIES.aggregator,
        contract=CONTRACT,
        left_out=[site_name(left_out)],
    )
    setups = {i: PARTIES.site_setup(i) for i in PARTIES.sites if i != left_out}
    for setup in setups.values():
        aggregator.on_advert(setup.on_offer(aggregator.offer()))
    for setup in setups.values():
        aggregator.on_confirm(setup.on_book(aggregator.book()))
    return aggregator, setups


def test_sites_agree_on_keys_without_one_that_is_left_out():
    """It need not answer; rounds under the setup are of the others."""
    aggregator, setups = set_up_without(2)
    record = aggregator.result()
    assert record.cohort == (1, 3, 4)
    for setup in setups.values():
        assert setup.on_confirms(record.confirms).cohort == record.cohort


def test_answer_of_a_site_that_is_left_out_counts_for_nothing():
    """An aggregator that takes it would write a book that it did not mean to."""
    aggregator = AggregatorSetup(
        identity=PARTIES.aggregator, contract=CONTRACT, left_out=[site_name(2)]
    )
    advert = PARTIES.site_setup(2).on_offer(aggregator.offer())
    with pytest.raises(BookRefused, match="is excluded"):
        aggregator.on_advert(advert)


def test_sites_that_saw_books_of_other_sites_get_no_keys():
    """An aggregator that leaves out one site here and another there."""
    _, setups = set_up_without(2)
    second, _ = set_up_without(3)
    with pytest.raises(ProtocolError):
        setups[1].on_confirms(second.result().confirms)

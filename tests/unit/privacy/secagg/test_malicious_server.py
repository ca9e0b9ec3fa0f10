"""The attacks of SECURE_AGGREGATION.md, section 6.3, on whole rounds.

An aggregator that may lie in every message plays against honest sites. Whatever it
does, a site stops with a typed error before it gives away what the attack is after,
and no ``Shares`` leaves it. What a site checks in each single message is in
``test_setup``, ``test_client`` and ``test_contract``; here are the attacks that need
more than one message, or more than one site, and the list as a whole.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.secagg_parties import (
    DIGEST,
    HEADER,
    JOB,
    Parties,
    Run,
    entropy,
    site_name,
    start,
)

from federation.errors import ProtocolError
from privacy.keystream import Mask, apply_masks_
from privacy.secagg.agreement.policy import Group
from privacy.secagg.arithmetic.ring import UpdateNotFinite
from privacy.secagg.arithmetic.seal import encode_
from privacy.secagg.errors import (
    OutOfOrder,
    WrongContext,
)
from privacy.secagg.protocol.client import SiteSession
from privacy.secagg.protocol.messages import (
    Book,
    Consent,
    Head,
    MaskedAnswer,
    Reveal,
    Shares,
    Survivors,
)
from privacy.secagg.protocol.round_memory import InMemoryRounds
from privacy.secagg.protocol.setup import AggregatorSetup

OTHER_MODEL = hashlib.sha256(b"crafted").digest()
OTHER_TASK = hashlib.sha256(b"evaluate").digest()
OTHER_JOB = hashlib.sha256(b"the same job with lr = 1e-30").digest()


@dataclass
class Liar:
    """An aggregator with five sites, t = 4, that hears everything and may say all.

    ``given`` is what the sites let go in R3; it is what attacks are after.
    """

    run: Run = field(default_factory=lambda: start(5, hybrid=False))
    masked: dict[int, MaskedAnswer] = field(default_factory=dict)
    given: list[Shares] = field(default_factory=list)

    def ask(
        self, numbers: tuple[int, ...], round_index: int = 1, **facts: object
    ) -> None:
        """R1, with what the sites are made to believe."""
        for number in numbers:
            session = self.run.sessions[number]
            session.begin_round(self.run.facts(round_index, **facts))
            data = session.finish_masked(vector_digest=DIGEST, header_digest=HEADER)
            self.masked[number] = MaskedAnswer.from_bytes(data)

    def survivors(self, numbers: tuple[int, ...]) -> bytes:
        return Survivors(heads={i: self.masked[i].head for i in numbers}).to_bytes()

    def consent(self, number: int, data: bytes) -> bytes:
        return self.run.sessions[number].on_survivors(data)

    def inbox(self, number: int, senders: tuple[int, ...]) -> dict[int, bytes]:
        return {j: self.masked[j].sealed[number] for j in senders if j != number}

    def reveal(
        self, number: int, consents: dict[int, bytes], senders: tuple[int, ...]
    ) -> None:
        """R3; what comes back is kept."""
        rows = {j: self.masked[j].rows[number] for j in senders if j != number}
        inbox = self.inbox(number, senders)
        request = Reveal(consents=consents, inbox=inbox, rows=rows)
        answer = self.run.sessions[number].on_reveal(request.to_bytes())
        self.given.append(Shares.from_bytes(answer))

    def forged(self, number: int, survivors: tuple[int, ...]) -> bytes:
        """The consent of a site that colludes: it signs whatever it is asked to."""
        context = Head.from_bytes(self.masked[number].head).context
        consent = Consent(number=number, context=context, survivors=survivors)
        return consent.signed_by(self.run.parties.sites[number]).to_bytes()


def in_another_job(run: Run, number: int) -> None:
    """Have a site work on another job than the contract names, as if unchecked."""
    run.sessions[number] = SiteSession(
        contract=run.contract,
        identity=run.parties.sites[number],
        secrets=dataclasses.replace(run.secrets[number], job_digest=OTHER_JOB),
        memory=InMemoryRounds(),
        random_bytes=entropy(f"rounds of {number}"),
    )


FOUR, OTHER_FOUR, ALL = (1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4, 5)


def other_theta(liar: Liar) -> None:
    """Site 1 alone is shown a crafted model; its peers will not continue with it."""
    liar.ask((1,), model_digest=OTHER_MODEL)
    liar.ask((2, 3, 4, 5))
    for number in ALL:
        with pytest.raises(WrongContext):
            liar.consent(number, liar.survivors(ALL))


def other_task(liar: Liar) -> None:
    """Site 1 alone trains, or clips to another norm; the others are asked otherwise."""
    liar.ask((1,), task_digest=OTHER_TASK)
    liar.ask((2, 3, 4, 5))
    for number in ALL:
        with pytest.raises(WrongContext):
            liar.consent(number, liar.survivors(ALL))


def other_job(liar: Liar) -> None:
    """Site 1 works on another job, and its policy has let the contract pass."""
    in_another_job(liar.run, 1)
    liar.ask(ALL)
    for number in ALL:
        with pytest.raises(WrongContext):
            liar.consent(number, liar.survivors(ALL))


def longer_list_after_a_shorter(liar: Liar) -> None:
    """Site 5 was declared lost, then is alive after all: both its masks would open."""
    liar.ask(ALL)
    consents = {i: liar.consent(i, liar.survivors(FOUR)) for i in FOUR}
    with pytest.raises(OutOfOrder):
        liar.consent(1, liar.survivors(ALL))
    liar.reveal(1, consents, FOUR)
    # The answer to the first list stands; of b_5, which the second opens, nothing.
    assert 5 not in liar.given.pop().self_shares
    with pytest.raises(OutOfOrder):
        liar.consent(1, liar.survivors(ALL))


ATTACKS = (
    other_theta,
    other_task,
    other_job,
    longer_list_after_a_shorter,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack_gains_no_share(attack: Callable[[Liar], None]):
    """Each ends in a typed error, and nothing that it is after has left a site."""
    liar = Liar()
    attack(liar)
    assert liar.given == []


def test_game_of_an_honest_server_gives_shares():
    """The test of the tests: with no lie, all of this succeeds."""
    liar = Liar()
    liar.ask(ALL)
    consents = {i: liar.consent(i, liar.survivors(FOUR)) for i in FOUR}
    for number in FOUR:
        liar.reveal(number, consents, FOUR)
    assert [shares.number for shares in liar.given] == list(FOUR)


@pytest.mark.parametrize("colluders", [(4, 5), (3, 5), (1, 2)])
@pytest.mark.parametrize("lists", [(FOUR, ALL), (FOUR, OTHER_FOUR)])
def test_two_sums_of_a_round_are_never_opened(
    colluders: tuple[int, ...], lists: tuple[tuple[int, ...], ...]
):
    """2 t > N + n_C: however honest sites are split, shares leave for one list only.

    Five sites, t = 4, as many colluders as that allows, which sign both lists; each
    honest site is told one of the lists that it is in.
    """
    honest = [i for i in ALL if i not in colluders]
    liar, opened = Liar(), 0
    splits = itertools.product(lists, repeat=len(honest))
    for round_index, told in enumerate(splits, start=1):
        liar.ask(ALL, round_index)
        signed = dict(zip(honest, told, strict=True))
        signed = {i: a for i, a in signed.items() if i in a}
        consents: dict[tuple[int, ...], dict[int, bytes]] = {
            a: {i: liar.forged(i, a) for i in colluders if i in a} for a in lists
        }
        for number, survivors in signed.items():
            data = liar.consent(number, liar.survivors(survivors))
            consents[survivors][number] = data
        released = set()
        for number, survivors in signed.items():
            try:
                liar.reveal(number, consents[survivors], survivors)
            except ProtocolError:
                continue
            released.add(survivors)
        assert len(released) <= 1
        opened += len(released)
    assert opened  # The bound is tight: some split does open one.


def test_two_jobs_of_one_contract_are_found_in_the_book():
    """Were each site given the contract of its own job, they would hold two."""
    parties = Parties(3)
    setups, adverts = {}, {}
    for number in parties.sites:
        job = OTHER_JOB if number == 1 else JOB
        setups[number] = parties.site_setup(
            number, policy=parties.policy(job_digest=job)
        )
        contract = parties.contract(job_digest=job)
        server = AggregatorSetup(identity=parties.aggregator, contract=contract)
        adverts[number] = setups[number].on_offer(server.offer())
    for setup in setups.values():
        with pytest.raises(WrongContext):
            setup.on_book(Book(adverts=adverts).to_bytes())


@pytest.mark.parametrize("num_other", [0, 1])
def test_masks_of_two_jobs_do_not_cancel(num_other: int):
    """P1, where no list is signed: with one job the sum opens, with two it is noise."""
    run = start(3, hybrid=False)
    for number in range(1, num_other + 1):
        in_another_job(run, number)
    total = np.zeros(4096, np.uint32)
    for session in run.sessions.values():
        masks = session.begin_round(run.facts())
        streams = [Mask(key=s.key, sign=s.sign) for s in masks.vector]
        apply_masks_(total, streams)
    if not num_other:
        assert not total.any()
        return
    # Uniform words: their mean is half of the ring, within six standard errors.
    assert abs(total.mean() / 2**32 - 0.5) < 6 / np.sqrt(12 * total.size)
    assert len(set(total.tolist())) > 4090


def test_two_contracts_of_one_run_end_the_setup():
    """A site that accepted other terms than the rest is found in the book."""
    parties = Parties(3)
    setups = {i: parties.site_setup(i) for i in parties.sites}
    adverts = {}
    for number, setup in setups.items():
        contract = parties.contract(max_rounds=49 if number == 1 else 50)
        server = AggregatorSetup(identity=parties.aggregator, contract=contract)
        adverts[number] = setup.on_offer(server.offer())
    book = Book(adverts=adverts).to_bytes()
    for setup in setups.values():
        with pytest.raises(WrongContext):
            setup.on_book(book)
        with pytest.raises(OutOfOrder, match="aborted"):
            setup.on_confirms(b"")


def test_two_partitions_of_one_run_end_the_setup():
    """A site that holds the same group for part of other groups is found as well."""
    parties = Parties(3)
    everyone = frozenset(map(site_name, parties.sites))
    adverts = {}
    setups = {}
    for number in parties.sites:
        partition = bytes([number == 1]) * 32
        group = Group(sites=everyone, partition=partition)
        setups[number] = parties.site_setup(number, policy=parties.policy(group=group))
        contract = parties.contract(partition=partition)
        server = AggregatorSetup(identity=parties.aggregator, contract=contract)
        adverts[number] = setups[number].on_offer(server.offer())
    book = Book(adverts=adverts).to_bytes()
    for setup in setups.values():
        with pytest.raises(WrongContext):
            setup.on_book(book)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_sites", [3, 5])
def test_update_that_is_not_finite_is_declined(num_sites: int, value: float):
    """The site says no, and takes no further part in the round."""
    run = start(num_sites)
    session: SiteSession = run.sessions[1]
    masks = session.begin_round(run.facts())
    update = np.zeros(16, np.float32)
    update[3] = value
    with pytest.raises(UpdateNotFinite):
        encode_(update, run.contract.ring(), weight=1.0, rounding_key=bytes(32))
    server = run.aggregator_round()
    assert server.on_decline(session.decline()) == site_name(1)
    assert not any(any(s.key) for s in (*masks.vector, *masks.header))
    for step in (session.on_survivors, session.on_reveal):
        with pytest.raises(OutOfOrder):
            step(b"")
    with pytest.raises(OutOfOrder):
        session.finish_masked(vector_digest=DIGEST, header_digest=HEADER)


def test_answer_of_another_setup_ends_the_round():
    """h_U: one site still holds what an earlier setup of the same contract made."""
    liar = Liar()
    old = dataclasses.replace(liar.run.secrets[5], setup_hash=bytes(32))
    liar.run.sessions[5] = SiteSession(
        contract=liar.run.contract,
        identity=liar.run.parties.sites[5],
        secrets=old,
        memory=InMemoryRounds(),
        random_bytes=entropy("rounds of an earlier setup"),
    )
    liar.ask(ALL)
    for number in ALL:
        with pytest.raises(WrongContext):
            liar.consent(number, liar.survivors(ALL))
    assert liar.given == []

"""What a relay checks of its sites' masked answers: as much as the aggregator."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import toy
from support.secagg_parties import MODEL, Run, start

from aggregator.relay import SecureRelay, book_in
from federation.errors import AggregatorAtFault
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    RoundTask,
    SecureStep,
    SiteFailure,
    SiteMessage,
    TaskKind,
)
from privacy.secagg.agreement.certificate import before_rounds, certify
from privacy.secagg.protocol import train
from privacy.secagg.protocol.masked_answers import relayed_round
from privacy.secagg.protocol.messages import Head, MaskedAnswer

CLIP = 1.0
EAST = SiteId("east")


@pytest.fixture
def made() -> Run:
    """Four sites after their setup."""
    return start(4)


def task_of(run: Run, number: int = 1) -> RoundTask:
    """What the aggregator sends in round 1."""
    setup_hash = run.record.setup_hash
    begun = certify(before_rounds(setup_hash), MODEL, run.parties.aggregator)
    body = train.TrainBody(
        setup_hash=setup_hash, confirms=b"", certificate=begun, update_clip=CLIP
    )
    site = run.contract.member(number).site
    secure = train.write_train(body)
    return toy.task(site, round_index=1, kind=TaskKind.EVALUATE, secure=secure)


def answer(run: Run, number: int, **facts: Any) -> MaskedUpdate:
    """A site's answer to it: evaluations have no words."""
    task = task_of(run, number)
    asked = {"task_digest": train.task_digest(task, train.read_train(task.secure))}
    session = run.sessions[number]
    session.begin_round(run.facts(**asked | facts))
    slots = train.header_spec(4, run.contract.header_slots).slots
    header_h = np.arange(len(slots), dtype=np.uint64)
    words = np.zeros(0, np.uint8)
    body = session.finish_masked(
        vector_digest=hashlib.sha256().digest(),
        header_digest=hashlib.sha256(header_h.data).digest(),
    )
    fields = {"words": words, "header_h": header_h, "body": body}
    return toy.masked(task.site, **fields, layout_digest=task.layout_digest)


def relayed(
    run: Run, answers: list[SiteMessage], *, book: bytes
) -> tuple[list[SiteId], list[SiteMessage]]:
    """Whose words a relay adds up, and the answers that it passes on."""
    relay = SecureRelay(
        name=EAST, identity=run.parties.sites[4], contract=run.contract, book=book
    )
    tasks = [task_of(run, number) for number in (1, 2, 3)]
    through, found = relay(tasks, answers)
    assert through is not None
    return [*through.sites], found


def test_a_relay_knows_what_sites_must_sign(made: Run):
    """From the book, the contract and the task, without a model."""
    task = task_of(made)
    found = relayed_round(task, contract=made.contract, book=made.record.book)
    assert found is not None
    answers = [answer(made, number) for number in (1, 2, 3)]
    head = Head.from_bytes(MaskedAnswer.from_bytes(answers[0].body).head)
    assert (found.context, found.cohort) == (head.context, made.contract.cohort)
    for book in (made.record.book, b""):
        assert len(relayed(made, [*answers], book=book)[0]) == len(answers)


def test_a_relay_that_has_missed_the_setup_knows_nothing(made: Run):
    other = start(4, max_rounds=49)
    for book in (b"", other.record.book):
        assert relayed_round(task_of(made), contract=made.contract, book=book) is None


def shares_of_others(run: Run) -> MaskedUpdate:
    """Bundles that differ from those that were signed."""
    update = answer(run, 2)
    masked = MaskedAnswer.from_bytes(update.body)
    sealed = {site: each[::-1] for site, each in masked.sealed.items()}
    return replace(update, body=replace(masked, sealed=sealed).to_bytes())


def too_few_shares(run: Run) -> MaskedUpdate:
    update = answer(run, 2)
    masked = MaskedAnswer.from_bytes(update.body)
    return replace(update, body=replace(masked, sealed={}).to_bytes())


def another_model(run: Run) -> MaskedUpdate:
    return answer(run, 2, model_digest=bytes(32))


def words_of_a_neighbour(run: Run) -> MaskedUpdate:
    """Sound words that site 4 has signed, under the name of site 2."""
    return replace(answer(run, 4), site=run.contract.member(2).site)


def header_of_others(run: Run) -> MaskedUpdate:
    update = answer(run, 2)
    return replace(update, header_h=update.header_h + np.uint64(1))


def words_for_another_model(run: Run) -> MaskedUpdate:
    return replace(answer(run, 2), layout_digest="11" * 32)


def words_of_another_size(run: Run) -> MaskedUpdate:
    """Signed as they are; an evaluation has none."""
    task = task_of(run, 2)
    session, words = run.sessions[2], np.zeros(4, np.uint8)
    digest = train.task_digest(task, train.read_train(task.secure))
    session.begin_round(run.facts(task_digest=digest))
    slots = train.header_spec(4, run.contract.header_slots).slots
    header_h = np.zeros(len(slots), np.uint64)
    body = session.finish_masked(
        vector_digest=hashlib.sha256(words.data).digest(),
        header_digest=hashlib.sha256(header_h.data).digest(),
    )
    fields = {"words": words, "header_h": header_h, "body": body}
    return toy.masked(task.site, **fields, layout_digest=task.layout_digest)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (words_of_a_neighbour, "differ from those that"),
        (header_of_others, "differ from those that"),
        (words_for_another_model, "for another model"),
        (words_of_another_size, "4 bytes of masked words"),
        (shares_of_others, "those that it signed"),
        (too_few_shares, "bundle of shares"),
        (another_model, "run, setup, round or"),
    ],
)
def test_one_wrong_site_does_not_cost_its_neighbours_their_round(
    made: Run, wrong: Callable[[Run], MaskedUpdate], text: str
):
    """What the aggregator would refuse with the whole sum is not added."""
    answers = [answer(made, 1), wrong(made), answer(made, 3)]
    within, found = relayed(made, answers, book=made.record.book)
    names = [made.contract.member(number).site for number in (1, 2, 3)]
    assert within == [names[0], names[2]]
    assert isinstance(found[1], SiteFailure)
    assert found[1].site == names[1]
    assert text in found[1].message


@pytest.mark.parametrize("wrong", ["book", "task", "certificate"])
def test_a_task_that_is_wrong_is_the_fault_of_the_aggregator(made: Run, wrong: str):
    """Before sites work on it; and where they have, they are not blamed."""
    task, book = task_of(made), made.record.book
    if wrong == "book":
        book = book[:-1]
    elif wrong == "task":
        task = replace(task, secure=b"no task")
    else:
        body = train.read_train(task.secure)
        secure = train.write_train(replace(body, certificate=b"none"))
        task = replace(task, secure=secure)
    relay = SecureRelay(
        name=EAST, identity=made.parties.sites[4], contract=made.contract, book=book
    )
    with pytest.raises(AggregatorAtFault, match="aggregator sent no task"):
        relay.check([task])
    through, (found,) = relay([task], [answer(made, 1)])
    assert through is None
    assert isinstance(found, SiteFailure)
    assert found.kind is FailureKind.AGGREGATOR


def test_the_book_of_a_setup_is_found_on_its_way(made: Run):
    book = made.record.book
    confirm = replace(toy.secure_task(), step=SecureStep.CONFIRM, body=book)
    assert book_in([confirm]) == book
    assert book_in([replace(confirm, step=SecureStep.ADVERTISE)]) == b""
    assert book_in([]) == b""

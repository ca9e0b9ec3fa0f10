"""What must be true of a masked answer: at the aggregator, and at a relay.

A relay checks all of it before it adds a site's words, because one site's words cannot
be taken out of a sum: an answer that only the aggregator refused would cost all sites
of the relay their round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from federation.errors import AggregatorAtFault
from federation.messages import RoundTask
from privacy.secagg.agreement.certificate import Certificate
from privacy.secagg.agreement.contract import Contract, Member, Setting
from privacy.secagg.agreement.message import DIGEST_BYTES
from privacy.secagg.arithmetic.shamir import SHARE_BYTES
from privacy.secagg.errors import (
    BadShare,
    MalformedMessage,
    WrongCohort,
    WrongContext,
)
from privacy.secagg.protocol import train
from privacy.secagg.protocol.commitments import SECRET, dealt_digests
from privacy.secagg.protocol.key_schedule import TAG_BYTES, RoundFacts, round_context
from privacy.secagg.protocol.messages import Book, Head, MaskedAnswer, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswer:
    """A masked answer that its site has signed for this round.

    Attributes:
        masked: The answer.
        member: The site.
    """

    masked: MaskedAnswer
    head: Head
    member: Member


def read_answer(
    data: bytes, *, contract: Contract, context: bytes, cohort: Sequence[int]
) -> CheckedAnswer:
    """Read a masked answer, and check everything of it but its vector.

    Args:
        data: Encoded ``MaskedAnswer``.
        contract: Who may answer.
        context: ctx_r of the round.
        cohort: U_r, increasing.

    Raises:
        WrongContext: It belongs to another round.
        WrongCohort: The site is not in this round.
        BadShare: The sealed shares are not those that the round needs.
        ProtocolError: It is malformed, or not signed by its site.
    """
    masked = MaskedAnswer.from_bytes(data)
    head = Head.from_bytes(masked.head)
    member = contract.member(head.number)
    verify(head, member)
    check_context(head.context, context, member)
    if member.number not in cohort:
        raise WrongCohort(f"site {member.site!r} has no keys in this setup")
    found = CheckedAnswer(masked=masked, head=head, member=member)
    _check_dealt(found, contract.setting, cohort)
    return found


def check_context(found: bytes, context: bytes, member: Member) -> None:
    """Check that a site's message is about a round.

    Raises:
        WrongContext: It is about another.
    """
    if found != context:
        raise WrongContext(
            f"the message of site {member.site!r} is for a different run, setup, "
            "round or model"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedRound:
    """A round as a relay sees it: from the messages that pass through it.

    Attributes:
        context: ctx_r.
        cohort: U_r, increasing.
    """

    context: bytes
    cohort: tuple[int, ...]


def relayed_round(
    task: RoundTask, *, contract: Contract, book: bytes
) -> RelayedRound | None:
    """Work out what a site must sign in answer to a task.

    A relay holds no model, so the model's digest is that of the certificate, which the
    site compares with the model itself.

    Args:
        task: Task of the site.
        contract: Contract of the run.
        book: The last that passed through the relay, encoded; empty if none did.

    Returns:
        The round; None if its setup is not that of the book, which a relay has missed.

    Raises:
        AggregatorAtFault: The aggregator sent something else.
    """
    try:
        body = train.read_train(task.secure)
        adverts = Book.from_bytes(book) if book else None
        if adverts is None or adverts.setup_hash != body.setup_hash:
            return None
        certificate = Certificate.from_bytes(body.certificate)
    except MalformedMessage as error:
        raise AggregatorAtFault(
            f"the aggregator sent no task of a secure round: {error}"
        ) from error
    cohort = tuple(sorted(adverts.adverts))
    facts = RoundFacts(
        round_index=task.round_index,
        cohort=cohort,
        model_digest=certificate.model_digest,
        task_digest=train.task_digest(task, body),
    )
    context = round_context(
        facts,
        contract_hash=contract.digest,
        setup_hash=body.setup_hash,
        job_digest=contract.job_digest,
    )
    return RelayedRound(context=context, cohort=cohort)


def _check_dealt(found: CheckedAnswer, setting: Setting, cohort: Sequence[int]) -> None:
    """Check sealed shares and commitments: complete, and as the head says."""
    masked, member = found.masked, found.member
    holders = set() if setting is Setting.P1 else {SECRET, *cohort}
    num_sites = len(cohort)
    sealed_bytes = SHARE_BYTES * num_sites + TAG_BYTES
    if (
        set(masked.sealed) != holders - {SECRET, member.number}
        or set(masked.rows) != holders
        or any(len(data) != sealed_bytes for data in masked.sealed.values())
        or any(len(row) != DIGEST_BYTES * num_sites for row in masked.rows.values())
    ):
        raise BadShare(
            f"site {member.site!r} did not seal one bundle of shares for each "
            "other site, or did not commit to all of them"
        )
    if dealt_digests(masked.sealed, masked.rows) != found.head.dealt:
        raise BadShare(
            f"the sealed shares or commitments of {member.site!r} differ from "
            "those that it signed"
        )

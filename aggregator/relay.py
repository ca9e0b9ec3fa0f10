"""What a relay does with its sites' answers: it makes one sum of their updates.

Without secure aggregation it is an aggregator to its sites: it sees their updates, and
sends their weighted mean. With it, it adds masked words and opens nothing: the masks
against the sites of other relays remain.

Shape suffixes: d float values of the model, h words of the header.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from federation.compression.fragments import fragment_of
from federation.errors import AggregatorAtFault, InvalidUpdate, ProtocolError
from federation.ids import SiteId
from federation.mapped import sha256
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    RelayedSum,
    RoundTask,
    SecureStep,
    SecureTask,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.protocols import CombineRule, WeightedUpdate
from federation.rounds.failures import failure
from federation.wire.relayed import with_words
from privacy.secagg.agreement.contract import Contract, Member
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.arithmetic.accumulator import sum_words
from privacy.secagg.errors import MalformedMessage
from privacy.secagg.protocol import train
from privacy.secagg.protocol.masked_answers import read_answer, relayed_round
from privacy.secagg.protocol.messages import (
    Book,
    Head,
    MaskedAnswer,
    RelayedHead,
    verify,
)
from privacy.secagg.protocol.sizes import update_bytes

Relayed = tuple[RelayedSum | None, list[SiteMessage]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRelay:
    """Sends the weighted mean of its sites' updates.

    Attributes:
        num_values: Float values of the model, d.
        weight_of: How much an update counts: as at the aggregator.
        combine: The mean.
        fault_of: What is wrong with the sums of an update: as at the aggregator.
    """

    name: SiteId
    num_values: int
    layout_digest: str
    weight_of: Callable[[SiteUpdate], float]
    combine: CombineRule
    fault_of: Callable[[SiteUpdate, range | None], str] = lambda _update, _steps: ""

    def __call__(
        self, tasks: Sequence[Task], answers: Sequence[SiteMessage]
    ) -> Relayed:
        """Combine the updates in the order of the tasks, whenever they came.

        One that the aggregator would refuse is left out: it would refuse the sum.

        Args:
            tasks: What the sites were asked, in the order of the job.
            answers: What each has answered.

        Returns:
            The mean, if there are updates, and the answers: those in it have its words,
            those that are not sound became failures.
        """
        found = list(answers)
        weighted: dict[int, WeightedUpdate] = {}
        for index, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            if not (isinstance(answer, SiteUpdate) and isinstance(task, RoundTask)):
                continue
            try:
                weight = self._weight(task, answer)
            except InvalidUpdate as error:
                found[index] = failure(answer, FailureKind.INVALID, str(error))
                continue
            weighted[index] = WeightedUpdate(
                site=answer.site,
                delta_d=answer.delta_d,
                weight=weight,
                refuse=_refusing(found, index, answer),
            )
        mean_d = np.zeros(self.num_values, np.float32)
        if any(each.weight for each in weighted.values()):
            try:
                mean_d = self.combine(weighted.values(), mean_d)
            except ValueError:  # None with a weight is finite.
                mean_d = np.zeros_like(mean_d)
        parts = [found[index] for index in weighted]
        updates = [part for part in parts if isinstance(part, SiteUpdate)]
        if not updates:
            return None, found
        total = SiteUpdate(
            run_id=updates[0].run_id,
            round_index=updates[0].round_index,
            site=self.name,
            layout_digest=self.layout_digest,
            delta_d=mean_d,
            integers_m=np.zeros(0, np.int64),
            num_examples=0,
            num_steps=0,
            training=None,
            evaluation=None,
            evaluation_after=None,
            phases=(),
            based_on=updates[0].based_on,
        )
        return _passed_on(total, updates, found)

    def _weight(self, task: RoundTask, update: SiteUpdate) -> float:
        """How much an update counts.

        Raises:
            InvalidUpdate: It is no sound answer to its task.
        """
        delta_d, integers_m = update.delta_d, update.integers_m
        asked_m = task.integers_m
        fault = ""
        if delta_d.shape != (self.num_values,) or delta_d.dtype != np.float32:
            fault = f"sent {delta_d.size} values of {delta_d.dtype} to its relay"
        elif (integers_m.shape, integers_m.dtype) != (asked_m.shape, asked_m.dtype):
            fault = f"sent its relay {integers_m.size} integers, not {asked_m.size}"
        elif update.layout_digest != self.layout_digest:
            fault = "trained a model with a different layout than this run's"
        elif (update.based_on, update.fragment) != (task.based_on, task.fragment):
            fault = f"sent its relay what is based on round {update.based_on}"
        fault = fault or self.fault_of(update, task.steps)
        if fault:
            raise InvalidUpdate(fault)
        return self.weight_of(update)


@dataclass(slots=True, kw_only=True)
class SecureRelay:
    """Sends the sum of its sites' masked words, and the signed heads of all.

    Attributes:
        identity: Its own, which the contract pins.
        contract: Between the aggregator and the sites; it has nothing secret.
        book: Book of the setup in force, as it passed through this relay.
    """

    name: SiteId
    identity: Identity
    contract: Contract
    book: bytes = b""

    def check(self, tasks: Sequence[Task]) -> None:
        """Check what the aggregator asks of sites in a round, before they work.

        Raises:
            AggregatorAtFault: It is no task of a round, or the book is none: whatever
                sites answered, it could not be checked.
        """
        for task in tasks:
            if isinstance(task, RoundTask):
                relayed_round(task, contract=self.contract, book=self.book)

    def __call__(
        self, tasks: Sequence[Task], answers: Sequence[SiteMessage]
    ) -> Relayed:
        """Add the masked words that their sites have signed; see ``PlainRelay``."""
        self.book = book_in(tasks) or self.book
        found = list(answers)
        parts: dict[int, MaskedUpdate] = {}  # By client number.
        for index, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            if not (isinstance(answer, MaskedUpdate) and isinstance(task, RoundTask)):
                continue
            try:
                number = self._checked(task, answer)
            except AggregatorAtFault as error:
                found[index] = failure(answer, FailureKind.AGGREGATOR, str(error))
            except ProtocolError as error:
                found[index] = failure(answer, FailureKind.INVALID, str(error))
            else:
                parts[number] = answer
        updates = [parts[number] for number in sorted(parts)]
        if not updates:
            return None, found
        contract = self.contract
        words = sum_words(
            (update.words for update in updates),
            size=updates[0].words.size,
            bits=contract.word_bits,
        )
        header_h = np.zeros_like(updates[0].header_h)
        heads = hashlib.sha256()
        for update in updates:
            header_h += update.header_h
            heads.update(MaskedAnswer.from_bytes(update.body).head)
        signed = RelayedHead(
            relay=self.name,
            heads_digest=heads.digest(),
            vector_digest=sha256(words),
            header_digest=hashlib.sha256(header_h.data).digest(),
        ).signed_by(self.identity)
        total = MaskedUpdate(
            run_id=updates[0].run_id,
            round_index=updates[0].round_index,
            site=self.name,
            layout_digest=updates[0].layout_digest,
            words=words,
            header_h=header_h,
            body=signed.to_bytes(),
            based_on=updates[0].based_on,
        )
        return _passed_on(total, updates, found)

    def _checked(self, task: RoundTask, update: MaskedUpdate) -> int:
        """Check that words are those that their site has signed, and as many as asked.

        Raises:
            ProtocolError: They are not.
        """
        contract = self.contract
        head, member = self._read(task, update.body)
        digests = sha256(update.words), hashlib.sha256(update.header_h.data).digest()
        if member.site != update.site or digests != (
            head.vector_digest,
            head.header_digest,
        ):
            raise ProtocolError(
                f"sent its relay words that differ from those that {member.site!r} "
                "signed"
            )
        said = update.layout_digest, update.based_on, update.fragment
        if said != (task.layout_digest, task.based_on, task.fragment):
            raise ProtocolError(
                "sent its relay words for another model than its task's"
            )
        slots = train.header_spec(contract.num_sites, contract.header_slots).slots
        sizes = update.words.size, update.header_h.size
        if sizes != (self._num_bytes(task), len(slots)):
            raise ProtocolError(f"sent its relay {sizes[0]} bytes of masked words")
        return head.number

    def _read(self, task: RoundTask, body: bytes) -> tuple[Head, Member]:
        """Read what a site has signed, as strictly as the aggregator will."""
        contract = self.contract
        current = relayed_round(task, contract=contract, book=self.book)
        if current is not None:
            found = read_answer(
                body,
                contract=contract,
                context=current.context,
                cohort=current.cohort,
            )
            return found.head, found.member
        head = Head.from_bytes(MaskedAnswer.from_bytes(body).head)
        member = contract.member(head.number)
        verify(head, member)
        return head, member

    def _num_bytes(self, task: RoundTask) -> int:
        """Bytes of the masked words that a task asks for."""
        contract = self.contract
        if task.kind is TaskKind.EVALUATE:
            return 0
        plan = train.read_train(task.secure).plan
        fragment = fragment_of(task.round_index, contract.fragments)
        return update_bytes(contract, plan, fragment)


def book_in(tasks: Sequence[Task]) -> bytes:
    """The book of a setup that tasks bring to their sites; empty if they bring none.

    Raises:
        AggregatorAtFault: What they bring is no book.
    """
    confirms = [
        task.body
        for task in tasks
        if isinstance(task, SecureTask) and task.step is SecureStep.CONFIRM
    ]
    for book in confirms:
        check_book(book)
    return confirms[0] if confirms else b""


def check_book(book: bytes) -> None:
    """Check that an encoded book is one.

    Raises:
        AggregatorAtFault: It is not.
    """
    try:
        Book.from_bytes(book)
    except MalformedMessage as error:
        raise AggregatorAtFault(
            f"the aggregator sent something else than a book of keys: {error}"
        ) from error


def _refusing(
    found: list[SiteMessage], index: int, update: SiteUpdate
) -> Callable[[], None]:
    def refuse() -> None:
        text = "sent NaN or infinite values"
        found[index] = failure(update, FailureKind.NOT_FINITE, text)

    return refuse


def _passed_on(
    update: SiteUpdate | MaskedUpdate,
    updates: Sequence[SiteUpdate | MaskedUpdate],
    found: Sequence[SiteMessage],
) -> Relayed:
    within = {one.site for one in updates}
    through = RelayedSum(
        sites=tuple(one.site for one in found if one.site in within), update=update
    )
    return through, [
        with_words(one, through)
        if isinstance(one, SiteUpdate | MaskedUpdate) and one.site in within
        else one
        for one in found
    ]

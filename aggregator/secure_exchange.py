"""Exchanges of the secure aggregation protocol over a grid.

What is common to one sum over all sites (``secure_sum``) and to sums over groups
(``group_sums``): to take a step with some sites, and to note what their answers and
their silence show about the keys that they have.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from aggregator.masked_round import MaskedRound, check_sender
from aggregator.secure_setup import RunSetup
from federation.errors import ProtocolError, QuorumNotMet
from federation.ids import RunId, SiteId
from federation.members import Standing
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    Reply,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteFailure,
)
from federation.protocols import Grid
from federation.rounds.failures import failure
from federation.rounds.gather import exchange, revoke_all, whole_sums
from federation.rounds.round_record import RoundRecord
from federation.rounds.schedule import BARRIER, Dispatcher, Schedule, ScheduleView
from privacy.secagg.arithmetic.ring import SumOutOfRange
from privacy.secagg.errors import BadShare, DrawRefused, TooFewSites
from privacy.secagg.protocol.server import AggregatorRound

_OF_NO_ROUND = frozenset(
    {SecureStep.COMMIT, SecureStep.DRAW, SecureStep.ADVERTISE, SecureStep.CONFIRM}
)

_SILENT = frozenset(
    {
        FailureKind.DEADLINE,
        FailureKind.UNREACHABLE,
        FailureKind.DISCONNECTED,
        FailureKind.BUSY,
    }
)


@dataclass(slots=True, kw_only=True, eq=False)
class SecureExchange:
    """Takes steps of the protocol with the sites of one run.

    Attributes:
        grid: The way to the sites.
        deadline_seconds: How long a step may take.
        run_setup_of: Where to note which keys a site has.
        held: For each site, the round of the newest model that it is known to have.
        answered: Sites whose masked updates of the newest round were folded.
        failed: Other sites that it was heard of, and why they sent none.
        labelled: Marks replies to tasks whose answers are no longer needed.
    """

    run_id: RunId
    grid: Grid
    deadline_seconds: float
    run_setup_of: Callable[[SiteId], RunSetup | None]
    held: dict[SiteId, int] = field(default_factory=dict, init=False)
    answered: set[SiteId] = field(default_factory=set, init=False)
    failed: dict[SiteId, FailureKind] = field(default_factory=dict, init=False)
    labelled: Callable[[Reply], Reply] = field(default=lambda reply: reply, init=False)
    _left: set[SiteId] = field(default_factory=set, init=False)

    def note_returns(self, record: RoundRecord) -> None:
        """Note that sites which left and are asked again have no keys."""
        for site in self._left - record.members.away().keys():
            self._left.remove(site)
            run_setup = self.run_setup_of(site)
            if run_setup is not None:
                run_setup.note_lacking(site)
        # As well those who left before this coordinator began.
        self._left |= record.members.standing(Standing.GONE).keys()

    def take(
        self,
        record: RoundRecord,
        step: SecureStep,
        sites: Sequence[SiteId],
        body: Callable[[SiteId], bytes],
        accept: Callable[[SiteId, bytes], SiteId],
    ) -> None:
        """Take one step with some sites; a wrong answer is reported and left out.

        Who has said meanwhile that it is gone is not asked.

        Args:
            record: The round.
            step: What to ask.
            sites: Whom.
            body: What goes to a site.
            accept: Takes a site's answer, and returns who has signed it.
        """
        away = record.members.away()
        tasks = [
            SecureTask(
                run_id=self.run_id,
                round_index=0 if step in _OF_NO_ROUND else record.round_index,
                site=site,
                step=step,
                body=body(site),
            )
            for site in sites
            if site not in away
        ]
        replies = exchange(self.grid, tasks, deadline_seconds=self.deadline_seconds)
        self.take_answers(record, step, map(self.labelled, replies), accept)

    def silent(self, sites: Iterable[SiteId]) -> list[SiteId]:
        """The sites of some whose last task had no answer at all."""
        return [site for site in sites if self.failed.get(site) in _SILENT]

    def take_answers(
        self,
        record: RoundRecord,
        step: SecureStep,
        replies: Iterable[Reply],
        accept: Callable[[SiteId, bytes], SiteId],
        round_index: int | None = None,
    ) -> None:
        """Record the answers to a step; see ``take``.

        ``round_index`` is that of the sum, if it began in an earlier round.
        """
        record.take_step(
            step,
            self._noting(replies),
            lambda answer: check_sender(answer.site, accept(answer.site, answer.body)),
            round_index,
        )

    def agree_and_reveal(
        self, record: RoundRecord, current: AggregatorRound, survivors: Sequence[SiteId]
    ) -> None:
        """R2 and R3: have the survivors agree on their list, and open the sum."""
        heads = current.survivors()
        self.take(
            record,
            SecureStep.SURVIVORS,
            asked_to_agree(record, current, survivors),
            lambda _: heads,
            lambda _, data: current.on_consent(data),
        )
        self.take(
            record,
            SecureStep.REVEAL,
            current.close_consents(),
            current.reveal,
            lambda _, data: current.on_shares(data),
        )

    def fold(
        self,
        record: RoundRecord,
        tasks: Sequence[RoundTask],
        round_of: Callable[[SiteId], MaskedRound],
        schedule: Schedule = BARRIER,
    ) -> None:
        """R1: send the model and fold each answer into its site's sum.

        Args:
            record: The round.
            tasks: One for each site; who is away by now is not asked.
            round_of: The sum that a site is in; a ``ProtocolError`` if in none.
            schedule: For how long to wait for late sites.
        """
        away = record.members.away()
        asked = {task.site: task for task in tasks if task.site not in away}
        dispatcher = Dispatcher(self.grid, deadline_seconds=self.deadline_seconds)
        view = ScheduleView(
            round_index=record.round_index,
            rounds=record.round_index,  # Also of an evaluation after the last one.
            cohort=list(asked),
            open=dispatcher.open,
            patience=record.patience,
        )
        replies = dispatcher.replies(
            schedule,
            view,
            write=lambda sites: [asked[site] for site in sites],
            tally=record,
            now=record.clock.monotonic,
        )
        self.fold_replies(record, replies, round_of)

    def fold_replies(
        self,
        record: RoundRecord,
        replies: Iterable[Reply],
        round_of: Callable[[SiteId], MaskedRound],
    ) -> None:
        """Fold each answer of a round into its site's sum; see ``fold``."""
        self.answered.clear()
        self.failed.clear()
        heard = self._heard(map(self.labelled, replies), round_of)
        for parts in whole_sums(record.sound(heard, MaskedUpdate), record):
            try:
                _fold(parts, round_of)
            except ProtocolError as error:
                revoke_all(parts, record, str(error))
            else:
                self._count(parts, record)
            parts.clear()  # One at a time: the next is about to land.

    def _count(
        self,
        parts: Sequence[tuple[MaskedUpdate, Reply]],
        record: RoundRecord,
    ) -> None:
        for update, reply in parts:
            self._note_answer(update.site)
            self.answered.add(update.site)
            self.held[update.site] = update.based_on
            record.count_masked(update, reply)

    def _heard(
        self, replies: Iterable[Reply], round_of: Callable[[SiteId], MaskedRound]
    ) -> Iterator[Reply]:
        """Check as they land that declines are signed by their sites."""
        for reply in self._noting(replies):
            answer = reply.message
            if isinstance(answer, SecureAnswer) and answer.step is SecureStep.DECLINE:
                try:
                    current = round_of(answer.site).protocol
                    check_sender(answer.site, current.on_decline(answer.body))
                except ProtocolError as error:
                    refused = failure(answer, FailureKind.INVALID, str(error))
                    yield replace(reply, message=refused)
                    continue
                self._note_answer(answer.site)
                self.failed[answer.site] = FailureKind.NOT_FINITE
            del answer  # The caller wants to let go of a masked update.
            yield reply
            del reply

    def _note_answer(self, site: SiteId) -> None:
        """Note that a site has answered a round of the setup in force."""
        run_setup = self.run_setup_of(site)
        if run_setup is not None:
            run_setup.note_answer(site)

    def _noting(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Note as they land which sites have lost their keys, or will.

        Nobody signs that, as nobody signs silence: anyone who could forge it could as
        well drop the site's answers.
        """
        for reply in replies:
            answer = reply.message
            if isinstance(answer, SiteFailure):
                self._note_failure(answer)
            elif isinstance(answer, MaskedUpdate) and answer.leaving is not None:
                self._left.add(answer.site)
            del answer
            yield reply
            del reply

    def _note_failure(self, answer: SiteFailure) -> None:
        if answer.kind is FailureKind.LEAVING:
            self._left.add(answer.site)
        self.failed[answer.site] = answer.kind
        run_setup = self.run_setup_of(answer.site)
        if run_setup is None:
            return
        if answer.kind is FailureKind.NOT_SET_UP:
            run_setup.note_lacking(answer.site)
        elif answer.kind is FailureKind.DISCONNECTED:
            run_setup.note_disconnected(answer.site)


def asked_to_agree(
    record: RoundRecord, current: AggregatorRound, survivors: Sequence[SiteId]
) -> Sequence[SiteId]:
    """Whom to ask in R2: one that leaves may be away by now, and t are enough."""
    stay = record.members.present(survivors)
    return stay if len(stay) >= current.threshold else survivors


def _fold(
    parts: Sequence[tuple[MaskedUpdate, Reply]],
    round_of: Callable[[SiteId], MaskedRound],
) -> None:
    """Fold one update, or the sum that a relay has made of several."""
    update, reply = parts[0]
    current = round_of(update.site)
    if reply.through is None:
        current.fold(update)
        return
    total = reply.through.update
    assert isinstance(total, MaskedUpdate)  # noqa: S101 -- as its parts are
    current.fold_relayed(total, [part for part, _ in parts])


@contextmanager
def losing_the_round(record: RoundRecord) -> Iterator[None]:
    """Turn errors that make a sum impossible into a lost round, with the reason."""
    try:
        yield
    except (TooFewSites, BadShare, DrawRefused, SumOutOfRange) as error:
        record.events.warned(f"round {record.round_index} has no sum: {error}")
        if isinstance(error, SumOutOfRange):
            record.verdicts.complaints.append(f"the sum: {error}")
        raise QuorumNotMet(str(error)) from error

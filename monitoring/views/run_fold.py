"""Fold events, one by one, into the view of a run.

``RunFold`` also takes events of an unfinished run; ``view`` gives a frozen picture of
what is known so far.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from federation.events import (
    CheckpointSaved,
    CheckpointSkipped,
    CostPredicted,
    DataDistributed,
    Event,
    GroupsCompared,
    LocalWorkChosen,
    ModelEvaluated,
    ModelSelected,
    PrivacyPlanned,
    RoundEvent,
    RoundFinished,
    RoundStarted,
    RunExtended,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    SitesIntroduced,
    SitesLeftOut,
    SitesPaid,
    SiteSummed,
    StepTaken,
    StoreUsed,
    Warned,
)
from federation.job.metrics import STATISTICS
from federation.messages import PrivacySpent
from monitoring.views.participation import waited
from monitoring.views.round_view import RoundView
from monitoring.views.run_totals import RunTotals, Superseded
from monitoring.views.run_view import RunView
from monitoring.views.site_view import larger, spent_by_site

MAX_REPORTS = 2_000  # Of rounds that are not settled.
KEPT_ROUNDS = 6  # Of them at the least, unless each has many: a timeline shows them.

_Event = TypeVar("_Event")

# Of these the newest counts, whatever round it is of.
_NEWEST = (
    RunFinished,
    DataDistributed,
    CostPredicted,
    PrivacyPlanned,
    SitesLeftOut,
    GroupsCompared,
    ModelSelected,
    SitesPaid,
)
# They may come before the RunStarted of their coordinator, or at the end of another's:
# they do not lengthen the time of a coordinator.
_NOTICES = (
    RunExtended,
    RunFinished,
    DataDistributed,
    PrivacyPlanned,
    SitesLeftOut,
    SitesIntroduced,
    Warned,
    CheckpointSkipped,
    StoreUsed,
)


# Events that a round has once, and the note that is made of each.
_ONCE: Mapping[type[RoundEvent], str] = {
    RoundStarted: "began",
    LocalWorkChosen: "work",
    RoundFinished: "ended",
    ModelEvaluated: "evaluated",
    CheckpointSaved: "saved",
}


@dataclass(slots=True)
class _RoundNotes:
    """What is known about a round; ``began`` and ``ended`` of none after the last."""

    began: RoundStarted | None = None
    reports: list[SiteAnswered | SiteFailed] = field(default_factory=list)
    steps: list[StepTaken] = field(default_factory=list)
    ended: RoundFinished | None = None
    evaluated: ModelEvaluated | None = None
    saved: CheckpointSaved | None = None
    work: LocalWorkChosen | None = None
    waited: Mapping[str, float] = field(default_factory=dict)
    awaited: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldState:
    """A fold, but for the events that it holds."""

    past: RunTotals
    settled: int
    last_round: int
    seconds_before: float
    last_at: float
    spent: tuple[tuple[str, PrivacySpent], ...]
    superseded: Superseded


class RunFold:
    """Takes the events of one run in their order.

    Attributes:
        is_lost: Whether a coordinator repeats rounds that were settled: fold all events
            once more, after ``expect``.
    """

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._started: list[RunStarted] = []
        self._engines: list[tuple[int, str]] = []
        self._seconds_before = 0.0  # of the coordinators before the newest
        self._last_at = 0.0
        self._newest: dict[type, Event] = {}
        self._rounds: dict[int, _RoundNotes] = {}
        self._last_round = 0
        # Never forgotten: a round that runs again was charged all the same.
        self._spent: dict[str, PrivacySpent] = {}
        self._extended: list[RunExtended] = []
        self._remarks: list[Warned | CheckpointSkipped | SiteSummed] = []
        self._superseded = Superseded()
        self._past: RunTotals | None = None
        self._settled = 0  # The newest round of them.
        self._restarts: list[int] = []
        self.is_lost = False
        # Of all coordinators: a round that runs again is paid for again.
        self._storage: dict[tuple[str, str, str], StoreUsed] = {}

    @property
    def has_started(self) -> bool:
        """Whether a coordinator has started, so that there is something to view."""
        return bool(self._started)

    def expect(self, restarts: Sequence[int]) -> None:
        """Note with which rounds the coordinators begin whose events come.

        So that no round is settled which one of them repeats.
        """
        self._restarts = [*restarts]

    def kept(self) -> tuple[FoldState, Sequence[Event]]:
        """Return what makes another fold like this one: see ``restore``."""
        state = FoldState(
            past=self._past or RunTotals(),
            settled=self._settled,
            last_round=self._last_round,
            seconds_before=self._seconds_before,
            last_at=self._last_at,
            spent=tuple(self._spent.items()),
            superseded=self._superseded,
        )
        events: list[Event] = [*self._started, *self._extended, *self._remarks]
        events += [*self._newest.values(), *self._storage.values()]
        for _, row in sorted(self._rounds.items()):
            begun, ended = (row.began, row.work), (row.ended, row.evaluated, row.saved)
            found = (*begun, *row.reports, *row.steps, *ended)
            events += [event for event in found if event is not None]
        return state, events

    def restore(self, state: FoldState) -> None:
        """Go on where another fold was, whose events were added before."""
        self._past, self._settled = state.past, state.settled
        self._last_round = state.last_round
        self._seconds_before, self._last_at = state.seconds_before, state.last_at
        self._spent = dict(state.spent)
        self._superseded = state.superseded

    def settle(self, most: int | None = None) -> None:
        """Replace rounds that are over by their totals, if there are many answers.

        Args:
            most: Answers that need not be settled; ``MAX_REPORTS`` by default.
        """
        held = sum(len(row.reports) for row in self._rounds.values())
        if held <= (MAX_REPORTS if most is None else most):
            return
        if self._started and self._started[-1].task == STATISTICS:
            return  # They have few rounds, and what they found depends on all.
        limit = min(self._restarts, default=self._last_round + 1)
        ended = [i for i in sorted(self._rounds) if self._rounds[i].ended and i < limit]
        few = len(self._rounds[self._last_round].reports) <= MAX_REPORTS / KEPT_ROUNDS
        gone = ended[: -KEPT_ROUNDS if few else -1]
        if not gone:
            return
        start = self._started[-1]
        rows = tuple(_view(each, self._rounds.pop(each), start) for each in gone)
        only = replace(
            self.view(),
            past=None,
            initial=None,
            rounds=rows,
            current=None,
            unevaluated=(),
            evaluation_steps=(),
            superseded=Superseded(),
        )
        totals = RunTotals.of(only)
        self._past = (self._past or RunTotals()).plus(totals).settled()
        self._settled = gone[-1]

    @property
    def finished(self) -> RunFinished | None:
        """The newest coordinator's last line; None while it works."""
        return self._newest_of(RunFinished)

    @property
    def left_out(self) -> SitesLeftOut | None:
        """As in the view, which is costly to make for each event."""
        return self._newest_of(SitesLeftOut)

    def most_spent(self, told: float | None) -> float | None:
        """Largest epsilon of any site so far, at least ``told``; None if unknown."""
        known = (told, *(spent.epsilon for spent in self._spent.values()))
        return max((e for e in known if e is not None), default=None)

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case RunStarted():
                self._start(event)
            case RunExtended():
                self._extended.append(event)
                self._newest.pop(RunFinished, None)  # It was not the end.
            case Warned() | CheckpointSkipped() | SiteSummed():
                self._remark(event)
            case StoreUsed():
                self._use(event)
            case _ if isinstance(event, _NEWEST):
                self._newest[type(event)] = event
            case RoundEvent():
                self._add_to_round(event)
        if not isinstance(event, _NOTICES):
            self._last_at = max(self._last_at, event.at)

    def _add_to_round(self, event: RoundEvent) -> None:
        if isinstance(event, RoundStarted):
            self._forget_from(event.round_index)
        known = self._rounds.setdefault(event.round_index, _RoundNotes())
        self._last_round = max(self._last_round, event.round_index)
        match event:
            case SiteAnswered() | SiteFailed():
                known.reports.append(event)
            case StepTaken():
                known.steps.append(event)
            case _ if type(event) in _ONCE:
                if isinstance(event, ModelEvaluated) and known.evaluated:
                    # An extension evaluates the model again that was the last one.
                    self._supersede(_RoundNotes(evaluated=known.evaluated))
                setattr(known, _ONCE[type(event)], event)
        if isinstance(event, RoundFinished):
            known.waited = waited(known.reports, known.awaited)
        self._charge(event)

    def _remark(self, event: Warned | CheckpointSkipped | SiteSummed) -> None:
        self._remarks.append(event)
        if not (isinstance(event, Warned) and event.awaited):
            return
        known = self._rounds.get(self._last_round)
        if known is not None and known.began and not known.ended:
            known.awaited.append((event.at - known.began.at, event.awaited))

    def view(self) -> RunView:
        """The view so far.

        Raises:
            ValueError: No ``RunStarted`` has come yet.
        """
        if not self._started:
            raise ValueError("no run has started: these events hold no RunStarted")
        known = sorted(self._rounds.items())
        running = max((index for index, row in known if row.began), default=0)
        # Of no round: of the evaluation that follows the last one.
        outside = [row for _, row in known if not (row.began or row.ended)]
        privacy = self._newest_of(PrivacyPlanned)
        # Statistics ask a lost round again.
        rounds = max(self._started[-1].rounds, running)
        return RunView(
            started=replace(self._started[-1], rounds=rounds),
            first_started_at=self._started[0].at,
            coordinators=len(self._started),
            extended=tuple(self._extended),
            finished=self.finished,
            seconds=self._seconds_before + self._seconds_now(),
            initial=self._rounds[0].evaluated if 0 in self._rounds else None,
            rounds=tuple(
                _view(index, row, self._started[-1])
                for index, row in known
                if row.ended
            ),
            current=_view(running, self._rounds[running], self._started[-1])
            if running and not self._rounds[running].ended
            else None,
            unevaluated=tuple(
                report
                for row in outside
                for report in row.reports
                if isinstance(report, SiteFailed)
            ),
            evaluation_steps=tuple(step for row in outside for step in row.steps),
            data=self._newest_of(DataDistributed),
            predicted=self._newest_of(CostPredicted),
            privacy=privacy,
            # Without a promise a site's word for what it spent means nothing.
            spent=dict(self._spent) if privacy else {},
            left_out=self._newest_of(SitesLeftOut),
            groups=self._newest_of(GroupsCompared),
            warnings=tuple(e for e in self._remarks if isinstance(e, Warned)),
            checkpoints=tuple(row.saved for _, row in known if row.saved),
            skipped=tuple(e for e in self._remarks if isinstance(e, CheckpointSkipped)),
            storage=tuple(self._storage.values()),
            selected=self._selected(),
            paid=self._newest_of(SitesPaid),
            engines=tuple(self._engines),
            past=self._past,
            superseded=self._superseded,
            summed={e.site: e for e in self._remarks if isinstance(e, SiteSummed)},
        )

    def _start(self, event: RunStarted) -> None:
        if self._started:
            self._seconds_before += self._seconds_now()
        self._started.append(event)
        kept = [each for each in self._engines if each[0] < event.first_round]
        if not kept or kept[-1][1] != event.engine:
            kept.append((event.first_round, event.engine))
        self._engines = kept
        self._newest.pop(RunFinished, None)
        self._newest.pop(ModelSelected, None)
        self._newest.pop(SitesPaid, None)
        self._newest.pop(SitesLeftOut, None)  # It is sent again if it still holds.
        self._last_at = event.at
        self._restarts = self._restarts[1:]
        self._forget_from(event.first_round)

    def _forget_from(self, first_round: int) -> None:
        """Drop what an earlier coordinator knew of rounds that now run again."""
        if first_round > self._last_round:
            return  # As at the start of almost every round.
        if first_round <= self._settled:
            self._past, self._settled, self.is_lost = None, 0, True
        for index in [index for index in self._rounds if index >= first_round]:
            self._supersede(self._rounds.pop(index))
        self._last_round = max(self._rounds, default=0)

    def _supersede(self, gone: _RoundNotes) -> None:
        """Count what was sent for nothing, as it was sent."""
        row, evaluated = _view(0, gone, self._started[-1]), gone.evaluated
        found = [(one.site, one.bytes_up, one.bytes_down) for one in gone.reports]
        shared: list[StepTaken | ModelEvaluated] = [*gone.steps]
        shared += [evaluated] if evaluated else []
        for each in shared:
            found += zip(each.sites, each.bytes_up, each.bytes_down, strict=True)
        self._superseded = self._superseded.plus(
            row.bytes_up + (sum(evaluated.bytes_up) if evaluated else 0),
            row.bytes_down + (sum(evaluated.bytes_down) if evaluated else 0),
            found,
        )

    def _newest_of(self, kind: type[_Event]) -> _Event | None:
        event = self._newest.get(kind)
        return event if isinstance(event, kind) else None

    def _selected(self) -> ModelSelected | None:
        """The model that the run has left, by rounds that took place."""
        found = self._newest_of(ModelSelected)
        if found is None:
            return None
        return replace(
            found,
            round_index=self._round_of(found.round_index),
            best_round=None
            if found.best_round is None
            else self._round_of(found.best_round),
        )

    def _round_of(self, index: int) -> int:
        """The round that made the model which is called after a number.

        Numbers that an extension skips begin with the model before them.
        """
        for one in self._extended:
            if one.last_round < index < one.first_round:
                return one.last_round
        return index

    def _charge(self, event: RoundEvent) -> None:
        told = spent_by_site(event) if isinstance(event, ModelEvaluated) else ()
        if isinstance(event, SiteAnswered) and event.spent is not None:
            told = ((event.site, event.spent),)
        for site, spent in told:
            self._spent[site] = larger(self._spent.get(site), spent)

    def _use(self, event: StoreUsed) -> None:
        place = (event.url, event.who, event.way)
        before = self._storage.get(place)
        uses = {} if before is None else {use.operation: use for use in before.uses}
        uses |= {use.operation: use.plus(uses.get(use.operation)) for use in event.uses}
        ordered = tuple(uses[operation] for operation in sorted(uses))
        spared = (
            (0, 0) if before is None else (before.spared_calls, before.spared_bytes)
        )
        self._storage[place] = replace(
            event,
            uses=ordered,
            spared_calls=event.spared_calls + spared[0],
            spared_bytes=event.spared_bytes + spared[1],
        )

    def _seconds_now(self) -> float:
        if self.finished is not None:
            return self.finished.seconds
        return max(0.0, self._last_at - self._started[-1].at)


def _view(index: int, known: _RoundNotes, started: RunStarted) -> RoundView:
    began, ended = known.began, known.ended
    started_at, cohort = (0.0, ()) if began is None else (began.at, began.cohort)
    if began is None and ended is not None:
        started_at, cohort = ended.at - ended.seconds, ended.asked
    covered = ""
    if ended is not None and started.replicas:
        covered = started.share(ended.answered, ended.asked) or "all data"
    return RoundView(
        index=index,
        started_at=started_at,
        cohort=cohort,
        copies=len(cohort) - started.datasets(cohort),
        covered=covered,
        reports=tuple(known.reports),
        steps=tuple(known.steps),
        finished=ended,
        evaluated=known.evaluated,
        saved=known.saved,
        work=known.work,
        waited=known.waited,
    )


def fold(events: Iterable[Event]) -> RunView:
    """View a whole log.

    Raises:
        ValueError: The log holds no ``RunStarted``.
    """
    run = RunFold()
    for event in events:
        run.add(event)
    return run.view()

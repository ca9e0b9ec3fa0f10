"""From events, one by one, to the view of a run.

``RunFold`` takes events also while the run goes on; ``view`` gives a frozen picture of
what is known so far.
"""

from collections.abc import Iterable
from dataclasses import replace

from federation.events import (
    CheckpointSaved,
    CheckpointSkipped,
    CostPredicted,
    DataDistributed,
    Event,
    GroupsCompared,
    ModelEvaluated,
    PrivacyPlanned,
    RoundFinished,
    RoundStarted,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    SitesLeftOut,
    StepTaken,
    StoreUsed,
    Warned,
)
from federation.messages import PrivacySpent
from monitoring.views.round_view import RoundView
from monitoring.views.run_view import RunView
from monitoring.views.site_view import larger, spent_by_site


class RunFold:
    """Takes the events of one run in their order."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._started: list[RunStarted] = []
        self._finished: RunFinished | None = None
        self._seconds_before = 0.0  # of the coordinators before the newest
        self._last_at = 0.0
        self._began: dict[int, RoundStarted] = {}
        self._reports: dict[int, list[SiteAnswered | SiteFailed]] = {}
        self._steps: dict[int, list[StepTaken]] = {}
        self._ended: dict[int, RoundFinished] = {}
        self._evaluated: dict[int, ModelEvaluated] = {}
        self._data: DataDistributed | None = None
        self._predicted: CostPredicted | None = None
        self._privacy: PrivacyPlanned | None = None
        # Never forgotten: a round that runs again was charged all the same.
        self._spent: dict[str, PrivacySpent] = {}
        self._saved: dict[int, CheckpointSaved] = {}
        self._left_out: SitesLeftOut | None = None
        self._groups: GroupsCompared | None = None
        self._warnings: list[Warned] = []
        self._skipped: list[CheckpointSkipped] = []
        # Of all coordinators: a round that runs again is paid for again.
        self._storage: dict[tuple[str, str, str], StoreUsed] = {}

    @property
    def has_started(self) -> bool:
        """Whether a coordinator has begun, so that there is something to view."""
        return bool(self._started)

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case RunStarted():
                self._start(event)
            case RoundStarted(round_index=index):
                self._forget_from(index)
                self._began[index] = event
            case SiteAnswered() | SiteFailed():
                self._reports.setdefault(event.round_index, []).append(event)
                if isinstance(event, SiteAnswered) and event.spent is not None:
                    self._charge(event.site, event.spent)
            case StepTaken(round_index=index):
                self._steps.setdefault(index, []).append(event)
            case (
                RoundFinished()
                | ModelEvaluated()
                | CheckpointSaved()
                | GroupsCompared()
                | CostPredicted()
            ):
                self._take_result(event)
            case _:
                # Notices may come before the RunStarted of their coordinator, so
                # they do not lengthen the time of the one before.
                self._take_notice(event)
                return
        self._last_at = max(self._last_at, event.at)

    def view(self) -> RunView:
        """What is known so far.

        Raises:
            ValueError: No ``RunStarted`` has come yet.
        """
        if not self._started:
            raise ValueError("no run has started: these events hold no RunStarted")
        running = max(self._began, default=0)
        return RunView(
            started=self._started[-1],
            first_started_at=self._started[0].at,
            coordinators=len(self._started),
            finished=self._finished,
            seconds=self._seconds_before + self._seconds_now(),
            initial=self._evaluated.get(0),
            rounds=tuple(self._round(index) for index in sorted(self._ended)),
            current=self._round(running)
            if running not in self._ended and running
            else None,
            unevaluated=self._unevaluated(),
            evaluation_steps=tuple(
                step
                for index in self._outside(self._steps)
                for step in self._steps[index]
            ),
            data=self._data,
            predicted=self._predicted,
            privacy=self._privacy,
            # Without a promise a site's word for what it spent means nothing.
            spent=dict(self._spent) if self._privacy else {},
            left_out=self._left_out,
            groups=self._groups,
            warnings=tuple(self._warnings),
            checkpoints=tuple(self._saved[index] for index in sorted(self._saved)),
            skipped=tuple(self._skipped),
            storage=tuple(self._storage.values()),
        )

    def _start(self, event: RunStarted) -> None:
        if self._started:
            self._seconds_before += self._seconds_now()
        self._started.append(event)
        self._finished = None
        self._last_at = event.at
        self._forget_from(event.first_round)

    def _forget_from(self, first_round: int) -> None:
        """Drop what an earlier coordinator knew of rounds that now run again."""
        for known in (
            self._began,
            self._reports,
            self._steps,
            self._ended,
            self._evaluated,
            self._saved,
        ):
            for index in [index for index in known if index >= first_round]:
                del known[index]

    def _take_result(
        self,
        event: RoundFinished
        | ModelEvaluated
        | CheckpointSaved
        | GroupsCompared
        | CostPredicted,
    ) -> None:
        match event:
            case RoundFinished():
                self._ended[event.round_index] = event
            case ModelEvaluated():
                self._evaluated[event.round_index] = event
                for site, spent in spent_by_site(event):
                    self._charge(site, spent)
            case CheckpointSaved():
                self._saved[event.round_index] = event
            case GroupsCompared():
                self._groups = event
            case CostPredicted():
                self._predicted = event

    def _take_notice(self, event: Event) -> None:
        match event:
            case DataDistributed():
                self._data = event
            case PrivacyPlanned():
                self._privacy = event
            case SitesLeftOut():
                self._left_out = event
            case Warned():
                self._warnings.append(event)
            case CheckpointSkipped():
                self._skipped.append(event)
            case StoreUsed():
                self._use(event)
            case RunFinished():
                self._finished = event

    def _charge(self, site: str, spent: PrivacySpent) -> None:
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
        if self._finished is not None:
            return self._finished.seconds
        return max(0.0, self._last_at - self._started[-1].at)

    def _unevaluated(self) -> tuple[SiteFailed, ...]:
        """Failures to evaluate the final model."""
        return tuple(
            report
            for index in self._outside(self._reports)
            for report in self._reports[index]
            if isinstance(report, SiteFailed)
        )

    def _outside(self, indices: Iterable[int]) -> list[int]:
        """Indices of no round: of the evaluation that follows the last one."""
        known = self._began.keys() | self._ended.keys()
        return sorted(index for index in indices if index not in known)

    def _round(self, index: int) -> RoundView:
        began, ended = self._began.get(index), self._ended.get(index)
        started_at, cohort = (0.0, ()) if began is None else (began.at, began.cohort)
        if began is None and ended is not None:
            started_at, cohort = ended.at - ended.seconds, ended.asked
        return RoundView(
            index=index,
            started_at=started_at,
            cohort=cohort,
            reports=tuple(self._reports.get(index, ())),
            steps=tuple(self._steps.get(index, ())),
            finished=ended,
            evaluated=self._evaluated.get(index),
            saved=self._saved.get(index),
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

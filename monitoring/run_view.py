"""A run as its events tell it: the one source of progress, report and result.

``RunFold`` takes events one by one, also while the run goes on; ``view`` gives a
frozen picture of what is known so far. A run that was resumed repeats rounds; the
newest record of a round counts, in its traffic too, while ``seconds`` adds up all
coordinators. Nothing here draws, and nothing here imports more than the kernel.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

from federation.events import (
    CheckpointSaved,
    CheckpointSkipped,
    DataDistributed,
    Event,
    ModelEvaluated,
    PrivacyPlanned,
    RoundFinished,
    RoundStarted,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    SitePrivacy,
    SiteShare,
    StepTaken,
    StoreUsed,
    Warned,
)
from federation.messages import MetricSums, Phase, PrivacySpent

RUNNING = "running"
COMPLETED = "completed"
EXHAUSTED = "exhausted"
LANGUAGE = "causal_lm"

Reports = tuple[SiteAnswered | SiteFailed, ...]
Series = tuple[tuple[int, float], ...]  # (round index, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """One round.

    Attributes:
        index: 1 for the first.
        started_at: When its tasks went out, in seconds since the epoch.
        cohort: Sites that were asked.
        reports: What became of each task, in order of arrival.
        steps: Further exchanges of secure aggregation.
        finished: Its canonical line; None while it runs.
        evaluated: The model after it; None if that was not evaluated, or not yet.
        saved: Its checkpoint; None if that is not durable, or not yet.
    """

    index: int
    started_at: float
    cohort: tuple[str, ...]
    reports: Reports
    steps: tuple[StepTaken, ...]
    finished: RoundFinished | None
    evaluated: ModelEvaluated | None
    saved: CheckpointSaved | None

    @property
    def status(self) -> str:
        """``running``, ``completed``, ``lost`` or ``discarded``."""
        return RUNNING if self.finished is None else self.finished.status

    @property
    def training_loss(self) -> float | None:
        """Mean loss while the sites trained, pooled over them."""
        return loss_of(self.finished.training if self.finished else None)

    @property
    def loss(self) -> float | None:
        """Mean held-out loss of the model after this round."""
        return loss_of(self.evaluated.pooled if self.evaluated else None)

    @property
    def accuracy(self) -> float | None:
        """Held-out accuracy of the model after this round."""
        return accuracy_of(self.evaluated.pooled if self.evaluated else None)

    @property
    def answered(self) -> int:
        """Number of sites whose update was folded in."""
        if self.finished is not None:
            return len(self.finished.answered)
        return sum(isinstance(report, SiteAnswered) for report in self.reports)

    @property
    def sites_evaluated(self) -> int | None:
        """How many sites' held-out data the loss is over; None if not evaluated."""
        return None if self.evaluated is None else len(self.evaluated.sites)

    @property
    def num_unheard(self) -> int:
        """Sites that the loss lacks, of as many as a round asks."""
        if self.evaluated is None:
            return 0
        # The last model is evaluated by all sites, which may be more than a cohort.
        return max(0, len(self.cohort) - len(self.evaluated.sites))

    @property
    def failures(self) -> dict[str, int]:
        """Number of refused or missing answers by kind."""
        return dict(self.finished.failed) if self.finished else {}

    @property
    def bytes_up(self) -> int:
        """Bytes from all sites."""
        if self.finished is not None:
            return self.finished.bytes_up
        steps = sum(sum(step.bytes_up) for step in self.steps)
        return steps + sum(report.bytes_up for report in self.reports)

    @property
    def bytes_down(self) -> int:
        """Bytes to all sites."""
        if self.finished is not None:
            return self.finished.bytes_down
        steps = sum(sum(step.bytes_down) for step in self.steps)
        return steps + sum(report.bytes_down for report in self.reports)

    @property
    def epsilon(self) -> float | None:
        """Largest epsilon that a site has told with its answer to this round."""
        if self.finished is not None:
            return self.finished.epsilon
        spent = [r.spent for r in self.reports if isinstance(r, SiteAnswered)]
        return max((told.epsilon for told in spent if told), default=None)

    @property
    def seconds(self) -> float | None:
        """Duration with its checkpoint; None while the round runs."""
        if self.finished is None:
            return None
        return self.finished.seconds + (self.saved.seconds if self.saved else 0.0)

    @property
    def update_clip(self) -> float | None:
        """What updates were clipped to, in weight units; None if nothing is."""
        return None if self.finished is None else self.finished.update_clip

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Where the aggregator's time went."""
        if self.finished is None or self.saved is None:
            return self.finished.phases if self.finished else ()
        checkpoint = Phase(
            name="checkpoint",
            start_seconds=self.finished.seconds,
            seconds=self.saved.seconds,
        )
        return (*self.finished.phases, checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """One site over the whole run.

    Attributes:
        site: Its name.
        share: What it holds, if the run has told.
        bytes_up: Bytes from it, in every exchange.
        bytes_down: Bytes to it, likewise.
        seconds: Sum of the times between question and answer.
        answered: Rounds in which its update counted.
        examples: Training examples that it holds; None if it has not told.
        training_loss: Loss while it trained, by round.
        loss: Loss of the global model after a round on this site's held-out data.
        accuracy: Accuracy of the same.
        failures: Everything of it that did not count.
        promise: What it promises of its records; None without privacy.
        spent: The most that it has told to have spent; None if it has not told.
        epsilon: What it had spent on its training records, by round.
        held_out_epsilon: What it had spent on its held-out records, by round.
    """

    site: str
    share: SiteShare | None
    bytes_up: int
    bytes_down: int
    seconds: float
    answered: int
    examples: int | None
    training_loss: Series
    loss: Series
    accuracy: Series
    failures: tuple[SiteFailed, ...]
    promise: SitePrivacy | None = None
    spent: PrivacySpent | None = None
    epsilon: Series = ()
    held_out_epsilon: Series = ()


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run, as far as its events go.

    Attributes:
        started: The newest line of a coordinator that began.
        first_started_at: When the first coordinator began, seconds since the epoch.
        coordinators: How many began: 1 plus the number of resumes.
        finished: The newest coordinator's last line; None while it runs, and for
            ever if it was killed.
        seconds: Time that coordinators have worked, all together.
        initial: The model before the first round, if it was evaluated.
        rounds: Rounds that ended, by index.
        current: The round in progress.
        unevaluated: Sites that failed to evaluate the final model, after the last
            round.
        evaluation_steps: Steps of secure aggregation to evaluate the final model.
        data: Who holds what.
        privacy: What is promised of the sites' records; None if nothing is.
        spent: The most that each site has told to have spent, by any coordinator;
            empty without ``privacy``.
        warnings: What a person should know.
        checkpoints: Durable states, by round.
        skipped: Checkpoints that were torn or corrupt.
        storage: What buckets were used for, by all coordinators, one entry for each
            URL and way.
    """

    started: RunStarted
    first_started_at: float
    coordinators: int
    finished: RunFinished | None
    seconds: float
    initial: ModelEvaluated | None
    rounds: tuple[RoundView, ...]
    current: RoundView | None
    unevaluated: tuple[SiteFailed, ...]
    evaluation_steps: tuple[StepTaken, ...]
    data: DataDistributed | None
    privacy: PrivacyPlanned | None
    spent: Mapping[str, PrivacySpent]
    warnings: tuple[Warned, ...]
    checkpoints: tuple[CheckpointSaved, ...]
    skipped: tuple[CheckpointSkipped, ...]
    storage: tuple[StoreUsed, ...]

    @property
    def status(self) -> str:
        """``running``, ``completed``, ``stopped``, ``exhausted`` or ``failed``."""
        return RUNNING if self.finished is None else self.finished.status

    @property
    def is_secret(self) -> bool:
        """Whether losses and counts are known of all sites together only."""
        return self.started.secure_aggregation

    @property
    def total_spent(self) -> PrivacySpent | None:
        """What holds for every site that has told: the largest of each number."""
        total: PrivacySpent | None = None
        for spent in self.spent.values():
            total = _larger(total, spent)
        return total

    @property
    def clip_adapts(self) -> bool:
        """Whether rounds differ in what updates were clipped to."""
        clips = {row.update_clip for row in self.rounds} - {None}
        return len(clips) > 1

    @property
    def is_language(self) -> bool:
        """Whether the model predicts tokens, so that perplexity is of interest."""
        return self.started.task == LANGUAGE

    @property
    def rounds_completed(self) -> int:
        """Rounds after which the weights changed."""
        if self.finished is not None:
            return self.finished.rounds_completed
        return sum(row.status == COMPLETED for row in self.rounds)

    @property
    def bytes_up(self) -> int:
        """Bytes from all sites, in the rounds that count and to evaluate."""
        rounds = sum(row.bytes_up for row in self._all_rounds())
        alone = sum(sum(event.bytes_up) for event in self._evaluations())
        steps = sum(sum(step.bytes_up) for step in self.evaluation_steps)
        failed = sum(event.bytes_up for event in self.unevaluated)
        return rounds + alone + steps + failed

    @property
    def bytes_down(self) -> int:
        """Bytes to all sites, in the rounds that count and to evaluate."""
        rounds = sum(row.bytes_down for row in self._all_rounds())
        alone = sum(sum(event.bytes_down) for event in self._evaluations())
        steps = sum(sum(step.bytes_down) for step in self.evaluation_steps)
        failed = sum(event.bytes_down for event in self.unevaluated)
        return rounds + alone + steps + failed

    @property
    def last_evaluated(self) -> ModelEvaluated | None:
        """The newest evaluation of the global model."""
        evaluated = (row.evaluated for row in reversed(self.rounds) if row.evaluated)
        return next(evaluated, self.initial)

    @property
    def failures(self) -> tuple[SiteFailed, ...]:
        """Everything that did not count, by round."""
        return tuple(r for r in self._reports() if isinstance(r, SiteFailed))

    @cached_property
    def sites(self) -> tuple[SiteView, ...]:
        """Every site, in the order of the job; strangers that answered come last."""
        shares = {share.site: share for share in self.data.shares} if self.data else {}
        reports: dict[str, list[SiteAnswered | SiteFailed]] = {
            site: [] for site in self.started.sites
        }
        for report in self._reports():
            reports.setdefault(report.site, []).append(report)
        measured: dict[str, list[_Measured]] = {site: [] for site in reports}
        for event in self._evaluations():
            rows = zip(
                event.sites,
                event.by_site or repeat(None, len(event.sites)),
                event.bytes_up,
                event.bytes_down,
                strict=True,
            )
            for site, sums, up, down in rows:
                found = _Measured(event.round_index, sums, up, down)
                measured.setdefault(site, []).append(found)
        steps_up, steps_down = self._step_bytes()
        promises = {p.site: p for p in self.privacy.sites} if self.privacy else {}
        told = self._told()
        views = []
        for site, own in measured.items():
            epsilon, held_out_epsilon = _spending(told.get(site, []))
            step_bytes = (steps_up[site], steps_down[site])
            view = _site_view(
                site, shares.get(site), reports.get(site, []), own, step_bytes
            )
            views.append(
                replace(
                    view,
                    promise=promises.get(site),
                    spent=self.spent.get(site),
                    epsilon=epsilon,
                    held_out_epsilon=held_out_epsilon,
                )
            )
        return tuple(views)

    def _told(self) -> Mapping[str, list[tuple[int, PrivacySpent]]]:
        """What each site has told to have spent, with the round that it told it in."""
        found: dict[str, list[tuple[int, PrivacySpent]]] = {}
        if self.privacy is None:
            return found
        for report in self._reports():
            if isinstance(report, SiteAnswered) and report.spent is not None:
                place = (report.round_index, report.spent)
                found.setdefault(report.site, []).append(place)
        for event in self._evaluations():
            for site, spent in spent_by_site(event):
                found.setdefault(site, []).append((event.round_index, spent))
        return found

    def _all_rounds(self) -> Sequence[RoundView]:
        return self.rounds if self.current is None else (*self.rounds, self.current)

    def _reports(self) -> Iterator[SiteAnswered | SiteFailed]:
        for row in self._all_rounds():
            yield from row.reports
        yield from self.unevaluated

    def _step_bytes(self) -> tuple[Counter[str], Counter[str]]:
        """Bytes up and down of each site in the steps of secure aggregation."""
        up, down = Counter[str](), Counter[str]()
        rounds = (step for row in self._all_rounds() for step in row.steps)
        for step in (*rounds, *self.evaluation_steps):
            rows = zip(step.sites, step.bytes_up, step.bytes_down, strict=True)
            for site, from_site, to_site in rows:
                up[site] += from_site
                down[site] += to_site
        return up, down

    def _evaluations(self) -> Iterator[ModelEvaluated]:
        for event in (self.initial, *(row.evaluated for row in self.rounds)):
            if event is not None:
                yield event


class _Measured(NamedTuple):
    """What a site found when it evaluated the global model."""

    round_index: int
    sums: MetricSums | None
    bytes_up: int
    bytes_down: int


def loss_of(sums: MetricSums | None) -> float | None:
    """Mean loss in nats, or None if nothing was predicted."""
    return sums.loss if sums is not None and sums.count else None


def accuracy_of(sums: MetricSums | None) -> float | None:
    """Fraction of right predictions, or None if nothing was predicted."""
    return sums.accuracy if sums is not None and sums.count else None


def perplexity(loss: float) -> float:
    """``exp`` of the mean loss of a token in nats; infinite if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _site_view(
    site: str,
    share: SiteShare | None,
    reports: Sequence[SiteAnswered | SiteFailed],
    measured: Sequence[_Measured],
    step_bytes: tuple[int, int],
) -> SiteView:
    up, down = step_bytes
    answers = [report for report in reports if isinstance(report, SiteAnswered)]
    return SiteView(
        site=site,
        share=share,
        bytes_up=up + sum(part.bytes_up for part in (*reports, *measured)),
        bytes_down=down + sum(part.bytes_down for part in (*reports, *measured)),
        seconds=sum(r.answered_seconds - r.asked_seconds for r in reports),
        answered=len(answers),
        examples=answers[-1].num_examples if answers else None,
        training_loss=_series((a.round_index, loss_of(a.training)) for a in answers),
        loss=_series((m.round_index, loss_of(m.sums)) for m in measured),
        accuracy=_series((m.round_index, accuracy_of(m.sums)) for m in measured),
        failures=tuple(r for r in reports if isinstance(r, SiteFailed)),
    )


def spent_by_site(event: ModelEvaluated) -> Sequence[tuple[str, PrivacySpent]]:
    """What sites have told with an exchange for evaluation alone."""
    # If one of them kept it to itself, nobody can say whose the others are.
    whole = len(event.spent) == len(event.sites)
    return tuple(zip(event.sites, event.spent, strict=True)) if whole else ()


def _larger(one: PrivacySpent | None, other: PrivacySpent) -> PrivacySpent:
    """What both stay within."""
    if one is None:
        return other
    held_out = (one.held_out_epsilon, other.held_out_epsilon)
    return PrivacySpent(
        epsilon=max(one.epsilon, other.epsilon),
        delta=max(one.delta, other.delta),
        held_out_epsilon=max((e for e in held_out if e is not None), default=None),
    )


def _spending(told: Sequence[tuple[int, PrivacySpent]]) -> tuple[Series, Series]:
    """Epsilon by round: of the training records, and of the held-out ones."""
    by_round: dict[int, PrivacySpent] = {}
    for index, spent in told:
        by_round[index] = _larger(by_round.get(index), spent)
    rounds = sorted(by_round.items())
    return (
        tuple((index, spent.epsilon) for index, spent in rounds),
        _series((index, spent.held_out_epsilon) for index, spent in rounds),
    )


def _series(points: Iterable[tuple[int, float | None]]) -> Series:
    return tuple((index, value) for index, value in points if value is not None)


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
        self._privacy: PrivacyPlanned | None = None
        # Never forgotten: a round that runs again was charged all the same.
        self._spent: dict[str, PrivacySpent] = {}
        self._saved: dict[int, CheckpointSaved] = {}
        self._warnings: list[Warned] = []
        self._skipped: list[CheckpointSkipped] = []
        # Of all coordinators: a round that runs again is paid for again.
        self._storage: dict[tuple[str, str], StoreUsed] = {}

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
            case RoundFinished() | ModelEvaluated() | CheckpointSaved():
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
            privacy=self._privacy,
            # Without a promise a site's word for what it spent means nothing.
            spent=dict(self._spent) if self._privacy else {},
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
        self, event: RoundFinished | ModelEvaluated | CheckpointSaved
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

    def _take_notice(self, event: Event) -> None:
        match event:
            case DataDistributed():
                self._data = event
            case PrivacyPlanned():
                self._privacy = event
            case Warned():
                self._warnings.append(event)
            case CheckpointSkipped():
                self._skipped.append(event)
            case StoreUsed():
                self._use(event)
            case RunFinished():
                self._finished = event

    def _charge(self, site: str, spent: PrivacySpent) -> None:
        self._spent[site] = _larger(self._spent.get(site), spent)

    def _use(self, event: StoreUsed) -> None:
        before = self._storage.get((event.url, event.way))
        uses = {} if before is None else {use.operation: use for use in before.uses}
        uses |= {use.operation: use.plus(uses.get(use.operation)) for use in event.uses}
        ordered = tuple(uses[operation] for operation in sorted(uses))
        self._storage[event.url, event.way] = replace(event, uses=ordered)

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


def result(view: RunView) -> dict[str, Any]:
    """What ``result.json`` holds; numbers that are not finite become None."""
    return {
        "status": view.status,
        "run_id": view.started.run_id,
        "job": view.started.job_name,
        "rounds_completed": view.rounds_completed,
        "final": _final(view),
        **_privacy_result(view),
        "rounds": [
            _round_result(row, is_private=view.privacy is not None)
            for row in view.rounds
        ],
        "sites": [_site_result(site) for site in view.sites],
        "storage": [
            {"url": used.url, "way": used.way, "uses": [asdict(u) for u in used.uses]}
            for used in view.storage
        ],
        "seconds": view.seconds,
    }


def _final(view: RunView) -> Mapping[str, float | int | None]:
    event = view.last_evaluated
    sums = None if event is None else event.pooled
    loss = loss_of(sums)
    final = {
        "round": None if event is None else event.round_index,
        "sites_evaluated": 0 if event is None else len(event.sites),
        "loss": _finite(loss),
        "accuracy": _finite(accuracy_of(sums)),
    }
    if view.is_language:
        final["perplexity"] = None if loss is None else _finite(perplexity(loss))
    return final


def _privacy_result(view: RunView) -> Mapping[str, Any]:
    """Epsilon and what it means; all None without differential privacy."""
    planned, total = view.privacy, view.total_spent
    found: dict[str, Any] = {
        "epsilon": total.epsilon if total else None,
        "delta": total.delta if total else None,
        "privacy": None,
    }
    if planned is not None:
        held_out = None if view.last_evaluated is None else "public"
        if any(site.held_out_noise is not None for site in planned.sites):
            held_out = "noise"
        found["privacy"] = {
            "unit": planned.unit,
            "relation": planned.relation,
            "accountant": planned.accountant,
            "sampling": planned.sampling,
            "holds_against": planned.holds_against or None,
            "signal_to_noise": _finite(planned.signal_to_noise),
            "epsilon_cap": max((s.epsilon_cap for s in planned.sites), default=None),
            "held_out": held_out,
            "held_out_epsilon": total.held_out_epsilon if total else None,
            "replaced": list(planned.replaced),
            "withheld": list(planned.withheld),
            "sites": [asdict(site) for site in planned.sites],
        }
    return found


def _round_result(row: RoundView, *, is_private: bool) -> Mapping[str, Any]:
    return {
        "round": row.index,
        "status": row.status,
        "training_loss": _finite(row.training_loss),
        "sites_evaluated": row.sites_evaluated,
        "loss": _finite(row.loss),
        "accuracy": _finite(row.accuracy),
        "asked": len(row.cohort),
        "answered": row.answered,
        "failed": row.failures,
        "bytes_up": row.bytes_up,
        "bytes_down": row.bytes_down,
        "seconds": row.seconds,
        "update_norm": _finite(row.finished.update_norm if row.finished else None),
        "update_clip": _finite(row.update_clip),
        "epsilon": row.epsilon if is_private else None,
    }


def _site_result(site: SiteView) -> Mapping[str, Any]:
    return {
        "site": site.site,
        "cloud": site.share.cloud if site.share else None,
        "region": site.share.region if site.share else None,
        "examples": site.share.train_examples if site.share else site.examples,
        "rounds_answered": site.answered,
        "failures": len(site.failures),
        "bytes_up": site.bytes_up,
        "bytes_down": site.bytes_down,
        "seconds": site.seconds,
        "loss": _finite(site.loss[-1][1]) if site.loss else None,
        "accuracy": _finite(site.accuracy[-1][1]) if site.accuracy else None,
        "epsilon": site.spent.epsilon if site.spent else None,
        "delta": site.spent.delta if site.spent else None,
        "held_out_epsilon": site.spent.held_out_epsilon if site.spent else None,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

"""A run from its events: the one source of progress, report and result.

``monitoring.views.run_fold`` makes it. A run that was resumed repeats rounds; the
newest record of a round counts, in its traffic too, while ``seconds`` adds up all
coordinators. Nothing here draws, and nothing here imports more than the kernel.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import pairwise, repeat

from federation.events import (
    CheckpointSaved,
    CheckpointSkipped,
    CostPredicted,
    DataDistributed,
    GroupsCompared,
    ModelEvaluated,
    ModelSelected,
    PrivacyPlanned,
    RunExtended,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    SitesLeftOut,
    SitesPaid,
    SiteSummed,
    StepTaken,
    StoreUsed,
    Warned,
)
from federation.job.metrics import CONFUSION, ENTROPIES, LANGUAGE, STATISTICS
from federation.messages import MetricSums, PrivacySpent
from monitoring.views import run_totals
from monitoring.views.participation import Participation, is_late, surplus
from monitoring.views.round_view import RUNNING, RoundView
from monitoring.views.run_totals import (
    RoundRow,
    RunTotals,
    Superseded,
    add_surplus,
    took_part,
)
from monitoring.views.site_view import (
    EvaluationView,
    Series,
    SiteView,
    failures,
    larger,
    site_view,
    spending,
    spent_by_site,
)

COMPLETED = run_totals.COMPLETED
EXHAUSTED = "exhausted"
INTERRUPTED = "interrupted"
DEPLOYED = "deployed"
VIRTUAL = "virtual"
MAX_SITES_SHOWN = 8  # In figures.


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run, as far as its events go.

    Attributes:
        started: The newest line of a coordinator that began.
        first_started_at: When the first coordinator began, seconds since the epoch.
        coordinators: How many began: 1 plus the number of resumes.
        extended: How the number of rounds was raised, each time.
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
        predicted: What the run was to take; None without a prediction.
        privacy: What is promised of the sites' records; None if nothing is.
        spent: The most that each site has reported to have spent, by any coordinator;
            empty without ``privacy``.
        left_out: Which sites the newest round excludes; None if none ever was.
        groups: What a rule over groups has combined last; None without groups.
        warnings: What a person should know.
        checkpoints: Durable states, by round.
        skipped: Checkpoints that were torn or corrupt.
        storage: What stores were used for, by all coordinators, one entry for each
            URL, user and way.
        selected: Which model the run has left, if its job selects one.
        paid: What sites have cost, at the end of a run in virtual time with prices.
        engines: What brought tasks to the sites, each from a round on.
        past: Totals of rounds that were settled, and are not in ``rounds``; see
            ``monitoring.views.run_totals``.
        superseded: Traffic of rounds that ran again, and of evaluations made anew.
        summed: The newest sums of each site, in a run of exact statistics in the clear.
    """

    started: RunStarted
    first_started_at: float
    coordinators: int
    extended: tuple[RunExtended, ...]
    finished: RunFinished | None
    seconds: float
    initial: ModelEvaluated | None
    rounds: tuple[RoundView, ...]
    current: RoundView | None
    unevaluated: tuple[SiteFailed, ...]
    evaluation_steps: tuple[StepTaken, ...]
    data: DataDistributed | None
    predicted: CostPredicted | None
    privacy: PrivacyPlanned | None
    spent: Mapping[str, PrivacySpent]
    left_out: SitesLeftOut | None
    groups: GroupsCompared | None
    warnings: tuple[Warned, ...]
    checkpoints: tuple[CheckpointSaved, ...]
    skipped: tuple[CheckpointSkipped, ...]
    storage: tuple[StoreUsed, ...]
    selected: ModelSelected | None = None
    paid: SitesPaid | None = None
    engines: tuple[tuple[int, str], ...] = ()
    past: RunTotals | None = None
    superseded: Superseded = field(default_factory=Superseded)
    summed: Mapping[str, SiteSummed] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """The engine, as text; if there were several, that of each range of rounds."""
        texts = [
            f"{engine} in rounds {first} to {then - 1}"
            for (first, engine), (then, _) in pairwise(self.engines)
        ]
        first, newest = self.engines[-1]
        return (
            ", ".join([*texts, f"{newest} from round {first} on"]) if texts else newest
        )

    @property
    def status(self) -> str:
        """A word of ``RunFinished``, or ``running``."""
        return RUNNING if self.finished is None else self.finished.status

    @property
    def is_secret(self) -> bool:
        """Whether losses and counts are known only for all sites together."""
        return self.started.secure_aggregation

    @property
    def is_deployed(self) -> bool:
        """Whether sites were machines of their own, and not simulated."""
        return self.started.engine == DEPLOYED

    @property
    def total_spent(self) -> PrivacySpent | None:
        """A bound for all reporting sites: the largest of each number."""
        return reduce(larger, self.spent.values(), None)

    @property
    def by_results(self) -> bool:
        """Whether results ended the run, so that what it spent depends on them."""
        return self.selected is not None and self.selected.stopped_early

    @property
    def guaranteed(self) -> PrivacySpent | None:
        """The run's guarantee: what was spent, or the cap if its results ended it."""
        sites = (site.guaranteed(by_results=self.by_results) for site in self.sites)
        found: PrivacySpent | None = None
        for one in filter(None, sites):
            found = larger(found, one)
        return found

    @cached_property
    def totals(self) -> RunTotals:
        """What all rounds add up to."""
        if self.past is None:
            return RunTotals.of(self)
        return self.past.plus(RunTotals.of(replace(self, past=None)))

    @property
    def ended(self) -> Sequence[RoundRow | RoundView]:
        """All rounds that ended, by index; the settled ones without their answers."""
        return (*(self.past.rows if self.past else ()), *self.rounds)

    @cached_property
    def virtual_dollars(self) -> Mapping[str, float]:
        """What each site has cost in virtual time; empty if that is not known."""
        paid = self.paid
        return dict(zip(paid.sites, paid.dollars, strict=True)) if paid else {}

    @property
    def num_rounds(self) -> int:
        """Rounds that ended."""
        return len(self.rounds) + (self.past.num_rounds if self.past else 0)

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that were saved."""
        return len(self.checkpoints) + (self.past.num_saved if self.past else 0)

    @property
    def last_checkpoint(self) -> CheckpointSaved | None:
        """The newest of them."""
        past = self.past.saved if self.past else None
        return self.checkpoints[-1] if self.checkpoints else past

    @property
    def clip_adapts(self) -> bool:
        """Whether the clip norm differs between rounds."""
        return len(self.totals.clips) > 1

    @property
    def trains(self) -> bool:
        """Whether there is a model: statistics have none."""
        return self.started.task != STATISTICS

    @property
    def is_language(self) -> bool:
        """Whether the model predicts tokens, so that perplexity is of interest."""
        return self.started.task in LANGUAGE

    @property
    def loss_unit(self) -> str:
        """`` in nats`` of a cross-entropy; the unit of others is unknown."""
        return " in nats" if self.started.task in ENTROPIES else ""

    @property
    def rounds_completed(self) -> int:
        """Rounds after which the weights changed."""
        if self.finished is not None:
            return self.finished.rounds_completed
        return self.totals.completed

    def seconds_left(self, now: float) -> float | None:
        """Guess how long the run goes on, from its last rounds; None before the first.

        Args:
            now: Seconds since 1970.
        """
        recent = [row.seconds for row in self.rounds[-5:] if row.seconds is not None]
        if not recent:
            return None
        mean = sum(recent) / len(recent)
        left = (self.started.rounds - self.rounds[-1].index) * mean
        spent = now - self.current.started_at if self.current else 0.0
        return max(0.0, left - min(max(0.0, spent), mean))

    @property
    def bytes_up(self) -> int:
        """Bytes from all sites, whatever they were for."""
        return self._traffic("bytes_up")

    @property
    def bytes_down(self) -> int:
        """Bytes to all sites, whatever they were for."""
        return self._traffic("bytes_down")

    @property
    def evaluation_bytes(self) -> tuple[int, int]:
        """Bytes up and down to evaluate outside rounds: those of the final model."""
        late = sum(each.bytes_up for each in self.unevaluated if is_late(each))
        found = self._evaluating("bytes_up") - late, self._evaluating("bytes_down")
        past = self.past.evaluation_bytes if self.past else (0, 0)
        return found[0] + past[0], found[1] + past[1]

    def _evaluating(self, way: str) -> int:
        by_site = (*self.evaluations(), *self.evaluation_steps)
        alone = sum(sum(getattr(event, way)) for event in by_site)
        return alone + sum(int(getattr(event, way)) for event in self.unevaluated)

    def _traffic(self, way: str) -> int:
        rounds = sum(int(getattr(row, way)) for row in self._all_rounds())
        past = 0 if self.past is None else int(getattr(self.past, way))
        return (
            self._evaluating(way) + rounds + past + int(getattr(self.superseded, way))
        )

    @property
    def last_evaluated(self) -> ModelEvaluated | None:
        """The newest evaluation of the global model; of the one that is left."""
        if self.selected is not None and self.selected.model != "last":
            chosen = self.selected.round_index
            past = self.past.evaluations if self.past else ()
            known = (*past, *self.evaluations())
            found = (e for e in known if e.round_index == chosen)
            # After a power cut, a checkpoint may know more than the events.
            return next(found, None)
        evaluated = (row.evaluated for row in reversed(self.rounds) if row.evaluated)
        past = self.past.evaluations[-1:] if self.past else ()
        return next(evaluated, past[0] if past else self.initial)

    @property
    def confusion(self) -> Sequence[Sequence[int]]:
        """The newest confusion matrix, a row for each label; empty if there is none."""
        event, labels = self.last_evaluated, range(len(self.started.classes))
        sums = {} if event is None else event.pooled.metrics
        names = [[f"{CONFUSION}_{one}_{found}" for found in labels] for one in labels]
        if not all(name in sums for row in names for name in row):
            return ()
        return [[int(sums[name]) for name in row] for row in names]

    @cached_property
    def failures(self) -> tuple[SiteFailed, ...]:
        """Refused and missing answers that rounds needed, by round.

        Those of settled rounds are only counted: see ``totals``.
        """
        return failures(self._reports())

    @cached_property
    def participation(self) -> Participation:
        """Who took part, and who made others wait."""
        counts, waited, whole = took_part(self.rounds)
        wasted = surplus(self._reports())
        if self.past is not None:
            counts.update(dict(self.past.counts))
            waited.update(dict(self.past.waited))
            whole += self.past.site_seconds
            wasted = add_surplus(self.past.surplus, wasted)
        counts.update(dict.fromkeys(self.started.sites, 0))
        knows = self.started.engine in {VIRTUAL, DEPLOYED} and whole > 0
        return Participation(
            counts=counts,
            waited=+waited if knows else {},
            share=waited.total() / whole if knows else None,
            surplus=wasted,
        )

    @cached_property
    def sites(self) -> tuple[SiteView, ...]:
        """Every site, in the order of the job; unknown ones that answered come last."""
        if self.past is not None:
            return self.totals.sites
        shares = {share.site: share for share in self.data.shares} if self.data else {}
        reports: dict[str, list[SiteAnswered | SiteFailed]] = {
            site: [] for site in self.started.sites
        }
        for report in self._reports():
            reports.setdefault(report.site, []).append(report)
        measured: dict[str, list[EvaluationView]] = {site: [] for site in reports}
        for event in self.evaluations():
            rows = zip(
                event.sites,
                event.by_site or repeat(None, len(event.sites)),
                event.bytes_up,
                event.bytes_down,
                strict=True,
            )
            for site, sums, up, down in rows:
                found = EvaluationView(event.round_index, sums, up, down)
                measured.setdefault(site, []).append(found)
        steps_up, steps_down = self._step_bytes()
        promises = {p.site: p for p in self.privacy.sites} if self.privacy else {}
        told = self._told()
        views = []
        for site, own in measured.items():
            step_bytes = (steps_up[site], steps_down[site])
            view = site_view(
                site, shares.get(site), reports.get(site, []), own, step_bytes
            )
            if self.privacy is not None:
                epsilon, held_out_epsilon = spending(told.get(site, []))
                view = replace(
                    view,
                    promise=promises.get(site),
                    spent=self.spent.get(site),
                    epsilon=epsilon,
                    held_out_epsilon=held_out_epsilon,
                )
            views.append(view)
        return tuple(views)

    @cached_property
    def shown_sites(self) -> tuple[SiteView, ...]:
        """The sites that figures show, in the order of the job.

        All of them if they are few; otherwise those with failures, then those whose
        loss differs most from the middle one.
        """
        sites = self.sites
        if len(sites) <= MAX_SITES_SHOWN:
            return sites
        losses = sorted(site.loss[-1][1] for site in sites if site.loss)
        middle = losses[len(losses) // 2] if losses else 0.0

        def interest(site: SiteView) -> tuple[int, float]:
            distance = abs(site.loss[-1][1] - middle) if site.loss else 0.0
            return site.num_failures, distance if math.isfinite(distance) else math.inf

        chosen = {s.site for s in sorted(sites, key=interest)[-MAX_SITES_SHOWN:]}
        return tuple(site for site in sites if site.site in chosen)

    def _told(self) -> Mapping[str, list[tuple[int, PrivacySpent]]]:
        """The spending that each site reported, with the round of the report."""
        found: dict[str, list[tuple[int, PrivacySpent]]] = {}
        if self.privacy is None:
            return found
        for report in self._reports():
            if isinstance(report, SiteAnswered) and report.spent is not None:
                place = (report.round_index, report.spent)
                found.setdefault(report.site, []).append(place)
        for event in self.evaluations():
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
        """Bytes up and down of each site in no answer that counts.

        In the steps of secure aggregation, and in what was superseded.
        """
        up, down = Counter[str](), Counter[str]()
        for site, from_site, to_site in self.superseded.sites:
            up[site] += from_site
            down[site] += to_site
        rounds = (step for row in self._all_rounds() for step in row.steps)
        for step in (*rounds, *self.evaluation_steps):
            rows = zip(step.sites, step.bytes_up, step.bytes_down, strict=True)
            for site, from_site, to_site in rows:
                up[site] += from_site
                down[site] += to_site
        return up, down

    def pooled(self, value: Callable[[MetricSums], float]) -> Series:
        """A result over all sites, by round, where there is one."""
        return tuple(
            (event.round_index, value(event.pooled))
            for event in self.evaluations()
            if event.pooled.count
        )

    def evaluations(self) -> Iterator[ModelEvaluated]:
        """Every evaluation of the global model, by round."""
        for event in (self.initial, *(row.evaluated for row in self.rounds)):
            if event is not None:
                yield event

"""Fold events into numbers of a run that only grow, and into what alerts follow.

Unlike a view, they count rounds that a resumed run repeated, since that traffic took
place, and need none of the events that came before.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from federation.event_log import from_line, to_line
from federation.events import (
    Event,
    ModelEvaluated,
    PrivacyPlanned,
    RoundFinished,
    RoundStarted,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    StepTaken,
)
from federation.messages import FailureKind
from monitoring import privacy_words
from monitoring.terminal.progress import DECLINED
from monitoring.views.round_view import RUNNING, accuracy_of, loss_of
from monitoring.views.site_view import spent_by_site

MAX_SITES = 200  # With numbers of their own.
OTHER_SITES = "other"  # The name that further sites share.
WORSE_FACTOR = 1.5  # Of the best loss, for one that is much worse.
# Standard deviations of its noise that a loss is believed to be off by, at most: the
# lowest of many noisy losses is far too low.
MOST_NOISE = 3.0
_RECENT_ROUNDS = 5
_NOT_SILENT = DECLINED | {FailureKind.SURPLUS}


@dataclass(kw_only=True)
class SiteNumbers:
    """The numbers of one site.

    Attributes:
        answers: Answers that counted.
        waited: Sum of the times between question and such an answer, in seconds.
        last_answer: When it answered last, seconds since 1970.
        failures: Other answers, and missing ones, by kind.
        epsilon: The largest that it has reported; None if it has not.
        steps: Optimiser steps, of answers that say how long they took.
        train_seconds: What these took.
    """

    answers: int = 0
    waited: float = 0.0
    last_answer: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    epsilon: float | None = None
    steps: int = 0
    train_seconds: float = 0.0

    @property
    def steps_per_second(self) -> float | None:
        """While it trains; None if the run hides that, or it has not trained."""
        return self.steps / self.train_seconds if self.train_seconds else None


@dataclass(kw_only=True)
class RunNumbers:
    """The numbers of one run, event by event.

    Attributes:
        job: The job's name.
        status: ``running``, or how the run ended.
        reason: Why it ended early, as its coordinator noted.
        rounds: Rounds of the job.
        values: Gauges by name; those that are not known are absent.
        ended: Rounds that ended, by status.
        bytes: Traffic of rounds that are over and of evaluations, by direction.
        under_way: The same since, of answers and steps.
        round_seconds: Sum of the durations of ended rounds.
        sites: By site; all further ones under one name.
        silent: Rounds in a row that a site has missed, if any.
        recent_seconds: Durations of the last rounds.
        is_between_rounds: Whether the newest round has ended.
        rounds_affordable: For how many more rounds the privacy budget lasts if each
            costs as much as the last one; infinite if nothing was spent.
        rounds_left: Rounds of the job after the last one that ended.
        epsilon_before: The largest epsilon when the last round ended.
        best_loss: The lowest held-out loss so far, noise considered.
        best_noise: Standard deviation of its noise, in nats.
        worse: Evaluations in a row that are much worse than that, whatever the noise.
        is_not_finite: Whether the newest loss is NaN or infinite.
        planned: What sites promise of their records.
    """

    job: str = ""
    status: str = RUNNING
    reason: str = ""
    rounds: int = 0
    values: dict[str, float] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    under_way: Counter[str] = field(default_factory=Counter)
    round_seconds: float = 0.0
    sites: dict[str, SiteNumbers] = field(default_factory=dict)
    silent: Counter[str] = field(default_factory=Counter)
    recent_seconds: list[float] = field(default_factory=list)
    is_between_rounds: bool = True
    rounds_affordable: float = math.inf
    rounds_left: int = 0
    epsilon_before: float = 0.0
    best_loss: float = math.inf
    best_noise: float = 0.0
    worse: int = 0
    is_not_finite: bool = False
    planned: PrivacyPlanned | None = None

    def kept(self) -> Mapping[str, Any]:
        """Return what ``restored`` makes the same numbers of, as JSON can hold it."""
        sites = {name: vars(site) for name, site in self.sites.items()}
        planned = self.planned and to_line(self.planned)
        return {**vars(self), "sites": sites, "planned": planned}

    @classmethod
    def restored(cls, kept: Mapping[str, Any]) -> "RunNumbers":
        """Go on where other numbers were."""
        names = ("ended", "bytes", "under_way", "silent")
        counters = {name: Counter(kept[name]) for name in names}
        sites = {name: SiteNumbers(**row) for name, row in kept["sites"].items()}
        planned = kept["planned"] and from_line(kept["planned"])
        return cls(**{**kept, **counters, "sites": sites, "planned": planned})

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case StepTaken():
                self._under_way(sum(event.bytes_up), sum(event.bytes_down))
            case SiteAnswered():
                self._answer(event)
            case SiteFailed():
                self._fail(event)
            case ModelEvaluated():
                self._evaluate(event)
            case RoundFinished():
                self._end_round(event)
            case _:
                self._note(event)

    def _note(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._count_under_way()
                self.job, self.rounds = event.job_name, event.rounds
                self.status, self.reason = RUNNING, ""
                self.values["started_timestamp_seconds"] = event.at
            case RoundStarted():
                self._count_under_way()
                self.values["round"] = event.round_index
                self.values["round_started_timestamp_seconds"] = event.at
                self.is_between_rounds = False
            case PrivacyPlanned():
                self.planned = event
                caps = [site.epsilon_cap for site in event.sites]
                self._set("epsilon_cap", max(caps, default=None))
            case RunFinished():
                self._count_under_way()
                self.status, self.reason = event.status, event.message

    def _evaluate(self, event: ModelEvaluated) -> None:
        loss = loss_of(event.pooled)
        self._set("loss", loss)
        noise = self._noise(event)
        self._set("loss_noise", None if loss is None else noise)
        if loss is not None:
            self._judge(loss, noise)
        self._set("accuracy", accuracy_of(event.pooled))
        self._count_bytes(sum(event.bytes_up), sum(event.bytes_down))
        for site, spent in spent_by_site(event):
            self._charge(site, spent.epsilon)

    def _noise(self, event: ModelEvaluated) -> float | None:
        """Standard deviation of the noise on the loss; None if it is not known."""
        if event.pooled.count > 0 and not privacy_words.count_noise(
            self.planned, event
        ):
            return 0.0
        return privacy_words.loss_noise(self.planned, event)

    def _judge(self, loss: float, noise: float | None) -> None:
        self.is_not_finite = not math.isfinite(loss)
        if noise is None:
            return
        best = self.best_loss + MOST_NOISE * self.best_noise
        is_worse = loss - MOST_NOISE * noise > WORSE_FACTOR * best
        self.worse = self.worse + 1 if is_worse else 0
        if loss + MOST_NOISE * noise < best:
            self.best_loss, self.best_noise = loss, noise

    def _end_round(self, event: RoundFinished) -> None:
        self.ended[event.status] += 1
        self.round_seconds += event.seconds
        self.recent_seconds.append(event.seconds)
        del self.recent_seconds[:-_RECENT_ROUNDS]
        self.is_between_rounds = True
        self.under_way.clear()  # The round's own sum covers it.
        self._count_bytes(event.bytes_up, event.bytes_down)
        self.rounds_left = self.rounds - event.round_index
        cap, spent = self.values.get("epsilon_cap"), self.values.get("epsilon", 0.0)
        if cap and spent > self.epsilon_before:
            cost = spent - self.epsilon_before
            self.rounds_affordable = max(0.0, cap - spent) / cost
            self.values["rounds_affordable"] = self.rounds_affordable
        self.epsilon_before = spent

    def _answer(self, event: SiteAnswered) -> None:
        site = self._site(event.site)
        site.answers += 1
        self._under_way(event.bytes_up, event.bytes_down)
        site.waited += event.answered_seconds - event.asked_seconds
        site.last_answer = event.at
        trained = sum(each.seconds for each in event.phases if each.name == "train")
        # Private runs hide how long sites take, whatever a site says.
        if event.num_steps is not None and self.planned is None and trained > 0:
            site.steps += event.num_steps
            site.train_seconds += trained
        self.silent.pop(event.site, None)
        if event.spent is not None:
            self._charge(event.site, event.spent.epsilon)

    def _fail(self, event: SiteFailed) -> None:
        self._under_way(event.bytes_up, event.bytes_down)
        failures, kind = self._site(event.site).failures, event.kind.value
        failures[kind] = failures.get(kind, 0) + 1
        if event.kind not in _NOT_SILENT:
            self.silent[event.site] += 1

    def _charge(self, name: str, epsilon: float) -> None:
        site = self._site(name)
        site.epsilon = max(epsilon, site.epsilon or 0.0)
        self._set("epsilon", max(site.epsilon, self.values.get("epsilon", 0.0)))

    def _under_way(self, up: int, down: int) -> None:
        self.under_way["up"] += up
        self.under_way["down"] += down

    def _count_under_way(self) -> None:
        """Count what no sum of a round covers: one was killed, or it was outside."""
        self.bytes.update(self.under_way)
        self.under_way.clear()

    def _count_bytes(self, up: int, down: int) -> None:
        self.bytes["up"] += up
        self.bytes["down"] += down

    def _set(self, name: str, value: float | None) -> None:
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def _site(self, site: str) -> SiteNumbers:
        is_known = site in self.sites or len(self.sites) < MAX_SITES
        return self.sites.setdefault(site if is_known else OTHER_SITES, SiteNumbers())

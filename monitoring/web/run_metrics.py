"""Runs as OpenMetrics, for a Prometheus of the operator's.

Everything follows from events, which hold nothing that a run may not reveal. The number
of time series is bounded: the newest ``MAX_RUNS`` runs, each with ``MAX_SITES`` sites.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
)
from federation.messages import FailureKind
from monitoring import privacy_words
from monitoring.runs.event_tail import EventTail
from monitoring.runs.run_folder import RunFolder
from monitoring.terminal.progress import DECLINED
from monitoring.views.round_view import RUNNING, accuracy_of, loss_of
from monitoring.views.site_view import spent_by_site

MAX_RUNS, MAX_SITES = 20, 200
WORSE_FACTOR = 1.5  # Of the best loss, for one that is much worse.
# Standard deviations of its noise that a loss is believed to be off by, at most: the
# lowest of many noisy losses is far too low.
MOST_NOISE = 3.0
_NOT_SILENT = DECLINED | {FailureKind.SURPLUS}
OTHER_SITES = "other"  # The name that further sites share.


@dataclass(kw_only=True)
class RunNumbers:
    """The numbers of one run, event by event.

    Counters include rounds that a resumed run repeated: that traffic took place.

    Attributes:
        job: The job's name.
        status: ``running``, or how the run ended.
        rounds: Rounds of the job.
        values: Gauges by name; those that are not known are absent.
        ended: Rounds that ended, by status.
        bytes: Traffic of ended rounds and separate evaluations, by direction.
        round_seconds: Sum of the durations of ended rounds.
        answers: Answers that counted, by site.
        failures: Others, by site and kind.
        last_answer: When a site answered last, seconds since 1970.
        waited: Sum of the times between question and answer, by site, in seconds.
        epsilon: Largest epsilon that a site has reported.
        recent_seconds: Durations of the last rounds.
        is_between_rounds: Whether the newest round has ended.
        silent: Rounds in a row that a site has missed.
        rounds_affordable: For how many more rounds the privacy budget lasts if each
            costs as much as the last one; infinite if nothing was spent.
        rounds_left: Rounds of the job after the last one that ended.
        best_loss: The lowest held-out loss so far, noise considered.
        best_noise: Standard deviation of its noise, in nats.
        worse: Evaluations in a row that are much worse than that, whatever the noise.
        is_not_finite: Whether the newest loss is NaN or infinite.
    """

    job: str = ""
    status: str = RUNNING
    rounds: int = 0
    values: dict[str, float] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    round_seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    last_answer: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    epsilon: dict[str, float] = field(default_factory=dict)
    recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    is_between_rounds: bool = True
    silent: Counter[str] = field(default_factory=Counter)
    rounds_affordable: float = math.inf
    rounds_left: int = 0
    best_loss: float = math.inf
    best_noise: float = 0.0
    worse: int = 0
    is_not_finite: bool = False
    _named: set[str] = field(default_factory=set)
    _planned: PrivacyPlanned | None = None
    _epsilon_before: float = 0.0  # When the last round ended.

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case SiteAnswered():
                self._answer(event)
            case SiteFailed():
                self._fail(event)
            case ModelEvaluated():
                self._evaluate(event)
            case RoundFinished():
                self._end_round(event)
            case _:
                self._begin(event)

    def _fail(self, event: SiteFailed) -> None:
        site = self._name(event.site)
        self.failures[site, event.kind.value] += 1
        if event.kind not in _NOT_SILENT:
            self.silent[site] += 1

    def _begin(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.job, self.rounds = event.job_name, event.rounds
                self.status = RUNNING
                self.values["started_timestamp_seconds"] = event.at
            case RoundStarted():
                self.values["round"] = event.round_index
                self.values["round_started_timestamp_seconds"] = event.at
                self.is_between_rounds = False
            case PrivacyPlanned():
                self._planned = event
                caps = [site.epsilon_cap for site in event.sites]
                self._set("epsilon_cap", max(caps, default=None))
            case RunFinished():
                self.status = event.status

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
            self._planned, event
        ):
            return 0.0
        return privacy_words.loss_noise(self._planned, event)

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
        self.is_between_rounds = True
        self._count_bytes(event.bytes_up, event.bytes_down)
        self.rounds_left = self.rounds - event.round_index
        cap, spent = self.values.get("epsilon_cap"), self.values.get("epsilon", 0.0)
        if cap and spent > self._epsilon_before:
            cost = spent - self._epsilon_before
            self.rounds_affordable = max(0.0, cap - spent) / cost
            self.values["rounds_affordable"] = self.rounds_affordable
        self._epsilon_before = spent

    def _answer(self, event: SiteAnswered) -> None:
        site = self._name(event.site)
        self.answers[site] += 1
        took = event.answered_seconds - event.asked_seconds
        self.waited[site] = self.waited.get(site, 0.0) + took
        self.last_answer[site] = event.at
        self.silent.pop(site, None)
        if event.spent is not None:
            self._charge(event.site, event.spent.epsilon)

    def _charge(self, site: str, epsilon: float) -> None:
        name = self._name(site)
        self.epsilon[name] = max(epsilon, self.epsilon.get(name, 0.0))
        self.values["epsilon"] = max(self.epsilon.values())

    def _count_bytes(self, up: int, down: int) -> None:
        self.bytes["up"] += up
        self.bytes["down"] += down

    def _set(self, name: str, value: float | None) -> None:
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def _name(self, site: str) -> str:
        if site not in self._named and len(self._named) < MAX_SITES:
            self._named.add(site)
        return site if site in self._named else OTHER_SITES


Rows = Iterable[tuple[tuple[str, ...], float]]  # Further labels, and the value.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A family of metrics: what each run has of it."""

    name: str
    text: str
    rows: Callable[[RunNumbers], Rows]
    labels: tuple[str, ...] = ()
    is_counter: bool = False

    def of(self, runs: Mapping[str, RunNumbers]) -> Metric:
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        found = kind(
            f"crossfed_{self.name}", self.text, labels=["run", "job", *self.labels]
        )
        for name, run in runs.items():
            for labels, value in self.rows(run):
                if math.isfinite(value):
                    found.add_metric([name, run.job, *labels], value)
        return found


def _gauge(name: str, text: str) -> _Family:
    def rows(run: RunNumbers) -> Rows:
        return [((), run.values[name])] if name in run.values else []

    return _Family(name=f"run_{name}", text=text, rows=rows)


def _by_name(numbers: Mapping[str, float]) -> Rows:
    return (((name,), value) for name, value in numbers.items())


_FAMILIES = (
    _Family(
        name="run_status",
        text="1 for the status of a run: running, or how it ended.",
        labels=("status",),
        rows=lambda run: [((run.status,), 1)],
    ),
    _Family(
        name="run_rounds",
        text="Rounds of the job.",
        rows=lambda run: [((), run.rounds)],
    ),
    _gauge("started_timestamp_seconds", "When its newest coordinator began."),
    _gauge("round", "The newest round that began, from 1."),
    _gauge("round_started_timestamp_seconds", "When that round began."),
    _gauge("loss", "Mean held-out loss of the newest evaluated model."),
    _gauge(
        "loss_noise",
        "Standard deviation of the noise on that loss; absent if it is not known.",
    ),
    _gauge("accuracy", "Held-out accuracy of the newest evaluated model, 0 to 1."),
    _gauge("epsilon", "Largest epsilon that a site has reported to have spent."),
    _gauge("epsilon_cap", "Largest epsilon that a site may spend."),
    _gauge(
        "rounds_affordable",
        "For how many more rounds that lasts if each costs as much as the last one.",
    ),
    _Family(
        name="run_rounds_ended",
        text="Rounds that ended, repeated ones included.",
        labels=("status",),
        rows=lambda run: _by_name(run.ended),
        is_counter=True,
    ),
    _Family(
        name="run_bytes",
        text="Bytes of ended rounds and separate evaluations.",
        labels=("direction",),
        rows=lambda run: _by_name(run.bytes),
        is_counter=True,
    ),
    _Family(
        name="run_round_seconds",
        text="Time that ended rounds took.",
        rows=lambda run: [((), run.round_seconds)],
        is_counter=True,
    ),
    _Family(
        name="site_answers",
        text="Answers that counted.",
        labels=("site",),
        rows=lambda run: _by_name(run.answers),
        is_counter=True,
    ),
    _Family(
        name="site_failures",
        text="Missing and refused answers.",
        labels=("site", "kind"),
        rows=lambda run: run.failures.items(),
        is_counter=True,
    ),
    _Family(
        name="site_response_seconds",
        text="Time between a site's tasks and its answers.",
        labels=("site",),
        rows=lambda run: _by_name(run.waited),
        is_counter=True,
    ),
    _Family(
        name="site_last_answer_timestamp_seconds",
        text="When a site answered last.",
        labels=("site",),
        rows=lambda run: _by_name(run.last_answer),
    ),
    _Family(
        name="site_epsilon",
        text="Epsilon that a site has reported to have spent.",
        labels=("site",),
        rows=lambda run: _by_name(run.epsilon),
    ),
)


class RunsCollector(Collector):
    """Collects the metrics of the newest runs whenever it is asked."""

    def __init__(self, find: Callable[[], Sequence[RunFolder]]) -> None:
        """Take what finds the runs.

        Args:
            find: Returns all runs, the oldest first.
        """
        self._find = find
        self._known: dict[Path, tuple[EventTail, RunNumbers]] = {}
        self._lock = Lock()  # Several scrapes may come at once.

    def collect(self) -> Iterator[Metric]:
        """Yield the families of metrics; see ``prometheus_client``."""
        found = self.look()
        yield from (family.of(found) for family in _FAMILIES)

    def look(self) -> Mapping[str, RunNumbers]:
        """The numbers of the newest runs, by name."""
        with self._lock:
            return self._look()

    def _look(self) -> dict[str, RunNumbers]:
        folders = {run.path: run for run in self._find()[-MAX_RUNS:]}
        self._known = {p: known for p, known in self._known.items() if p in folders}
        for path, run in folders.items():
            tail, numbers = self._known.setdefault(
                path, (EventTail(run.events), RunNumbers())
            )
            events = tail.news()
            if tail.is_anew:
                numbers = RunNumbers()
                self._known[path] = tail, numbers
            for event in events:
                numbers.add(event)
        known = {path.name: numbers for path, (_, numbers) in self._known.items()}
        return {name: numbers for name, numbers in known.items() if numbers.rounds}

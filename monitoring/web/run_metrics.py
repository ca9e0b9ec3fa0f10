"""Runs as OpenMetrics, for a Prometheus of the operator's.

Everything follows from events, which hold nothing that a run may not reveal. The number
of time series is bounded: the newest ``MAX_RUNS`` runs, each with ``MAX_SITES`` sites.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from monitoring.runs.numbers_reader import MAX_RUNS, NumbersReader
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_numbers import RunNumbers, SiteNumbers

WAIT_SECONDS = 0.02  # Of a scrape, for the first look at a log that nobody has left.

Rows = Iterable[tuple[tuple[str, ...], float]]  # Further labels, and the value.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A family of metrics: what each run has of it."""

    name: str
    text: str
    rows: Callable[[RunNumbers], Rows]
    labels: tuple[str, ...] = ()
    is_counter: bool = False
    may_diverge: bool = False  # A value that is not finite says something.

    def of(self, runs: Mapping[str, RunNumbers]) -> Metric:
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        found = kind(
            f"crossfed_{self.name}", self.text, labels=["run", "job", *self.labels]
        )
        for name, run in runs.items():
            for labels, value in self.rows(run):
                if self.may_diverge or math.isfinite(value):
                    found.add_metric([name, run.job, *labels], value)
        return found


def _gauge(name: str, text: str, *, may_diverge: bool = False) -> _Family:
    def rows(run: RunNumbers) -> Rows:
        return [((), run.values[name])] if name in run.values else []

    return _Family(name=f"run_{name}", text=text, rows=rows, may_diverge=may_diverge)


def _by_name(numbers: Mapping[str, float]) -> Rows:
    return (((name,), value) for name, value in numbers.items())


def _of_answers(
    name: str, text: str, value: Callable[[SiteNumbers], float], *, is_counter: bool
) -> _Family:
    """A family of sites that have answered."""

    def rows(run: RunNumbers) -> Rows:
        return (((n,), value(site)) for n, site in run.sites.items() if site.answers)

    return _Family(
        name=f"site_{name}",
        text=text,
        labels=("site",),
        rows=rows,
        is_counter=is_counter,
    )


_FAMILIES = (
    _Family(
        name="run_status",
        text="1 for the status of a run: running, waiting, or how it ended.",
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
    _gauge(
        "loss", "Mean held-out loss of the newest evaluated model.", may_diverge=True
    ),
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
        text="Bytes of rounds that are over, also repeated ones, and of evaluations.",
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
    _of_answers(
        "answers", "Answers that counted.", lambda site: site.answers, is_counter=True
    ),
    _of_answers(
        "response_seconds",
        "Time between a site's tasks and its answers.",
        lambda site: site.waited,
        is_counter=True,
    ),
    _of_answers(
        "last_answer_timestamp_seconds",
        "When a site answered last.",
        lambda site: site.last_answer,
        is_counter=False,
    ),
    _Family(
        name="site_failures",
        text="Missing and refused answers.",
        labels=("site", "kind"),
        rows=lambda run: (
            ((name, kind), number)
            for name, site in run.sites.items()
            for kind, number in site.failures.items()
        ),
        is_counter=True,
    ),
    _Family(
        name="site_epsilon",
        text="Epsilon that a site has reported to have spent.",
        labels=("site",),
        rows=lambda run: (
            ((name,), site.epsilon)
            for name, site in run.sites.items()
            if site.epsilon is not None
        ),
    ),
)


class RunsCollector(Collector):
    """Collects the metrics of the newest runs whenever it is asked."""

    def __init__(
        self,
        find: Callable[[], Sequence[RunFolder]],
        never_begun: Callable[[], Mapping[str, RunNumbers]] = dict,
        waiting: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """Take what finds the runs.

        Args:
            find: Returns all runs, the oldest first.
            never_begun: Returns runs that ended before their first event, by name, the
                oldest first: no log has them.
            waiting: Returns the names of runs that wait for their turn, or next one.
        """
        self._find, self._never_begun, self._waiting = find, never_begun, waiting
        self._known: dict[Path, NumbersReader] = {}
        self._found: Mapping[str, RunNumbers] = {}
        self._lock = Lock()  # Several scrapes may come at once.

    def collect(self) -> Iterator[Metric]:
        """Yield the families of metrics; see ``prometheus_client``."""
        failed = list(self._never_begun().items())[-MAX_RUNS:]
        found = {**dict(failed), **self.look(WAIT_SECONDS)}
        for name in found.keys() & set(self._waiting()):
            found[name] = replace(found[name], status="waiting")
        yield from (family.of(found) for family in _FAMILIES)

    def look(self, seconds: float = -1.0) -> Mapping[str, RunNumbers]:
        """The numbers of the newest runs, by name.

        Args:
            seconds: How long to wait for another look; after that, what the last one
                found. Without end by default.
        """
        if self._lock.acquire(timeout=seconds):
            try:
                self._known = {
                    run.path: self._known.get(run.path) or NumbersReader(run.events)
                    for run in self._find()[-MAX_RUNS:]
                }
                found = {path.name: each.look() for path, each in self._known.items()}
                self._found = {name: run for name, run in found.items() if run.rounds}
            finally:
                self._lock.release()
        return self._found

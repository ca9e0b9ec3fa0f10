"""One round of a run from its events, and its metrics."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from federation.events import (
    CheckpointSaved,
    LocalWorkChosen,
    ModelEvaluated,
    RoundFinished,
    SiteAnswered,
    SiteFailed,
    StepTaken,
)
from federation.messages import FailureKind, MetricSums, Phase, Resources
from monitoring.views.derived_metrics import derived, means

RUNNING = "running"
# What became of a site in a round.
TOOK_PART, FAILED, NO_UPDATE, NOT_ASKED = "+", "x", ".", " "

Reports = tuple[SiteAnswered | SiteFailed, ...]


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
        work: Its local steps, if the run chooses them; otherwise None.
        waited: For each site the site-seconds that others waited for it.
        copies: How many sites of the cohort hold the data of another one of it.
        covered: What part of the data the round covered, if sites are replicas.
    """

    index: int
    started_at: float
    cohort: tuple[str, ...]
    reports: Reports
    steps: tuple[StepTaken, ...]
    finished: RoundFinished | None
    evaluated: ModelEvaluated | None
    saved: CheckpointSaved | None
    work: LocalWorkChosen | None = None
    waited: Mapping[str, float] = field(default_factory=dict)
    copies: int = 0
    covered: str = ""

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
    def asked(self) -> int:
        """Number of sites that were asked."""
        return len(self.cohort)

    @property
    def answered(self) -> int:
        """Number of sites whose update was folded in."""
        if self.finished is not None:
            return len(self.finished.answered)
        return sum(isinstance(report, SiteAnswered) for report in self.reports)

    @property
    def sites_evaluated(self) -> int | None:
        """Number of sites that the loss covers; None if not evaluated."""
        return None if self.evaluated is None else len(self.evaluated.sites)

    @property
    def num_unheard(self) -> int:
        """Number of asked sites whose data the loss does not cover."""
        if self.evaluated is None:
            return 0
        # The last model is evaluated by all sites, which may be more than a cohort.
        return max(0, len(self.cohort) - self.copies - len(self.evaluated.sites))

    @property
    def failures(self) -> dict[str, int]:
        """Number of refused or missing answers by kind."""
        return dict(self.finished.failed) if self.finished else {}

    @property
    def bytes_up(self) -> int:
        """Bytes from all sites."""
        return self._traffic("bytes_up")

    @property
    def bytes_down(self) -> int:
        """Bytes to all sites."""
        return self._traffic("bytes_down")

    def _traffic(self, way: str) -> int:
        if self.finished is not None:
            return int(getattr(self.finished, way))
        steps = sum(sum(getattr(step, way)) for step in self.steps)
        return steps + sum(int(getattr(report, way)) for report in self.reports)

    @property
    def epsilon(self) -> float | None:
        """Largest epsilon that a site reported with its answer to this round."""
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
        """The clip norm of updates, in weight units; None without clipping."""
        return None if self.finished is None else self.finished.update_clip

    @property
    def update_norm(self) -> float | None:
        """Euclidean norm of the combined update; None if there is none."""
        return None if self.finished is None else self.finished.update_norm

    @property
    def length(self) -> float:
        """Seconds of a round that ended, until its state was saved; otherwise 0."""
        if self.finished is None:
            return 0.0
        return max(0.0, (self.saved or self.finished).at - self.started_at)

    @property
    def resources(self) -> Resources | None:
        """What the round took at the aggregator, if that is known."""
        return self.finished.resources if self.finished else None

    @property
    def metrics(self) -> tuple[tuple[str, float], ...]:
        """Metrics of the model after it, besides loss and accuracy."""
        found = metrics_of(self.evaluated.pooled if self.evaluated else None)
        return tuple(found.items())

    @property
    def newest(self) -> Mapping[str, SiteAnswered | SiteFailed]:
        """The newest report about each site."""
        return {report.site: report for report in without_copies(self.reports)}

    @property
    def states(self) -> Mapping[str, str]:
        """What became of each site that it asked."""
        failed = (r.site for r in self.reports if isinstance(r, SiteFailed))
        answered = self.finished.answered if self.finished else ()
        return {
            **dict.fromkeys(self.cohort, NO_UPDATE),
            **dict.fromkeys(failed, FAILED),
            **dict.fromkeys(answered, TOOK_PART),
        }

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the aggregator's time."""
        if self.finished is None or self.saved is None:
            return self.finished.phases if self.finished else ()
        checkpoint = Phase(
            name="checkpoint",
            start_seconds=self.finished.seconds,
            seconds=self.saved.seconds,
        )
        return (*self.finished.phases, checkpoint)


def without_copies(
    reports: Iterable[SiteAnswered | SiteFailed],
) -> Iterator[SiteAnswered | SiteFailed]:
    """Leave out answers that came twice: the network's fault, not the site's.

    A site that refuses to work twice has no other report of the round, and stays.
    """
    heard = set[tuple[int, str]]()
    for report in reports:
        of = report.round_index, report.site
        if not (
            isinstance(report, SiteFailed)
            and report.kind is FailureKind.DUPLICATE
            and of in heard
        ):
            yield report
        heard.add(of)


def loss_of(sums: MetricSums | None) -> float | None:
    """Mean loss in nats, or None if nothing was predicted."""
    return sums.loss if sums is not None and sums.count else None


def accuracy_of(sums: MetricSums | None) -> float | None:
    """Fraction of correct predictions, or None if nothing was predicted or counted."""
    if sums is None or not sums.count or "correct" not in sums.metrics:
        return None
    return sums.accuracy


def metrics_of(sums: MetricSums | None) -> Mapping[str, float]:
    """Metrics besides loss and accuracy, by name: means, and what follows from sums."""
    if sums is None or not sums.count:
        return {}
    return {**means(sums), **derived(sums)}


def named_metric(sums: MetricSums, name: str) -> float | None:
    """A result by its name in reports, or None if it is not there."""
    if name == "loss":
        return loss_of(sums)
    found = accuracy_of(sums) if name == "accuracy" else None
    # An objective of the user's own may report an accuracy as any other metric.
    return metrics_of(sums).get(name) if found is None else found


def perplexity(loss: float) -> float:
    """``exp`` of the mean loss of a token in nats; infinite if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf

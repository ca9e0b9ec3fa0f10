"""One site over a whole run, from the run's events."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from federation.events import (
    ModelEvaluated,
    SiteAnswered,
    SiteFailed,
    SitePrivacy,
    SiteShare,
)
from federation.messages import (
    UNKNOWN_ENERGY,
    Energy,
    FailureKind,
    MetricSums,
    PrivacySpent,
    Resources,
)
from monitoring.views.participation import is_late, is_task
from monitoring.views.round_view import accuracy_of, loss_of, without_copies

# A site may claim any number, and a page has to show it.
_MOST_SECONDS, _MOST_JOULES = 1e12, 1e15

Series = tuple[tuple[int, float], ...]  # (round index, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """One site over the whole run.

    Attributes:
        site: Its name.
        share: What it holds, if the run reports it.
        bytes_up: Bytes from it, in every exchange.
        bytes_down: Bytes to it, likewise.
        seconds: Sum of the times between question and answer.
        answered: Rounds in which its update counted.
        used: What its work took in all answers that counted; None if none did.
        examples: Training examples that it holds; None if it has not said.
        training_loss: Loss while it trained, by round.
        loss: Loss of the global model after a round on this site's held-out data.
        accuracy: Accuracy of the same.
        failures: Everything of it that did not count; not of rounds that are settled.
        num_failures: How many tasks failed, in all rounds.
        promise: What it promises of its records; None without privacy.
        spent: The most that it has reported to have spent; None if it has not.
        epsilon: What it had spent on its training records, by round.
        held_out_epsilon: What it had spent on its held-out records, by round.
    """

    site: str
    share: SiteShare | None
    bytes_up: int
    bytes_down: int
    seconds: float
    answered: int
    used: Resources | None
    examples: int | None
    training_loss: Series
    loss: Series
    accuracy: Series
    failures: tuple[SiteFailed, ...]
    num_failures: int
    promise: SitePrivacy | None = None
    spent: PrivacySpent | None = None
    epsilon: Series = ()
    held_out_epsilon: Series = ()

    def guaranteed(self, *, by_results: bool) -> PrivacySpent | None:
        """The guarantee: what was spent, or the site's cap if results ended the run."""
        if self.spent is None or self.promise is None or not by_results:
            return self.spent
        cap = self.promise.epsilon_cap
        held_out = None if self.spent.held_out_epsilon is None else cap
        return replace(self.spent, epsilon=cap, held_out_epsilon=held_out)


class EvaluationView(NamedTuple):
    """A site's results of evaluating the global model."""

    round_index: int
    sums: MetricSums | None
    bytes_up: int
    bytes_down: int


def site_view(
    site: str,
    share: SiteShare | None,
    reports: Sequence[SiteAnswered | SiteFailed],
    measured: Sequence[EvaluationView],
    step_bytes: tuple[int, int],
) -> SiteView:
    """Collect what is known about one site, except its privacy."""
    up, down = step_bytes
    answers = [report for report in reports if isinstance(report, SiteAnswered)]
    failed = failures(reports)
    return SiteView(
        site=site,
        share=share,
        bytes_up=up + sum(part.bytes_up for part in (*reports, *measured)),
        bytes_down=down + sum(part.bytes_down for part in (*reports, *measured)),
        # Answers to earlier rounds were counted there, until the deadline.
        seconds=sum(r.answered_seconds - r.asked_seconds for r in reports if _took(r)),
        answered=len(answers),
        used=total([a.resources for a in answers if a.resources is not None]),
        examples=answers[-1].num_examples if answers else None,
        training_loss=_series((a.round_index, loss_of(a.training)) for a in answers),
        loss=_series((m.round_index, loss_of(m.sums)) for m in measured),
        accuracy=_series((m.round_index, accuracy_of(m.sums)) for m in measured),
        failures=failed,
        num_failures=num_missed(failed),
    )


def _took(report: SiteAnswered | SiteFailed) -> bool:
    if isinstance(report, SiteAnswered) or is_task(report):
        return True
    return report.kind is FailureKind.SURPLUS and report.bytes_down > 0


def failures(reports: Iterable[SiteAnswered | SiteFailed]) -> tuple[SiteFailed, ...]:
    """What sites did not do that their rounds needed."""
    return tuple(
        report
        for report in without_copies(reports)
        if isinstance(report, SiteFailed) and report.kind is not FailureKind.SURPLUS
    )


def num_missed(failed: Iterable[SiteFailed]) -> int:
    """Count the tasks that failed: a late answer is to one that had failed before."""
    return sum(not is_late(each) for each in failed)


def total(used: Sequence[Resources]) -> Resources | None:
    """Add up the resources of work: the sum of times, the maximum of memory."""
    if not used:
        return None
    cpu = [each.cpu_seconds for each in used if each.cpu_seconds is not None]
    memory = [u.peak_memory_bytes for u in used if u.peak_memory_bytes is not None]
    return Resources(
        busy_seconds=min(sum(u.busy_seconds for u in used), _MOST_SECONDS),
        cpu_seconds=min(sum(cpu), _MOST_SECONDS) if cpu else None,
        peak_memory_bytes=max(memory, default=None),
        method=used[-1].method,
        energy=_energy([each.energy for each in used]),
    )


def _energy(parts: Sequence[Energy | None]) -> Energy | None:
    """The energy of all parts: unknown if that of one is, or was not reported."""
    known = [each for each in parts if each is not None]
    if not known:  # Of most sites in most runs, and there are thousands.
        return None
    joules = _added([each.joules for each in known], len(parts))
    if joules is None:
        return UNKNOWN_ENERGY
    grams = _added([each.grams for each in known], len(parts))
    return Energy(joules=joules, grams=grams, method=known[-1].method)


def _added(
    ranges: Sequence[tuple[float, float] | None], parts: int
) -> tuple[float, float] | None:
    known = [ends for ends in ranges if ends is not None]
    if not known or len(known) < parts:
        return None
    low, high = (min(sum(ends), _MOST_JOULES) for ends in zip(*known, strict=True))
    return low, high


def spent_by_site(event: ModelEvaluated) -> Sequence[tuple[str, PrivacySpent]]:
    """The spending that sites reported with an exchange only for evaluation."""
    # If one of them kept it to itself, nobody can say whose the others are.
    whole = len(event.spent) == len(event.sites)
    return tuple(zip(event.sites, event.spent, strict=True)) if whole else ()


def larger(one: PrivacySpent | None, other: PrivacySpent) -> PrivacySpent:
    """The larger of both, number by number."""
    if one is None:
        return other
    held_out = (one.held_out_epsilon, other.held_out_epsilon)
    return PrivacySpent(
        epsilon=max(one.epsilon, other.epsilon),
        delta=max(one.delta, other.delta),
        held_out_epsilon=max((e for e in held_out if e is not None), default=None),
    )


def spending(told: Sequence[tuple[int, PrivacySpent]]) -> tuple[Series, Series]:
    """Epsilon by round: of the training records, and of the held-out ones."""
    by_round: dict[int, PrivacySpent] = {}
    for index, spent in told:
        by_round[index] = larger(by_round.get(index), spent)
    rounds = sorted(by_round.items())
    return (
        tuple((index, spent.epsilon) for index, spent in rounds),
        _series((index, spent.held_out_epsilon) for index, spent in rounds),
    )


def _series(points: Iterable[tuple[int, float | None]]) -> Series:
    return tuple((index, value) for index, value in points if value is not None)

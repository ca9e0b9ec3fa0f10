"""Who took part in a run, and who kept others waiting: from its events."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from federation.events import SiteAnswered, SiteFailed
from federation.messages import FailureKind
from monitoring.units import (
    format_bytes,
    format_count,
    format_duration,
    format_fraction,
)

_NAMED, _LEAST_NAMED = 3, 0.05  # Sites that words name: how many, with which share.

# What did not keep its round open: answers to other rounds, and what nobody needed.
_ASIDE = {FailureKind.LATE, FailureKind.SURPLUS, FailureKind.UNKNOWN}
_ASIDE |= {FailureKind.DUPLICATE}


def jain_index(counts: Sequence[int]) -> float | None:
    """How evenly a total is shared: 1 if all are equal, 1/n if one has everything.

    ``(sum x)^2 / (n sum x^2)``: Jain, Chiu and Hawe 1984, DEC-TR-301, equation 2.

    Args:
        counts: For each site the rounds in which its update counted.

    Returns:
        From 1/n to 1; None if none counted.
    """
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else None


def waited(
    reports: Iterable[SiteAnswered | SiteFailed],
    awaited: Sequence[tuple[float, Collection[str]]] = (),
) -> Mapping[str, float]:
    """Site-seconds of one round that its sites waited for each of them.

    A site waits from its answer until the last one of the round. While several are
    at work, each of them has an equal share in the waiting of those that are done: the
    Shapley value of the airport game (Littlechild and Owen 1973).

    Args:
        reports: What became of the round's tasks.
        awaited: Sites that had gone, and for which the others waited until the round
            asked them: from which second on, in order.

    Returns:
        Seconds by site; together as much as all sites waited.
    """
    tasks = [each for each in reports if is_task(each)]
    ends = sorted(
        (each.answered_seconds, each.site, isinstance(each, SiteAnswered))
        for each in tasks
    )
    found, share, before, waiting = dict[str, float](), 0.0, 0.0, 0
    for index, (seconds, site, answers) in enumerate(ends):
        share += waiting * (seconds - before) / (len(ends) - index)
        found[site] = found.get(site, 0.0) + share
        before, waiting = seconds, waiting + answers
    asked = min((each.asked_seconds for each in tasks), default=0.0)
    untils = [*(begin for begin, _ in awaited[1:]), asked]
    for (begin, gone), until in zip(awaited, untils, strict=False):
        others = len({each.site for each in tasks}.difference(gone))
        for site in gone:
            share = others * max(0.0, until - begin) / len(gone)
            found[site] = found.get(site, 0.0) + share
    return found


def is_task(report: SiteAnswered | SiteFailed) -> bool:
    """Whether a report is of a task of its own round that was needed."""
    return isinstance(report, SiteAnswered) or report.kind not in _ASIDE


def is_late(report: SiteFailed) -> bool:
    """Whether it is an answer to a task that was counted when it was closed."""
    is_unneeded = report.kind is FailureKind.SURPLUS and not report.bytes_down
    return report.kind is FailureKind.LATE or is_unneeded


def surplus(reports: Iterable[SiteAnswered | SiteFailed]) -> tuple[int, int, float]:
    """Count tasks that nobody needed: how many, their bytes, seconds until closed."""
    found = [
        each
        for each in reports
        if isinstance(each, SiteFailed) and each.kind is FailureKind.SURPLUS
    ]
    # A late answer to a withdrawn task has an event of its own.
    tasks = [each for each in found if not is_late(each)]
    return (
        len(tasks),
        sum(each.bytes_down + each.bytes_up for each in found),
        sum(each.answered_seconds - each.asked_seconds for each in tasks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """Who took part in a run, and what waiting for others has cost.

    Attributes:
        counts: For each site of the job the rounds in which its update counted.
        waited: For each site the site-seconds that others waited for it.
        share: Share of the sites' time in rounds that was waiting; None where it is not
            known: sites of one process wait for its cores.
        surplus: Of tasks that were withdrawn, or whose answers were not used, since
            others had answered before: how many, their bytes, and the seconds until
            they were closed. How long sites went on with them is not known.
    """

    counts: Mapping[str, int]
    waited: Mapping[str, float]
    share: float | None
    surplus: tuple[int, int, float] = (0, 0, 0.0)

    @property
    def fairness(self) -> float | None:
        """Jain's index of the counts; None if none counted."""
        return jain_index([*self.counts.values()])

    def words(self) -> Iterator[str]:
        """What a person should know of it, in sentences without a full stop."""
        if self.share is not None and self.waited:
            total = sum(self.waited.values())
            worst = sorted(self.waited.items(), key=lambda pair: -pair[1])[:_NAMED]
            for_whom = ", ".join(
                f"{site} ({format_fraction(seconds / total)})"
                for site, seconds in worst
                if seconds >= _LEAST_NAMED * total
            )
            yield (
                f"sites waited {format_fraction(self.share)} of their time in rounds, "
                f"{format_duration(total)} of all sites together"
                f"{f', for {for_whom}' if for_whom else ''}"
            )
        tasks, wasted, seconds = self.surplus
        if tasks:
            yield (
                f"{format_count(tasks, 'task')} {'was' if tasks == 1 else 'were'} "
                "not needed, since others had answered before: "
                f"{format_bytes(wasted)}, {format_duration(seconds)} of sites until "
                "then; a site finishes what it has begun"
            )
        if self.fairness is not None:
            counts = self.counts.values()
            low, high = min(counts), max(counts)
            number = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            yield (
                f"each site's update counted in {number} rounds; Jain's index "
                f"{self.fairness:.2f}"
            )

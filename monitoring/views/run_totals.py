"""What rounds add up to: totals of a run, or of rounds that are folded away.

A page of ten thousand rounds at a thousand sites cannot hold every answer. So a fold
settles rounds that are over: it keeps their totals, and later rounds are added. Curves
of settled rounds are thinned to what a figure can show; all other numbers are exact.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from federation.events import CheckpointSaved, ModelEvaluated, SiteFailed
from federation.messages import Resources
from monitoring.views.round_view import NOT_ASKED, RoundView, accuracy_of, loss_of
from monitoring.views.site_view import Series, SiteView, num_missed, total

if TYPE_CHECKING:
    from monitoring.views.run_view import RunView

MAX_ROWS = 200  # Rounds of a table, and of the figure of who took part.
MAX_FAILURES = 100  # Failures of a list.
MAX_POINTS = 500  # Points of a line; of a site's, fewer if there are many sites.
_MIN_SITE_POINTS, _ALL_SITE_POINTS = 30, 30_000
COMPLETED = "completed"

Pairs = tuple[tuple[str, Any], ...]  # A mapping, as JSON can hold several.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """A round without its answers; the names are those of ``RoundView``.

    Attributes:
        sites: What became of each site of the job, a letter for each in its order: see
            ``round_view``. Empty of rounds before the newest ``MAX_ROWS``.
    """

    index: int
    status: str
    training_loss: float | None
    loss: float | None
    accuracy: float | None
    sites_evaluated: int | None
    num_unheard: int
    asked: int
    answered: int
    failures: Mapping[str, int]
    bytes_up: int
    bytes_down: int
    epsilon: float | None
    seconds: float | None
    update_clip: float | None
    update_norm: float | None
    covered: str
    length: float
    resources: Resources | None
    metrics: tuple[tuple[str, float], ...]
    sites: str

    @classmethod
    def of(cls, row: RoundView, sites: Sequence[str]) -> "RoundRow":
        """Take the row of a round; ``sites`` are those of the job."""
        states = row.states
        found = "".join(states.get(site, NOT_ASKED) for site in sites)
        names = (each.name for each in fields(cls) if each.name != "sites")
        return cls(**{name: getattr(row, name) for name in names}, sites=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """Traffic of rounds that ran again, and of evaluations that were made anew.

    Attributes:
        bytes_up: Bytes from all sites.
        bytes_down: Bytes to all sites.
        sites: Bytes from and to each of them.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    sites: tuple[tuple[str, int, int], ...] = ()

    def plus(
        self, up: int, down: int, parts: Iterable[tuple[str, int, int]]
    ) -> "Superseded":
        """Add bytes, and the part of each site."""
        sites = {site: (its_up, its_down) for site, its_up, its_down in self.sites}
        for site, its_up, its_down in parts:
            before = sites.get(site, (0, 0))
            sites[site] = (before[0] + its_up, before[1] + its_down)
        return Superseded(
            bytes_up=self.bytes_up + up,
            bytes_down=self.bytes_down + down,
            sites=tuple((site, *both) for site, both in sites.items()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Totals of rounds.

    Attributes:
        num_rounds: Rounds that ended.
        completed: Those of them after which the weights changed.
        bytes_up: Bytes from all sites, also to evaluate.
        bytes_down: Bytes to all sites, likewise.
        evaluation_bytes: Of these, up and down, those to evaluate outside rounds.
        best: The lowest held-out loss after a completed round that all of its sites
            evaluated, and the first round with it.
        clips: Clip norms; two are enough to know that they differ.
        has_unheard: Whether some loss does not cover all sites.
        aggregator: What rounds took at the aggregator.
        num_failures: Tasks without an answer that counted, though a round needed it.
        kinds: The same by kind.
        failures: The newest of them.
        counts: For each site the rounds in which its update counted.
        waited: For each site the site-seconds that others waited for it.
        site_seconds: Time of all sites in rounds.
        surplus: Tasks that nobody needed; see ``participation.surplus``.
        evaluations: That of ``best``, and the newest, which may be the same.
        num_saved: Checkpoints.
        saved: The newest of them.
        sites: What each site did.
        curves: Points of lines by name: ``loss``, ``accuracy``, ``training``, ``up``,
            ``down`` and ``seconds``.
        rows: All rounds.
    """

    num_rounds: int = 0
    completed: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    evaluation_bytes: tuple[int, int] = (0, 0)
    best: tuple[float, int] | None = None
    clips: tuple[float, ...] = ()
    has_unheard: bool = False
    aggregator: Resources | None = None
    num_failures: int = 0
    kinds: tuple[tuple[str, int], ...] = ()
    failures: tuple[SiteFailed, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    waited: tuple[tuple[str, float], ...] = ()
    site_seconds: float = 0.0
    surplus: tuple[int, int, float] = (0, 0, 0.0)
    evaluations: tuple[ModelEvaluated, ...] = ()
    num_saved: int = 0
    saved: CheckpointSaved | None = None
    sites: tuple[SiteView, ...] = ()
    curves: tuple[tuple[str, Series], ...] = ()
    rows: tuple[RoundRow, ...] = ()

    @classmethod
    def of(cls, view: "RunView") -> "RunTotals":
        """Add up the rounds that a view holds itself."""
        ended = [row.finished for row in view.rounds if row.finished]
        failures, best = view.failures, _best(view.rounds)
        counts, waited, whole = took_part(view.rounds)
        saved = [row.saved for row in view.rounds if row.saved]
        return cls(
            num_rounds=len(view.rounds),
            completed=sum(row.status == COMPLETED for row in view.rounds),
            bytes_up=view.bytes_up,
            bytes_down=view.bytes_down,
            evaluation_bytes=view.evaluation_bytes,
            best=best,
            clips=_some(
                {r.update_clip for r in view.rounds if r.update_clip is not None}
            ),
            has_unheard=any(row.num_unheard for row in view.rounds),
            aggregator=total([each.resources for each in ended if each.resources]),
            num_failures=num_missed(failures),
            kinds=_pairs(Counter(each.kind.value for each in failures)),
            failures=failures[-MAX_FAILURES:],
            counts=_pairs(counts),
            waited=_pairs(waited),
            site_seconds=whole,
            surplus=view.participation.surplus,
            evaluations=_newest_and_best(
                best, [row.evaluated for row in view.rounds if row.evaluated]
            ),
            num_saved=len(saved),
            saved=saved[-1] if saved else None,
            sites=view.sites,
            curves=_pairs(_curves(view)),
            rows=tuple(
                RoundRow.of(row, view.started.sites if left <= MAX_ROWS else ())
                for row, left in zip(
                    view.rounds, range(len(view.rounds), 0, -1), strict=True
                )
            ),
        )

    def plus(self, later: "RunTotals") -> "RunTotals":
        """Add those of later rounds."""
        ours, theirs = self.evaluation_bytes, later.evaluation_bytes
        used = [each for each in (self.aggregator, later.aggregator) if each]
        best = min((b for b in (self.best, later.best) if b), default=None)
        evaluations = (*self.evaluations, *later.evaluations)
        return RunTotals(
            num_rounds=self.num_rounds + later.num_rounds,
            completed=self.completed + later.completed,
            bytes_up=self.bytes_up + later.bytes_up,
            bytes_down=self.bytes_down + later.bytes_down,
            evaluation_bytes=(ours[0] + theirs[0], ours[1] + theirs[1]),
            best=best,
            clips=_some({*self.clips, *later.clips}),
            has_unheard=self.has_unheard or later.has_unheard,
            aggregator=total(used),
            num_failures=self.num_failures + later.num_failures,
            kinds=_added(self.kinds, later.kinds),
            failures=(*self.failures, *later.failures)[-MAX_FAILURES:],
            counts=_added(self.counts, later.counts),
            waited=_added(self.waited, later.waited),
            site_seconds=self.site_seconds + later.site_seconds,
            surplus=add_surplus(self.surplus, later.surplus),
            evaluations=_newest_and_best(best, evaluations),
            num_saved=self.num_saved + later.num_saved,
            saved=later.saved or self.saved,
            sites=_joined_sites(self.sites, later.sites),
            curves=_joined_curves(self.curves, later.curves),
            rows=(*self.rows, *later.rows),
        )

    def settled(self) -> "RunTotals":
        """Return what is worth keeping of rounds that are over."""
        points = max(_MIN_SITE_POINTS, _ALL_SITE_POINTS // max(1, len(self.sites)))
        return replace(
            self,
            sites=tuple(_settled(site, min(points, MAX_POINTS)) for site in self.sites),
            curves=tuple((n, _thinned(c, MAX_POINTS)) for n, c in self.curves),
            rows=(
                *(
                    replace(r, sites="") if r.sites else r
                    for r in self.rows[:-MAX_ROWS]
                ),
                *self.rows[-MAX_ROWS:],
            ),
        )


def _best(rows: Iterable[RoundView]) -> tuple[float, int] | None:
    losses = (
        (row.loss, row.index)
        for row in rows
        # A loss that lacks a site's data cannot be compared with the others.
        if row.loss is not None and row.status == COMPLETED and not row.num_unheard
    )
    return min(losses, default=None)


def _newest_and_best(
    best: tuple[float, int] | None, found: Sequence[ModelEvaluated]
) -> tuple[ModelEvaluated, ...]:
    chosen = None if best is None else best[1]
    kept = [each for each in found[:-1] if each.round_index == chosen]
    return (*kept[-1:], *found[-1:])


def _curves(view: "RunView") -> Mapping[str, Series]:
    ended = [row for row in view.rounds if row.seconds is not None]
    measured = [event for event in view.evaluations() if event.pooled.count]
    found: Mapping[str, Sequence[tuple[int, float | None]]] = {
        "loss": [(e.round_index, loss_of(e.pooled)) for e in measured],
        "accuracy": [(e.round_index, accuracy_of(e.pooled)) for e in measured],
        "training": [(row.index, row.training_loss) for row in view.rounds],
        "up": [(row.index, row.bytes_up) for row in ended],
        "down": [(row.index, row.bytes_down) for row in ended],
        "seconds": [(row.index, row.seconds) for row in ended],
    }
    return {
        name: tuple((at, value) for at, value in points if value is not None)
        for name, points in found.items()
    }


def took_part(
    rows: Iterable[RoundView],
) -> tuple[Counter[str], Counter[str], float]:
    """Count who took part.

    Returns:
        For each site the rounds in which its update counted, and the site-seconds that
        others waited for it; and the time of all sites in rounds.
    """
    counts, waited, whole = Counter[str](), Counter[str](), 0.0
    for row in rows:
        counts.update(row.finished.answered if row.finished else ())
        waited.update(row.waited)
        whole += (row.seconds or 0.0) * row.asked
    return counts, waited, whole


def add_surplus(
    one: tuple[int, int, float], other: tuple[int, int, float]
) -> tuple[int, int, float]:
    """Add what ``participation.surplus`` counts."""
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _some(clips: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(clips)[:2])


def _pairs(found: Mapping[str, Any]) -> Pairs:
    return tuple(found.items())


def _added(one: Pairs, other: Pairs) -> Pairs:
    found = Counter(dict(one))
    for name, number in other:
        found[name] += number
    return _pairs(found)


def _joined_sites(
    before: Sequence[SiteView], later: Sequence[SiteView]
) -> tuple[SiteView, ...]:
    if not before:
        return tuple(later)
    known = {site.site: site for site in before}
    found = [_joined(known.pop(s.site), s) if s.site in known else s for s in later]
    return (*found, *known.values())


def _joined(one: SiteView, later: SiteView) -> SiteView:
    used = [each for each in (one.used, later.used) if each]
    return replace(
        later,
        bytes_up=one.bytes_up + later.bytes_up,
        bytes_down=one.bytes_down + later.bytes_down,
        seconds=one.seconds + later.seconds,
        answered=one.answered + later.answered,
        used=total(used),
        examples=one.examples if later.examples is None else later.examples,
        training_loss=_in_order(one.training_loss, later.training_loss),
        loss=_in_order(one.loss, later.loss),
        accuracy=_in_order(one.accuracy, later.accuracy),
        num_failures=one.num_failures + later.num_failures,
        epsilon=_in_order(one.epsilon, later.epsilon),
        held_out_epsilon=_in_order(one.held_out_epsilon, later.held_out_epsilon),
    )


def _settled(site: SiteView, points: int) -> SiteView:
    return replace(
        site,
        share=None,  # Later rounds have it, as what the site promises.
        failures=(),
        promise=None,
        spent=None,
        training_loss=(),
        loss=_thinned(site.loss, points),
        accuracy=_thinned(site.accuracy, points),
        epsilon=_thinned(site.epsilon, points),
        held_out_epsilon=(),
    )


def _joined_curves(before: Pairs, later: Pairs) -> Pairs:
    found = dict(before)
    for name, points in later:
        found[name] = _in_order(found.get(name, ()), points)
    return _pairs(found)


def _in_order(one: Series, other: Series) -> Series:
    """Join two series; the model before the first round is among the later points."""
    if not one or not other:
        return one or other
    return one + other if one[-1][0] < other[0][0] else tuple(sorted(one + other))


def _thinned(series: Series, points: int) -> Series:
    """Keep every second point until they are few, and the last one."""
    while len(series) > points:
        series = (*series[:-1:2], series[-1])
    return series

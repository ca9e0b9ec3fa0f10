"""Names the state that all sites of a secure sum begin with: the newest that all have.

The aggregator knows what a site has kept by the sums that it was in. A site that lacks
the state of a task says so, and does not take part in that round; the next round
then begins with an older state that it has too, or with none. Where that would take
the personal parts of all sites back to the start, it is left out instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from aggregator.secure_exchange import SecureExchange
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.kept_state import KEPT_ROUNDS, keepers
from federation.job.spec import JobSpec
from federation.messages import FailureKind, StateName, TaskKind
from federation.rounds.round_record import RoundRecord
from federation.vectors import Layout
from privacy.secagg.agreement.certificate import OpenedRound

Known = Mapping[SiteId, tuple[StateName, ...]]
# Such a site may be late, with all its work done.
_MAY_HAVE_TRAINED = {
    FailureKind.DEADLINE,
    FailureKind.UNREACHABLE,
    FailureKind.LATE,
    FailureKind.LEAVING,
}


class KeptStates:
    """Which state a round begins with, in the secure sums of one run."""

    def __init__(self, job: JobSpec, layout: Layout) -> None:
        """Know nothing of what sites lack."""
        # The sites of a free cohort have trained in several rounds: each begins with
        # what its own last one left.
        self._keeps = {
            kind: bool(keepers(job, layout, trains=kind is TaskKind.TRAIN))
            and not job.has_free_cohorts
            for kind in TaskKind
        }
        self._kept = ", ".join(keepers(job, layout))
        self._has_personal = layout.num_personal > 0
        secure = job.privacy.secure_aggregation
        # Groups that are too small lose their part of a round, and others go on.
        self._needed = 0 if job.has_groups else job.minimum_sites
        # What levels leave out follows from the sum just before, and from no other.
        self._only_newest = secure.levels is not None
        self._named: dict[SiteId, StateName] = {}
        self._behind: set[SiteId] = set()
        self._waited_for: set[SiteId] = set()
        self._left_out: set[SiteId] = set()

    def name(
        self, record: RoundRecord, sites: Sequence[SiteId]
    ) -> Mapping[SiteId, StateName]:
        """Name the state that the sites of one sum begin with.

        Args:
            record: The round; it warns if that is not the newest state.
            sites: The sites of the sum that are asked.

        Returns:
            The name for each site; empty if they begin with none.

        Raises:
            SiteError: Sites lack what the others have, which is not given up for
                them, and too few are left.
        """
        for site in sites:
            self._named.pop(site, None)
        if not self._keeps[record.kind]:
            return {}
        known = record.states
        newest = _newest(name for site in sites for name in known.get(site, ()))
        behind = [site for site in sites if site in self._behind]
        found = _common(known, sites, behind, newest)
        if self._only_newest and found != newest:
            found = None
        if found is None and newest is not None and self._is_worth(newest):
            found = self._leave_out(record, sites, behind, newest)
        elif found != newest:
            lacking = [site for site in behind if newest not in known.get(site, ())]
            start = f"that of round {found.round_index}" if found else "none"
            record.events.warned(
                f"round {record.round_index}: {', '.join(lacking)} did not keep the "
                f"newest state of the others ({self._kept}), so all sites begin with "
                f"{start}"
            )
        named = dict.fromkeys(sites, found) if found else {}
        self._named.update(named)
        return named

    def _is_worth(self, newest: StateName) -> bool:
        """Whether a state holds what sites cannot train again in a few rounds."""
        return self._has_personal and newest.round_index > KEPT_ROUNDS

    def _leave_out(
        self,
        record: RoundRecord,
        sites: Sequence[SiteId],
        behind: Sequence[SiteId],
        newest: StateName,
    ) -> StateName:
        """Name a state of the other sites; those that lack it will say so.

        Raises:
            SiteError: Too few others are left.
        """
        known = record.states
        lost = [site for site in behind if self._only_newest or not known.get(site)]
        others = [site for site in behind if site not in lost]
        found = _common(known, sites, others, newest)
        if found is None:
            lost, found = list(behind), newest
        names = ", ".join(lost)
        reason = (
            f"round {record.round_index}: {names} lost the state of this run, or never "
            "had it. All sites of a secure sum begin with the state of one round, and "
            "without any the personal parts of all sites would begin again"
        )
        advice = (
            "start a new run from this model (model.weights), in which all personal "
            "parts begin again"
        )
        if len(sites) - len(lost) < self._needed:
            raise SiteError(
                f"{reason}. Restore the folder of {names} and resume this run, or "
                f"{advice}"
            )
        if not self._left_out.issuperset(lost):
            record.events.warned(
                f"{reason}, so the run goes on without {names}. If it must take part, "
                f"stop the run, restore its folder and resume, or {advice}"
            )
            self._left_out.update(lost)
        return found

    def settle(self, record: RoundRecord, exchange: SecureExchange) -> None:
        """Note who has not kept this round's state, once its answers are in.

        Others go back for a site that says so; and once, until it answers again, for
        one that failed: it may never be well.
        """
        self._behind &= exchange.answered
        for site, kind in exchange.failed.items():
            if kind is FailureKind.NO_STATE:
                self._behind.add(site)
                if self._named.get(site) in record.states.get(site, ()):
                    record.states[site] = ()  # It had that state: it lost its files.
            elif kind not in _MAY_HAVE_TRAINED and site not in self._waited_for:
                self._behind.add(site)
                self._waited_for.add(site)

    def keep(
        self, record: RoundRecord, sites: Iterable[SiteId], opened: OpenedRound
    ) -> None:
        """Note that the sites of a sum have kept what its round left."""
        if self._keeps[TaskKind.TRAIN]:
            name = StateName(opened.round_index, opened.context.hex())
            for site in sites:
                self._behind.discard(site)
                self._waited_for.discard(site)
                known = record.states.get(site, ())
                record.states[site] = (*known, name)[-KEPT_ROUNDS:]


def _common(
    known: Known,
    sites: Sequence[SiteId],
    behind: Sequence[SiteId],
    newest: StateName | None,
) -> StateName | None:
    """The newest state of those who have the newest, and of those who are behind."""
    has = [{*known.get(site, ())} for site in sites]
    counts = [
        states
        for site, states in zip(sites, has, strict=True)
        if site in behind or newest in states
    ]
    return _newest(set.intersection(*counts)) if counts else None


def _newest(names: Iterable[StateName]) -> StateName | None:
    return max(names, key=attrgetter("round_index"), default=None)

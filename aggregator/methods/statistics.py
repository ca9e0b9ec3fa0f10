"""Statistics at the aggregator: means over sites become sums of whole numbers."""

from collections.abc import Iterable, Iterator

import numpy as np

from federation.events import Emit, SiteSummed
from federation.job.spec import JobSpec
from federation.job.statistics_checks import table
from federation.job.statistics_table import (
    CATEGORIES,
    COUNTS,
    HISTOGRAMS,
    SITES,
    SQUARES,
    SUMS,
)
from federation.methods.statistics import STATISTICS
from federation.protocols import (
    Clock,
    CombineRule,
    RunProgress,
    RunState,
    WeightedUpdate,
)
from federation.rounds.guest import ServerGuest
from federation.rounds.round_record import RoundRecord
from federation.rounds.round_sums import COMPLETED


class StatisticsRounds(ServerGuest):
    """Ends the run when the table is complete; lost rounds are asked again."""

    def is_over(self, state: RunProgress) -> bool:
        """Whether each stage has its sums; see ``ServerGuest``."""
        return state.rounds_completed >= len(table(self.job).stages)

    def after_round(self, new_state: RunState, record: RoundRecord) -> RunState:
        """Undo the division by the number of sites; see ``ServerGuest``."""
        if record.status == COMPLETED:
            asked = table(self.job)
            stage = asked.stages[new_state.rounds_completed - 1]
            asked.total_(stage, new_state.weights_d, record.verdicts.num_answered)
        return new_state


def noting(job: JobSpec, rule: CombineRule, emit: Emit, clock: Clock) -> CombineRule:
    """Return a rule that also emits the sums of each site, for comparing sites.

    They came in the clear, without noise: the aggregator can read them anyway. What is
    wrong with an update is the rule's to see.
    """
    if job.statistics is None or job.privacy.differential_privacy.enabled:
        return rule
    asked, parts = table(job), (COUNTS, SUMS, SQUARES, HISTOGRAMS, CATEGORIES)
    stage = asked.stages[0]

    def noted(updates: Iterable[WeightedUpdate]) -> Iterator[WeightedUpdate]:
        for update in updates:
            table_d = np.asarray(update.delta_d[0 : stage.stop])
            most = float(np.abs(table_d).max(initial=0.0))
            # Of the first round, and not a relay's sum over several sites.
            if most <= asked.element_bound and asked.read(stage, table_d)[SITES] == [1]:
                sums = asked.read(stage, table_d)
                found = {name: tuple(sums.get(name, ())) for name in parts}
                emit(SiteSummed(at=clock.now(), site=update.site, **found))
            yield update

    return lambda updates, out_d: rule(noted(updates), out_d)


def begin(job: JobSpec) -> ServerGuest | None:
    """Begin a run of statistics."""
    return StatisticsRounds(job) if STATISTICS.is_on(job) else None

"""Statistics at the aggregator: means over sites become sums of whole numbers."""

from federation.job.spec import JobSpec
from federation.job.statistics_checks import table
from federation.methods.statistics import STATISTICS
from federation.protocols import RunProgress, RunState
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


def begin(job: JobSpec) -> ServerGuest | None:
    """Begin a run of statistics."""
    return StatisticsRounds(job) if STATISTICS.is_on(job) else None

"""A schedule without rounds: FedBuff (Nguyen et al. 2022, arXiv:2106.06639)."""

from collections.abc import Sequence
from dataclasses import dataclass

from federation.rounds.schedule import (
    Action,
    Apply,
    Arrival,
    Done,
    ScheduleView,
    Send,
    Wait,
)


@dataclass(frozen=True)
class Buffered:
    """Applies as soon as some answers count, and sends what is new to who is idle.

    Attributes:
        size: Answers that make a model.
        most_stale: Models that may be newer than what an answer is based on.
    """

    size: int
    most_stale: int = 10

    def next(self, state: ScheduleView, inbox: Sequence[Arrival], now: float) -> Action:
        """Send, apply or wait."""
        del now
        if state.round_index > state.rounds:
            return Done()
        if sum(arrival.counts for arrival in inbox) >= self.size:
            return Apply()
        at_work = {task.site for task in state.open}
        at_work |= {arrival.task.site for arrival in inbox}
        idle = [site for site in state.cohort if site not in at_work]
        if idle:
            return Send(idle)
        return Wait() if state.open else Apply()

    def share(self, staleness: int) -> float:
        """Weigh what is older less, by the root of its age."""
        return 0.0 if staleness > self.most_stale else (1.0 + staleness) ** -0.5

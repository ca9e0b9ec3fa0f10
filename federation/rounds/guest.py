"""What a method may do in a run at the aggregator: the seam of all its methods.

The round loop (``federation.rounds.coordinator``) is the algorithm: draw a cohort,
gather updates, combine them, take the server's step. A method does the rest through
these functions; ``aggregator.methods.registry`` lists all methods.

Shape suffixes: d float values of the model.
"""

# ruff: noqa: ARG002 -- what methods need, the defaults do not use

from dataclasses import dataclass

from federation.events import Emit
from federation.job.spec import JobSpec
from federation.protocols import RunProgress, RunState
from federation.rounds.round_record import RoundRecord
from federation.vectors import Vector


@dataclass(frozen=True)
class ServerGuest:
    """A method in a run at the aggregator. By default it does nothing.

    Attributes:
        job: Says how the method works.
    """

    job: JobSpec

    def is_over(self, state: RunProgress) -> bool:
        """Whether the run ends here, although its schedule has more rounds."""
        return False

    def before_round_(self, record: RoundRecord) -> None:
        """Decide what sites do in a round, before any is asked."""

    def after_step_(self, record: RoundRecord, weights_d: Vector) -> None:
        """Change the model that the server's step has made.

        Args:
            record: The round.
            weights_d: The model after the step, shape ``(d,)``.

        Raises:
            BeyondCodec: No site could be sent the model: the round is discarded.
        """

    def after_round(self, new_state: RunState, record: RoundRecord) -> RunState:
        """Return the state after a round with what the method keeps of it.

        Args:
            new_state: The state after the round.
            record: The round; ``status`` says whether it was completed.
        """
        return new_state

    def last_evaluated(self, state: RunState) -> RunState:
        """Return the state with the model that sites evaluate after the last round."""
        return state

    def after_run(
        self, state: RunState, record: RoundRecord | None, *, at: float, emit: Emit
    ) -> RunState:
        """Return the state that a finished run leaves.

        Args:
            state: The state after the last round.
            record: The evaluation of ``last_evaluated``; None if the job has none.
            at: Time of the method's events.
            emit: Where they go.
        """
        return state

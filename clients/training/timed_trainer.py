"""A trainer whose work takes time on a virtual clock."""

from clients.training.forwarding import ForwardingTrainer
from federation.clock import VirtualClock
from federation.messages import MetricSums
from federation.protocols import LocalUpdate, LocalWeights, Trainer
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Vector


class TimedTrainer(ForwardingTrainer):
    """Trains as another trainer does, at a constant speed."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        clock: VirtualClock,
        seconds_per_step: float,
        seconds_per_evaluation: float,
    ) -> None:
        """Give work its time; paying takes none.

        Args:
            trainer: Does the work.
            clock: The site's; moves on by what the work takes.
            seconds_per_step: Time of an optimiser step.
            seconds_per_evaluation: Time of an evaluation.
        """
        super().__init__(trainer)
        self._clock = clock
        self._seconds_per_step = seconds_per_step
        self._seconds_per_evaluation = seconds_per_evaluation

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
    ) -> LocalWeights | LocalUpdate:
        """Train; every step takes its time."""
        result = super().fit(weights_d, integers_m, round_index=round_index, kept=kept)
        self._clock.sleep(result.num_steps * self._seconds_per_step)
        return result

    def evaluate(
        self, weights_d: Vector, integers_m: IntegerVector, *, round_index: int
    ) -> MetricSums:
        """Evaluate; that takes its time, too."""
        sums = super().evaluate(weights_d, integers_m, round_index=round_index)
        self._clock.sleep(self._seconds_per_evaluation)
        return sums

"""A trainer whose work takes time on a virtual clock."""

from collections.abc import Callable
from typing import Unpack

from clients.methods.overlap import own_model
from clients.training.forwarding import ForwardingTrainer
from federation.clock import VirtualClock
from federation.messages import MetricSums
from federation.protocols import (
    EvaluateArguments,
    FitArguments,
    LocalUpdate,
    LocalWeights,
    Trainer,
)
from federation.rounds.cost import WorkSeconds
from federation.vectors import NO_ARRAYS, IntegerVector, Vector


class TimedTrainer(ForwardingTrainer):
    """Trains as another trainer does, at a constant speed."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        clock: VirtualClock,
        work: WorkSeconds,
        relative: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        """Give work its time; paying takes none.

        Args:
            trainer: Does the work.
            clock: The site's; moves on by what the work takes.
            work: Time of a round's training, and of an evaluation.
            relative: How much longer the training of a round takes, by its number.
        """
        super().__init__(trainer)
        self._clock = clock
        self._work, self._relative = work, relative
        self._waits_since: float | None = None  # Without what evaluations took since.

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[FitArguments],
    ) -> LocalWeights | LocalUpdate:
        """Train, and let virtual time pass."""
        result = super().fit(weights_d, integers_m, **arguments)
        ahead = 0.0
        if self._waits_since is not None and own_model(
            arguments.get("kept", NO_ARRAYS)
        ):
            waited = self._clock.monotonic() - self._waits_since
            ahead = min(self._work.ahead, waited)
        train, steps = self._work.train, arguments.get("steps")
        train *= self._relative(arguments["round_index"])
        if steps is not None:
            train *= len(steps) / self._work.num_steps
        self._clock.sleep(train - ahead)
        self._waits_since = self._clock.monotonic()
        return result

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[EvaluateArguments],
    ) -> MetricSums:
        """Evaluate, and let virtual time pass."""
        sums = super().evaluate(weights_d, integers_m, **arguments)
        self._clock.sleep(self._work.evaluate)
        if self._waits_since is not None:
            self._waits_since += self._work.evaluate
        return sums

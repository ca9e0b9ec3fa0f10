"""Local steps that a site takes while updates and models are on their way.

A site that waits for the other sites' updates does nothing. With overlap, the first tau
local steps of a round begin with the site's own weights at the end of the round before,
and so can be taken while its update travels and the sum is made. Then the global model
arrives, and the site continues from a mix of both (Streaming DiLoCo, Douillard et al.
2025, arXiv:2501.18512, section 3.2)::

    x = alpha x_own + (1 - alpha) theta

where alpha is ``overlap_mix``. What a round computes follows from the site's state and
the model alone: whether the steps were taken ahead, or after the model has come, the
result has the same bits. So a site that is killed and starts again repeats it, and a
simulation in one process trains what a deployed run trains.

Shape suffixes: d float values of the model, m integer values of it.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from clients.methods.guest import Guest, LocalRound
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from federation.methods.overlap import OVERLAP
from federation.rounds.local_work import total_steps
from federation.vectors import Arrays, IntegerVector, Layout, Role, Vector

_WEIGHTS, _INTEGERS = "overlap/weights", "overlap/integers"


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadSteps:
    """What a round's first steps led to.

    Attributes:
        weights_d: The site's own weights after them.
        integers_m: Integer values of the model.
        kept: The optimiser's state, if the job keeps it.
        training: Sums over these steps.
    """

    weights_d: Vector
    integers_m: IntegerVector
    kept: Arrays
    training: MetricSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What the rest of a round begins with, after steps that were taken ahead.

    Attributes:
        weights_d: Weights to load, shape ``(d,)``.
        integers_m: Integer values to load, shape ``(m,)``.
        kept: What the site has kept of an earlier round, or of steps taken ahead.
        num_steps: Steps that were taken ahead.
        training: Sums over these; None for none.
    """

    weights_d: Vector
    integers_m: IntegerVector
    kept: Arrays
    num_steps: int = 0
    training: MetricSums | None = None

    def total(self, training: MetricSums) -> MetricSums:
        """Add the sums over these steps to those over the rest."""
        return training if self.training is None else training + self.training


class Overlap(Guest):
    """Keeps a site's own model at the end of a round, for steps of the next."""

    def arrays(self, local_d: Vector, local_m: IntegerVector) -> Arrays:
        """Return copies of the site's own values."""
        return {_WEIGHTS: local_d.copy(), _INTEGERS: local_m.copy()}


def begin(start: LocalRound) -> Overlap | None:
    """Begin a round, if the job takes steps ahead."""
    return Overlap() if OVERLAP.is_on(start.job) else None


def own_model(kept: Arrays) -> tuple[Vector, IntegerVector] | None:
    """Find a site's own model in its state; None if there is none."""
    return (kept[_WEIGHTS], kept[_INTEGERS]) if _WEIGHTS in kept else None


def mixed(own_d: Vector, weights_d: Vector, *, mix: float) -> Vector:
    """Return ``mix * own + (1 - mix) * global``, in new memory."""
    found_d = own_d * np.float32(mix)
    found_d += weights_d * np.float32(1 - mix)
    return found_d


def arrived(
    own_m: IntegerVector, integers_m: IntegerVector, layout: Layout
) -> IntegerVector:
    """Return the integers that a site continues with, each by its role.

    Args:
        own_m: The site's own, after the steps that it took ahead.
        integers_m: The model's.
        layout: Layout of the model.
    """
    largest_m = np.maximum(own_m, integers_m)
    found_m = np.where(layout.integer_mask(Role.MAX), largest_m, integers_m)
    return np.where(layout.integer_mask(Role.KEEP), own_m, found_m)


class WorkAhead:
    """Takes a round's first steps in a thread of its own, if there is time for that."""

    def __init__(
        self, job: JobSpec, steps: Callable[[int, Arrays, int], AheadSteps]
    ) -> None:
        """Prepare for a run.

        Args:
            job: Says how many steps are taken ahead.
            steps: Takes them; called with the round, the site's state, and the number
                of the first one, counted over the run.
        """
        self._training, self._steps = job.training, steps
        self._last_step = total_steps(job) if OVERLAP.is_on(job) else 0
        self._pool: ThreadPoolExecutor | None = None
        self._begun: tuple[tuple[int, int], Arrays, Future[AheadSteps]] | None = None

    def begin(self, round_index: int, kept: Arrays, first_step: int) -> None:
        """Begin with a round's first steps, if there is one; it returns immediately."""
        if own_model(kept) is None or first_step >= self._last_step:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        future = self._pool.submit(self._steps, round_index, kept, first_step)
        self._begun = (round_index, first_step), kept, future

    def beginning(
        self,
        round_index: int,
        model: tuple[Vector, IntegerVector],
        kept: Arrays,
        *,
        layout: Layout,
        first_step: int,
    ) -> Beginning:
        """Mix what a round's first steps have led to with the model that has arrived.

        Args:
            round_index: Number of the round, from 1.
            model: The global weights and integers.
            kept: The site's state. Without a model of its own, nothing is mixed.
            layout: Layout of the model.
            first_step: The first of the round's steps, counted over the run.

        Raises:
            Exception: What the steps raise.
        """
        weights_d, integers_m = model
        if not self._last_step or own_model(kept) is None:
            return Beginning(weights_d=weights_d, integers_m=integers_m, kept=kept)
        ahead = self._take(round_index, kept, first_step)
        mix = self._training.overlap_mix
        return Beginning(
            weights_d=mixed(ahead.weights_d, weights_d, mix=mix),
            integers_m=arrived(ahead.integers_m, integers_m, layout),
            kept=ahead.kept,
            num_steps=self._training.overlap_steps,
            training=ahead.training,
        )

    def _take(self, round_index: int, kept: Arrays, first_step: int) -> AheadSteps:
        """Return the first steps of a round, which are taken now if they were not."""
        begun, self._begun = self._begun, None
        if begun is not None:
            which, before, future = begun
            if which == (round_index, first_step) and _is_same(before, kept):
                return future.result()
            future.cancel()  # What becomes of it, an error too, is of no account.
        return self._steps(round_index, kept, first_step)


def _is_same(one: Arrays, other: Arrays) -> bool:
    """Whether a state that was stored is the one that steps began with."""
    return all(
        name in other and np.array_equal(array, other[name])
        for name, array in one.items()
    )

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

from federation.messages import MetricSums
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
class OwnWeights:
    """A site's own model at the end of a round."""

    weights_d: Vector
    integers_m: IntegerVector

    def arrays(self) -> Arrays:
        """Copies to store with the site's state."""
        return {_WEIGHTS: self.weights_d.copy(), _INTEGERS: self.integers_m.copy()}


def own_weights(kept: Arrays) -> OwnWeights | None:
    """Find a site's own model in its state; None if there is none."""
    if _WEIGHTS not in kept:
        return None
    return OwnWeights(weights_d=kept[_WEIGHTS], integers_m=kept[_INTEGERS])


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

    def __init__(self, steps: Callable[[int, Arrays, int], AheadSteps]) -> None:
        """Take steps with ``steps``: round, site's state, steps of the run before."""
        self._steps = steps
        self._pool: ThreadPoolExecutor | None = None
        self._begun: tuple[tuple[int, int], Arrays, Future[AheadSteps]] | None = None

    def begin(self, round_index: int, kept: Arrays, first_step: int) -> None:
        """Begin with a round's first steps; it returns immediately."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        future = self._pool.submit(self._steps, round_index, kept, first_step)
        self._begun = (round_index, first_step), kept, future

    def take(self, round_index: int, kept: Arrays, first_step: int) -> AheadSteps:
        """Return the first steps of a round, which are taken now if they were not.

        Raises:
            Exception: What the steps raise.
        """
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

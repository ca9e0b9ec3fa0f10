"""Control variates of SCAFFOLD, without a byte on the line.

A site's local steps drift towards the optimum of its own records. SCAFFOLD
(Karimireddy et al. 2020, arXiv:1910.06378, Algorithm 1, option II) adds
``h_i = c - c_i`` to each local gradient, where ``c_i`` is the site's mean gradient of
its last round and ``c`` the mean of all ``c_i``. There, ``c`` travels down and the
change of ``c_i`` up. If every site takes part in every round, with the same steps, none
of this needs to travel: ``c`` follows from the mean of all updates, which the next
model contains. With ``y_i``, a site's weights after round r, ``x``, the model that
round r has made, and the learning rates ``eta_k`` of its steps::

    h_i <- h_i + (y_i - x) / sum_k eta_k

This is Scaffnew (Mishchenko et al. 2022, arXiv:2202.09357, Algorithm 2) with a fixed
number of steps between exchanges. The weighted mean of all ``h_i`` is 0 and stays 0.

An update that did not count must not change ``h_i``; see ``clients.methods.counted``.
If secure aggregation clips an update, ``y_i`` is what the clipped update leads to: with
the site's own weights, the mean of all ``h_i`` would no longer be 0.

Shape suffix: d float values of the model.
"""

import math

import numpy as np
import torch

from clients.learning_rate import rate_of
from clients.methods.counted import CountedArrays, corrupt
from clients.methods.guest import Guest, LocalRound, gradient_of
from federation.mapped import give_back, own
from federation.methods.control_variates import CONTROL_VARIATES
from federation.vectors import Arrays, IntegerVector, Vector, chunks

_PREFIX = "variates/"
_VARIATE, _WEIGHTS = _PREFIX + "variate", _PREFIX + "weights"
_RATES = _PREFIX + "rates"


class ControlVariates(Guest):
    """A site's control variate in one round."""

    def __init__(self, start: LocalRound, variate_d: Vector) -> None:
        """Begin a round.

        Args:
            start: The round.
            variate_d: ``h_i``, shape ``(d,)``, added to each gradient. Without use for
                values that are not parameters.
        """
        self._job, self._round, self._steps = start.job, start.round_index, start.steps
        self._variate_d = variate_d
        self._variates = start.parts(variate_d)

    @torch.no_grad()
    def gradient_(self) -> None:
        """Add the control variate."""
        for parameter, variate in self._variates:
            gradient_of(parameter).add_(variate)

    def arrays(self, local_d: Vector, _local_m: IntegerVector) -> Arrays:
        """Return what the next round begins with to correct its gradients."""
        # Of all steps, also where the site has left before the last one: variates
        # cancel only if all sites divide by the same sum.
        rates = sum(rate_of(self._job, number) for number in self._steps)
        return {
            _VARIATE: self._variate_d,
            _WEIGHTS: local_d.copy(),
            _RATES: np.array([rates]),
            **KEPT.of_round(self._round),
        }


def begin(start: LocalRound) -> ControlVariates | None:
    """Begin a round, if the job has control variates.

    Raises:
        CorruptObject: What the site has kept is not a control variate of this model.
    """
    if not CONTROL_VARIATES.is_on(start.job):
        return None
    return ControlVariates(start, variate_now(start.kept, start.weights_d))


def variate_now(kept: Arrays, weights_d: Vector) -> Vector:
    """Bring a site's variate up to the model that a round begins with.

    Args:
        kept: What the site has kept of its last round, if that counted.
        weights_d: The model, ``x``, shape ``(d,)``.

    Raises:
        CorruptObject: What the site has kept is not a control variate of this model.
    """
    if _VARIATE not in kept:
        return np.zeros_like(weights_d)
    _check(kept, weights_d.size)
    variate_d, rates = own(kept[_VARIATE]), float(kept[_RATES][0])
    if _WEIGHTS in kept and rates:  # Without a step, no site has drifted.
        local_d, scale = kept[_WEIGHTS], np.float32(1 / rates)
        for piece in chunks(variate_d.size):
            variate_d[piece] += (local_d[piece] - weights_d[piece]) * scale
            give_back(variate_d[piece])
    return variate_d


def _follow_clipped_(local_d: Vector, weights_d: Vector, factor: np.float32) -> None:
    """Move local weights to those that a clipped update leads to."""
    for piece in chunks(local_d.size):
        local_d[piece] -= weights_d[piece]
        local_d[piece] *= factor
        local_d[piece] += weights_d[piece]


def _check(kept: Arrays, size: int) -> None:
    """Check that what a site has kept is a control variate of a model of this size.

    Raises:
        CorruptObject: It is not.
    """
    KEPT.check(kept, (_VARIATE, _WEIGHTS), size)
    rates = kept.get(_RATES)
    if rates is None or rates.shape != (1,) or not 0 <= rates[0] < math.inf:
        raise corrupt(f"no {_RATES}, the sum of a round's learning rates")


KEPT = CountedArrays(
    name=CONTROL_VARIATES.name,
    prefix=_PREFIX,
    pending=_WEIGHTS,
    follow_clipped_=_follow_clipped_,
)

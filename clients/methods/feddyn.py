"""Dynamic regularisation: FedDyn (Acar et al. 2021, arXiv:2111.04263, Algorithm 1).

Each site minimises its loss ``L_k`` plus a linear and a quadratic term, so that a fixed
point of the rounds is a stationary point of the mean of all losses, however long the
local training of a round is. With ``x``, the model of the round, and ``y_k``, where the
site's steps have led::

    y_k ~ argmin_y  L_k(y) - <g_k, y> + alpha/2 |y - x|^2
    g_k <- g_k - alpha (y_k - x)

The server keeps ``h <- h - alpha mean_k (y_k - x)`` over all sites, and its next model
is ``mean_k y_k - h / alpha``. With all sites in every round, ``-h / alpha`` is the sum
of all mean updates so far, in which alpha cancels: the server optimiser
``running_sum``. So nothing travels but updates, also in a secure sum.

An update that did not count changes neither ``h`` nor ``g_k``; see
``clients.methods.counted``. A site that has lost its ``g_k`` cannot go on: ``h`` would
differ from the mean of all ``g_k`` for ever, and rounds would lead somewhere else. If
secure aggregation clips an update, ``g_k`` follows the clipped one, as ``h`` does.

Shape suffix: d float values of the model.
"""

import numpy as np
import torch

from clients.methods.counted import CountedArrays
from clients.methods.guest import Guest, LocalRound, gradient_of
from federation.errors import SiteError
from federation.mapped import give_back, own
from federation.methods.feddyn import FEDDYN
from federation.vectors import Arrays, IntegerVector, Vector, chunks

_PREFIX = "feddyn/"
_GRADIENT, _UPDATE = _PREFIX + "gradient", _PREFIX + "update"


class FedDyn(Guest):
    """A site's linear and quadratic term in one round."""

    def __init__(self, start: LocalRound, gradient_d: Vector) -> None:
        """Begin a round.

        Args:
            start: The round.
            gradient_d: ``g_k``, shape ``(d,)``. Without use for values that are not
                parameters.
        """
        self._alpha = start.job.training.dynamic_alpha
        self._round, self._weights_d = start.round_index, start.weights_d
        self._gradient_d = gradient_d
        origins = dict(zip(start.trained.values(), start.anchor, strict=True))
        self._terms = [
            (parameter, origins[parameter], linear)
            for parameter, linear in start.parts(gradient_d)
        ]

    @torch.no_grad()
    def gradient_(self) -> None:
        """Add ``alpha (y - x) - g_k``."""
        for parameter, origin, linear in self._terms:
            gradient = gradient_of(parameter)
            gradient.add_(parameter - origin, alpha=self._alpha).sub_(linear)

    def arrays(self, local_d: Vector, _local_m: IntegerVector) -> Arrays:
        """Return what the next round begins with."""
        return {
            _GRADIENT: self._gradient_d,
            _UPDATE: local_d - self._weights_d,
            **KEPT.of_round(self._round),
        }


def begin(start: LocalRound) -> FedDyn | None:
    """Begin a round, if the job has dynamic regularisation.

    Raises:
        CorruptObject: What the site has kept is not of this model.
        SiteError: The site has lost what it kept.
    """
    if not FEDDYN.is_on(start.job):
        return None
    if KEPT.lost in start.kept:
        raise SiteError(
            "the site has lost what it kept for FedDyn (training.dynamic_alpha) when "
            f"its update of round {start.kept[KEPT.lost][0]} became a part of the "
            "model: restore its state, or start a new run from this model "
            "(model.weights)"
        )
    size, alpha = start.weights_d.size, start.job.training.dynamic_alpha
    return FedDyn(start, gradient_now(start.kept, size, alpha))


def gradient_now(kept: Arrays, size: int, alpha: float) -> Vector:
    """Bring a site's ``g_k`` up to its last update, if that counted.

    Args:
        kept: What the site has kept of its last round.
        size: Float values of the model, d.
        alpha: Strength of the terms.

    Raises:
        CorruptObject: What the site has kept is not of this model.
    """
    if _GRADIENT not in kept:
        return np.zeros(size, np.float32)
    KEPT.check(kept, (_GRADIENT, _UPDATE), size)
    gradient_d = own(kept[_GRADIENT])
    if _UPDATE in kept:
        update_d = kept[_UPDATE]
        for piece in chunks(size):
            gradient_d[piece] -= update_d[piece] * np.float32(alpha)
            give_back(gradient_d[piece])
    return gradient_d


def _follow_clipped_(update_d: Vector, _weights_d: Vector, factor: np.float32) -> None:
    update_d *= factor


KEPT = CountedArrays(
    name=FEDDYN.name,
    prefix=_PREFIX,
    pending=_UPDATE,
    follow_clipped_=_follow_clipped_,
)

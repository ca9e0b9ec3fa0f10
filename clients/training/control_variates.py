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

An update that did not count must not change ``h_i``, as the model holds none of that
round then. Each task names the newest round whose update of the site counted.

Shape suffix: d float values of the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from federation.job.spec import JobSpec
from federation.mapped import give_back, own
from federation.vectors import Arrays, Layout, Role, Vector, chunks

_PREFIX = "variates/"
_VARIATE, _WEIGHTS = _PREFIX + "variate", _PREFIX + "weights"
_RATES, _ROUND = _PREFIX + "rates", _PREFIX + "round"


@dataclass(frozen=True, slots=True)
class ControlVariates:
    """A site's control variate in one round.

    Attributes:
        variate_d: ``h_i``, added to each gradient; 0 for what is not trained.
    """

    variate_d: Vector

    @classmethod
    def begin(cls, job: JobSpec, kept: Arrays, weights_d: Vector) -> Self | None:
        """Bring a site's variate up to the model that a round begins with.

        Args:
            job: Says whether there are any.
            kept: What the site has kept of its last round; see ``if_counted``.
            weights_d: The model, ``x``.

        Returns:
            None if the job has no control variates.
        """
        if not job.training.control_variates:
            return None
        if _VARIATE not in kept:
            return cls(np.zeros_like(weights_d))
        variate_d = own(kept[_VARIATE])
        if _WEIGHTS in kept:
            local_d, scale = kept[_WEIGHTS], np.float32(1 / kept[_RATES][0])
            for piece in chunks(variate_d.size):
                variate_d[piece] += (local_d[piece] - weights_d[piece]) * scale
                give_back(variate_d[piece])
        return cls(variate_d)

    def gradients(
        self, layout: Layout, trained: Iterable[tuple[str, torch.nn.Parameter]]
    ) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return each trained parameter with what is added to its gradient."""
        places = {t.name: t for t in layout.tensors if t.role is Role.PARAMETER}
        found = []
        for name, parameter in trained:
            if name in places:
                tensor = places[name]
                part = self.variate_d[tensor.offset : tensor.offset + tensor.size]
                values = torch.from_numpy(part.reshape(tensor.shape))
                found.append((parameter, values.to(parameter)))
        return found

    def arrays(
        self, local_d: Vector, *, rates: Iterable[float], round_index: int
    ) -> Arrays:
        """Return what the next round begins with.

        Args:
            local_d: The site's weights after its steps, ``y_i``.
            rates: Learning rate of each step of the round.
            round_index: The round that these steps belong to.
        """
        return {
            _VARIATE: self.variate_d,
            _WEIGHTS: local_d.copy(),
            _RATES: np.array([sum(rates)]),
            _ROUND: np.array([round_index]),
        }


def if_counted(kept: Arrays, counted: int) -> Arrays:
    """Leave out the weights of a round whose update is no part of the model.

    Args:
        kept: What a site has kept of its last round.
        counted: The newest round whose update of the site is a part of the model.
    """
    if _ROUND not in kept or kept[_ROUND][0] == counted:
        return kept
    return {name: array for name, array in kept.items() if name != _WEIGHTS}


@torch.no_grad()
def add_variates(
    gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor]],
) -> None:
    """Add a site's control variate to the gradients of a step."""
    for parameter, variate in gradients:
        if parameter.grad is None:  # No batch of this step has used it.
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.add_(variate)

"""The proximal term of FedProx (Li et al. 2020, arXiv:1812.06127, equation 2)."""

from collections.abc import Sequence

import torch

from clients.methods.guest import Guest, LocalRound, gradient_of


class Proximal(Guest):
    """Adds the gradient of ``mu/2 |x - theta|^2``, which depends on no record."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        anchor: Sequence[torch.Tensor],
        mu: float,
    ) -> None:
        """Hold on to the global weights ``theta``.

        Args:
            parameters: Trained parameters ``x``.
            anchor: The same as the round began.
            mu: Weight of the term.
        """
        self._parameters, self._anchor, self._mu = parameters, anchor, mu

    @torch.no_grad()
    def gradient_(self) -> None:
        """Add ``mu (x - theta)``."""
        for parameter, origin in zip(self._parameters, self._anchor, strict=True):
            gradient_of(parameter).add_(parameter - origin, alpha=self._mu)


def begin(start: LocalRound) -> Proximal | None:
    """Begin a round, if the job has the term."""
    mu = start.job.training.proximal_mu
    return Proximal([*start.trained.values()], start.anchor, mu) if mu else None

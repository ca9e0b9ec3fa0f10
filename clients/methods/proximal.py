"""The proximal term of FedProx (Li et al. 2020, arXiv:1812.06127, equation 2)."""

import torch

from clients.methods.guest import Guest, LocalRound, gradient_of
from federation.methods.proximal import PROXIMAL


class Proximal(Guest):
    """Adds the gradient of ``mu/2 |x - theta|^2``, which depends on no record."""

    def __init__(self, start: LocalRound) -> None:
        """Hold on to the global weights ``theta``."""
        self._mu = start.job.training.proximal_mu
        self._pairs = list(zip(start.trained.values(), start.anchor, strict=True))

    @torch.no_grad()
    def gradient_(self) -> None:
        """Add ``mu (x - theta)``."""
        for parameter, origin in self._pairs:
            gradient_of(parameter).add_(parameter - origin, alpha=self._mu)


def begin(start: LocalRound) -> Proximal | None:
    """Begin a round, if the job has the term."""
    return Proximal(start) if PROXIMAL.is_on(start.job) else None

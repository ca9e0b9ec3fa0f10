"""Updates scaled to a number of steps: FedNova (Wang et al. 2020, arXiv:2007.07481).

Section 5, with plain SGD, where the norm of ``a_i`` is the number of steps. Its
``tau_eff``, which is free, is the job's ``normalized_steps``; so sites can scale their
own updates, and a sum of them, also a secure one, is all that the aggregator needs.
With work by capacity it is the mean of the round's steps, as in the paper.
"""

import torch

from clients.methods.guest import Guest, LocalRound
from federation.rounds.local_work import is_by_capacity, steps_each


class NormalizedSteps(Guest):
    """Scales what a round's steps have changed."""

    def __init__(self, start: LocalRound, wanted: int) -> None:
        """Hold on to the global weights.

        Args:
            start: The round.
            wanted: Steps that every update stands for.
        """
        self._wanted = wanted
        # Personal parts stay as they were trained: no sum is made of them.
        origins = zip(start.trained, start.anchor, strict=True)
        shared = start.shared
        self._pairs = [(shared[n], origin) for n, origin in origins if n in shared]

    @torch.no_grad()
    def end_(self, num_steps: int) -> None:
        """Scale the change to the wanted number of steps."""
        if num_steps in {0, self._wanted}:
            return
        scale = self._wanted / num_steps
        for parameter, origin in self._pairs:
            parameter.copy_(origin + (parameter - origin) * scale)


def begin(start: LocalRound) -> NormalizedSteps | None:
    """Begin a round, if the job scales updates, or faster sites take more steps."""
    wanted = start.job.training.normalized_steps
    if is_by_capacity(start.job):
        wanted = steps_each(start.job, start.round_index)
    return None if wanted is None else NormalizedSteps(start, wanted)

"""Zeros of a pruned model that stay zero: see ``clients.models.pruning``.

An optimiser that moves each value by its own gradient leaves values without a gradient
where they are. Sharded parameters are left out: their zeros come back at the
aggregator. So are personal parts: they begin as the factory made them, and nothing has
pruned them.
"""

from collections.abc import Iterable

import torch

from clients.methods.guest import Guest, LocalRound
from federation.methods.kept_zeros import KEPT_ZEROS


class KeptZeros(Guest):
    """Lets no gradient reach trained values that are zero as a round begins."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Find the zeros.

        Args:
            parameters: Whole ones, which were pruned.
        """
        self._masks = [(p, p.detach() != 0) for p in parameters]

    def gradient_(self) -> None:
        """Set gradients of zeros to zero."""
        for parameter, mask in self._masks:
            if parameter.grad is not None:
                parameter.grad.mul_(mask)


def begin(start: LocalRound) -> KeptZeros | None:
    """Begin a round, if the job keeps zeros."""
    if not KEPT_ZEROS.is_on(start.job):
        return None
    return KeptZeros(p for p in start.shared.values() if not hasattr(p, "to_local"))

"""Ranks of a model's adapters that a site does not train.

See ``federation.job.adapter_ranks``: columns of B and rows of A stay as they came.
"""

from collections.abc import Mapping

import torch

from clients.methods.guest import Guest, LocalRound
from federation.errors import SiteError
from federation.job.adapter_ranks import fixed_part


class FixedRanks(Guest):
    """What an optimiser must not change of a model that holds the global weights."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], rank: int) -> None:
        """Copy the values that stay.

        Args:
            parameters: Those that are trained, by name.
            rank: Ranks that the site trains.

        Raises:
            SiteError: Each rank of the site holds a part of the model.
        """
        self._parts: list[tuple[torch.nn.Parameter, tuple[slice, ...]]] = []
        for name, parameter in parameters.items():
            part = fixed_part(name, rank)
            if part is None:
                continue
            if hasattr(parameter, "to_local"):
                raise SiteError(
                    "adapters of fewer ranks (sites.lora_rank) cannot be sharded: set "
                    'compute.sharding = "none"'
                )
            self._parts.append((parameter, part))
        self._values = [p.detach()[part].clone() for p, part in self._parts]

    def gradient_(self) -> None:
        """Leave no gradient for what stays, so that norms and moments do not see it."""
        for parameter, part in self._parts:
            if parameter.grad is not None:
                parameter.grad[part] = 0

    @torch.no_grad()
    def after_step_(self) -> None:
        """Undo what a step did without a gradient, such as weight decay."""
        for (parameter, part), values in zip(self._parts, self._values, strict=True):
            parameter[part] = values


def begin(start: LocalRound) -> FixedRanks | None:
    """Begin a round, if the site trains fewer ranks than the job has."""
    rank = start.lora_rank
    return None if rank is None else FixedRanks(start.trained, rank)

"""A model that was loaded for a round, and what a site reads out of it afterwards.

Shape suffixes: d float values of the model, m integer values of it.
"""

import torch

from clients.models import weights
from federation.job.spec import JobSpec
from federation.vectors import IntegerVector, Layout, Vector


class LoadedModel:
    """A model that holds the weights to begin with.

    Attributes:
        integers_m: Its integer values, shape ``(m,)``.
    """

    def __init__(
        self, job: JobSpec, module: torch.nn.Module, layout: Layout, weights_d: Vector
    ) -> None:
        """Note what it holds of the weights that were loaded, of shape ``(d,)``."""
        self._module, self._layout, self._weights_d = module, layout, weights_d
        self._is_protected = job.privacy.differential_privacy.enabled
        held_d, self.integers_m = weights.read(module, layout)
        # By bfloat16 parameters, for example.
        self._lost_d = weights_d - held_d if weights.is_rounded(layout) else None

    def correct_(self, local_d: Vector, local_m: IntegerVector) -> None:
        """Change what was read after training to what may leave the site.

        Args:
            local_d: Shape ``(d,)``.
            local_m: Shape ``(m,)``.
        """
        if self._lost_d is not None:
            # What the model could not hold is not what training changed.
            local_d += self._lost_d
        if self._is_protected:
            # Nothing leaves but what noise goes into.
            weights.copy_untrained(
                self._module, self._layout, source_d=self._weights_d, out_d=local_d
            )
            local_m[:] = self.integers_m

"""Computing in 16 bits: autocast, and a loss that is scaled where they are float16.

float16 has 5 bits of exponent. Gradients below 6e-8 become 0 in it, so the loss is
multiplied by a large power of two, and the gradients are divided by it before they are
used (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). Where a gradient then
overflows, the step is skipped and the scale is halved; after many steps without that,
it is doubled, as ``torch.amp.GradScaler`` does. bfloat16 has the exponents of float32
and needs none of this.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from clients.methods.guest import Guest, LocalRound
from clients.ranks.control import LOSS_SCALE
from federation.methods.half_precision import FLOAT16
from federation.vectors import Arrays, IntegerVector, Vector

_LOG = logging.getLogger(__name__)

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Those of GradScaler.
_FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000
# A gradient that overflows with a smaller one is not finite in float32 either, or the
# forward pass is not: skipping more steps would only hide that.
_SMALLEST_SCALE = 2.0**-14


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Enter this for forward passes in the precision of a job."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_TYPES[precision])


class LossScale(Guest):
    """What the loss of a site is multiplied by in float16.

    Attributes:
        scale: The factor, a power of two.
        skipped: Steps of this round that were not taken.
    """

    def __init__(self, start: LocalRound) -> None:
        """Begin with a large scale."""
        self._start, self._parameters = start, start.trained.values()
        self._since_change = 0
        self.scale = _FIRST_SCALE
        self.skipped = 0

    def loss_(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss, of which gradients are to be taken."""
        return loss * self.scale

    def gradient_(self) -> bool:
        """Divide gradients by the scale, and set the scale of the next step.

        Returns:
            Whether the step may be taken: all gradients are finite, or a smaller scale
            would not make them so.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)  # Exact: a power of two.
        overflows = self._start.peers.total(_count_not_finite(gradients)) > 0
        if overflows and self.scale > _SMALLEST_SCALE:
            self.scale /= 2
            self._since_change = 0
            self.skipped += 1
            return False
        self._since_change += 1
        if self._since_change >= _GROWTH_STEPS:
            self.scale *= 2
            self._since_change = 0
        return True

    def end_(self, num_steps: int) -> None:
        """Log how many steps were skipped."""
        if self.skipped:
            _LOG.warning(
                "site %s skipped %d of %d steps of round %d: gradients overflowed in "
                "float16, and each time the scale of the loss was halved",
                self._start.site,
                self.skipped,
                num_steps + self.skipped,
                self._start.round_index,
            )

    def arrays(self, _local_d: Vector, _local_m: IntegerVector) -> Arrays:
        """Return the scale: a round would begin with steps to skip without it."""
        return self.state()

    def state(self) -> Arrays:
        """Return scale and counters."""
        values = [self.scale, self._since_change, self.skipped]
        return {LOSS_SCALE: np.array(values, np.float64)}

    def restore(self, state: Arrays) -> None:
        """Put a kept state in place, if there is one."""
        if LOSS_SCALE in state:
            scale, since_change, skipped = state[LOSS_SCALE].tolist()
            self.scale, self._since_change = scale, int(since_change)
            self.skipped = int(skipped)


def begin(start: LocalRound) -> LossScale | None:
    """Begin a round in float16 with the scale that an earlier one has left, if any."""
    if not FLOAT16.is_on(start.job):
        return None
    found = LossScale(start)
    found.restore(start.kept)
    found.skipped = 0
    return found


def _count_not_finite(gradients: Sequence[torch.Tensor]) -> int:
    """How many gradients have a value that is not finite, of this rank's part."""
    held = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    if not held:
        return 0
    # One question to the device, and not one for each tensor.
    return int(torch.stack([(~g.isfinite()).any() for g in held]).sum())

"""From a site's trained weights to its update, and the form in which it leaves.

Shape suffixes: d float values of the model.
"""

from collections.abc import Mapping
from typing import Generic, TypeVar

import numpy as np

from clients.methods.guest import UNSTABLE, NotFinite
from clients.training.site_state import Fact, KeptState
from federation.protocols import LocalUpdate, LocalWeights
from federation.vectors import NO_ARRAYS, Arrays, Vector, is_finite

SealedT = TypeVar("SealedT")


class Form(Generic[SealedT]):
    """The form in which a round's update leaves. By default it leaves nothing out."""

    def begin(self, kept: KeptState, weights_d: Vector) -> Vector:  # noqa: ARG002
        """Settle what an earlier round left out, before any work is done.

        Args:
            kept: The state that the round begins with.
            weights_d: The global weights, shape ``(d,)``.

        Returns:
            The weights that training begins with.
        """
        return weights_d

    def update(self, weights_d: Vector, result: LocalWeights | LocalUpdate) -> SealedT:
        """Turn trained weights, in their own memory, into what leaves."""
        raise NotImplementedError

    def left(self) -> tuple[Arrays, Mapping[str, Fact]]:
        """Return what the next round needs: arrays and facts of a state."""
        return NO_ARRAYS, {}


def local_weights(weights_d: Vector, result: LocalWeights | LocalUpdate) -> Vector:
    """Return the site's own weights, given those that training began with."""
    if isinstance(result, LocalUpdate):
        return weights_d + result.update_d
    return result.weights_d


def beyond_clip(norm: float, clip_norm: float, most_of_it: str = "") -> str:
    """Say that secure aggregation scales an update down, and the two ways out.

    Args:
        norm: Norm of the update, known to nobody but its site.
        clip_norm: The bound, which is smaller; both in weight units.
        most_of_it: Name of the tensor that changed most, if known.
    """
    where = f", most of it in {most_of_it!r}" if most_of_it else ""
    return (
        f"the update has a norm of {norm:.3g}{where}, and secure aggregation scales it "
        f"down to {clip_norm:g}, all values alike: raise "
        "privacy.secure_aggregation.clip_norm; or make updates smaller: normalise "
        "inputs and targets, and keep running statistics at the sites (model.personal "
        '= ["*running_*"])'
    )


def prepare(weights_d: Vector, result: LocalWeights | LocalUpdate) -> Vector:
    """Turn trained weights into the update: local minus global.

    Works in the result's memory, which holds the update afterwards.

    Args:
        weights_d: The global weights that training began with, shape ``(d,)``.
        result: What training produced.

    Returns:
        The update, shape ``(d,)``, finite.

    Raises:
        NotFinite: Training left the finite numbers.
    """
    if isinstance(result, LocalUpdate):
        delta_d = result.update_d
    else:
        delta_d = result.weights_d
        with np.errstate(over="ignore", invalid="ignore"):  # Looked at right below.
            np.subtract(delta_d, weights_d, out=delta_d)
    if not is_finite(delta_d):
        raise NotFinite(UNSTABLE)
    return delta_d

"""From a site's trained weights to its update.

Shape suffixes: d float values of the model.
"""

import numpy as np

from clients.methods.guest import UNSTABLE, NotFinite
from federation.compression.codec import Codec, encoded_over
from federation.protocols import LocalUpdate, LocalWeights
from federation.vectors import Vector, Words, is_finite


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


def encode(
    weights_d: Vector,
    result: LocalWeights | LocalUpdate,
    *,
    codec: Codec,
    seed: int,
    residual_d: Vector | None = None,
) -> Words:
    """Turn trained weights into the words of the update, in the same memory.

    Args:
        weights_d: The global weights that training began with, shape ``(d,)``.
        result: What training produced.
        codec: Codec of updates.
        seed: The round.
        residual_d: What earlier updates have left out; replaced.

    Raises:
        NotFinite: Training left the finite numbers.
        BeyondCodec: It left those of the codec.
    """
    delta_d = prepare(weights_d, result)
    return encoded_over(codec, delta_d, residual_d=residual_d, seed=seed)

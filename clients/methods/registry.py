"""All local methods, in the order in which they change a gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.methods import (
    control_variates,
    feddyn,
    filled_parts,
    fixed_ranks,
    half_precision,
    kept_zeros,
    normalized_steps,
    overlap,
    personal_parts,
    proximal,
)
from clients.methods.counted import CountedArrays
from clients.methods.guest import Guest, LocalRound
from federation.ids import SiteId
from federation.vectors import Arrays, IntegerVector, Vector

Begin = Callable[[LocalRound], Guest | None]

LOCAL_METHODS: Sequence[Begin] = (
    filled_parts.begin,
    half_precision.begin,
    fixed_ranks.begin,
    control_variates.begin,
    feddyn.begin,
    proximal.begin,
    normalized_steps.begin,
    kept_zeros.begin,
    personal_parts.begin,
    overlap.begin,
)
# What methods keep that may only follow updates which counted.
COUNTED: Sequence[CountedArrays] = (control_variates.KEPT, feddyn.KEPT)


def begin(start: LocalRound) -> Sequence[Guest]:
    """Begin a round of every method that the job uses."""
    return [guest for each in LOCAL_METHODS if (guest := each(start)) is not None]


def arrays(guests: Sequence[Guest], local_d: Vector, local_m: IntegerVector) -> Arrays:
    """Return what all guests keep for the next round; see ``Guest.arrays``."""
    found: dict[str, NDArray[Any]] = {}
    for guest in guests:
        found |= guest.arrays(local_d, local_m)
    return found


def states(guests: Sequence[Guest]) -> dict[str, NDArray[Any]]:
    """Return what all guests continue an interrupted round from."""
    found: dict[str, NDArray[Any]] = {}
    for guest in guests:
        found |= guest.state()
    return found


def if_counted(
    kept: Arrays, counted: int, *, earlier: Callable[[], Arrays], site: SiteId
) -> Arrays:
    """Take every method's arrays of a round; see ``CountedArrays.if_counted``."""
    for each in COUNTED:
        kept = each.if_counted(kept, counted, earlier=earlier, site=site)
    return kept


def follow_clipped_(kept: Arrays, weights_d: Vector, clip_factor: float) -> None:
    """Change what methods keep of a round to what its clipped update leads to.

    Args:
        kept: What the site keeps of its round; changed in place.
        weights_d: The model that the round began with, shape ``(d,)``.
        clip_factor: What clipping multiplied the update by; 1 for nothing.
    """
    for each in COUNTED:
        if each.pending in kept and clip_factor != 1:
            pending_d, factor = kept[each.pending], np.float32(clip_factor)
            each.follow_clipped_(pending_d, weights_d, factor)

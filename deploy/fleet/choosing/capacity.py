"""Where a market may have had spot machines when nothing looked: a draw.

Pure. Each zone alternates between capacity and none, with a rate of losses and a rate
of recoveries. Both are estimated from what was seen in that zone, which counts beside
a few events with the rates of all zones, which count beside one with assumed rates:
the posterior means of Gamma priors. From them, the slots that nothing has seen are
drawn, so that the policy reads a history of the same kind in every market.
"""

import numpy as np
from numpy.typing import NDArray

from deploy.fleet.choosing.outlook import Floats

# Nothing has looked in a slot; otherwise it had capacity, 1, or none, 0.
UNKNOWN = -1
# Assumed before anything was seen: how long there is capacity, and then none.
_UP_HOURS, _DOWN_HOURS = 6.0, 3.0
# How many events the assumption, and the mean of all zones, count as much as.
_ASSUMED_EVENTS, _SHARED_EVENTS = 1.0, 2.0
# The same question must have the same answer, with every command.
_SEED = 7


def drawn(
    seen_zt: NDArray[np.int64], *, slot_hours: float, times: int = 1
) -> NDArray[np.bool_]:
    """Fill in what was not seen.

    Args:
        seen_zt: 1 for capacity, 0 for none, ``UNKNOWN``, by zone and slot.
        slot_hours: Length of a slot.
        times: How many draws, one after another: what depends on luck evens out.

    Returns:
        Whether there was capacity, shape ``(z, times * t)``; as it was seen where it
        was.
    """
    lost_z, found_z = rates(seen_zt, slot_hours=slot_hours)
    seen_zt = np.tile(seen_zt, (1, times))
    draws_zt = np.random.default_rng(_SEED).random(seen_zt.shape)
    # A draw ends a spell of either kind, or leaves it.
    is_up_zt = draws_zt >= 1.0 - found_z[:, None]
    is_down_zt = draws_zt < lost_z[:, None]
    state_zt = np.where(is_up_zt, 1, np.where(is_down_zt, 0, UNKNOWN))
    state_zt[:, 0] = draws_zt[:, 0] < found_z / (lost_z + found_z)
    state_zt = np.where(seen_zt == UNKNOWN, state_zt, seen_zt)
    slots_t = np.arange(seen_zt.shape[1])
    set_zt = np.maximum.accumulate(np.where(state_zt == UNKNOWN, 0, slots_t), axis=1)
    return np.asarray(np.take_along_axis(state_zt, set_zt, axis=1) == 1)


def rates(seen_zt: NDArray[np.int64], *, slot_hours: float) -> tuple[Floats, Floats]:
    """Estimate the probabilities that capacity is lost, and is found again, in a slot.

    Args:
        seen_zt: As for ``drawn``.
        slot_hours: Length of a slot.

    Returns:
        Of each zone, shape ``(z,)``, both at most a half.
    """
    before_zt, after_zt = seen_zt[:, :-1], seen_zt[:, 1:]
    found = []
    for state, hours in ((1, _UP_HOURS), (0, _DOWN_HOURS)):
        slots_z = ((before_zt == state) & (after_zt != UNKNOWN)).sum(1)
        events_z = ((before_zt == state) & (after_zt == 1 - state)).sum(1)
        assumed = _ASSUMED_EVENTS * max(1.0, hours / slot_hours)
        shared = (events_z.sum() + _ASSUMED_EVENTS) / (slots_z.sum() + assumed)
        rate_z = (events_z + _SHARED_EVENTS) / (slots_z + _SHARED_EVENTS / shared)
        found.append(np.minimum(rate_z, 0.5))
    return found[0], found[1]

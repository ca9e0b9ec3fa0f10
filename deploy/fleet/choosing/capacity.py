"""Where a market may have had spot machines when nothing looked: draws.

Pure. Each zone alternates between capacity and none: a Markov chain of two states. A
zone is seen at some times only, so an observation counts with the probability of its
state after that many slots (Kalbfleisch and Lawless 1985,
https://doi.org/10.1080/01621459.1985.10478195). The mean lengths of a zone's spells are
log-normal around those of the market, which are log-normal around an assumption: a
hierarchical model as in Gelman et al., Bayesian Data Analysis, chapter 5, computed on a
grid.

From these lengths, the slots that nothing has seen are drawn, so that the policy reads
a history of the same kind in every market. Each draw has the lengths of another part of
the market's posterior, from scarce to plentiful capacity: a policy that knows one
market in the middle waits too long where capacity turns out to be scarce.
"""

import numpy as np
from numpy.typing import NDArray

from deploy.fleet.choosing.outlook import Floats

# Nothing has looked in a slot; otherwise it had capacity, 1, or none, 0.
UNKNOWN = -1
# Assumed of a market before anything was seen: how long there is capacity, and then
# none; and standard deviations of the logarithms of both, of a market around these and
# of a zone around its market.
_UP_HOURS, _DOWN_HOURS = 6.0, 3.0
_MARKET_SPREAD, _ZONE_SPREAD = 1.0, 0.7
# Lengths of spells that are considered, from 24 minutes to ten days; both of a pair.
_GRID_HOURS = np.geomspace(0.4, 240.0, 16)
_LOGS_2G = np.log([axis.ravel() for axis in np.meshgrid(_GRID_HOURS, _GRID_HOURS)])
# The same question must have the same answer, with every command.
_SEED = 7


def drawn(
    seen_zt: NDArray[np.int64], *, slot_hours: float, times: int = 1
) -> NDArray[np.bool_]:
    """Fill in what was not seen.

    Args:
        seen_zt: 1 for capacity, 0 for none, ``UNKNOWN``, by zone and slot.
        slot_hours: Length of a slot.
        times: How many draws, one after another, from scarce to plentiful.

    Returns:
        Whether there was capacity, shape ``(z, times * t)``; as it was seen where it
        was.
    """
    lost_kz, found_kz = rates(seen_zt, slot_hours=slot_hours, parts=times)
    draws_kzt = np.random.default_rng(_SEED).random((times, *seen_zt.shape))
    # A draw ends a spell of either kind, or leaves it.
    is_up_kzt = draws_kzt >= 1.0 - found_kz[..., None]
    is_down_kzt = draws_kzt < lost_kz[..., None]
    state_kzt = np.where(is_up_kzt, 1, np.where(is_down_kzt, 0, UNKNOWN))
    state_kzt[..., 0] = draws_kzt[..., 0] < found_kz / (lost_kz + found_kz)
    state_kzt = np.where(seen_zt == UNKNOWN, state_kzt, seen_zt)
    slots_t = np.arange(seen_zt.shape[1])
    set_kzt = np.where(state_kzt == UNKNOWN, 0, slots_t)
    set_kzt = np.maximum.accumulate(set_kzt, axis=-1)
    found_kzt = np.take_along_axis(state_kzt, set_kzt, axis=-1) == 1
    return np.concatenate(found_kzt, axis=-1)


def rates(
    seen_zt: NDArray[np.int64], *, slot_hours: float, parts: int = 1
) -> tuple[Floats, Floats]:
    """Estimate the probabilities that capacity is lost, and is found again, in a slot.

    1. The mean logarithms of a zone's lengths, given the market's and what was seen.
    2. The posterior of the market's.
    3. Its parts of equal probability, from scarce to plentiful capacity.

    Args:
        seen_zt: As for ``drawn``.
        slot_hours: Length of a slot.
        parts: How many.

    Returns:
        Of each zone, shape ``(parts, z)``, both at most a half: inverses of geometric
        means of lengths.
    """
    lost_g, found_g = np.minimum(slot_hours / np.exp(_LOGS_2G), 0.5)
    # 1.
    log_zg = np.array([log_likelihood(seen_t, lost_g, found_g) for seen_t in seen_zt])
    likely_zg = np.exp(log_zg - log_zg.max(1, keepdims=True))
    zone_of_market_gg = _near(_LOGS_2G, _ZONE_SPREAD)
    zone_of_market_gg /= zone_of_market_gg.sum(0)
    mass_zg = likely_zg @ zone_of_market_gg
    means_2zg = (likely_zg * _LOGS_2G[:, None]) @ zone_of_market_gg / mass_zg
    # 2.
    assumed_21 = np.log([[_UP_HOURS], [_DOWN_HOURS]])
    log_g = np.log(_near(assumed_21, _MARKET_SPREAD)[0]) + np.log(mass_zg).sum(0)
    market_g = np.exp(log_g - log_g.max())
    # 3.
    weights_kg = _divided(market_g / market_g.sum(), parts)
    hours_2kz = np.exp(weights_kg @ means_2zg.transpose(0, 2, 1))
    lost_kz, found_kz = np.minimum(slot_hours / hours_2kz, 0.5)
    return lost_kz, found_kz


def log_likelihood(
    seen_t: NDArray[np.int64], lost_g: Floats, found_g: Floats
) -> Floats:
    """Log-likelihood of what was seen in a zone, for each pair of rates.

    The first observation has the share of time with capacity. After ``k`` slots,
    ``(1 - lost - found) ** k`` of a state's distance from that share is left.

    Args:
        seen_t: A row of ``seen_zt``.
        lost_g: Probabilities that capacity is lost in a slot, at most a half.
        found_g: Probabilities that it is found again, at most a half.

    Returns:
        Natural logarithms, shape ``(g,)``; 0 if nothing was seen.
    """
    (slots_n,) = np.nonzero(seen_t != UNKNOWN)
    share_g = found_g / (lost_g + found_g)
    if not slots_n.size:
        return np.zeros_like(share_g)
    states_n = seen_t[slots_n]
    steps = np.stack([np.diff(slots_n), states_n[:-1], states_n[1:]])
    (after_k, from_k, to_k), counts_k = np.unique(steps, axis=1, return_counts=True)
    kept_gk = (1.0 - lost_g - found_g)[:, None] ** after_k
    up_gk = share_g[:, None] + kept_gk * (from_k - share_g[:, None])
    likely_gk = np.where(to_k == 1, up_gk, 1.0 - up_gk).clip(min=1e-12)
    first_g = share_g if states_n[0] else 1.0 - share_g
    return np.asarray(np.log(first_g) + np.log(likely_gk) @ counts_k)


def _near(logs_2h: Floats, spread: float) -> Floats:
    """Density of a normal distribution around each pair of logarithms, unscaled."""
    away_hg = ((logs_2h[:, :, None] - _LOGS_2G[:, None]) ** 2).sum(0)
    return np.asarray(np.exp(-away_hg / (2.0 * spread**2)))


def _divided(market_g: Floats, parts: int) -> Floats:
    """Weights of the grid in each part: a cell on a bound is in both."""
    order_g = np.argsort(_LOGS_2G[0] - _LOGS_2G[1], kind="stable")
    ends_g = np.cumsum(market_g[order_g])
    starts_g = ends_g - market_g[order_g]
    bounds_k = np.arange(parts)[:, None] / parts
    inside_kg = np.minimum(ends_g, bounds_k + 1 / parts) - np.maximum(
        starts_g, bounds_k
    )
    weights_kg = np.empty_like(inside_kg)
    weights_kg[:, order_g] = inside_kg.clip(min=0.0)
    return np.asarray(weights_kg / weights_kg.sum(1, keepdims=True))

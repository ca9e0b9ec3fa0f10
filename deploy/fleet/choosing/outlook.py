"""What the rest of a job costs on a market of spot machines, as far as one can know.

Pure. Time is in slots. The market is a Markov chain over the level of the best spot
price, estimated from its history; "no capacity anywhere" is the last level. Backwards
in time follow the expected dollars to finish, for each number of slots of work and of
slots left: on a spot machine, on none, and on demand. Being late is forbidden by a
price that nothing else reaches.

The parts are those of SkyNomad (arXiv:2601.06520): probes, predicted lifetimes, costs
of moving and the pressure of the deadline in one cost. The method is ours: it solves
the chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LEVELS = 6
# Slots that a rate is believed in before anything was seen: one loss in ten.
_PRIOR_LOSSES, _PRIOR_SLOTS = 1.0, 10.0
_PRIOR_MOVES = 0.02
_LATE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketHistory:
    """What was seen of spot machines, by probes and price lists.

    Attributes:
        names: The offers that the rows are about.
        prices_zt: Dollars per hour, by offer and slot, the newest last.
        available_zt: Whether there was capacity.
    """

    names: Sequence[str]
    prices_zt: Floats
    available_zt: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A market's chain, and the expected dollars to finish.

    Attributes:
        names: The spot offers that it knows.
        boot: Slots that a new machine takes before it works.
        on_demand: Dollars of a slot on demand.
        stall: Dollars of a slot without work: what the other sites cost meanwhile.
        loss_z: Probability that a machine of an offer is lost in a slot.
        mean_z: Mean price of each offer, in dollars of a slot.
        persistence: Share of a price's distance from its mean that is left a slot
            later.
        loss: Probability that a machine of the best offer is lost in a slot.
        edges: Bounds between levels, in dollars of a slot.
        price_s: Mean best price in each level; infinite in the last.
        chain_ss: Probability of each level a slot later.
        spot_nws: Expected dollars to finish on a spot machine, by slots left, slots of
            work left and level.
        idle_nws: The same on no machine.
        reserve_nws: The same on demand.
    """

    names: Sequence[str]
    boot: int
    on_demand: float
    stall: float
    loss_z: Floats
    mean_z: Floats
    persistence: float
    loss: float
    edges: Floats
    price_s: Floats
    chain_ss: Floats
    spot_nws: Floats
    idle_nws: Floats
    reserve_nws: Floats

    def level(self, price: float | None) -> int:
        """Level of a best price, in dollars of a slot; None if there is no capacity."""
        if price is None:
            return len(self.price_s) - 1
        return int(np.searchsorted(self.edges, price))

    def later(self, values_nws: Floats, level: int, *, after: int, at: "Left") -> float:
        """Expected dollars to finish from a level some slots ago."""
        left = at.slots - after
        if left < 0:
            return _LATE
        weights_s = np.linalg.matrix_power(self.chain_ss, after)[level]
        return float(weights_s @ values_nws[left][max(at.work, 0)])

    def on_spot(self, level: int, *, after: int, at: "Left", loss: float) -> float:
        """Expected dollars from a spot machine that may be lost in each slot."""
        kept = (1 - loss) ** after
        spot = self.later(self.spot_nws, level, after=after, at=at)
        idle = self.later(self.idle_nws, level, after=after, at=at)
        return kept * spot + (1 - kept) * idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Slots until the deadline, and slots of work."""

    slots: int
    work: int


def foresee(
    history: MarketHistory,
    left: Left,
    *,
    boot: int,
    on_demand: float,
    stall: float = 0.0,
) -> Outlook:
    """Estimate the chain of a market and solve it.

    Args:
        history: Prices in dollars of a slot; at least one offer and two slots.
        left: Of the job now; the outlook answers for less of both, too.
        boot: Slots that a new machine takes, at least 1.
        on_demand: Dollars of a slot on demand.
        stall: Dollars of a slot without work.
    """
    prices_zt, seen_zt = history.prices_zt, history.available_zt
    lost_zt = seen_zt[:, :-1] & ~seen_zt[:, 1:]
    loss_z = (lost_zt.sum(1) + _PRIOR_LOSSES) / (seen_zt[:, :-1].sum(1) + _PRIOR_SLOTS)
    # The best offer: its price, and the machines that will have to be started again.
    rates_zt = np.where(seen_zt, prices_zt, np.inf) * (1 + boot * loss_z[:, None])
    best_t, slots_t = rates_zt.argmin(0), np.arange(prices_zt.shape[1])
    some_t = np.asarray(seen_zt.any(0), dtype=np.bool_)
    price_t = prices_zt[best_t, slots_t]
    lost_t = lost_zt[best_t[:-1], slots_t[:-1]]
    loss = (lost_t.sum() + _PRIOR_LOSSES) / (some_t[:-1].sum() + _PRIOR_SLOTS)
    edges, price_s, level_t = _levels(price_t, some_t, on_demand)
    chain_ss = np.full((len(price_s), len(price_s)), _PRIOR_MOVES)
    np.add.at(chain_ss, (level_t[:-1], level_t[1:]), 1.0)
    chain_ss /= chain_ss.sum(1, keepdims=True)
    market = _MarketChain(price_s, chain_ss, float(loss), boot, on_demand, stall)
    spot_nws, idle_nws, reserve_nws = _solved(market, left)
    return Outlook(
        names=tuple(history.names),
        boot=boot,
        on_demand=on_demand,
        stall=stall,
        loss_z=loss_z,
        mean_z=prices_zt.mean(1),
        persistence=_persistence(prices_zt),
        loss=float(loss),
        edges=edges,
        price_s=price_s,
        chain_ss=chain_ss,
        spot_nws=spot_nws,
        idle_nws=idle_nws,
        reserve_nws=reserve_nws,
    )


def _levels(
    price_t: Floats, some_t: NDArray[np.bool_], on_demand: float
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Divide prices into levels that are equally frequent."""
    seen = price_t[some_t] if some_t.any() else np.array([on_demand])
    edges = np.quantile(seen, np.arange(1, _LEVELS) / _LEVELS)
    level_t = np.where(some_t, np.searchsorted(edges, price_t), _LEVELS)
    inside = [price_t[level_t == level] for level in range(_LEVELS)]
    means = [each.mean() if each.size else on_demand for each in inside]
    return edges, np.array([*means, np.inf]), level_t


def _persistence(prices_zt: Floats) -> float:
    """First-order autoregression of all prices around their means.

    Over several slots, since one alone is mostly noise.
    """
    lag = min(5, prices_zt.shape[1] - 1)
    away_zt = prices_zt - prices_zt.mean(1, keepdims=True)
    earlier, later = away_zt[:, :-lag], away_zt[:, lag:]
    scale = float((earlier**2).sum())
    share = float((earlier * later).sum()) / scale if scale else 0.0
    return float(min(max(share, 0.0), 0.999) ** (1 / lag))


@dataclass(frozen=True, slots=True)
class _MarketChain:
    price_s: Floats
    chain_ss: Floats
    loss: float
    boot: int
    on_demand: float
    stall: float


def _solved(market: _MarketChain, left: Left) -> tuple[Floats, Floats, Floats]:
    """Dollars to finish, backwards in time; see ``Outlook``.

    1. Nothing left to do costs nothing; work at the deadline is late.
    2. On no machine: wait, or start one and look again when it works.
    3. On a machine: one slot of work, or leave it and do as on none.
    """
    boot, forward_ss = market.boot, market.chain_ss.T
    kept, booted = 1 - market.loss, (1 - market.loss) ** market.boot
    boot_ss = np.linalg.matrix_power(market.chain_ss, boot).T
    price_s = np.where(np.isfinite(market.price_s), market.price_s, _LATE)
    # 1.
    shape = (left.slots + 1, left.work + 1, len(price_s))
    spot_nws, idle_nws, reserve_nws = (np.full(shape, _LATE) for _ in range(3))
    for values_nws in (spot_nws, idle_nws, reserve_nws):
        values_nws[:, 0] = 0.0
    for n in range(1, left.slots + 1):
        # 2.
        free_ws = market.stall + idle_nws[n - 1, 1:] @ forward_ss
        if n >= boot:
            then_ws = booted * spot_nws[n - boot] + (1 - booted) * idle_nws[n - boot]
            on_spot_ws = boot * (price_s + market.stall) + then_ws[1:] @ boot_ss
            started = boot * (market.on_demand + market.stall)
            on_demand_ws = started + reserve_nws[n - boot, 1:] @ boot_ss
            free_ws = np.minimum(free_ws, np.minimum(on_spot_ws, on_demand_ws))
        # 3.
        after_ws = kept * spot_nws[n - 1] + (1 - kept) * idle_nws[n - 1]
        worked_ws = price_s + after_ws[:-1] @ forward_ss
        reserved_ws = market.on_demand + reserve_nws[n - 1, :-1] @ forward_ss
        idle_nws[n, 1:] = np.minimum(free_ws, _LATE)
        spot_nws[n, 1:] = np.minimum(worked_ws, free_ws).clip(max=_LATE)
        reserve_nws[n, 1:] = np.minimum(reserved_ws, free_ws).clip(max=_LATE)
    return spot_nws, idle_nws, reserve_nws

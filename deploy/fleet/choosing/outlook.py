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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LEVELS = 6
# Slots that a rate is believed in before anything was seen: one loss in ten.
_PRIOR_LOSSES, _PRIOR_SLOTS = 1.0, 10.0
_PRIOR_MOVES = 0.02
# Slots after which the chain keeps as much of a price's deviation as history did.
_LAG = 20
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
        kept_ss: Probability that a machine of the best offer is kept, and of each level
            a slot later.
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
    kept_ss: Floats
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

    def on_spot(
        self, level: int, *, after: int, at: "Left", loss: float | None = None
    ) -> float:
        """Expected dollars from a spot machine that may be lost in each slot.

        Args:
            level: Of the best price now, when there is capacity.
            after: Slots from now.
            at: What is left now.
            loss: Probability of a loss in a slot; None for that of the best offer.
        """
        left, work = at.slots - after, max(at.work, 0)
        if left < 0:
            return _LATE
        kept_s = np.linalg.matrix_power(self.kept_ss, after)[level]
        lost_s = np.linalg.matrix_power(self.chain_ss, after)[level] - kept_s
        if loss is not None:
            kept = (1 - loss) ** after
            kept_s = kept_s * (kept / kept_s.sum())
            lost_s = lost_s * ((1 - kept) / lost_s.sum())
        spot_s, idle_s = self.spot_nws[left][work], self.idle_nws[left][work]
        return float(kept_s @ spot_s + lost_s @ idle_s)


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
    kept_ss, lost_ss = _chains(level_t, lost_t, len(price_s))
    kept_ss = _slowed(kept_ss, lost_ss, level_t, price_s)
    market = _MarketChain(price_s, kept_ss, lost_ss, boot, on_demand, stall)
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
        kept_ss=kept_ss,
        chain_ss=kept_ss + lost_ss,
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


def _chains(
    level_t: NDArray[np.int64], lost_t: NDArray[np.bool_], levels: int
) -> tuple[Floats, Floats]:
    """Estimate the probabilities of the levels a slot later, with the machine or not.

    A loss by the last zone with capacity is one event: it must not count once as the
    loss of a machine and once more as the end of all capacity.

    Args:
        level_t: Level of the best price.
        lost_t: Whether the best machine was lost a slot later; one shorter.
        levels: How many.

    Returns:
        For a machine of the best offer, the probabilities that it is kept and of each
        level then, shape ``(s, s)``; the same for its loss. Without capacity there is
        no machine, which counts as a loss.
    """
    lost_ss = np.full((levels, levels), _PRIOR_MOVES * _PRIOR_LOSSES / _PRIOR_SLOTS)
    lost_ss[:, -1] = lost_ss[-1] = _PRIOR_MOVES
    kept_ss = _PRIOR_MOVES - lost_ss
    is_kept_t = ~lost_t & (level_t[:-1] < levels - 1)
    for is_so_t, counts_ss in ((is_kept_t, kept_ss), (~is_kept_t, lost_ss)):
        np.add.at(counts_ss, (level_t[:-1][is_so_t], level_t[1:][is_so_t]), 1.0)
    scale_s1 = (kept_ss + lost_ss).sum(1, keepdims=True)
    return kept_ss / scale_s1, lost_ss / scale_s1


def _slowed(
    kept_ss: Floats, lost_ss: Floats, level_t: NDArray[np.int64], price_s: Floats
) -> Floats:
    """Make changes of price as slow as they were.

    Levels of a price are not a Markov chain: a price near an edge often crosses it and
    comes back, and the chain forgets on which side it was. Estimated from one slot to
    the next, it mixes too fast (Prinz et al. 2011, https://doi.org/10.1063/1.3565032),
    and waiting for a lower price looks too cheap. So changes of price that a machine
    survives are made rarer, until prices ``_LAG`` slots apart are about as correlated
    as in the history. Losses are fast and stay as they were estimated.

    Returns:
        In place of ``kept_ss``, with the same sums of rows.
    """
    lag = min(_LAG, level_t.size - 1)
    seen_ss = np.zeros_like(kept_ss)
    np.add.at(seen_ss, (level_t[:-lag], level_t[lag:]), 1.0)
    later_ss = np.linalg.matrix_power(kept_ss + lost_ss, lag)
    expected_ss = seen_ss.sum(1, keepdims=True) * later_ss
    # With all changes a times as likely, an eigenvalue near 1 is its power of a.
    logs = np.log([_correlation(each, price_s) for each in (seen_ss, expected_ss)])
    fewer_ss = kept_ss * max(0.0, 1.0 - logs[0] / logs[1])
    np.fill_diagonal(fewer_ss, 0.0)
    return np.asarray(kept_ss - fewer_ss + np.diag(fewer_ss.sum(1)))


def _correlation(joint_ss: Floats, price_s: Floats) -> float:
    """Correlation of the earlier price with the later one, within [0.001, 0.999].

    Args:
        joint_ss: Frequency of each pair of levels; those without capacity do not count.
        price_s: Price of each level.
    """
    pairs_ss, price_s = joint_ss[:-1, :-1], price_s[:-1]
    total = pairs_ss.sum()
    if not total:
        return 0.001
    pairs_ss = pairs_ss / total
    before_s = price_s - pairs_ss.sum(1) @ price_s
    after_s = price_s - pairs_ss.sum(0) @ price_s
    scale = (pairs_ss.sum(1) @ before_s**2) * (pairs_ss.sum(0) @ after_s**2)
    covariance = before_s @ pairs_ss @ after_s
    found = covariance / math.sqrt(scale) if scale > 0.0 else 0.0
    return float(min(max(found, 0.001), 0.999))


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
    kept_ss: Floats
    lost_ss: Floats
    boot: int
    on_demand: float
    stall: float


def _solved(market: _MarketChain, left: Left) -> tuple[Floats, Floats, Floats]:
    """Dollars to finish, backwards in time; see ``Outlook``.

    1. Nothing left to do costs nothing; work at the deadline is late.
    2. On no machine: wait, or start one and look again when it works.
    3. On a machine: one slot of work, or leave it and do as on none.
    """
    boot, kept_ss, lost_ss = market.boot, market.kept_ss.T, market.lost_ss.T
    forward_ss = kept_ss + lost_ss
    boot_ss = np.linalg.matrix_power(forward_ss, boot)
    booted_ss = np.linalg.matrix_power(kept_ss, boot)
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
            on_spot_ws = boot * (price_s + market.stall)
            on_spot_ws = on_spot_ws + spot_nws[n - boot, 1:] @ booted_ss
            on_spot_ws += idle_nws[n - boot, 1:] @ (boot_ss - booted_ss)
            started = boot * (market.on_demand + market.stall)
            on_demand_ws = started + reserve_nws[n - boot, 1:] @ boot_ss
            free_ws = np.minimum(free_ws, np.minimum(on_spot_ws, on_demand_ws))
        # 3.
        worked_ws = price_s + spot_nws[n - 1, :-1] @ kept_ss
        worked_ws += idle_nws[n - 1, :-1] @ lost_ss
        reserved_ws = market.on_demand + reserve_nws[n - 1, :-1] @ forward_ss
        idle_nws[n, 1:] = np.minimum(free_ws, _LATE)
        spot_nws[n, 1:] = np.minimum(worked_ws, free_ws).clip(max=_LATE)
        reserve_nws[n, 1:] = np.minimum(reserved_ws, free_ws).clip(max=_LATE)
    return spot_nws, idle_nws, reserve_nws

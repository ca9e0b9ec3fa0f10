"""What the rest of a job costs on a market of spot machines."""

import numpy as np
import pytest

from deploy.fleet.choosing.outlook import Left, MarketHistory, Outlook, foresee

PRICE, ON_DEMAND = 0.3, 1.0


def outlook(
    prices_zt: np.ndarray, available_zt: np.ndarray, left: Left | None = None
) -> Outlook:
    names = [f"offer {row}" for row in range(len(prices_zt))]
    history = MarketHistory(names=names, prices_zt=prices_zt, available_zt=available_zt)
    left = left or Left(slots=4, work=2)
    return foresee(history, left, boot=1, on_demand=ON_DEMAND)


def spells(zones: int, *, lost: float, found: float, slots: int = 20_000) -> np.ndarray:
    """Capacity that is lost and found with a probability in each slot."""
    draws_zt = np.random.default_rng(3).random((zones, slots))
    state_zt = np.ones((zones, slots), dtype=bool)
    for slot in range(1, slots):
        before_z, draw_z = state_zt[:, slot - 1], draws_zt[:, slot]
        state_zt[:, slot] = np.where(before_z, draw_z >= lost, draw_z < found)
    return state_zt


def test_a_loss_that_ends_all_capacity_counts_once():
    """In one zone, each slot of work but the last may cost one more start.

    With a loss of probability p and a start that takes a slot, which the machine may
    not survive either, a start costs 1 / (1 - p) slots.
    """
    lost, work = 0.2, 40
    available_zt = spells(1, lost=lost, found=0.5)
    prices_zt = np.full(available_zt.shape, PRICE)
    market = outlook(prices_zt, available_zt, Left(slots=600, work=work))
    starts = (work - 1) * lost / (1 - lost)
    level = market.level(PRICE)
    assert market.spot_nws[600, work, level] == pytest.approx(
        PRICE * (work + starts), rel=0.03
    )
    assert market.kept_ss[level].sum() == pytest.approx(1 - lost, abs=0.02)


def test_a_machine_may_be_lost_while_other_zones_have_capacity():
    available_zt = spells(4, lost=0.2, found=0.8)
    prices_zt = np.full(available_zt.shape, PRICE)
    market = outlook(prices_zt, available_zt)
    level = market.level(PRICE)
    assert market.kept_ss[level].sum() == pytest.approx(0.8, abs=0.02)
    assert market.chain_ss[level, -1] < 0.05


def test_a_price_is_forgotten_as_slowly_as_in_the_history():
    """Prices with a half-life of 60 slots; the levels alone would forget in 20."""
    slots, keep = 20_000, 0.5 ** (1 / 60)
    steps = np.random.default_rng(3).normal(0.0, np.sqrt(1 - keep**2), slots)
    away_t = np.zeros(slots)
    for slot in range(1, slots):
        away_t[slot] = keep * away_t[slot - 1] + steps[slot]
    prices_zt = PRICE * np.exp(0.2 * away_t)[None]
    market = outlook(prices_zt, np.ones_like(prices_zt, dtype=bool))
    after_ss = np.linalg.matrix_power(market.chain_ss, 20)[:-1, :-1]
    away_s = market.price_s[:-1] - market.price_s[:-1].mean()
    left = away_s @ after_ss @ away_s / (away_s @ away_s)
    assert left == pytest.approx(keep**20, abs=0.1)


def test_what_is_known_of_an_offer_replaces_the_loss_of_the_best():
    """A machine that lasts is worth more than one that is soon lost."""
    available_zt = spells(2, lost=0.2, found=0.5, slots=2000)
    prices_zt = np.full(available_zt.shape, PRICE)
    market = outlook(prices_zt, available_zt, Left(slots=60, work=30))
    at, level = Left(slots=60, work=30), market.level(PRICE)
    lasts, own, ends = (
        market.on_spot(level, after=1, at=at, loss=loss) for loss in (0.0, None, 0.9)
    )
    assert lasts < own < ends

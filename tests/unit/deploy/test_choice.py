"""Where a site's machine should run: the rule alone, without a cloud."""

import numpy as np
import pytest

from cloud_adapters.compute.pool import Market
from deploy.fleet.choosing.choice import Action, MachineOffer, Situation, decide
from deploy.fleet.choosing.outlook import Left, MarketHistory, foresee
from federation.errors import ComputeError

SLOT = 0.25
HOUR = 3600.0
ON_DEMAND = MachineOffer(
    provider="aws",
    region="us-east-1",
    machine="g5.xlarge",
    market=Market.ON_DEMAND,
    dollars_per_hour=1.0,
)


def spot(
    zone: str = "us-east-1a", price: float = 0.3, **changes: object
) -> MachineOffer:
    return MachineOffer(
        provider="aws",
        region=zone[:-1],
        zone=zone,
        machine="g5.xlarge",
        market=Market.SPOT,
        dollars_per_hour=price,
        **changes,
    )


A, B = spot("us-east-1a"), spot("us-east-1b", 0.32)


def situation(
    *,
    work: float,
    left: float,
    current: str = "",
    rare: bool = False,
    low: bool = False,
    stall: float = 0.0,
) -> Situation:
    """A job of some hours on a market of two zones."""
    rng = np.random.default_rng(5)
    slots = 400
    prices = np.array([[0.3], [0.32]]) * np.ones((2, slots)) * SLOT
    if low:  # Half of the time at a third of the price.
        prices[:, np.arange(slots) % 40 < 20] /= 3
    available = rng.random((2, slots)) < 0.9
    if rare:  # A spell of ten hours in two days.
        available[:] = np.arange(slots) % 200 < 40
    outlook = foresee(
        MarketHistory(
            names=[A.name, B.name],
            prices_zt=prices,
            available_zt=available,
        ),
        Left(slots=int(left / SLOT), work=int(work / SLOT)),
        boot=1,
        on_demand=SLOT,
        stall=stall * SLOT,
    )
    return Situation(
        work_hours=work,
        deadline=left * HOUR,
        boot_hours=SLOT,
        slot_hours=SLOT,
        current=current,
        outlook=outlook,
    )


def test_starts_on_the_cheapest_spot_machine():
    found = decide(situation(work=8, left=16), [A, B, ON_DEMAND], 0.0)
    assert (found.action, found.offer) == (Action.MOVE, A)
    assert "us-east-1a" in found.reason
    assert "$0.300" in found.reason


def test_stays_where_a_move_costs_more_than_it_saves():
    here = situation(work=8, left=16, current=B.name)
    found = decide(here, [A, B, ON_DEMAND], 0.0)
    assert (found.action, found.offer) == (Action.STAY, B)
    assert "move would cost more" in found.reason


def test_moves_when_the_present_price_has_risen():
    here = situation(work=8, left=16, current=B.name)
    found = decide(here, [A, spot(B.zone, 0.95), ON_DEMAND], 0.0)
    assert (found.action, found.offer) == (Action.MOVE, A)


def test_traffic_of_a_move_counts():
    """As far as the cheaper machine costs more in the end."""
    far = spot("us-east-1a", 0.3, moving_dollars=50.0)
    found = decide(situation(work=8, left=16), [far, B, ON_DEMAND], 0.0)
    assert found.offer == B


def test_unavailable_machines_are_not_chosen():
    gone = spot("us-east-1a", 0.3, is_available=False)
    busy = situation(work=8, left=16, stall=2.0)
    assert decide(busy, [gone, B, ON_DEMAND], 0.0).offer == B


def test_waiting_costs_what_the_other_sites_cost_meanwhile():
    """Alone, a site can wait until the price has fallen."""
    alone = situation(work=2, left=30, low=True)
    assert decide(alone, [A, B, ON_DEMAND], 0.0).action is Action.WAIT
    busy = situation(work=2, left=30, low=True, stall=2.0)
    assert decide(busy, [A, B, ON_DEMAND], 0.0).offer == A
    assert decide(situation(work=8, left=16, stall=9.0), [ON_DEMAND], 0.0).offer


def test_a_saving_that_is_not_worth_a_wait_is_left():
    """Two cents an hour, until the machine is lost, or a dollar until it is found."""
    offers = [spot("us-east-1a", 0.3, is_available=False), B, ON_DEMAND]
    assert decide(situation(work=8, left=16, stall=1.0), offers, 0.0).offer == B


def test_waits_while_there_is_no_spot_machine_and_time_to_spare():
    found = decide(situation(work=8, left=16), [ON_DEMAND], 0.0)
    assert (found.action, found.offer) == (Action.WAIT, None)
    assert "and 7.8 h can be spared" in found.reason


def test_waits_for_a_price_that_is_usually_lower():
    here = situation(work=2, left=30, low=True)
    found = decide(here, [A, B, ON_DEMAND], 0.0)
    assert found.action is Action.WAIT
    assert "lower price is likely" in found.reason


@pytest.mark.parametrize("offers", [[ON_DEMAND], [A, B, ON_DEMAND]])
def test_deadline_ends_all_risks(offers: list[MachineOffer]):
    """A new spot machine could be lost before it has worked."""
    found = decide(situation(work=8, left=8.3), offers, 0.0)
    assert (found.action, found.offer) == (Action.ON_DEMAND, ON_DEMAND)
    assert "no slack" in found.reason


def test_a_spot_machine_that_works_is_kept_while_its_loss_can_be_made_up_for():
    here = situation(work=8, left=8.3, current=A.name)
    assert decide(here, [A, B, ON_DEMAND], 0.0).offer == A
    late = situation(work=8, left=8.2, current=A.name)
    assert decide(late, [A, B, ON_DEMAND], 0.0).offer == ON_DEMAND


def test_on_demand_is_used_early_where_others_wait_and_spot_machines_are_rare():
    few = situation(work=30, left=34, rare=True, stall=1.0)
    found = decide(few, [ON_DEMAND], 0.0)
    assert found.action is Action.ON_DEMAND
    assert "waiting for a spot" in found.reason


def test_leaves_on_demand_for_a_spot_machine_while_there_is_slack():
    here = situation(work=8, left=16, current=ON_DEMAND.name)
    assert decide(here, [A, B, ON_DEMAND], 0.0).offer == A


def test_no_machine_on_demand_is_an_error():
    with pytest.raises(ComputeError, match="no machine on demand"):
        decide(situation(work=8, left=16), [A, B], 0.0)

"""What is known of spot machines becomes the history that the policy reads."""

from dataclasses import replace

import numpy as np

from cloud_adapters.compute.machine_types import SpotPrice
from cloud_adapters.compute.pool import Market
from deploy.fleet.choosing.choice import MachineOffer
from deploy.fleet.choosing.spot_history import (
    Sighting,
    ended_unseen,
    history,
    is_believed,
)

HOUR = 3600.0
NOW = 1.7e9


def offer(zone: str, dollars: float = 0.5) -> MachineOffer:
    return MachineOffer(
        provider="aws",
        region="us-east-1",
        zone=zone,
        machine="g5.xlarge",
        market=Market.SPOT,
        dollars_per_hour=dollars,
    )


def price(zone: str, hours_ago: float, dollars: float) -> SpotPrice:
    return SpotPrice(zone=zone, at=NOW - hours_ago * HOUR, dollars_per_hour=dollars)


def seen(zone: str, hours_ago: float, *, has_capacity: bool) -> Sighting:
    return Sighting(zone=zone, at=NOW - hours_ago * HOUR, has_capacity=has_capacity)


def test_a_price_holds_until_the_next_one_and_a_zone_without_any_has_its_offers():
    """Also before the first that was published; in dollars of a slot."""
    prices = [price("b", 1.2, 0.2), price("b", 3.2, 0.8), price("x", 0.0, 9.0)]
    found = history(
        [offer("a"), offer("b")], prices, [], now=NOW, slot_hours=0.5
    ).prices_zt
    assert np.unique(found[0]).tolist() == [0.25]
    assert found[1][-8:].tolist() == [*[0.4] * 5, *[0.1] * 3]
    assert found[1][0] == 0.4


def test_a_machine_has_run_until_it_was_lost_or_given_up():
    """A refusal says something about its own slot; the slots between are drawn."""
    sightings = [
        *(seen("a", 40.0 - n, has_capacity=n % 2 == 0) for n in range(10)),
        seen("a", 30.0, has_capacity=True),
        seen("a", 10.0, has_capacity=False),
        replace(seen("b", 120.0, has_capacity=True), is_given_up=True),
        seen("b", 140.0, has_capacity=True),
        seen("c", 8 * 24.0, has_capacity=False),
        seen("c", 20.0, has_capacity=True),
    ]
    offers = [offer("a"), offer("b"), offer("c")]
    found = history(offers, [], sightings, now=NOW, slot_hours=1.0).available_zt
    assert found.shape == (3, 4 * 7 * 24)
    assert found[0, -31:-11].all()
    assert not found[0, -11]
    assert found[1, -141:-120].all()
    assert not found[1, -120:].all()
    assert found[2, -21:].all()  # It runs now.


def test_losses_that_were_seen_make_the_history_worse():
    """Also where nothing was seen: in other zones, and before."""
    lost = [
        seen("a", hours, has_capacity=hours % 4 == 0)
        for hours in np.arange(40.0, 0.0, -1.0)
    ]
    worse, assumed = (
        history([offer("a"), offer("b")], [], some, now=NOW, slot_hours=0.5)
        for some in (lost, [])
    )
    assert worse.available_zt[1].mean() < assumed.available_zt[1].mean() - 0.1


def test_a_clock_that_was_set_back_takes_nothing_from_the_history():
    """Sightings of later on are of no account until then."""
    later = [seen("a", -30.0, has_capacity=False)]
    found = history([offer("a")], [], later, now=NOW, slot_hours=1.0)
    without = history([offer("a")], [], [], now=NOW, slot_hours=1.0)
    np.testing.assert_array_equal(found.available_zt, without.available_zt)


def test_a_zone_without_capacity_is_tried_again_after_a_while():
    sightings = [seen("a", 0.5, has_capacity=False)]
    for now, expected in ((NOW, False), (NOW + 24 * HOUR, True), (NOW - HOUR, True)):
        found = is_believed(offer("a"), sightings, now=now, slot_hours=1.0)
        assert found is expected
    assert is_believed(offer("b"), sightings, now=NOW, slot_hours=1.0)
    sightings.append(seen("a", 0.1, has_capacity=True))
    assert is_believed(offer("a"), sightings, now=NOW, slot_hours=1.0)


def test_sightings_of_later_on_end_nothing():
    """A clock that was set back has them: their time would make all others old."""
    here = seen("a", 5.0, has_capacity=True)
    later = seen("a", -500.0, has_capacity=True)
    lost = seen("b", 1.0, has_capacity=False)
    expected = [replace(here, is_given_up=True)]
    assert ended_unseen([later, here, lost], [("c", NOW)], NOW) == expected
    assert ended_unseen([here], [("a", NOW), ("a", here.at)], NOW) == []

"""Slots that nothing has looked at are drawn from what was seen."""

import numpy as np
import pytest

from deploy.fleet.choosing.capacity import UNKNOWN, drawn, rates


def unseen(zones: int, slots: int = 840) -> np.ndarray:
    return np.full((zones, slots), UNKNOWN)


def test_what_was_seen_stays_as_it_was():
    seen_zt = unseen(2)
    seen_zt[0, 100:200], seen_zt[0, 200:230], seen_zt[1, -1] = 1, 0, 0
    found_zt = drawn(seen_zt, slot_hours=0.2)
    known_zt = seen_zt != UNKNOWN
    np.testing.assert_array_equal(found_zt[known_zt], seen_zt[known_zt] == 1)
    np.testing.assert_array_equal(found_zt, drawn(seen_zt, slot_hours=0.2))


def test_several_draws_are_of_the_same_rates():
    """They differ where nothing was seen, and there alone."""
    seen_zt = unseen(1)
    seen_zt[0, 100:200] = 1
    first_t, second_t = drawn(seen_zt, slot_hours=0.2, times=2).reshape(2, -1)
    assert (first_t != second_t).any()
    assert (first_t & second_t)[100:200].all()


def test_a_market_that_nothing_has_seen_has_capacity_as_assumed():
    """For 6 of 9 hours, in spells: far fewer changes than independent slots have."""
    found_zt = drawn(unseen(50), slot_hours=0.2)
    assert found_zt.mean() == pytest.approx(6 / 9, abs=0.03)
    changes = (found_zt[:, 1:] != found_zt[:, :-1]).mean()
    assert changes == pytest.approx(2 * 0.2 / 9, rel=0.1)


def test_losses_count_in_their_zone_and_less_in_all_others():
    """Also the other way round: a machine that was kept makes all zones safer."""
    before_z, _ = rates(unseen(2), slot_hours=1.0)
    assert before_z.tolist() == pytest.approx([1 / 6, 1 / 6])
    seen_zt = unseen(2)
    for slot in range(0, 40, 4):
        seen_zt[0, slot : slot + 3], seen_zt[0, slot + 3] = 1, 0
    lost_z, found_z = rates(seen_zt, slot_hours=1.0)
    assert lost_z[0] > lost_z[1] > before_z[1]
    # Each refusal was followed by a machine.
    assert found_z[0] == pytest.approx(0.5)
    seen_zt[:, :] = 1
    lost_z, _ = rates(seen_zt, slot_hours=1.0)
    assert lost_z.max() < 0.01


def test_a_slot_longer_than_a_spell_is_a_rate_that_can_be():
    lost_z, found_z = rates(unseen(1), slot_hours=100.0)
    assert (lost_z[0], found_z[0]) == (0.5, 0.5)
    assert drawn(unseen(1, 2), slot_hours=100.0).shape == (1, 2)

"""Slots that nothing has looked at are drawn from what was seen."""

import numpy as np
import pytest

from deploy.fleet.choosing.capacity import (
    UNKNOWN,
    drawn,
    log_likelihood,
    rates,
)


def unseen(zones: int, slots: int = 840) -> np.ndarray:
    return np.full((zones, slots), UNKNOWN)


def test_what_was_seen_stays_as_it_was():
    seen_zt = unseen(2)
    seen_zt[0, 100:200], seen_zt[0, 200:230], seen_zt[1, -1] = 1, 0, 0
    found_zt = drawn(seen_zt, slot_hours=0.2)
    known_zt = seen_zt != UNKNOWN
    np.testing.assert_array_equal(found_zt[known_zt], seen_zt[known_zt] == 1)
    np.testing.assert_array_equal(found_zt, drawn(seen_zt, slot_hours=0.2))


def test_draws_are_of_scarce_to_plentiful_capacity():
    """They differ where nothing was seen, and there alone."""
    seen_zt = unseen(30)
    seen_zt[0, 100:200] = 1
    found_zt = drawn(seen_zt, slot_hours=0.2, times=3)
    found_zkt = found_zt.reshape(30, 3, -1)
    assert found_zkt[0, :, 100:200].all()
    scarce, middle, plentiful = found_zkt.mean(axis=(0, 2))
    assert scarce < middle - 0.05 < plentiful - 0.1


def test_parts_of_the_posterior_agree_with_the_whole():
    """Their logarithms have its mean, and they come together with what is seen."""
    seen_zt = unseen(2)
    whole_1z = np.log(rates(seen_zt, slot_hours=0.2))[:, 0]
    parts_kz = np.log(rates(seen_zt, slot_hours=0.2, parts=5))
    np.testing.assert_allclose(parts_kz.mean(1), whole_1z)
    seen_zt[:, ::2] = 1
    seen_zt[:, ::20] = 0
    seen_kz = np.log(rates(seen_zt, slot_hours=0.2, parts=5))
    assert np.ptp(seen_kz, axis=1).max() < 0.1 * np.ptp(parts_kz, axis=1).min()


def test_a_market_that_nothing_has_seen_has_capacity_as_assumed():
    """For 6 of 9 hours, in spells: far fewer changes than independent slots have."""
    (lost_z,), (found_z,) = rates(unseen(50), slot_hours=0.2)
    assert 0.2 / lost_z == pytest.approx(6.0, rel=0.05)
    assert 0.2 / found_z == pytest.approx(3.0, rel=0.12)
    found_zt = drawn(unseen(50), slot_hours=0.2)
    assert found_zt.mean() == pytest.approx(6 / 9, abs=0.04)
    changes = (found_zt[:, 1:] != found_zt[:, :-1]).mean()
    assert changes == pytest.approx(2 * 0.2 / 9, rel=0.1)


def test_a_first_look_and_looks_far_apart_count():
    """They say how rare capacity is, although no change was seen between them."""
    _, before_kz = rates(unseen(1), slot_hours=0.2)
    once_zt, often_zt = unseen(1), unseen(1)
    once_zt[0, 100] = 0
    often_zt[0, 100:401:100] = 0
    lost_kz, found_kz = rates(once_zt, slot_hours=0.2)
    assert found_kz < before_kz
    later_lost_kz, later_found_kz = rates(often_zt, slot_hours=0.2)
    assert later_found_kz < found_kz
    assert later_lost_kz > lost_kz


def test_a_look_long_ago_says_little_of_now():
    """After many spells, the state is as likely as any other."""
    grid = np.array([0.1, 0.3]), np.array([0.2, 0.1])
    seen_t = unseen(1, 60)[0]
    seen_t[0], seen_t[-1] = 1, 0
    share = np.array([2 / 3, 1 / 4])
    expected = np.log(share) + np.log(1 - share)
    found = log_likelihood(seen_t, *grid)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    seen_t[1] = 1
    next_to_it = log_likelihood(seen_t, *grid) - found
    np.testing.assert_allclose(next_to_it, np.log(1 - grid[0]), rtol=1e-3)


def test_losses_count_in_their_zone_and_less_in_all_others():
    """Also the other way round: a machine that was kept makes all zones safer."""
    (before_z,), _ = rates(unseen(2), slot_hours=1.0)
    seen_zt = unseen(2)
    for slot in range(0, 40, 4):
        seen_zt[0, slot : slot + 3], seen_zt[0, slot + 3] = 1, 0
    (lost_z,), (found_z,) = rates(seen_zt, slot_hours=1.0)
    assert lost_z[0] > lost_z[1] > before_z[1]
    # Each refusal was followed by a machine.
    assert found_z[0] == pytest.approx(0.5)
    seen_zt[:, :] = 1
    (lost_z,), _ = rates(seen_zt, slot_hours=1.0)
    assert lost_z.max() < 0.01


def test_a_slot_longer_than_a_spell_is_a_rate_that_can_be():
    (lost_z,), (found_z,) = rates(unseen(1), slot_hours=240.0)
    assert (lost_z[0], found_z[0]) == (0.5, 0.5)
    assert drawn(unseen(1, 2), slot_hours=100.0).shape == (1, 2)

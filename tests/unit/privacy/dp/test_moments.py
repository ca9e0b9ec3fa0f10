"""Noised means and deviations: what one record changes, and what an attacker sees."""

import hashlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays
from support.examples import few

from privacy.dp import accountant
from privacy.dp.curve_tests import independent
from privacy.dp.moments import MOST_RECORDS, Array, MomentsMechanism

_ANY = st.floats(width=64) | st.sampled_from([-1.0, 0.0, 1.0, 0.5, 1 + 1e-16])


def moments(num_features: int = 2, noise: float = 1.0, records: int = 50):
    return MomentsMechanism(
        noise_multiplier=noise, num_features=num_features, num_records=records
    )


def repeatable() -> Callable[[int], bytes]:
    numbers = itertools.count()
    return lambda size: hashlib.shake_256(b"%d" % next(numbers)).digest(size)


@given(
    units=arrays.arrays(np.float64, (7, 3, 4), elements=_ANY),
    gone=st.integers(0, 6),
)
def test_one_record_moves_the_sums_by_the_sensitivity_at_most(units: Array, gone: int):
    """Whatever its values are; and sums are exact, so that rounding adds nothing."""
    mechanism = moments(3)
    rows = mechanism.contributions(units)
    assert (np.linalg.norm(rows, axis=1) <= np.sqrt(2 * 3 + 1)).all()
    whole = rows.sum(axis=0)
    without = np.delete(rows, gone, axis=0).sum(axis=0)
    assert np.array_equal(whole - without, rows[gone])


@few(30)
@given(
    units=arrays.arrays(np.float64, (9, 3), elements=_ANY),
    cuts=st.sets(st.integers(1, 8), min_size=1),
)
def test_one_person_moves_the_sums_by_the_sensitivity_at_most(
    units: Array, cuts: set[int]
):
    """With any number of records; the others add what they added before."""
    mechanism = moments(3)
    starts = np.array([0, *sorted(cuts)])
    sizes = np.diff([*starts, 9])
    totals = np.add.reduceat(mechanism.contributions(units), starts)
    rows = mechanism.of_persons(totals, sizes)
    assert (np.linalg.norm(rows, axis=1) <= np.sqrt(2 * 3 + 1)).all()
    assert (rows[:, -1] == 1).all()
    without = mechanism.of_persons(totals[1:], sizes[1:]).sum(axis=0)
    assert np.array_equal(rows.sum(axis=0) - without, rows[0])


def test_sensitivity_is_attained_and_no_less():
    """By a record in a corner of the bounds, or beyond it."""
    for corner in ([1.0, -1.0, 1.0], [9.0, -np.inf, 1e300]):
        (row,) = moments(3).contributions(np.array([corner]))
        assert row.tolist() == [1, -1, 1, 1, 1, 1, 1]
    assert moments(3)._mechanism().clip_norm == np.sqrt(7)


def _p_value(told: MomentsMechanism, used: MomentsMechanism) -> float:
    """Of the best attack on one release: is a record in a corner there or not?"""
    random_bytes, size = repeatable(), 1500
    without = told.contributions(np.zeros((20, 2))).sum(axis=0)
    record = told.contributions(np.ones((1, 2)))[0]
    is_in = np.arange(size) % 2 == 0
    scores = np.array(
        [used.release(without + record * here, random_bytes) @ record for here in is_in]
    )
    return independent(accountant.trade_off([told.event()]), scores, is_in)


@pytest.mark.slow
def test_attacks_stay_within_what_is_charged():
    """And half the noise is found."""
    claim = moments(noise=1.0)
    assert _p_value(claim, claim) > 0.05
    assert _p_value(claim, moments(noise=0.5)) < 1e-3


def test_noise_is_what_the_event_says():
    mechanism, random_bytes = moments(4, noise=3.0), repeatable()
    noise = np.array(
        [mechanism.release(np.zeros(9), random_bytes) for _ in range(1000)]
    )
    event = mechanism.event()
    assert event.noise_multiplier == pytest.approx(3.0, rel=1e-3)
    assert event.sampling_rate == 1.0
    wanted = event.noise_multiplier * np.sqrt(9)
    assert noise.std() == pytest.approx(wanted, rel=0.02)
    assert abs(np.corrcoef(noise.T) - np.eye(9)).max() < 0.1


def test_what_is_read_is_near_the_truth():
    rng = np.random.default_rng(3)
    units = rng.normal([0.2, -0.4], [0.1, 0.3], size=(4000, 2))
    mechanism = moments(noise=10.0, records=4000)
    noisy = mechanism.release(mechanism.contributions(units).sum(axis=0), repeatable())
    mean, deviation = mechanism.read(noisy)
    assert mean == pytest.approx([0.2, -0.4], abs=0.02)
    assert deviation == pytest.approx([0.1, 0.3], abs=0.05)


def test_where_noise_drowns_the_sums_the_result_is_usable():
    """Means within the bounds, deviations that can be divided by."""
    mechanism, random_bytes = moments(noise=50.0), repeatable()
    for _ in range(50):
        mean, deviation = mechanism.read(mechanism.release(np.zeros(5), random_bytes))
        assert (abs(mean) <= 1).all()
        assert (deviation > 0).all()
        assert (deviation <= 1).all()


def test_large_data_are_sampled_at_a_coarse_rate():
    """The mechanism clips sums of a million; the rate is charged as it is."""
    records = 10 * MOST_RECORDS + 1
    event = moments(records=records).event()
    assert event.sampling_rate == moments(records=records + 5).event().sampling_rate
    assert 0.075 < event.sampling_rate < 0.1
    assert moments(records=MOST_RECORDS).event().sampling_rate == 1.0


def test_missing_values_are_in_the_middle_of_the_bounds():
    """A feature that a record lacks says nothing of it; the record still counts."""
    (row,) = moments(2).contributions(np.array([[np.nan, 0.5]]))
    assert row.tolist() == [0, 0.5, 0, 0.25, 1]


def test_fewer_records_than_noise_count_as_the_noise():
    """Else a count near 0, or below, makes noise into a large mean."""
    mechanism = moments(1, noise=1.0)
    error = np.sqrt(3)
    for count in (-5.0, 0.0, 1e-6):
        mean, deviation = mechanism.read(np.array([error / 2, 0.0, count]))
        assert mean == pytest.approx([0.5], rel=1e-3)
        assert deviation == pytest.approx([1.0], rel=1e-3)


def test_variance_below_the_error_of_its_estimate_counts_as_that():
    """Dividing by what noise has left of it would blow the feature up."""
    mechanism = moments(1, noise=1.0)
    _, deviation = mechanism.read(np.array([0.0, 0.0, 100.0]))
    assert deviation == pytest.approx([np.sqrt(np.sqrt(3) / 100)], rel=1e-3)

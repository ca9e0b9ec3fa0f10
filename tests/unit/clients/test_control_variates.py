"""Control variates at one site."""

import logging

import numpy as np
import pytest
from support.small_jobs import small_job

from clients.training.control_variates import (
    ControlVariates,
    follow_clipped_,
    if_counted,
)
from federation.errors import CorruptObject
from federation.ids import SiteId

JOB = small_job(training={"local_steps": 2, "control_variates": True})
X = np.zeros(15, np.float32)
Y = np.ones(15, np.float32)


GONE: dict[str, np.ndarray] = {}
SITE = SiteId("site-a")


def kept_of_round_3():
    begun = ControlVariates.begin(JOB, {}, X)
    assert begun is not None
    return begun.arrays(Y, rates=[0.5, 0.25], round_index=3)


def counted_of(
    kept: dict[str, np.ndarray], counted: int, earlier: dict[str, np.ndarray] = GONE
) -> dict[str, np.ndarray]:
    return dict(if_counted(kept, counted, earlier=lambda: earlier, site=SITE))


def variate(kept: dict[str, np.ndarray], weights_d: np.ndarray) -> np.ndarray:
    begun = ControlVariates.begin(JOB, kept, weights_d)
    assert begun is not None
    return begun.variate_d


def test_variate_is_drift_over_learning_rates():
    kept = counted_of(kept_of_round_3(), 3)
    np.testing.assert_allclose(variate(kept, Y / 4), np.full(15, (1 - 0.25) / 0.75))
    assert not variate(kept, Y).any()


def test_update_that_did_not_count_changes_nothing():
    kept = kept_of_round_3()
    for counted in (0, 2):
        assert not variate(counted_of(kept, counted), Y / 4).any()


def test_job_without_variates_keeps_none():
    plain = small_job(training={"local_steps": 2})
    assert ControlVariates.begin(plain, {}, X) is None
    assert counted_of({"optimizer/a": X}, 0) == {"optimizer/a": X}


def test_sites_go_back_to_the_round_that_counted():
    """One that has trained since begins with the same variate as one that has not."""
    kept = kept_of_round_3()
    begun = ControlVariates.begin(JOB, kept, Y / 4)
    assert begun is not None
    lost = begun.arrays(Y / 2, rates=[0.5], round_index=4) | {"optimizer/a": X}
    found = counted_of(dict(lost), 3, dict(kept))
    np.testing.assert_array_equal(variate(found, Y / 8), variate(dict(kept), Y / 8))
    assert "optimizer/a" in found
    # None has counted yet: no site has a variate.
    assert not variate(counted_of(dict(lost), 0), Y / 8).any()


def test_round_without_a_learning_rate_changes_nothing():
    """A user's schedule may return 0 for a whole round."""
    begun = ControlVariates.begin(JOB, kept_of_round_3(), X)
    assert begun is not None
    kept = begun.arrays(X, rates=[0.0, 0.0], round_index=4)
    np.testing.assert_array_equal(variate(dict(kept), X), begun.variate_d)


def test_clipped_update_counts_as_it_was_sent():
    """Or the weighted mean of all variates would no longer be 0."""
    kept = dict(kept_of_round_3())
    follow_clipped_(kept, Y / 2, 1.0)
    np.testing.assert_array_equal(kept["variates/weights"], Y)
    follow_clipped_(kept, Y / 2, 0.25)
    np.testing.assert_allclose(kept["variates/weights"], 0.5 + 0.25 * (Y - Y / 2))
    np.testing.assert_array_equal(variate(kept, 0.625 * Y), X)
    follow_clipped_({}, X, 0.5)  # A job without variates keeps none.


def test_lost_newer_state_is_logged(caplog: pytest.LogCaptureFixture):
    kept = kept_of_round_3()
    with caplog.at_level(logging.WARNING):
        counted_of(kept, 2)
    assert not caplog.records
    assert "variates/weights" not in counted_of(kept, 5)
    assert "site-a is of round 3" in caplog.text


@pytest.mark.parametrize(
    ("name", "array", "fault"),
    [
        ("variate", np.zeros(3, np.float32), "of 3 values.*has 15"),
        ("variate", np.zeros(15), "variates/variate"),
        ("weights", np.full(15, np.nan, np.float32), "NaN"),
        ("rates", None, "learning rates"),
        ("rates", np.array([]), "learning rates"),
        ("rates", np.array([np.nan]), "learning rates"),
        ("rates", np.array([-0.1]), "learning rates"),
    ],
)
def test_damaged_state_is_refused(name: str, array: np.ndarray | None, fault: str):
    kept = {**kept_of_round_3(), f"variates/{name}": array}
    if array is None:
        del kept[f"variates/{name}"]
    with pytest.raises(CorruptObject, match=fault):
        ControlVariates.begin(JOB, kept, X)

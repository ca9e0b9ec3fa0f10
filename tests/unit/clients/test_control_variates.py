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


SITE = SiteId("site-a")


def kept_of_round_3():
    begun = ControlVariates.begin(JOB, {}, X)
    assert begun is not None
    return begun.arrays(Y, rates=[0.5, 0.25], round_index=3)


def variate(kept: dict[str, np.ndarray], weights_d: np.ndarray) -> np.ndarray:
    begun = ControlVariates.begin(JOB, kept, weights_d)
    assert begun is not None
    return begun.variate_d


def test_variate_is_drift_over_learning_rates():
    kept = dict(if_counted(kept_of_round_3(), 3, site=SITE))
    np.testing.assert_allclose(variate(kept, Y / 4), np.full(15, (1 - 0.25) / 0.75))
    assert not variate(kept, Y).any()


def test_update_that_did_not_count_changes_nothing():
    kept = kept_of_round_3()
    for counted in (0, 2):
        assert not variate(dict(if_counted(kept, counted, site=SITE)), Y / 4).any()


def test_job_without_variates_keeps_none():
    plain = small_job(training={"local_steps": 2})
    assert ControlVariates.begin(plain, {}, X) is None
    assert if_counted({"optimizer/a": X}, 0, site=SITE) == {"optimizer/a": X}


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
        if_counted(kept, 2, site=SITE)
    assert not caplog.records
    assert "variates/weights" not in if_counted(kept, 5, site=SITE)
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

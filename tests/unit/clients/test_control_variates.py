"""Control variates at one site."""

import numpy as np
from support.small_jobs import small_job

from clients.training.control_variates import ControlVariates, if_counted

JOB = small_job(training={"local_steps": 2, "control_variates": True})
X = np.zeros(15, np.float32)
Y = np.ones(15, np.float32)


def kept_of_round_3():
    begun = ControlVariates.begin(JOB, {}, X)
    assert begun is not None
    return begun.arrays(Y, rates=[0.5, 0.25], round_index=3)


def variate(kept: dict[str, np.ndarray], weights_d: np.ndarray) -> np.ndarray:
    begun = ControlVariates.begin(JOB, kept, weights_d)
    assert begun is not None
    return begun.variate_d


def test_variate_is_drift_over_learning_rates():
    kept = dict(if_counted(kept_of_round_3(), 3))
    np.testing.assert_allclose(variate(kept, Y / 4), np.full(15, (1 - 0.25) / 0.75))
    assert not variate(kept, Y).any()


def test_update_that_did_not_count_changes_nothing():
    kept = kept_of_round_3()
    for counted in (0, 2):
        assert not variate(dict(if_counted(kept, counted)), Y / 4).any()


def test_job_without_variates_keeps_none():
    plain = small_job(training={"local_steps": 2})
    assert ControlVariates.begin(plain, {}, X) is None
    assert if_counted({"optimizer/a": X}, 0) == {"optimizer/a": X}

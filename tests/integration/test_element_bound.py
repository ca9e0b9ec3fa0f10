"""A bound of elements through a whole run: the job, the contract, both halves."""

import dataclasses

import numpy as np
import pytest
from support.secure_runs import in_the_clear, retrained, run, secure_job

from federation.errors import QuorumNotMet
from federation.protocols import LocalWeights

pytestmark = pytest.mark.slow


def test_bounded_elements_are_closer_to_the_mean_in_the_clear():
    """Far below the clip norm the grid is finer, and the weights are closer."""
    far, near = {"clip_norm": 1000.0}, {"clip_norm": 1000.0, "element_bound": 1.0}
    plain_d = run(in_the_clear(secure_job(rounds=1))).state.weights_d
    errors = [
        float(
            np.linalg.norm(run(secure_job(rounds=1, **keys)).state.weights_d - plain_d)
        )
        for keys in (far, near)
    ]
    assert errors[1] < errors[0] / 3
    assert errors[1] <= 1e-6 * np.linalg.norm(plain_d)


def test_site_beyond_the_bound_declines():
    """The sum is opened without it."""
    job = secure_job(rounds=1, clip_norm=1e4, element_bound=10.0)
    wraps = {"site-1": retrained(_leap)}
    found = run(job, wraps=wraps)
    assert found.statuses() == ["completed"]
    assert found.answered(1) == ("site-0", "site-2", "site-3", "site-4")
    assert [site for site, _ in found.failures(1)] == ["site-1"]


def test_bound_that_no_site_keeps_loses_every_round():
    """And nobody's update was encoded."""
    with pytest.raises(QuorumNotMet, match=r"only round .*no result"):
        run(secure_job(rounds=1, element_bound=1e-6))


def test_elements_beyond_the_bound_may_be_clipped():
    """Rounds are completed, by steps as small as the bound."""
    one, two = (
        run(secure_job(rounds=rounds, element_bound=1e-6, clip_elements=True))
        for rounds in (1, 2)
    )
    assert two.statuses() == ["completed"] * 2
    step = np.abs(two.state.weights_d - one.state.weights_d).max()
    assert 5e-7 < step < 2e-6


def _leap(result: LocalWeights) -> LocalWeights:
    return dataclasses.replace(result, weights_d=result.weights_d + np.float32(100))

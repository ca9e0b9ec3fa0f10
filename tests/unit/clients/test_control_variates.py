"""Control variates at one site."""

import logging
import re

import numpy as np
import pytest
import torch
from support.small_jobs import small_job

from clients.methods import control_variates
from clients.methods.control_variates import ControlVariates
from clients.methods.guest import LocalRound
from clients.methods.registry import follow_clipped_, if_counted
from clients.models import weights
from federation.errors import CorruptObject
from federation.ids import SiteId

TRAINING = {
    "local_steps": 2,
    "control_variates": True,
    "optimizer": {
        "name": "sgd",
        "lr": 0.375,
    },  # So the rates of a round add up to 0.75.
}
JOB = small_job(training=TRAINING)
X = np.zeros(15, np.float32)
Y = np.ones(15, np.float32)
NO_INTEGERS = np.zeros(0, np.int64)


GONE: dict[str, np.ndarray] = {}
SITE = SiteId("site-a")


def begun(
    kept: dict[str, np.ndarray],
    weights_d: np.ndarray,
    *,
    round_index: int = 3,
) -> ControlVariates:
    model = torch.nn.Linear(4, 3)
    start = LocalRound(
        job=JOB,
        site=SiteId("site-0"),
        round_index=round_index,
        steps=range(2),
        model=model,
        layout=weights.layout_of(model, {}),
        weights_d=weights_d,
        kept=kept,
    )
    found = control_variates.begin(start)
    assert found is not None
    return found


def kept_of_round_3():
    return dict(begun({}, X).arrays(Y, NO_INTEGERS))


def counted_of(
    kept: dict[str, np.ndarray], counted: int, earlier: dict[str, np.ndarray] = GONE
) -> dict[str, np.ndarray]:
    return dict(if_counted(kept, counted, earlier=lambda: earlier, site=SITE))


def variate(kept: dict[str, np.ndarray], weights_d: np.ndarray) -> np.ndarray:
    return control_variates.variate_now(kept, weights_d)


def test_variate_is_added_to_the_gradient():
    """Also to that of a parameter which no batch of the step has used."""
    kept = counted_of(kept_of_round_3(), 3)
    guest = begun(kept, Y / 4)
    guest.gradient_()
    (weight, part), (bias, _) = guest._variates
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, part)
    assert bias.grad is not None
    np.testing.assert_allclose(part.numpy(), np.ones((3, 4)))


def test_variate_is_drift_over_learning_rates():
    kept = counted_of(kept_of_round_3(), 3)
    np.testing.assert_allclose(variate(kept, Y / 4), np.full(15, (1 - 0.25) / 0.75))
    assert not variate(kept, Y).any()


def test_update_that_did_not_count_changes_nothing():
    kept = kept_of_round_3()
    for counted in (0, 2):
        assert not variate(counted_of(kept, counted), Y / 4).any()


def test_job_without_variates_keeps_none():
    start = LocalRound(
        job=small_job(training={"local_steps": 2}),
        site=SiteId("site-0"),
        round_index=1,
        steps=range(2),
        model=torch.nn.Linear(4, 3),
        layout=weights.layout_of(torch.nn.Linear(4, 3), {}),
        weights_d=X,
        kept={},
    )
    assert control_variates.begin(start) is None
    assert counted_of({"optimizer/a": X}, 0) == {"optimizer/a": X}


def test_sites_go_back_to_the_round_that_counted():
    """One that has trained since begins with the same variate as one that has not."""
    kept = kept_of_round_3()
    later = begun(kept, Y / 4, round_index=4)
    lost = dict(later.arrays(Y / 2, NO_INTEGERS)) | {"optimizer/a": X}
    found = counted_of(dict(lost), 3, dict(kept))
    np.testing.assert_array_equal(variate(found, Y / 8), variate(dict(kept), Y / 8))
    assert "optimizer/a" in found
    # None has counted yet: no site has a variate.
    assert not variate(counted_of(dict(lost), 0), Y / 8).any()


def test_round_without_a_learning_rate_changes_nothing():
    """A user's schedule may return 0 for a whole round."""
    idle = control_variates.variate_now(kept_of_round_3(), X)
    kept = dict(begun(kept_of_round_3(), X, round_index=4).arrays(X, NO_INTEGERS))
    kept["variates/rates"] = np.zeros(1)
    np.testing.assert_array_equal(variate(kept, X), idle)


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
    assert re.search("site-a .* of round 3", caplog.text)


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
        control_variates.variate_now(kept, X)

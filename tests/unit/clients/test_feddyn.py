"""FedDyn's terms at one site."""

import numpy as np
import pytest
import torch
from support.small_jobs import small_job

from clients.methods import feddyn
from clients.methods.feddyn import FedDyn, gradient_now
from clients.methods.guest import LocalRound
from clients.methods.registry import follow_clipped_, if_counted
from clients.models import weights
from federation.errors import CorruptObject, SiteError
from federation.ids import SiteId
from federation.vectors import Arrays

ALPHA = 0.5
SITE = SiteId("site-a")
X = np.zeros(15, np.float32)
Y = np.ones(15, np.float32)
NO_INTEGERS = np.zeros(0, np.int64)


def begun(kept: Arrays, weights_d: np.ndarray) -> FedDyn:
    model = torch.nn.Linear(4, 3)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(weights_d[0]))
    job = small_job(
        num_sites=3,
        training={"local_steps": 2, "dynamic_alpha": ALPHA},
        aggregation={"server_optimizer": {"name": "running_sum"}},
    )
    start = LocalRound(
        job=job,
        site=SiteId("site-0"),
        round_index=3,
        steps=range(2),
        model=model,
        layout=weights.layout_of(model, {}),
        weights_d=weights_d,
        kept=kept,
    )
    found = feddyn.begin(start)
    assert found is not None
    return found


def kept_of_round_3() -> dict[str, np.ndarray]:
    return dict(begun({}, X).arrays(Y, NO_INTEGERS))


def test_gradient_gets_the_pull_and_the_linear_term():
    """Also that of a parameter which no batch of the step has used."""
    guest = begun(kept_of_round_3(), X)
    for parameter, _, _ in guest._terms:
        torch.nn.init.constant_(parameter, 2.0)
    guest.gradient_()
    for parameter, _, _ in guest._terms:
        assert parameter.grad is not None
        # alpha (y - x) - g, and g = -alpha (1 - 0) after the round before.
        np.testing.assert_allclose(parameter.grad.numpy(), ALPHA * 2 + ALPHA * 1)


def test_update_that_did_not_count_changes_nothing():
    kept = kept_of_round_3()
    for counted, factor in ((3, -ALPHA), (2, 0.0), (0, 0.0)):
        found = if_counted(kept, counted, earlier=dict, site=SITE)
        np.testing.assert_allclose(gradient_now(found, 15, ALPHA), factor * Y)


def test_site_that_lost_its_state_does_not_train():
    """Its correction is in the server's sum for ever; from round 1 on it had none."""
    for kept in ({}, kept_of_round_3()):
        found = if_counted(kept, 5, earlier=dict, site=SITE)
        with pytest.raises(SiteError, match=r"round 5 .*restore its state"):
            begun(found, X)
    begun(if_counted({}, 0, earlier=dict, site=SITE), X)


def test_clipped_update_counts_as_it_was_sent():
    kept = kept_of_round_3()
    follow_clipped_(kept, X, 0.25)
    np.testing.assert_allclose(gradient_now(kept, 15, ALPHA), -0.25 * ALPHA * Y)


def test_state_is_not_changed_by_the_next_round():
    """A round that is lost begins with it once more."""
    kept = kept_of_round_3()
    before = {name: array.copy() for name, array in kept.items()}
    begun(kept, X).gradient_()
    for name, array in kept.items():
        np.testing.assert_array_equal(before[name], array)


@pytest.mark.parametrize(
    ("name", "array", "fault"),
    [
        ("gradient", np.zeros(3, np.float32), r"of 3 values.*has 15"),
        ("update", np.zeros(15), "feddyn/update"),
        ("update", np.full(15, np.nan, np.float32), "NaN"),
    ],
)
def test_damaged_state_is_refused(name: str, array: np.ndarray, fault: str):
    with pytest.raises(CorruptObject, match=fault):
        gradient_now({**kept_of_round_3(), f"feddyn/{name}": array}, 15, ALPHA)

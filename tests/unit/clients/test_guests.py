"""What guests of a round are given."""

import numpy as np
import pytest
import torch
from support.small_jobs import small_job

from clients.methods import normalized_steps, proximal
from clients.methods.guest import LocalRound
from clients.models import weights
from federation.ids import SiteId


class Tied(torch.nn.Module):
    """Two layers that share their weight, as an embedding and a head do."""

    def __init__(self) -> None:
        """Tie them."""
        super().__init__()
        self.body = torch.nn.Linear(3, 3, bias=False)
        self.head = torch.nn.Linear(3, 3, bias=False)
        self.head.weight = self.body.weight


def test_a_tied_weight_is_pulled_and_scaled_once():
    model = Tied()
    job = small_job(
        training={"local_epochs": 1, "proximal_mu": 0.5},
    )
    start = LocalRound(
        job=job,
        site=SiteId("site-0"),
        round_index=1,
        steps=range(1),
        model=model,
        layout=weights.layout_of(model, {}),
        weights_d=np.zeros(9, np.float32),
        kept={},
    )
    pull, scale = proximal.begin(start), normalized_steps.NormalizedSteps(start, 4)
    assert pull is not None
    before = model.body.weight.detach().clone()
    with torch.no_grad():
        model.body.weight.add_(1.0)
    pull.gradient_()
    assert model.body.weight.grad is not None
    torch.testing.assert_close(model.body.weight.grad, torch.full((3, 3), 0.5))
    scale.end_(2)
    torch.testing.assert_close(model.body.weight.detach(), before + 2)


def test_personal_parts_are_not_scaled():
    """A site that takes fewer steps keeps what these have led to."""
    model = torch.nn.Linear(3, 2)
    start = LocalRound(
        job=small_job(schedule={"allocation": "capacity"}),
        site=SiteId("site-0"),
        round_index=1,
        steps=range(2),
        model=model,
        layout=weights.layout_of(model, {}, personal_patterns=("bias",)),
        weights_d=np.zeros(6, np.float32),
        kept={},
    )
    scale = normalized_steps.NormalizedSteps(start, 4)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    scale.end_(2)
    torch.testing.assert_close(model.weight.detach(), weight + 2)
    torch.testing.assert_close(model.bias.detach(), bias + 1)


@pytest.mark.parametrize(
    ("round_index", "taken", "scale"), [(1, 5, 1.0), (2, 5, 5.0), (5, 80, 0.25)]
)
def test_updates_are_scaled_to_the_mean_of_their_round(
    round_index: int, taken: int, scale: float
):
    """Of 20 steps on average: those of the first round, of equal work, not at all."""
    model = torch.nn.Linear(2, 1, bias=False)
    start = LocalRound(
        job=small_job(
            rounds=8,
            training={"local_steps": 20},
            schedule={"allocation": "capacity"},
        ),
        site=SiteId("site-0"),
        round_index=round_index,
        steps=range(taken),
        model=model,
        layout=weights.layout_of(model, {}),
        weights_d=np.zeros(2, np.float32),
        kept={},
    )
    scaled = normalized_steps.begin(start)
    assert scaled is not None
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    scaled.end_(taken)
    torch.testing.assert_close(model.weight.detach(), before + scale)

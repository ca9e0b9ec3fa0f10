"""Small weights become zero, and stay so."""

import numpy as np
import pytest
import torch
from support.small_jobs import small_job

from clients.methods import kept_zeros
from clients.methods.guest import Guest, LocalRound
from clients.methods.kept_zeros import KeptZeros
from clients.models import weights
from clients.models.pruning import prune_
from federation.errors import JobError
from federation.ids import SiteId


def two_layers() -> torch.nn.Sequential:
    """Weights 1 to 4 and 5 to 8, and biases."""
    first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
        last.weight.copy_(torch.tensor([[5.0, 6.0], [-7.0, 8.0]]))
        for layer in (first, last):
            layer.bias.fill_(0.1)
    return torch.nn.Sequential(first, torch.nn.Tanh(), last)


def test_the_smallest_values_of_all_layers_go():
    """By magnitude, over both layers together."""
    model = two_layers()
    found = prune_(model, 0.6)
    assert [(s.layer, s.zeros, s.weights) for s in found] == [("0", 4, 4), ("2", 0, 4)]
    model = two_layers()
    prune_(model, 0.25)
    assert model[0].weight.tolist() == [[0, 0], [3, 4]]


def test_whole_outputs_go_with_their_bias_and_the_last_layer_stays():
    """The output with the smaller L1 norm; one is always left."""
    model = two_layers()
    found = prune_(model, 0.99, kind="channel")
    assert model[0].weight.tolist() == [[0, 0], [3, 4]]
    assert model[0].bias[0] == 0 != model[0].bias[1]
    assert [s.zeros for s in found] == [2, 0]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_a_fraction_is_between_0_and_1(fraction: float):
    """Neither nothing nor everything."""
    with pytest.raises(JobError, match="between 0 and 1"):
        prune_(two_layers(), fraction)


def test_a_model_without_such_layers_is_refused():
    """A single layer is the last one, and has no output to lose."""
    with pytest.raises(JobError, match="pruned by channel"):
        prune_(torch.nn.Linear(2, 2), 0.5, kind="channel")


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_training_leaves_zeros_alone(name: str):
    """As long as the guest is there; without it they move again."""
    model = two_layers()
    prune_(model, 0.5)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)

    def step(guest: Guest | None = None) -> None:
        model(torch.ones(3, 2)).square().sum().backward()
        if guest is not None:
            guest.gradient_()
        optimizer.step()

    step(KeptZeros(model.parameters()))
    assert model[0].weight.tolist() == [[0, 0], [0, 0]]
    step()
    assert not (model[0].weight == 0).all()


def test_personal_parts_were_not_pruned():
    """A bias that is new is zero, and is trained all the same."""
    model = two_layers()
    torch.nn.init.zeros_(model[2].bias)
    torch.nn.init.zeros_(model[0].bias)
    weights_of_run = {"keep_zeros": True, "weights": "w@" + 64 * "0"}
    start = LocalRound(
        job=small_job(
            model={"factory": "net:make", "personal": ["2.*"], **weights_of_run}
        ),
        site=SiteId("site-0"),
        round_index=1,
        steps=range(1),
        model=model,
        layout=weights.layout_of(model, {}, personal_patterns=["2.*"]),
        weights_d=np.zeros(6, np.float32),
        kept={},
    )
    guest = kept_zeros.begin(start)
    assert guest is not None
    model(torch.ones(3, 2)).square().sum().backward()
    guest.gradient_()
    assert not model[0].bias.grad.any()
    assert model[2].bias.grad.all()

"""Features that are not trained."""

import pytest
import torch
from torch import nn

from clients.frozen_features import oriented_gradients


def images(number: int = 5, height: int = 8, width: int = 8) -> torch.Tensor:
    return torch.rand(
        number, 1, height, width, generator=torch.Generator().manual_seed(1)
    )


def features(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, nn.Sequential)
    found = model[0](inputs)
    assert isinstance(found, torch.Tensor)
    return found


def test_only_the_head_is_trained_and_it_begins_at_zero():
    """So no number of the features has to pay for noise."""
    model = oriented_gradients()
    assert [tuple(p.shape) for p in model.parameters()] == [(10, 8 * 16 + 64 + 1)]
    assert list(model.state_dict()) == ["1.weight"]
    assert model(images()).abs().max() == 0


def test_an_edge_is_seen_where_it_is():
    """A vertical edge shows in the direction across, in its cells alone."""
    image = torch.zeros(1, 1, 8, 8)
    image[..., 4:] = 1
    shares = features(oriented_gradients(), image)[0, : 8 * 16].view(8, 4, 4)
    across = shares[0] - shares[0, 0, 0]
    assert (across[:, 1:3] > 0).all()
    assert across[:, [0, 3]].abs().max() < 1e-6
    assert (shares[4] - shares[4, 0, 0]).abs().max() < 1e-6  # the other way


def test_cells_must_divide_the_image():
    with pytest.raises(ValueError, match="cells of 3 do not divide 8 x 8"):
        oriented_gradients(cell=3)

"""Frozen features of images for a linear model on top, for small data.

Under differential privacy the noise grows with the number of trained weights, and the
accuracy that a small dataset can pay for is that of good features that need no
training (Tramer and Boneh 2021, "Differentially Private Learning Needs Better
Features (or Much More Data)", arXiv:2011.11660). These here are histograms of oriented
gradients (Dalal and Triggs 2005, "Histograms of Oriented Gradients for Human
Detection", section 3) beside coarse intensities.

Shapes: B batch, H and W pixels down and across.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name.

_CONSTANT = 0.3  # of the unit norm: room for the bias in what is clipped
_TINY = 1e-6


def oriented_gradients(
    classes: int = 10,
    height: int = 8,
    width: int = 8,
    orientations: int = 8,
    cell: int = 2,
) -> nn.Module:
    """Linear classifier, which starts at zero, on frozen features of an image.

    Every example's features have the same norm, so that clipping its gradient takes
    as much from one as from the other.

    Args:
        classes: Number of classes.
        height: H, a multiple of ``cell``.
        width: W, a multiple of ``cell``.
        orientations: Directions that a gradient's angle is shared out to.
        cell: Pixels down and across that are added up to one feature a direction.

    Returns:
        A module from images ``(B, 1, H, W)`` to logits ``(B, classes)``. Only the
        linear layer has parameters.

    Raises:
        ValueError: The cells do not divide the image.
    """
    if height % cell or width % cell:
        raise ValueError(f"cells of {cell} do not divide {height} x {width} pixels")
    num_cells = (height // cell) * (width // cell)
    num_features = orientations * num_cells + height * width + 1
    head = nn.Linear(num_features, classes, bias=False)
    nn.init.zeros_(head.weight)
    return nn.Sequential(OrientedGradients(orientations, cell), head)


class OrientedGradients(nn.Module):
    """Shares of gradients by direction and cell, and intensities; nothing is trained.

    Args:
        orientations: Number of directions.
        cell: Pixels down and across of a cell.
    """

    def __init__(self, orientations: int, cell: int) -> None:
        """Lay out the directions, evenly over the circle."""
        super().__init__()
        self._cell = cell
        angles = torch.arange(orientations) * (2 * math.pi / orientations)
        directions = torch.stack((angles.cos(), angles.sin()), dim=1)
        # Constants, and so no part of the model's state.
        self.register_buffer("_directions", directions, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return features of images ``(B, 1, H, W)``."""
        across = F.pad(images[..., :, 2:] - images[..., :, :-2], (1, 1))
        down = F.pad(images[..., 2:, :] - images[..., :-2, :], (0, 0, 1, 1))
        gradient = torch.cat((across, down), dim=1)
        along = torch.einsum("bghw,og->bohw", gradient, self._directions)
        size = torch.hypot(across, down)  # Far quicker than a norm of two values.
        # The squared cosine of the angle between gradient and direction, times size.
        shares = along.clamp(min=0).square() / (size + _TINY)
        cells = F.avg_pool2d(shares, self._cell) * self._cell**2
        features = torch.cat((cells.flatten(1), images.flatten(1)), dim=1)
        features = features - features.mean(dim=1, keepdim=True)
        features = F.normalize(features, dim=1)
        return F.pad(features, (0, 1), value=_CONSTANT)

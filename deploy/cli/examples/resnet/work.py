"""A small residual network, and handwritten digits as images."""

import torch
from torch import nn

from clients.data import Examples, digits, preprocessing


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2016, arXiv:1603.05027, fig. 4e).

    GroupNorm in place of BatchNorm: batch statistics of sites with different classes
    do not average well (Hsieh et al. 2020, arXiv:1910.00189), and per-record gradients
    of differential privacy do not exist with them.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, before),
            nn.ReLU(),
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.GroupNorm(8, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
        )
        self.shortcut = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Conv2d(before, after, 1, stride, bias=False)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Channels of the block: ``(B, C, H, W)`` before and after."""
        added: torch.Tensor = self.shortcut(images) + self.body(images)
        return added


def net(width: int = 16, blocks: int = 1, classes: int = 10) -> nn.Module:
    """Three stages of residual blocks, for images of one channel.

    Args:
        width: Channels of the first stage; each further stage has twice as many and
            half the height and width.
        blocks: Blocks of each stage; with 3, this is a ResNet-20.
        classes: Number of classes.
    """
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False)]
    before = width
    for stage in range(3):
        after = width << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers.append(ResidualBlock(before, after, stride))
            before = after
    layers += [nn.GroupNorm(8, before), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, classes))


@preprocessing("public")
def images(held_out_fraction: float = 0.2) -> tuple[Examples, Examples]:
    """1,797 images ``(1, 8, 8)`` from 0 to 1, in ten classes: (train, held_out)."""
    return digits(held_out_fraction)

"""A small U-Net, and images of shapes with a class for each pixel."""

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clients.data import preprocessing

SIDE = 24  # Pixels of an image's side.
CLASSES = ("background", "disc", "checks", "cross")

Scenes = tuple[NDArray[np.uint8], NDArray[np.int64]]


class UNet(nn.Module):
    """Two levels down and up, with shortcuts (Ronneberger et al., arXiv:1505.04597)."""

    def __init__(self, width: int, classes: int) -> None:
        """Draw the weights."""
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.enter = _block(1, width)
        self.down = nn.ModuleList(_block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(
            _block(a + b, a) for a, b in reversed([*pairwise(widths)])
        )
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``(B, K, H, W)`` for images ``(B, 1, H, W)``."""
        levels = [self.enter(images)]
        for block in self.down:
            levels.append(block(nn.functional.max_pool2d(levels[-1], 2)))
        found = levels.pop()
        for block in self.up:
            wide = nn.functional.interpolate(found, scale_factor=2.0)
            found = block(torch.cat([levels.pop(), wide], dim=1))
        logits: torch.Tensor = self.leave(found)
        return logits


def _block(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.GroupNorm(4, after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.GroupNorm(4, after),
        nn.ReLU(),
    )


def net(width: int = 8, classes: int = 4) -> nn.Module:
    """The U-Net."""
    return UNet(width, classes)


@preprocessing("none")
def scenes(
    camera: int = 0, images: int = 500, shapes: int = 2
) -> tuple[Scenes, Scenes]:
    """Images ``(n, 1, 24, 24)``, uint8, and classes ``(n, 24, 24)``: (train, held_out).

    Args:
        camera: Camera of the site: each has its own contrast and noise.
        images: Training images; a quarter as many are held out.
        shapes: Shapes of an image; later ones hide parts of earlier ones.
    """
    rng = np.random.default_rng(camera)
    contrast, noise = rng.uniform(80, 140), rng.uniform(5, 20)
    classes = np.zeros((images + images // 4, SIDE, SIDE), np.int64)
    light = np.full(classes.shape, 80.0)
    for image, mask in zip(light, classes, strict=True):
        for kind in rng.integers(1, len(CLASSES), size=shapes):
            inside, shade = _shape(rng, CLASSES[kind])
            image[inside] = 80 + contrast * shade[inside]
            mask[inside] = kind
    light += rng.normal(0, noise, light.shape)
    pixels = light.clip(0, 255).astype(np.uint8)[:, None]
    return (pixels[:images], classes[:images]), (pixels[images:], classes[images:])


def _shape(
    rng: np.random.Generator, kind: str
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Pixels of a shape of random size at a random place, and their light."""
    radius = rng.uniform(4, 7)
    place = rng.uniform(radius, SIDE - radius, (2, 1, 1))
    grid = np.mgrid[:SIDE, :SIDE]
    x, y = np.abs(grid - place)
    inside: dict[str, NDArray[np.bool_]] = {
        "disc": np.hypot(x, y) <= radius,
        "checks": np.maximum(x, y) <= radius - 1,
        "cross": (np.maximum(x, y) <= radius) & (np.abs(x - y) < 1.5),
    }
    light = np.ones((SIDE, SIDE)) if kind != "checks" else grid.sum(axis=0) % 2.0
    return inside[kind], light * rng.uniform(0.5, 1.0)

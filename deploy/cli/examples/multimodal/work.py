"""Digits with two views: an image, and a few noisy words that describe it.

Not every site has both. A view that is missing is an empty one: a black image, or no
words. Shape suffixes: B records, W words, D width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from clients.data import Examples, digits, preprocessing

WORDS = (
    "", "round", "straight", "open", "closed", "left", "right", "top", "bottom", "loop",
    "hook", "two", "one", "curve", "corner", "bar", "slanted", "tail", "cross", "thin",
)  # fmt: skip
# What people say about each digit; the word of place 0 pads.
SAID = (
    "round closed one loop", "straight thin one bar", "curve top bar hook",
    "two curve open left", "corner open top cross", "bar curve bottom hook",
    "loop bottom curve left", "bar top slanted straight", "two loop closed round",
    "loop top tail right",
)  # fmt: skip
LENGTH = 4


class TwoViews(nn.Module):
    """An encoder for each view; their sum goes to the classifier."""

    def __init__(self, width: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, width),
        )
        self.words = nn.EmbeddingBag(len(WORDS), width, mode="mean", padding_idx=0)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(width, 10))

    def forward(self, image: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Logits ``(B, 10)`` for images ``(B, 1, 8, 8)`` and words ``(B, W)``."""
        seen_b = image.flatten(1).any(1)
        found_bd = self.image(image) * seen_b[:, None] + self.words(words)
        logits_bk: torch.Tensor = self.head(found_bd)
        return logits_bk


def net(width: int = 64) -> nn.Module:
    """The classifier of both views."""
    return TwoViews(width)


@preprocessing("public")
def views(
    part: int = 0,
    parts: int = 1,
    has: Sequence[str] = ("image", "words"),
    wrong: float = 0.5,
) -> tuple[Examples, Examples]:
    """A site's digits: ``image`` ``(n, 1, 8, 8)`` and ``words`` ``(n, 4)``.

    Args:
        part: Number of the site, from 0.
        parts: Number of sites that share the digits.
        has: The views that this site has.
        wrong: Probability that a word is any other word.

    Returns:
        (train, held_out).
    """
    train, held_out = digits()
    return (
        _seen(train, slice(part, None, parts), has, wrong),
        _seen(held_out, slice(part, None, parts), has, wrong),
    )


def _seen(
    all_of_it: Examples, rows: slice, has: Sequence[str], wrong: float
) -> Examples:
    image, digit = (
        np.asarray(all_of_it.inputs)[rows],
        np.asarray(all_of_it.targets)[rows],
    )
    rng = np.random.default_rng([len(digit), rows.start])
    vocabulary = np.array([[WORDS.index(w) for w in text.split()] for text in SAID])
    words = vocabulary[digit]
    other = rng.integers(1, len(WORDS), size=words.shape)
    words = np.where(rng.random(words.shape) < wrong, other, words)
    if "image" not in has:
        image = np.zeros_like(image)
    if "words" not in has:
        words = np.zeros_like(words)
    return Examples(inputs={"image": image, "words": words}, targets=digit)

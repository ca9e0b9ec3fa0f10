"""A two-tower recommender: what will a user buy next, given what they have bought?

Interactions are generated, so that the best possible answer is known: each user has a
taste, each item belongs to one, and every day new items appear and old ones fade.
Shape suffixes: B users, H items of a history, I items, D width.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clients.data import preprocessing

NUM_ITEMS = 400
NUM_TASTES = 8
HISTORY = 12
NEW_PER_DAY = 20  # Items that appear; the catalogue is numbered by age.
FIRST_DAY = 200  # Items of day 0.
PADDING = NUM_ITEMS  # In place of an item, in a short history.

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]


class Towers(nn.Module):
    """Scores of all items for each user.

    The tower of users embeds a history, so a site's users need no row of their own in
    the shared model; the tower of items is a table.
    """

    def __init__(self, width: int) -> None:
        """Draw both towers."""
        super().__init__()
        self.history = nn.EmbeddingBag(
            NUM_ITEMS + 1, width, mode="mean", padding_idx=PADDING
        )
        self.user = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
        )
        self.items = nn.Embedding(NUM_ITEMS, width)
        nn.init.normal_(self.items.weight, std=0.1)

    def forward(self, history_bh: torch.Tensor) -> torch.Tensor:
        """Scores ``(B, I)``."""
        user_bd = self.user(self.history(history_bh))
        scores_bi: torch.Tensor = user_bd @ self.items.weight.t()
        return scores_bi


def net(width: int = 32) -> nn.Module:
    """The two towers."""
    return Towers(width)


@preprocessing("none")
def purchases(day: int = 0, users: int = 1500, seed: int = 0) -> tuple[Pairs, Pairs]:
    """One day of a site: histories ``(n, 12)`` and the item bought next.

    Args:
        day: From 0.
        users: Users of the site who buy something on that day.
        seed: Seed of the site: its users prefer some tastes to others.

    Returns:
        (train, held_out), by user: nobody is in both.
    """
    rng = np.random.default_rng([seed, day])
    shares = np.random.default_rng(seed).dirichlet(np.full(NUM_TASTES, 2.0))
    taste_of_user = rng.choice(NUM_TASTES, size=users, p=shares)
    wanted = probabilities(day)[taste_of_user]
    # Gumbel's trick: the largest perturbed scores are a draw without replacement.
    noise = rng.gumbel(size=wanted.shape)
    drawn = np.argsort(-(np.log(wanted + 1e-12) + noise), axis=1)[:, : HISTORY + 1]
    bought = rng.permuted(drawn, axis=1)
    history, target = bought[:, :HISTORY], bought[:, HISTORY]
    short = np.arange(HISTORY) >= rng.integers(3, HISTORY + 1, size=users)[:, None]
    history = np.where(short, PADDING, history)
    cut = int(0.8 * users)
    return (history[:cut], target[:cut]), (history[cut:], target[cut:])


def probabilities(day: int) -> NDArray[np.float64]:
    """What users of each taste buy on a day: shape ``(tastes, I)``, rows sum to 1."""
    item = np.arange(NUM_ITEMS)
    # Items have a taste and an appeal, which halves in five days after their first.
    rng = np.random.default_rng(42)
    taste = rng.integers(NUM_TASTES, size=NUM_ITEMS)
    appeal = rng.lognormal(0.0, 1.0, size=NUM_ITEMS)
    first = np.maximum(0, (item - FIRST_DAY) // NEW_PER_DAY + 1)
    age = np.maximum(0, day - first)
    now = np.where(first <= day, appeal * np.exp2(-age / 5), 0.0)
    weights = now * np.where(taste == np.arange(NUM_TASTES)[:, None], 1.0, 0.02)
    result: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return result

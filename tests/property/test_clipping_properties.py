"""Norms without gradients are those of gradients, for every layer that has them."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from privacy.dp_sgd.clipping import ClippedSum

# The first of them imports Opacus, which takes seconds.
pytestmark = pytest.mark.slow

CLIP_NORM = 0.5
SCALES = (0.0, 1e-40, 1e-8, 1.0, 6e4, 1e12, 1e25, float("inf"), float("nan"))


class Tied(nn.Module):
    """One matrix as an embedding and as a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 3)
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.tokens(x))


LAYERS = {
    "linear": lambda: nn.Linear(4, 3),
    "linear without bias": lambda: nn.Linear(4, 3, bias=False),
    "wide linear": lambda: nn.Linear(4, 9),
    "embedding": lambda: nn.Embedding(7, 3),
    "padded embedding": lambda: nn.Embedding(7, 3, padding_idx=2),
    "tied": Tied,
    "convolution": lambda: nn.Conv1d(4, 2, 1),
    "layer norm": lambda: nn.LayerNorm(4),
}


def _records(kind: str, size: int, places: int, rng: torch.Generator) -> torch.Tensor:
    if kind in ("embedding", "padded embedding", "tied"):
        return torch.randint(0, 7, (size, places), generator=rng)
    shape = (size, 4, places) if kind == "convolution" else (size, places, 4)
    return torch.randn(shape, generator=rng)


def _sum(
    model: nn.Module,
    records: torch.Tensor,
    scales: torch.Tensor,
    clipping: str,
    clip_norm: float,
) -> torch.Tensor:
    """Sum under a loss whose gradient grows with each record's scale."""
    weights = torch.linspace(-1.0, 2.0, 97)

    def loss() -> torch.Tensor:
        out = model(records).flatten(1)
        mixed = out * weights[: out.shape[1]] + 0.5 * out.square()
        return (mixed.sum(1) * scales).sum()

    total = ClippedSum(
        model, clip_norm=clip_norm, clipping=clipping, batch_size=len(records)
    )
    total.add_(loss, len(records))
    return total.sum_d


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    places=st.integers(1, 6),
    clip_norm=st.sampled_from([1e-4, 0.5, 1e6]),
)
def test_both_ways_clip_alike(
    kind: str, seed: int, size: int, places: int, clip_norm: float
):
    """Up to float32, and to the 2^-18 that inner products are allowed."""
    rng = torch.Generator().manual_seed(seed)
    model = LAYERS[kind]()
    records, ones = _records(kind, size, places, rng), torch.ones(size)
    hooks, ghost = (
        _sum(model, records, ones, how, clip_norm) for how in ("hooks", "ghost")
    )
    assert torch.isfinite(ghost).all()
    assert (ghost - hooks).norm() <= 1e-3 * hooks.norm() + 1e-30
    assert ghost.norm() <= size * clip_norm


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    places=st.integers(1, 6),
    scale=st.sampled_from(SCALES),
)
def test_no_record_of_any_size_adds_more_than_its_bound(
    kind: str, clipping: str, seed: int, places: int, scale: float
):
    """One record beside others: what it changes, and that it spoils nothing."""
    rng = torch.Generator().manual_seed(seed)
    model = LAYERS[kind]()
    records = _records(kind, 3, places, rng)
    scales = torch.tensor([1.0, 1.0, scale])
    with_it = _sum(model, records, scales, clipping, CLIP_NORM)
    without = _sum(model, records[:2], scales[:2], clipping, CLIP_NORM)
    assert torch.isfinite(with_it).all()
    assert (with_it - without).norm().item() <= CLIP_NORM

"""Muon in float32 takes the steps of torch's, and is taken where bfloat16 is slow."""

import pytest
import torch
from torch import nn

from clients.float32_muon import Float32Muon, orthogonalised
from clients.training import local_steps
from clients.training.local_steps import make_optimizers
from federation.job.spec import OptimizerSpec

LR, MOMENTUM, DECAY = 0.1, 0.9, 2.0

needs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9"
)


def torchs(matrix: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        [matrix],
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        adjust_lr_fn="match_rms_adamw",
    )


def ours(matrix: nn.Parameter) -> Float32Muon:
    return Float32Muon([matrix], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def step(
    optimizer: torch.optim.Optimizer, matrix: nn.Parameter, count: int
) -> torch.Tensor:
    """Take steps along gradients that depend on the weights and on each other."""
    draws = torch.Generator().manual_seed(5)
    for _ in range(count):
        drawn = torch.randn(matrix.shape, generator=draws)
        matrix.grad = drawn + matrix.detach()
        optimizer.step()
    return matrix.detach()


@needs_muon
@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (12, 12)])
def test_steps_are_those_of_torch(shape: tuple[int, int]):
    """To the rounding of bfloat16, of which torch's products are."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, right = (nn.Parameter(start.clone()) for _ in range(2))
    expected = step(torchs(left), left, 6)
    found = step(ours(right), right, 6)
    moved = (expected - start).norm()
    assert (found - expected).norm() < 0.01 * moved


@needs_muon
def test_state_is_that_of_torch():
    """A run may continue on a machine of the other kind."""
    matrix = nn.Parameter(torch.ones(4, 3))
    first, second = torchs(matrix), ours(matrix)
    step(first, matrix, 2)
    state = first.state_dict()["state"]
    second.load_state_dict({**second.state_dict(), "state": state})
    (kept,) = second.state.values()
    step(second, matrix, 1)
    assert list(kept) == ["momentum_buffer"]


def test_a_gradient_is_not_changed_and_a_matrix_without_one_stays():
    """Clipping and SCAFFOLD read gradients; frozen matrices have none."""
    matrix = nn.Parameter(torch.ones(3, 2))
    optimizer = ours(matrix)
    optimizer.step()
    assert torch.equal(matrix, torch.ones(3, 2))
    gradient = torch.arange(6.0).reshape(3, 2)
    matrix.grad = gradient.clone()
    optimizer.step()
    assert torch.equal(matrix.grad, gradient)
    assert not torch.equal(matrix, torch.ones(3, 2))


def test_singular_values_come_near_one():
    """The five iterations bring those of a random matrix between 0.6 and 1.25."""
    drawn = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalised(1e3 * drawn))
    assert 0.6 < values.min() < values.max() < 1.25
    assert torch.equal(orthogonalised(torch.zeros(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("shape", [(16, 16), (16, 20), (16, 28), (64, 16)])
@pytest.mark.parametrize("smallest", [0, -4])
def test_either_way_computes_the_same(shape: tuple[int, int], smallest: int):
    """Also where singular values are far apart, and where many products are saved."""
    draws = torch.Generator().manual_seed(3)
    rows = torch.logspace(0, smallest, shape[0])[:, None]
    update = rows * torch.randn(shape, generator=draws)
    exact = update.double() / update.double().norm()
    for _ in range(5):
        gram = exact @ exact.T
        exact = 3.4445 * exact + (2.0315 * gram @ gram - 4.7750 * gram) @ exact
    off = orthogonalised(update).double() - exact
    assert off.norm() < 1e-4 * exact.norm()


@needs_muon
@pytest.mark.parametrize(("is_fast", "kind"), [(False, "Float32Muon"), (True, "Muon")])
def test_float32_is_taken_where_bfloat16_is_slow(
    is_fast: bool,  # noqa: FBT001 -- by pytest
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Settings are those of the job."""
    monkeypatch.setattr(local_steps, "multiplies_bfloat16", lambda _: is_fast)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    spec = OptimizerSpec(name="muon", lr=0.3, momentum=0.7, weight_decay=0.2)
    muon, _ = make_optimizers(model, spec)
    (group,) = muon.param_groups
    assert type(muon).__name__ == kind
    settings = {key: group[key] for key in ("lr", "momentum", "weight_decay")}
    assert settings == {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.2}

"""Reference models."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from clients import models


def num_parameters(model: nn.Module):
    return sum(p.numel() for p in model.parameters())


def size_rows():
    """Rows of the table in the docstring of ``gpt``."""
    rows = re.findall(r"^ *(\d+[MB]) +([\d, ]+)$", models.gpt.__doc__, re.MULTILINE)
    return [(size, [int(n.replace(",", "")) for n in r.split()]) for size, r in rows]


@pytest.mark.parametrize(("size", "row"), size_rows())
def test_gpt_sizes_are_as_documented(size: str, row: list[int]):
    """Each row of the table gives its parameter count, near its nominal size."""
    *options, expected = row
    with torch.device("meta"):
        actual = num_parameters(models.gpt(*options))
    nominal = int(size[:-1]) * {"M": 10**6, "B": 10**9}[size[-1]]
    assert expected == actual
    assert 0.8 < actual / nominal < 1.1


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 64, (3, 16), generator=generator)


def small_gpt(norm: str = "rmsnorm"):
    torch.manual_seed(0)
    return models.gpt(64, 16, layers=2, heads=2, width=32, norm=norm)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_gpt_is_causal(norm: str, tokens: torch.Tensor):
    """Logits do not depend on later tokens, and do on the token itself."""
    model, changed = small_gpt(norm), tokens.clone()
    changed[:, 9] = (tokens[:, 9] + 1) % 64
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 16, 64)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.allclose(after[:, 9:], before[:, 9:])


def test_gpt_reads_short_and_refuses_long_input(tokens: torch.Tensor):
    """Fewer tokens than the context are fine, more are refused."""
    model = small_gpt()
    assert model(tokens[:, :5]).shape == (3, 5, 64)
    with pytest.raises(ValueError, match="32 tokens"):
        model(torch.cat([tokens, tokens], dim=1))


def test_gpt_options_are_checked():
    """Options that cannot work are refused by name."""
    with pytest.raises(ValueError, match="0 layers"):
        models.gpt(layers=0)
    with pytest.raises(ValueError, match="3 heads"):
        models.gpt(width=32, heads=3)
    with pytest.raises(ValueError, match="'batchnorm' is unknown"):
        models.gpt(norm="batchnorm")


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (lambda: models.digits_cnn(classes=7, width=4), (5, 1, 8, 8), (5, 7)),
        (lambda: models.mlp(64, 3, hidden=[8, 9]), (5, 1, 8, 8), (5, 3)),
        (lambda: models.mlp(30, 2, hidden=()), (5, 30), (5, 2)),
        (lambda: models.logistic_regression(30, 2), (5, 30), (5, 2)),
    ],
)
def test_classifiers_map_examples_to_classes(
    model: Callable[[], nn.Module], inputs: tuple[int, ...], expected: tuple[int, ...]
):
    """One row of logits per example."""
    assert model()(torch.zeros(inputs)).shape == expected

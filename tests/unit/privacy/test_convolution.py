"""Record gradients of convolutions, against autograd record by record."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from support.examples import few
from torch import nn

from privacy.dp_sgd import convolution
from privacy.dp_sgd.convolution import Workspace, gradients, is_covered

pair = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Conv2d, torch.Tensor]:
    """A layer and a batch that it takes."""
    torch.manual_seed(draw(st.integers(0, 999)))
    padding: Any = draw(
        st.one_of(
            st.tuples(st.integers(0, 5), st.integers(0, 5)),
            st.sampled_from(["same", "valid"]),
        )
    )
    stride = (1, 1) if padding == "same" else draw(pair)
    channels = draw(pair)
    layer = nn.Conv2d(
        *channels,
        kernel_size=draw(pair),
        stride=stride,
        dilation=draw(pair),
        padding=padding,
        bias=draw(st.booleans()),
    )
    size = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    if not isinstance(layer.padding, str):
        for axis in (0, 1):
            reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
            assume(size[axis] + 2 * int(layer.padding[axis]) >= reach)
    elif padding == "valid":
        for axis in (0, 1):
            assume(size[axis] > layer.dilation[axis] * (layer.kernel_size[axis] - 1))
    return layer, torch.randn(draw(st.integers(1, 6)), channels[0], *size)


def by_autograd(layer: nn.Conv2d, inputs: torch.Tensor, backprops: torch.Tensor):
    one_by_one = [
        torch.autograd.grad(
            (layer(inputs[k : k + 1]) * backprops[k : k + 1]).sum(),
            list(layer.parameters()),
        )
        for k in range(len(inputs))
    ]
    return [torch.stack(of_one) for of_one in zip(*one_by_one, strict=True)]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@few(15)
@given(case=layers(), unrolled=st.sampled_from([1, 500, 1 << 18]))
def test_gradients_are_those_of_records_one_by_one(
    case: tuple[nn.Conv2d, torch.Tensor], unrolled: int
):
    """Whatever the geometry, and however many records are unrolled at a time."""
    layer, inputs = case
    workspace = Workspace()
    # What an earlier batch has left must not be seen.
    for shape in ((9,), (40_000,), (40_000,)):
        workspace.take(shape, inputs).fill_(float("nan"))
    workspace.begin()
    backprops = torch.randn_like(layer(inputs).detach())
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(convolution, "_UNROLLED_VALUES", unrolled)
        found = gradients(layer, inputs, backprops, workspace)
    expected = by_autograd(layer, inputs, backprops)
    assert list(found) == list(layer.parameters())
    for ours, theirs in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_have_no_gradient():
    """Nor does a step spend time on them."""
    layer = nn.Conv2d(1, 2, 3)
    layer.weight.requires_grad_(False)  # noqa: FBT003 (torch names it otherwise)
    found = gradients(
        layer, torch.randn(2, 1, 5, 5), torch.randn(2, 2, 3, 3), Workspace()
    )
    assert list(found) == [layer.bias]


def test_memory_is_used_again():
    """Batches of other sizes, as Poisson sampling draws them, ask for no more."""
    layer, workspace = nn.Conv2d(3, 4, 3, padding=1), Workspace()
    held = []
    for num_records in (7, 30, 12, 30, 1):
        workspace.begin()
        for _ in range(2):
            inputs = torch.randn(num_records, 3, 6, 6)
            gradients(layer, inputs, torch.randn(num_records, 4, 6, 6), workspace)
        held.append([buffer.data_ptr() for buffer in workspace.buffers])
    assert held[1] == held[2] == held[3] == held[4]
    assert len(held[0]) == len(set(held[0])) == 6


def test_other_layers_are_left_to_others():
    """A subclass may compute something else, and groups are another product."""

    class Own(nn.Conv2d):
        pass

    assert is_covered(nn.Conv2d(2, 2, 1))
    assert not is_covered(nn.Conv2d(2, 2, 1, groups=2))
    assert not is_covered(nn.Conv2d(2, 2, 1, padding_mode="circular"))
    assert not is_covered(Own(2, 2, 1))
    assert not is_covered(nn.Conv1d(2, 2, 1))

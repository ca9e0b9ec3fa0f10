"""Per-record gradients of a convolution's weights, in reused memory.

A record's gradient is one product of matrices: the gradients of the outputs, by place,
with the windows of the input that made them (Chellapilla et al. 2006, section 2.1,
"im2col"). Opacus computes the same; here the windows of only a few records at a time
are unrolled, so that they stay in the processor's cache, and no step asks the operating
system for new memory, which took longer than the products.

Shape suffixes: B records, o and i channels of outputs and inputs, h and w rows and
columns of an image, q places of the outputs, y and x rows and columns of a kernel.
"""

from typing import TypeGuard

import torch
from torch import nn

_UNROLLED_VALUES = 1 << 18  # 1 MiB: half of a usual second-level cache


class Workspace:
    """Memory for the gradients of a batch, reused for the next batch.

    Attributes:
        buffers: What there is, in the order in which a batch asks for it.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self.buffers: list[torch.Tensor] = []
        self._taken = 0

    def begin(self) -> None:
        """Release all that was taken: it will be overwritten."""
        self._taken = 0

    def take(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Memory that was not taken since ``begin``; its content is arbitrary."""
        size = torch.Size(shape).numel()
        if self._taken == len(self.buffers):
            self.buffers.append(like.new_empty(size))
        elif not _fits(self.buffers[self._taken], size, like):
            self.buffers[self._taken] = like.new_empty(size)
        self._taken += 1
        return self.buffers[self._taken - 1][:size].view(shape)


def _fits(buffer: torch.Tensor, size: int, like: torch.Tensor) -> bool:
    same = buffer.dtype == like.dtype and buffer.device == like.device
    return same and buffer.numel() >= size


def is_covered(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether ``gradients`` computes what a layer needs."""
    if type(layer) is not nn.Conv2d:
        return False
    return layer.groups == 1 and layer.padding_mode == "zeros"


def gradients(
    layer: nn.Conv2d,
    inputs_bihw: torch.Tensor,
    backprops: torch.Tensor,
    workspace: Workspace,
) -> dict[nn.Parameter, torch.Tensor]:
    """Gradients of a layer's parameters, for each record.

    Args:
        layer: For which ``is_covered`` holds.
        inputs_bihw: What it was called with, float32.
        backprops: Gradient of the loss by its outputs, shape ``(B, o, rows, columns)``.
        workspace: Where the weights' gradients lie.

    Returns:
        By parameter that is trained, shape ``(B, *parameter)``. The weights' gradients
        lie in the order ``(B, o, y, x, i)``, in which windows are read in one piece.
    """
    found: dict[nn.Parameter, torch.Tensor] = {}
    for name, parameter in layer.named_parameters(recurse=False):
        if parameter.requires_grad and name == "weight":
            found[parameter] = _by_windows(layer, inputs_bihw, backprops, workspace)
        elif parameter.requires_grad:
            found[parameter] = backprops.sum((2, 3))
    return found


def _by_windows(
    layer: nn.Conv2d,
    inputs_bihw: torch.Tensor,
    backprops: torch.Tensor,
    workspace: Workspace,
) -> torch.Tensor:
    num_records, channels, height, width = inputs_bihw.shape
    rows, columns = backprops.shape[2:]
    kernel_y, kernel_x = _pair(layer.kernel_size)
    before_y, before_x = _padding_before(layer)
    backprops_boq = backprops.reshape(num_records, -1, rows * columns)
    window = kernel_y * kernel_x * channels
    gradients = workspace.take(
        (num_records, backprops_boq.shape[1], window), backprops_boq
    )
    at_once = max(1, min(num_records, _UNROLLED_VALUES // (rows * columns * window)))
    need_y = (rows - 1) * layer.stride[0] + (kernel_y - 1) * layer.dilation[0] + 1
    need_x = (columns - 1) * layer.stride[1] + (kernel_x - 1) * layer.dilation[1] + 1
    # A stride may leave inputs at the end that no window sees.
    high = max(0, min(height, need_y - before_y))
    wide = max(0, min(width, need_x - before_x))
    padded = workspace.take((at_once, need_y, need_x, channels), inputs_bihw).zero_()
    inner = padded[:, before_y : before_y + high, before_x : before_x + wide]
    step = padded.stride()
    windows = padded.as_strided(
        (at_once, rows, columns, kernel_y, kernel_x, channels),
        (
            step[0],
            step[1] * layer.stride[0],
            step[2] * layer.stride[1],
            step[1] * layer.dilation[0],
            step[2] * layer.dilation[1],
            1,
        ),
    )
    unrolled = workspace.take(tuple(windows.shape), inputs_bihw)
    unrolled_bqw = unrolled.view(at_once, rows * columns, window)
    images = inputs_bihw[:, :, :high, :wide].permute(0, 2, 3, 1)
    for start in range(0, num_records, at_once):
        chunk = slice(start, min(start + at_once, num_records))
        size = chunk.stop - start
        inner[:size].copy_(images[chunk])
        unrolled[:size].copy_(windows[:size])
        torch.bmm(backprops_boq[chunk], unrolled_bqw[:size], out=gradients[chunk])
    shape = (num_records, -1, kernel_y, kernel_x, channels)
    return gradients.view(shape).permute(0, 1, 4, 2, 3)


def _padding_before(layer: nn.Conv2d) -> tuple[int, int]:
    """Zeros above and to the left of an image."""
    if not isinstance(layer.padding, str):
        return _pair(layer.padding)
    if layer.padding == "valid":
        return 0, 0
    y, x = _pair(layer.kernel_size)  # "same": the odd zero is below and to the right.
    return layer.dilation[0] * (y - 1) // 2, layer.dilation[1] * (x - 1) // 2


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    y, x = values
    return y, x

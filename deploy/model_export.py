"""The final model as tensors by name: in float32, or in the model's own types."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from aggregator import tensor_file
from federation.protocols import Buffer, RunState
from federation.vectors import Layout

Array = NDArray[Any]


def named_arrays(layout: Layout, state: RunState) -> dict[str, Array]:
    """The model's tensors in its own order: float32 and int64 views of the state."""
    found: dict[str, Array] = {}
    for spec, floats in layout.float_views(state.weights_d):
        found[spec.name] = floats
    for spec, integers in layout.integer_views(state.integers_m):
        found[spec.name] = integers
    return {spec.name: found[spec.name] for spec in layout.tensors}


def file_pieces(layout: Layout, arrays: Mapping[str, Array]) -> Iterable[Buffer]:
    """A safetensors file of the model in its own types.

    Args:
        layout: Layout of the model; it names the types.
        arrays: From ``named_arrays``.
    """
    typed: dict[str, Array] = {}
    halves = []
    for spec in layout.tensors:
        array = arrays[spec.name]
        if spec.dtype == "bfloat16":  # NumPy has no such type: carry its bits.
            halves.append(spec.name)
            rounded = from_dlpack(array).to(torch.bfloat16)
            array = rounded.view(torch.uint16).numpy()
        elif array.dtype.name != spec.dtype:
            array = array.astype(np.dtype(spec.dtype))
        typed[spec.name] = array
    return tensor_file.pieces(typed, {"format": "pt"}, bfloat16=halves)

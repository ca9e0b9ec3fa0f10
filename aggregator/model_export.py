"""The final model as tensors by name: in float32, or in the model's own types."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from aggregator import tensor_file
from cloud_adapters.storage import sealed_tensors
from federation.errors import CorruptObject
from federation.protocols import Buffer, RunState
from federation.vectors import Layout, Role

Array = NDArray[Any]


def named_arrays(
    layout: Layout, state: RunState, frozen: Mapping[str, Array]
) -> dict[str, Array]:
    """The model's tensors in its own order: float32 and int64 views of the state.

    Personal parts are at the sites and not among them.

    Args:
        layout: Layout of the model.
        state: The trained values.
        frozen: All others, see ``ModelPool.frozen_arrays``.
    """
    found = dict(frozen)
    for spec, floats in layout.float_views(state.weights_d):
        found[spec.name] = floats
    for spec, integers in layout.integer_views(state.integers_m):
        found[spec.name] = integers
    order = (spec.name for spec in layout.tensors if spec.role is not Role.PERSONAL)
    return {name: found[name] for name in order}


def file_pieces(layout: Layout, arrays: Mapping[str, Array]) -> Iterable[Buffer]:
    """A safetensors file of the model in its own types, with its digest.

    Args:
        layout: Layout of the model; it names the types.
        arrays: From ``named_arrays``.
    """
    typed: dict[str, Array] = {}
    halves = []
    for spec in layout.tensors:
        if spec.name not in arrays:  # A personal part.
            continue
        array = arrays[spec.name]
        if spec.dtype == "bfloat16":  # NumPy has no such type: carry its bits.
            halves.append(spec.name)
            rounded = torch.from_numpy(array).to(torch.bfloat16)
            array = rounded.view(torch.uint16).numpy()
        elif array.dtype.name != spec.dtype:
            array = array.astype(np.dtype(spec.dtype))
        typed[spec.name] = array
    return tensor_file.pieces(typed, {"format": "pt"}, bfloat16=halves, is_sealed=True)


def read(path: Path) -> dict[str, Array]:
    """Read an exported model: float32 and int64 arrays by tensor name.

    Raises:
        CorruptObject: It is not a whole safetensors file, it is damaged, or it cannot
            be read.
    """
    try:
        arrays = {
            name: tensor.to(
                torch.float32 if tensor.is_floating_point() else torch.int64
            ).numpy()
            for name, tensor in load_file(path).items()
        }
        sealed_tensors.check(path)
    # torch has no values of some types that the format has, such as F4.
    except (OSError, SafetensorError, NotImplementedError) as error:
        raise CorruptObject(
            f"{path} cannot be read: {error}; resume the run to write it again"
        ) from error
    return arrays

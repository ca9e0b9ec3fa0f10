"""A torch module as flat vectors, and back.

Shape suffixes: d float values of the model, m integer values of the model.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from federation.errors import JobError, LayoutMismatch
from federation.vectors import IntegerVector, Layout, Role, Vector

_INTEGER_TYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}


def layout_of(module: torch.nn.Module, integer_buffers: Mapping[str, str]) -> Layout:
    """Lay out a module's state: each tensor once, tied weights under one name.

    Args:
        module: Any module.
        integer_buffers: Role by name pattern, see ``ModelSpec.integer_buffers``.

    Raises:
        JobError: A tensor is of a type that cannot travel, or a pattern fits none.
        LayoutMismatch: There is nothing to train.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    rows, unused = [], set(integer_buffers)
    for name, tensor in _state(module).items():
        if tensor.is_floating_point():
            role = Role.PARAMETER if name in parameters else Role.BUFFER
        elif tensor.dtype in _INTEGER_TYPES:
            role, pattern = _integer_role(name, integer_buffers)
            unused.discard(pattern)
        else:
            raise JobError(
                f"tensor {name!r} of the model is {tensor.dtype}, which cannot be "
                "sent; only real floating-point, integer and boolean tensors can",
                key="model.factory",
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((name, tuple(tensor.shape), dtype, role))
    if unused:
        raise JobError(
            f"no integer or boolean buffer of the model is called {min(unused)!r}",
            key="model.integer_buffers",
        )
    return Layout.build(rows)


def _integer_role(name: str, roles: Mapping[str, str]) -> tuple[Role, str]:
    for pattern, role in roles.items():
        if fnmatchcase(name, pattern):
            return Role(role), pattern
    counter = name.endswith("num_batches_tracked")
    return (Role.MAX if counter else Role.FROM_SERVER), ""


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of the module's state, each memory once, in the module's order."""
    seen, state = set(), {}
    for name, tensor in module.state_dict().items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() == 0 or memory not in seen:
            seen.add(memory)
            state[name] = tensor
    return state


@torch.no_grad()
def load(
    module: torch.nn.Module,
    layout: Layout,
    weights_d: Vector,
    integers_m: IntegerVector,
) -> None:
    """Copy vectors into a module's tensors.

    Raises:
        LayoutMismatch: The vectors are not as long as the layout says.
    """
    sizes = (weights_d.shape, integers_m.shape)
    if sizes != ((layout.size,), (layout.num_integers,)):
        raise LayoutMismatch(
            f"got {weights_d.size} values and {integers_m.size} integers for a model "
            f"of {layout.size} and {layout.num_integers}"
        )
    state = _state(module)
    # DLPack takes read-only arrays, which from_numpy warns about.
    for spec, view in layout.float_views(weights_d):
        state[spec.name].copy_(from_dlpack(view))
    for integer_spec, integer_view in layout.integer_views(integers_m):
        state[integer_spec.name].copy_(from_dlpack(integer_view))


@torch.no_grad()
def read(module: torch.nn.Module, layout: Layout) -> tuple[Vector, IntegerVector]:
    """Copy a module's tensors out into new vectors."""
    weights_d = np.empty(layout.size, dtype=np.float32)
    integers_m = np.empty(layout.num_integers, dtype=np.int64)
    state = _state(module)
    for spec, view in layout.float_views(weights_d):
        torch.from_numpy(view).copy_(state[spec.name])
    for integer_spec, integer_view in layout.integer_views(integers_m):
        torch.from_numpy(integer_view).copy_(state[integer_spec.name])
    return weights_d, integers_m

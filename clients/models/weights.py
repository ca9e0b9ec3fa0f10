"""A torch module as flat vectors, and back.

Shape suffixes: d float values of the model, m integer values of the model.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from clients.models import personal
from federation.errors import JobError, LayoutMismatch
from federation.job.adapters import Factors
from federation.mapped import give_back
from federation.vectors import AVERAGED, IntegerVector, Layout, Role, Vector

_INTEGER_TYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}


def layout_of(
    module: torch.nn.Module,
    integer_buffers: Mapping[str, str],
    *,
    personal_patterns: Sequence[str] = (),
    sends_frozen: bool = False,
) -> Layout:
    """Lay out a module's state: each tensor once, tied weights under one name.

    Args:
        module: Any module.
        integer_buffers: Role by name pattern, see ``ModelSpec.integer_buffers``.
        personal_patterns: What stays at each site, see ``ModelSpec.personal``.
        sends_frozen: Whether parameters that require no gradient travel all the same,
            for sites whose code is given a whole model.

    Raises:
        JobError: A tensor is of a kind that cannot travel, a pattern fits none, or
            there is nothing to train or to share.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    rows, unused, unused_personal = [], set(integer_buffers), set(personal_patterns)
    exact = exact_factors(module)
    from_server = {each.weight for each in exact if not each.refactored}
    for name, tensor in _distinct(module).items():
        parameter = parameters.get(name)
        if name in from_server:
            role = Role.SERVER
        elif parameter is not None and not (parameter.requires_grad or sends_frozen):
            role = Role.FROZEN
        elif fitting := personal.match(name, personal_patterns):
            role = Role.PERSONAL if tensor.is_floating_point() else Role.KEEP
            unused_personal -= fitting
        elif tensor.is_floating_point():
            role = Role.PARAMETER if name in parameters else Role.BUFFER
        else:
            role, pattern = _integer_role(name, integer_buffers)
            unused.discard(pattern)
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((name, tuple(tensor.shape), dtype, role))
    if unused:
        raise JobError(
            f"no integer or boolean buffer of the model is called {min(unused)!r}",
            key="model.integer_buffers",
        )
    if not any(p.requires_grad and p.numel() for p in parameters.values()):
        raise JobError(
            "the model has nothing to train: it needs a floating-point parameter "
            "that requires a gradient",
            key="model.factory",
        )
    _check_tied(module, personal_patterns)
    _check_personal(unused_personal, {role for *_, role in rows})
    layout = Layout.build(rows)
    return replace(layout, frozen=frozen_digest(module, layout))


def _check_personal(unused: set[str], roles: set[Role]) -> None:
    if unused:
        raise JobError(
            f"nothing that the model trains is called {min(unused)!r}",
            key="model.personal",
        )
    if Role.PARAMETER not in roles:
        raise JobError(
            "all parameters that the model trains are personal, so the sites would "
            "share nothing: name fewer",
            key="model.personal",
        )


def _check_tied(module: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Refuse a pattern for weights that travel under another of their names."""
    first: dict[object, str] = {}
    for name, tensor in module.state_dict().items():
        known = first.setdefault(_memory(tensor), name) if tensor.numel() else name
        if personal.match(name, patterns) and not personal.match(known, patterns):
            raise JobError(
                f"{name!r} shares its values with {known!r}, which is not personal: "
                "name both, or neither",
                key="model.personal",
            )


def exact_factors(module: torch.nn.Module) -> tuple[Factors, ...]:
    """Adapters whose products the aggregator averages, if the model has any."""
    found: tuple[Factors, ...] = getattr(module, "exact_factors", ())
    return found


def frozen_digest(module: torch.nn.Module, layout: Layout) -> str:
    """SHA-256 of the frozen tensors' names and bytes; empty if none is frozen.

    Of a sharded module it is that of the rows which this process holds.
    """
    state, found, names = module.state_dict(), hashlib.sha256(), layout.frozen_names
    for name in names:
        held, _ = _held(state[name])
        flat = held.detach().cpu().contiguous().reshape(-1)
        found.update(f"{name}\0{flat.numel()}\0".encode())
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest() if names else ""


def frozen_arrays(module: torch.nn.Module, layout: Layout) -> dict[str, NDArray[Any]]:
    """Copy the frozen tensors out, in types that NumPy has."""
    state = module.state_dict()
    found: dict[str, NDArray[Any]] = {}
    for name in layout.frozen_names:
        tensor = state[name].detach().cpu()
        wide = tensor.float() if tensor.dtype is torch.bfloat16 else tensor.clone()
        found[name] = wide.numpy()
    return found


def _integer_role(name: str, roles: Mapping[str, str]) -> tuple[Role, str]:
    for pattern, role in roles.items():
        if fnmatchcase(name, pattern):
            return Role(role), pattern
    counter = name.endswith("num_batches_tracked")
    return (Role.MAX if counter else Role.FROM_SERVER), ""


def _distinct(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of the module's state, each memory once, in the module's order."""
    seen, distinct = set(), {}
    for name, tensor in module.state_dict().items():
        _check_travels(name, tensor)
        memory = _memory(tensor)
        if tensor.numel() == 0 or memory not in seen:
            seen.add(memory)
            distinct[name] = tensor
    return distinct


def _memory(tensor: torch.Tensor) -> object:
    """What tensors have in common that are one, under several names."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _check_travels(name: str, tensor: object) -> None:
    trouble = None
    if not isinstance(tensor, torch.Tensor):
        trouble = f"is a {type(tensor).__name__}: only tensors can be sent"
    elif is_lazy(tensor):
        trouble = "has no shape yet: give lazy layers their sizes"
    elif tensor.is_meta or tensor.layout is not torch.strided:
        trouble = "is sparse or on the meta device: make it dense, with values"
    elif not tensor.is_floating_point() and tensor.dtype not in _INTEGER_TYPES:
        trouble = (
            f"is {tensor.dtype}: only real floating-point, integer and boolean "
            "tensors can be sent"
        )
    elif tensor.numel() and any(
        stride == 0 and size > 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        trouble = "repeats its memory: clone what expand() returned"
    if trouble is not None:
        raise JobError(f"{name!r} of the model {trouble}", key="model.factory")


def memory_of(module: torch.nn.Module) -> set[int]:
    """Addresses of the memory that holds the module's state."""
    return {
        _held(tensor)[0].untyped_storage().data_ptr()
        for tensor in module.state_dict().values()
        if tensor.numel()
    }


def is_rounded(layout: Layout) -> bool:
    """Whether the model holds fewer digits than the float32 vector."""
    exact = {"float32", "float64"}
    return any(t.dtype not in exact for t in layout.tensors if t.role in AVERAGED)


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
    state = module.state_dict()
    # Copies, one tensor at a time: torch warns about read-only arrays, and exports
    # by DLPack refuse them in older versions.
    for spec, view in layout.float_views(weights_d):
        held, rows = _held(state[spec.name])
        held.copy_(torch.from_numpy(view[rows].copy()))
        give_back(view[rows])
    for integer_spec, integer_view in layout.integer_views(integers_m):
        state[integer_spec.name].copy_(torch.from_numpy(integer_view.copy()))


@torch.no_grad()
def read(module: torch.nn.Module, layout: Layout) -> tuple[Vector, IntegerVector]:
    """Copy a module's tensors out into new vectors.

    Of a sharded module the rows that other ranks hold stay 0; as nothing writes to
    them, they take no memory.
    """
    weights_d = np.zeros(layout.size, dtype=np.float32)
    integers_m = np.empty(layout.num_integers, dtype=np.int64)
    state = module.state_dict()
    for spec, view in layout.float_views(weights_d):
        held, rows = _held(state[spec.name])
        torch.from_numpy(view[rows]).copy_(held)
    for integer_spec, integer_view in layout.integer_views(integers_m):
        torch.from_numpy(integer_view).copy_(state[integer_spec.name])
    return weights_d, integers_m


def _held(tensor: Any) -> tuple[torch.Tensor, Any]:
    """Return this process's part of a tensor, and its rows.

    FSDP2 gives each rank an equal number of rows, rounded up, and the last ranks what
    is left. Its tensors are recognised by a method: importing their class is slow.
    """
    if not hasattr(tensor, "to_local"):
        return tensor, ...
    held: torch.Tensor = tensor.to_local()
    mesh = tensor.device_mesh
    start = -(-len(tensor) // mesh.size()) * mesh.get_local_rank()
    return held, slice(start, start + len(held))


def own_spans(
    module: torch.nn.Module, layout: Layout, *, is_first: bool
) -> tuple[tuple[int, int], ...]:
    """Places ``[start, stop)`` of the flat vector that this process is to write.

    Args:
        module: A model that every rank has, whole or in parts.
        layout: Layout of the whole model.
        is_first: Whether this is the first rank, which writes what all have.
    """
    state = module.state_dict()
    spans: list[tuple[int, int]] = []
    for spec, view in layout.float_views(np.empty(layout.size, dtype=np.float32)):
        _, rows = _held(state[spec.name])
        if rows is ...:
            if is_first:
                _append(spans, spec.offset, spec.offset + spec.size)
            continue
        row_size = spec.size // len(view)
        start, stop, _ = rows.indices(len(view))
        _append(spans, spec.offset + start * row_size, spec.offset + stop * row_size)
    return tuple(spans)


def _append(spans: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append a span, joined to the last one if they touch."""
    if start >= stop:
        return
    if spans and spans[-1][1] == start:
        start = spans.pop()[0]
    spans.append((start, stop))


def trained_spans(
    module: torch.nn.Module, layout: Layout
) -> tuple[tuple[int, int], ...]:
    """Places ``[start, stop)`` in the flat vector that training with gradients changes.

    Spans that touch are joined, so that large models have few of them.
    """
    trained = _trained(module)
    spans: list[tuple[int, int]] = []
    for spec, _ in layout.float_views(np.empty(layout.size, dtype=np.float32)):
        if spec.name in trained:
            _append(spans, spec.offset, spec.offset + spec.size)
    return tuple(spans)


def copy_untrained(
    module: torch.nn.Module, layout: Layout, *, source_d: Vector, out_d: Vector
) -> None:
    """Copy the values of all tensors that training with gradients does not change.

    Args:
        module: The model: says which parameters require a gradient.
        layout: Layout of the whole model.
        source_d: Shape ``(d,)``.
        out_d: Shape ``(d,)``; written to.
    """
    trained = _trained(module)
    pairs = zip(layout.float_views(source_d), layout.float_views(out_d), strict=True)
    for (spec, source), (_, out) in pairs:
        if spec.name not in trained:
            out[...] = source


def _trained(module: torch.nn.Module) -> set[str]:
    return {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
